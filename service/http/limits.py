"""Limits on what may wait and run, in all and of one tenant, and on a request's time. Knows no route and no engine.

The limits count sequences: each choice of each prompt is one, so that a request counts by the work that it asks for.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from kvstore.service.http.errors import NO_RETRY, ApiError, unavailable
from kvstore.service.settings.serve_options import ServeOptions

RETRY_AFTER_S = 1
SEQUENCES_PER_REQUEST = 32  # of all that wait or run, on average: so --max-queue bounds sequences, too
MAX_LARGE_BYTES = 2**28  # of large bodies that are read at once; a small one never waits for them
LARGE_BODY_BYTES = 2**20


class Deadline:
    """The time that one request has. error: what its client is told when the time is over before the answer.
    check_key: raises ApiError once the request's key is no longer taken.
    """

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self.check_key: Callable[[], object] = lambda: None
        self._timeout = timeout
        self._ending: ApiError | None = None

    def end(self, error: ApiError) -> None:
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
    """Counts one server's requests. Used in its event loop only.

    is_shared: several tenants may use it. is_draining: what runs may end, and nothing more is admitted.
    """

    def __init__(self, options: ServeOptions, is_shared: bool = False) -> None:
        self._options = options
        self.is_shared, self.is_draining = is_shared, False
        self._max_sequences = SEQUENCES_PER_REQUEST * options.max_queue
        self._requests: Counter[str] = Counter()  # by tenant, that wait or run
        self._sequences: Counter[str] = Counter()  # theirs
        self._deadlines: set[Deadline] = set()
        self.large_bodies = asyncio.Semaphore(max(2, MAX_LARGE_BYTES // options.max_body_bytes))

    def counts(self) -> dict[str, int]:
        """How many sequences of each tenant wait or run."""
        return dict(+self._sequences)

    @property
    def num_admitted(self) -> int:
        """The number of requests that wait or run, of all tenants."""
        return self._requests.total()

    @property
    def num_open(self) -> int:
        """The number of requests of any kind that are not answered yet."""
        return len(self._deadlines)

    # -- room --------------------------------------------------------------------------------------------------------
    @contextmanager
    def admit(self, name: str, num_sequences: int = 1) -> Iterator[None]:
        """Admit a request that computes this number of sequences, and hold its place while the context lasts.

        Raises ApiError 400 when it asks for more than ever fits, 503 when the server is full or drained, 429 when the
        tenant has as much of it as the others leave to it.
        """
        self._check_room(name, num_sequences)
        self._requests[name] += 1
        self._sequences[name] += num_sequences
        try:
            yield
        finally:
            self._requests[name] -= 1
            self._sequences[name] -= num_sequences
            if not self._requests[name]:
                del self._requests[name], self._sequences[name]

    def _check_room(self, name: str, num_sequences: int) -> None:
        """Where there are several tenants, each has at most half of what the others leave free, so a newcomer finds
        room.
        """
        if self.is_draining:
            raise unavailable("this server takes no more requests: it is being drained", "draining", RETRY_AFTER_S)
        share = 2 if self.is_shared else 1
        own_requests, own_sequences = self._requests[name], self._sequences[name]
        free_requests = self._options.max_queue - self.num_admitted
        free_sequences = self._max_sequences - self._sequences.total()
        largest = self._max_sequences // share
        if num_sequences > largest:
            raise ApiError(
                400,
                f"the request asks for {num_sequences} sequences (its prompts times n), and this server takes at most "
                f"{largest} in one request; send several smaller ones",
                code="too_many_sequences",
            )
        if free_requests < 1 or num_sequences > free_sequences:
            raise unavailable("the server is full; try again", "server_overloaded", RETRY_AFTER_S)
        most = max(1, (free_requests + own_requests) // share)
        most_sequences = max(1, (free_sequences + own_sequences) // share)
        if own_requests + 1 > most or own_sequences + num_sequences > most_sequences:
            raise ApiError(
                429,
                f"this key has {own_requests} requests with {own_sequences} sequences waiting or "
                "running, and other keys need the rest of the room; try again",
                type="rate_limit_error",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )

    @asynccontextmanager
    async def body(self, num_bytes: int | None) -> AsyncIterator[None]:
        """Hold room for reading a body of this size (None: unknown). Waits while too many large bodies are being
        read.
        """
        if num_bytes is not None and num_bytes <= LARGE_BODY_BYTES:
            yield
            return
        async with self.large_bodies:
            yield

    # -- time --------------------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[Deadline]:
        """Run one request within its deadline. Raises ApiError when the time is over."""
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

    def end_refused(self) -> None:
        """End the requests whose key is no longer taken."""
        for deadline in list(self._deadlines):
            try:
                deadline.check_key()
            except ApiError as error:
                deadline.end(error)

    def end_all(self, error: ApiError) -> None:
        for deadline in list(self._deadlines):
            deadline.end(error)
