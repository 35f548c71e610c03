"""Whose turn it is: the waiting and the running requests of each tenant, and what each may take of a step. No torch.

Within a tenant, requests are served in the order of their keys. Tenants share the running set and the tokens of a step
equally; past use does not count.
"""

import bisect
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from kvstore.engine.core.request import Request, Status

Key = tuple[int, int]


@dataclass(slots=True, eq=False)
class TenantQueue:
    """The requests of one tenant, sorted by key."""

    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    turn: int = 0  # rises when the tenant comes, and when it gives back a place in the running set
    place: int = 0  # of its latest request, in the order in which the requests of all are expected to start

    @property
    def rank(self) -> tuple[int, int]:
        """The tenant of the lowest rank is next: it runs fewest requests, and among equals has waited longest."""
        return len(self.running), self.turn


class Budget:
    """The tokens of one step. share: what one tenant may take of them, None when there is one tenant."""

    def __init__(self, num_tokens: int, share: int | None = None) -> None:
        self.left = num_tokens
        self._share = share
        self._taken: dict[str, int] = {}

    def most(self, request: Request) -> int:
        """How many tokens this request may still compute."""
        if self._share is None:
            return self.left
        return min(self.left, self._share - self._taken.get(request.tenant, 0))

    def spend(self, request: Request, num_tokens: int) -> None:
        self.left -= num_tokens
        if self._share is not None:
            self._taken[request.tenant] = self._taken.get(request.tenant, 0) + num_tokens


class TenantQueues:
    """All tenants with requests. key: orders the requests of a tenant; no two have the same.

    Every operation is O(log n) in requests, O(n) in active tenants.
    """

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._tenants: dict[str, TenantQueue] = {}
        self._num_turns = 0
        self._num_places = 0
        self.num_running = 0
        self.num_waiting = 0

    def __len__(self) -> int:
        return len(self._tenants)

    def of(self, request: Request) -> TenantQueue:
        return self._tenants[request.tenant]

    # -- coming and going --------------------------------------------------------------------------------------------
    def arrive(self, choices: Iterable[Request]) -> None:
        """Give a request and its choices their places in the order in which all are expected to start.

        A tenant without waiting requests is next, so its places begin where the others' queues begin.
        """
        for request in choices:
            tenant = self._tenants.get(request.tenant)
            if tenant is None:
                tenant = self._tenants[request.tenant] = TenantQueue(turn=self._next_turn())
            if not tenant.waiting:
                heads = (other.waiting[0].place for other in self._tenants.values() if other.waiting)
                tenant.place = max(tenant.place, min(heads, default=self._num_places + 1) - 1)
            tenant.place += 1
            request.place = tenant.place
            self._num_places = max(self._num_places, tenant.place)

    def queue(self, request: Request) -> None:
        """Put a request into its tenant's waiting queue."""
        request.status = Status.WAITING
        bisect.insort(self.of(request).waiting, request, key=self._key)
        self.num_waiting += 1

    def run(self, request: Request) -> None:
        """Move a waiting request to the running set."""
        tenant = self.of(request)
        self._take_out(tenant.waiting, request)
        self.num_waiting -= 1
        request.status = Status.RUNNING
        bisect.insort(tenant.running, request, key=self._key)
        self.num_running += 1

    def take_out(self, request: Request) -> None:
        """Remove a request that waits or runs."""
        tenant = self.of(request)
        if request.status is Status.RUNNING:
            self._take_out(tenant.running, request)
            self.num_running -= 1
            tenant.turn = self._next_turn()
        else:
            self._take_out(tenant.waiting, request)
            self.num_waiting -= 1

    def forget_idle(self, name: str) -> None:
        """Forget a tenant whose last request has ended."""
        tenant = self._tenants[name]
        if not tenant.waiting and not tenant.running:
            del self._tenants[name]

    def clear(self) -> None:
        self._tenants.clear()
        self.num_running = self.num_waiting = 0

    def _take_out(self, ordered: list[Request], request: Request) -> None:
        index = bisect.bisect_left(ordered, self._key(request), key=self._key)
        assert ordered[index] is request
        del ordered[index]

    def _next_turn(self) -> int:
        self._num_turns += 1
        return self._num_turns

    # -- order -------------------------------------------------------------------------------------------------------
    def running(self) -> list[Request]:
        """All running requests: each tenant's first, each tenant's second, and so on. The last is preempted first."""
        if len(self._tenants) == 1:
            return next(iter(self._tenants.values())).running.copy()
        rows = zip_longest(*(tenant.running for tenant in self._tenants.values()))
        return list(chain.from_iterable(sorted(filter(None, row), key=self._key) for row in rows))

    def waiting(self) -> list[TenantQueue]:
        """Tenants with waiting requests, in no order."""
        return [tenant for tenant in self._tenants.values() if tenant.waiting]

    def ahead_of(self, tenant: TenantQueue) -> TenantQueue | None:
        """The tenant that runs most, if after giving up a place it would still run no less than this one."""
        first = max(self._tenants.values(), key=lambda other: len(other.running))
        return first if len(first.running) > len(tenant.running) + 1 else None

    def sharers(self, tenant: TenantQueue | None) -> Iterator[Request]:
        """Waiting requests that hold blocks of their prompt, the last first. None: of all tenants, those that run most
        first.
        """
        order = sorted(self._tenants.values(), key=lambda other: len(other.running), reverse=True)
        for each in order if tenant is None else [tenant]:
            yield from (request for request in reversed(each.waiting) if request.block_numbers)

    # -- a step's tokens ---------------------------------------------------------------------------------------------
    def budget(self, num_tokens: int, num_places: int) -> Budget:
        """Divide a step's tokens equally; what one tenant does not need goes to the others. num_places: free places to
        run.
        """
        if len(self._tenants) < 2:
            return Budget(num_tokens)
        order = sorted(self.waiting(), key=lambda tenant: tenant.rank)
        starting = set(order[:num_places])  # their need is unknown until they are admitted
        wanted = sorted(
            num_tokens if tenant in starting else sum(r.num_tokens - r.num_computed_tokens for r in tenant.running)
            for tenant in self._tenants.values()
            if tenant in starting or tenant.running
        )
        left, share = num_tokens, 1
        for index, num_wanted in enumerate(wanted):
            share = max(share, -(-left // (len(wanted) - index)))
            left -= min(num_wanted, share, left)
        return Budget(num_tokens, share)

    def check_integrity(self, known: Container[str]) -> None:
        """Assert that counts and orders agree, and that all are `known` ids."""
        for status in (Status.RUNNING, Status.WAITING):
            lists = [t.running if status is Status.RUNNING else t.waiting for t in self._tenants.values()]
            count = self.num_running if status is Status.RUNNING else self.num_waiting
            assert sum(map(len, lists)) == count, f"{count} {status.value} requests are counted"
            for ordered in lists:
                assert ordered == sorted(ordered, key=self._key), f"{status.value} requests are out of order"
                assert all(request.status is status and request.request_id in known for request in ordered)
        assert all(tenant.waiting or tenant.running for tenant in self._tenants.values()), "a tenant without requests"
