"""A sum of bytes, in all and for each tenant."""

from __future__ import annotations


class TenantBytes:
    """of_tenants: of those that have some."""

    def __init__(self) -> None:
        self.total = 0
        self.of_tenants: dict[str, int] = {}

    def of(self, tenant: str) -> int:
        return self.of_tenants.get(tenant, 0)

    def add(self, tenant: str, num_bytes: int) -> None:
        """Add to the sum; a negative number takes away from it."""
        self.total += num_bytes
        if left := self.of_tenants.get(tenant, 0) + num_bytes:
            self.of_tenants[tenant] = left
        else:
            self.of_tenants.pop(tenant, None)

    def clear(self) -> None:
        self.total = 0
        self.of_tenants.clear()
