"""Bounds on what clients may take: connections and how slow they may be, what may wait and run, a request's time.

aiohttp has neither a cap on connections nor deadlines for heads and for readers that stop. The limits on requests count
sequences: each choice of each prompt is one, so that a request counts by the work that it asks for. Knows no route and
no engine.
"""

import asyncio
import errno
import logging
import resource
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

import msgspec
from aiohttp import web

from kvstore.errors import KVStoreError
from kvstore.service.http.errors import NO_RETRY, ApiError, error_response, unavailable
from kvstore.service.http.telling import log
from kvstore.service.settings.serve_options import ServeOptions

# The kernel's buffer for each connection. It bounds what a reader that has stopped can hold back. The kernel asks for
# more only when a third is free, so a small buffer also lowers what a slow reader must read within a write timeout.
SEND_BUFFER_BYTES = 64 * 2**10
LINGER_S = 2.0  # to drain the rest of an unwanted body, so that its sender reads the answer
NUM_OWN = 192  # beside connections: the store's files, the engine's process, what the runtime opens
TOLD_S = 10.0  # between two log lines about connections that cannot be accepted
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
RETRY_AFTER_S = 1
SEQUENCES_PER_REQUEST = 32  # of all that wait or run, on average: so --max-queue bounds sequences, too
MAX_LARGE_BYTES = 2**28  # of large bodies that are read at once; a small one never waits for them
LARGE_BODY_BYTES = 2**20


# -- connections -------------------------------------------------------------------------------------------------------
def new_request_id() -> str:
    return secrets.token_hex(12)


class Connection(web.RequestHandler):
    """aiohttp's protocol, with a deadline for a request's head and one for a reader that reads nothing.

    A head that begins in the packet of the request before has aiohttp's timeout for idle connections. The transport's
    own buffer is empty: writing pauses as soon as the kernel accepts no more (TLS has 64 KiB before it), and resumes
    when the kernel has accepted everything. connections: those of the server, which this one joins.
    """

    __slots__ = ("_all", "_head_timer", "_is_refused", "_options", "_unsent", "_wire", "_write_timer")

    def __init__(
        self, server: web.Server, options: ServeOptions, connections: set["Connection"], loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(
            server, loop=loop, keepalive_timeout=options.keep_alive_s, access_log=None, lingering_time=LINGER_S,
            auto_decompress=False,
        )  # fmt: skip
        self._options, self._all = options, connections
        self._is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._wire: asyncio.Transport | None = None  # stays known while aiohttp closes it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        transport.set_write_buffer_limits(high=1)  # at 0, TLS pauses without anything to write, and never resumes
        self._wire = transport
        if len(self._all) >= self._options.max_connections:
            self._refuse(transport)
            return
        self._all.add(self)
        super().connection_made(transport)
        self._await_head()

    def _refuse(self, transport: asyncio.Transport) -> None:
        self._is_refused = True
        body = msgspec.json.encode(unavailable("the server has too many connections", "too_many_connections").body())
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
            f"X-Request-Id: {new_request_id()}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        transport.write(head.encode() + body)
        transport.close()

    def connection_lost(self, error: BaseException | None) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._write_timer = None
        if not self._is_refused:
            self._all.discard(self)
            super().connection_lost(error)

    # -- a head that does not end --------------------------------------------------------------------------------------
    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        num_before = self._request_count
        super().data_received(data)
        if self._request_count > num_before:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif data and self._is_idle:
            self._await_head()

    @property
    def _is_idle(self) -> bool:
        """Whether arriving bytes belong to the head of the next request."""
        return self._waiter is not None and not self._messages

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self._loop.call_later(self._options.header_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_idle and self._wire is not None:
            self._wire.abort()

    # -- a reader that takes nothing -----------------------------------------------------------------------------------
    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _watch(self) -> None:
        """Check after a while whether the reader has read anything."""
        if self._wire is not None:
            self._unsent = self._wire.get_write_buffer_size()
            self._write_timer = self._loop.call_later(self._options.write_timeout_s, self._look)

    def _look(self) -> None:
        self._write_timer = None
        assert self._wire is not None
        if self._wire.get_write_buffer_size() >= self._unsent:
            self._wire.abort()
        else:
            self._watch()

    # -- what is no HTTP -----------------------------------------------------------------------------------------------
    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer aiohttp's own errors in our shape, without repeating what the client sent."""
        if status >= 500:
            log("a connection failed", {}, logging.ERROR, exc)
            error = ApiError(status, "internal error", type="server_error", code="internal_error")
        else:
            error = ApiError(status, "this is not a valid HTTP request", code="bad_request")
        if request.writer.output_size > 0:
            raise ConnectionError("the answer had begun")
        response = error_response(error)
        response.headers["X-Request-Id"] = new_request_id()
        response.force_close()
        return response


def ensure_descriptors(max_connections: int, ends: int = 1) -> None:
    """Raise the soft limit of this process and so of the engine's process. Raises KVStoreError where it cannot.

    ends: of each connection that this process has.
    """
    needed = max_connections * ends + NUM_OWN
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (ValueError, OSError):
        fewer = f", or give --max-connections {(hard - NUM_OWN) // ends} or fewer" if hard > NUM_OWN else ""
        raise KVStoreError(
            f"--max-connections {max_connections} needs {needed} open files, but this process may have {hard}; raise "
            f"the hard limit (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of Docker){fewer}"
        ) from None


class AcceptErrors:
    """An event loop's exception handler: logs now and then, in one line, that connections cannot be accepted.

    asyncio tries again after a second.
    """

    def __init__(self) -> None:
        self._told_s: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _SHORT or "socket" not in context:
            loop.default_exception_handler(context)
            return
        now = time.monotonic()
        if self._told_s is None or now - self._told_s >= TOLD_S:
            self._told_s = now
            log("connections wait: they cannot be accepted", {"error": error.strerror}, logging.ERROR)


# -- requests ----------------------------------------------------------------------------------------------------------
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
