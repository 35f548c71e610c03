"""How many requests may wait and run, per tenant and in all, and how long one may take. Knows no route, no engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from service.errors import NO_RETRY, ApiError, unavailable
from service.serve_options import ServeOptions

RETRY_AFTER_S = 1
MAX_LARGE_BODIES = 32  # that arrive at once: each may have its 32 MiB, and a small one never waits for them
LARGE_BODY_BYTES = 2**20


@dataclass(slots=True)
class _Tenant:
    """num_running counts those that were let in; waiters wait for that, the first to come first."""

    num_running: int = 0
    waiters: deque[asyncio.Future[None]] = field(default_factory=deque)


class Deadline:
    """The time one request has. `error` is what its client is told when it is over before the answer is."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self._timeout = timeout
        self._ending: ApiError | None = None

    def end(self, error: ApiError) -> None:
        """The request ends now, with this error."""
        if self._ending is None and not self._timeout.expired():
            self._ending = error
            self._timeout.reschedule(asyncio.get_running_loop().time())

    @property
    def error(self) -> ApiError | None:
        """None while there is time."""
        if not self._timeout.expired():
            return None
        return self._ending or ApiError(
            504, "the request took longer than it may", type="server_error", code="request_timeout", headers=NO_RETRY
        )


class Limits:
    """Counts of one server's requests. Used in its event loop only."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._tenants: dict[str, _Tenant] = {}
        self._deadlines: set[Deadline] = set()
        self.large_bodies = asyncio.Semaphore(MAX_LARGE_BODIES)
        self.num_admitted = 0  # waiting or running, of all tenants

    @property
    def num_running(self) -> int:
        return sum(tenant.num_running for tenant in self._tenants.values())

    @property
    def num_waiting(self) -> int:
        return sum(len(tenant.waiters) for tenant in self._tenants.values())

    def counts(self) -> dict[str, tuple[int, int]]:
        """Per tenant that has any: how many requests run and how many wait."""
        return {name: (tenant.num_running, len(tenant.waiters)) for name, tenant in self._tenants.items()}

    @property
    def num_open(self) -> int:
        """Requests that have not been answered yet, of whatever kind."""
        return len(self._deadlines)

    # -- turns -------------------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def admit(self, tenant: str) -> AsyncIterator[None]:
        """In here runs one request that computes. Waits for the tenant's turn.

        Raises ApiError 503 when the server is full, 429 when the tenant has too many.
        """
        if self.num_admitted >= self._options.max_queue:
            raise unavailable("the server is full; try again", "server_overloaded", RETRY_AFTER_S)
        self.num_admitted += 1
        try:
            await self._enter(tenant)
            try:
                yield
            finally:
                self._leave(tenant)
        finally:
            self.num_admitted -= 1

    async def _enter(self, name: str) -> None:
        limit = self._options.max_concurrent_per_key
        tenant = self._tenants.setdefault(name, _Tenant())
        if limit and (tenant.num_running >= limit or any(not waiter.done() for waiter in tenant.waiters)):
            if len(tenant.waiters) >= self._options.max_queue_per_key:
                raise _too_many(f"this key has {tenant.num_running} requests running and {len(tenant.waiters)} waiting")
            await self._wait(name, tenant)
        else:
            tenant.num_running += 1

    async def _wait(self, name: str, tenant: _Tenant) -> None:
        """Returns when a request that ends has handed its place over."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tenant.waiters.append(waiter)
        try:
            async with asyncio.timeout(self._options.queue_timeout_s):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():
                self._leave(name)  # the place came just as the waiting was given up
            else:
                tenant.waiters.remove(waiter)
                self._forget_idle(name)
            if isinstance(error, TimeoutError):
                raise _too_many("the request has waited too long for others of this key") from None
            raise

    def _leave(self, name: str) -> None:
        tenant = self._tenants[name]
        for waiter in tenant.waiters:
            if not waiter.done():
                tenant.waiters.remove(waiter)
                waiter.set_result(None)  # the place goes on: num_running stays
                return
        tenant.num_running -= 1
        self._forget_idle(name)

    def _forget_idle(self, name: str) -> None:
        tenant = self._tenants.get(name)
        if tenant is not None and not tenant.num_running and not tenant.waiters:
            del self._tenants[name]

    @asynccontextmanager
    async def body(self, num_bytes: int | None) -> AsyncIterator[None]:
        """In here a body of so many bytes is read; None is not known. Waits while too many large ones are."""
        if num_bytes is not None and num_bytes <= LARGE_BODY_BYTES:
            yield
            return
        async with self.large_bodies:
            yield

    # -- time --------------------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[Deadline]:
        """In here runs one request, with the time that it has. Raises ApiError when that is over."""
        timeout = asyncio.timeout(self._options.request_timeout_s)
        deadline = Deadline(timeout)
        self._deadlines.add(deadline)
        try:
            async with timeout:
                yield deadline
        except TimeoutError:
            if deadline.error is None:
                raise
            raise deadline.error from None
        finally:
            self._deadlines.discard(deadline)

    def end_all(self, error: ApiError) -> None:
        """Every request ends now, with this error."""
        for deadline in list(self._deadlines):
            deadline.end(error)


def _too_many(message: str) -> ApiError:
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers)
