"""Whose turn it is: the waiting and the running requests of each tenant, and what each may take of a step. No torch.

Inside a tenant requests go in the order of their keys. Between tenants the running set and the tokens of a step are
shared equally; nothing is remembered of what a tenant had before.
"""

import bisect
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from kvstore.engine.core.request import Request, Status

Key = tuple[int, int]


@dataclass(slots=True, eq=False)
class TenantQueue:
    """waiting and running: sorted by key. turn: numbers in order when tenants came, or last gave back a place in the
    running set. place: of its latest request in the expected order of all."""

    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    turn: int = 0
    place: int = 0

    @property
    def rank(self) -> tuple[int, int]:
        """The lowest is next: who runs least, and of those who has waited longest."""
        return len(self.running), self.turn


class Budget:
    """Tokens of one step. share: what one tenant may take of them, None when there is one tenant."""

    def __init__(self, num_tokens: int, share: int | None = None) -> None:
        self.left = num_tokens
        self._share = share
        self._taken: dict[str, int] = {}

    def most(self, request: Request) -> int:
        """Tokens that this request may still compute."""
        if self._share is None:
            return self.left
        return min(self.left, self._share - self._taken.get(request.tenant, 0))

    def spend(self, request: Request, num_tokens: int) -> None:
        self.left -= num_tokens
        if self._share is not None:
            self._taken[request.tenant] = self._taken.get(request.tenant, 0) + num_tokens


class TenantQueues:
    """key: gives a request's place among those of its tenant; different for each of them.

    Every operation is O(log n) in requests, O(n) in tenants that have any.
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

        A tenant of which nobody waits is next, so its places begin where the others' queues begin.
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
        """It waits from now on."""
        request.status = Status.WAITING
        bisect.insort(self.of(request).waiting, request, key=self._key)
        self.num_waiting += 1

    def run(self, request: Request) -> None:
        """It has waited, and runs from now on."""
        tenant = self.of(request)
        self._take_out(tenant.waiting, request)
        self.num_waiting -= 1
        request.status = Status.RUNNING
        bisect.insort(tenant.running, request, key=self._key)
        self.num_running += 1

    def take_out(self, request: Request) -> None:
        """It waits or runs no more."""
        tenant = self.of(request)
        if request.status is Status.RUNNING:
            self._take_out(tenant.running, request)
            self.num_running -= 1
            tenant.turn = self._next_turn()
        else:
            self._take_out(tenant.waiting, request)
            self.num_waiting -= 1

    def forget_idle(self, name: str) -> None:
        """A request of this tenant has ended; others of it that are not in the queue yet have not."""
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
        """All that run: the first of each tenant, the second of each, and so on. The last is who has to go first."""
        if len(self._tenants) == 1:
            return next(iter(self._tenants.values())).running.copy()
        rows = zip_longest(*(tenant.running for tenant in self._tenants.values()))
        return list(chain.from_iterable(sorted(filter(None, row), key=self._key) for row in rows))

    def waiting(self) -> list[TenantQueue]:
        """Those of whom somebody waits, in no order."""
        return [tenant for tenant in self._tenants.values() if tenant.waiting]

    def ahead_of(self, tenant: TenantQueue) -> TenantQueue | None:
        """Who runs most, if it would still not run less than this one after giving it a place."""
        first = max(self._tenants.values(), key=lambda other: len(other.running))
        return first if len(first.running) > len(tenant.running) + 1 else None

    def sharers(self, tenant: TenantQueue | None) -> Iterator[Request]:
        """Those who wait with blocks of their prompt, the last first. None: of all tenants, who runs most first."""
        order = sorted(self._tenants.values(), key=lambda other: len(other.running), reverse=True)
        for each in order if tenant is None else [tenant]:
            yield from (request for request in reversed(each.waiting) if request.block_numbers)

    # -- a step's tokens ---------------------------------------------------------------------------------------------
    def budget(self, num_tokens: int, num_places: int) -> Budget:
        """Equal shares of a step's tokens; what one does not need is the others'. num_places: that are free to run."""
        if len(self._tenants) < 2:
            return Budget(num_tokens)
        order = sorted(self.waiting(), key=lambda tenant: tenant.rank)
        starting = set(order[:num_places])  # how much these need is not known before they are asked for
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
