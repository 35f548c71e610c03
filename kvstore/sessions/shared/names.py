"""What the keys of shared sessions are called in a Redis. A Cluster keeps all with one hash tag on one primary."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.sessions.record import SessionKey
from kvstore.sessions.tables import name_key

LEASES = "lease"  # * no table: a key of its own for each, as it has an end


@dataclass(frozen=True, slots=True)
class Names:
    """prefix: of all of them."""

    prefix: bytes

    @classmethod
    def of(cls, is_cluster: bool) -> Names:
        return cls(b"{kvstore:sessions}:" if is_cluster else b"kvstore:sessions:")

    @property
    def members(self) -> bytes:
        return self.prefix + b"members"

    @property
    def version(self) -> bytes:
        return self.prefix + b"version"

    def values(self, table: str) -> bytes:
        """The hash of a table's values."""
        return self.prefix + table.encode()

    def keys(self, table: str) -> bytes:
        """The sorted set of a table's keys."""
        return self.values(table) + b":keys"

    def lease(self, key: SessionKey) -> bytes:
        return self.leased(name_key(key))

    def leased(self, name: bytes) -> bytes:
        return self.values(LEASES) + b":" + name
