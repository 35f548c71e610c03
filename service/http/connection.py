"""TCP connections: deadlines and a cap that aiohttp does not have, and enough open files for all. Knows no route."""

import asyncio
import errno
import logging
import resource
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
from aiohttp import web

from kvstore.errors import KVStoreError
from kvstore.service.http.errors import ApiError, error_response, unavailable
from kvstore.service.http.logs import log
from kvstore.service.settings.serve_options import ServeOptions

# The kernel's buffer for each connection. It bounds what a reader that has stopped can hold back. The kernel asks for
# more only when a third is free, so a small buffer also lowers what a slow reader must read within a write timeout.
SEND_BUFFER_BYTES = 64 * 2**10
LINGER_S = 2.0  # to drain the rest of an unwanted body, so that its sender reads the answer
NUM_OWN = 192  # beside connections: the store's files, the engine's process, what the runtime opens
TOLD_S = 10.0  # between two log lines about connections that cannot be accepted
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def new_request_id() -> str:
    return secrets.token_hex(12)


@dataclass(slots=True)
class Connections:
    options: ServeOptions
    open: set["Connection"] = field(default_factory=set)

    @property
    def is_full(self) -> bool:
        return len(self.open) >= self.options.max_connections


class Connection(web.RequestHandler):
    """aiohttp's protocol, with a deadline for a request's head and one for a reader that reads nothing.

    A head that begins in the packet of the request before has aiohttp's timeout for idle connections. The transport's
    own buffer is empty: writing pauses as soon as the kernel accepts no more (TLS has 64 KiB before it), and resumes
    when the kernel has accepted everything.
    """

    __slots__ = ("_all", "_head_timer", "_is_refused", "_unsent", "_wire", "_write_timer")

    def __init__(self, server: web.Server, connections: Connections, loop: asyncio.AbstractEventLoop) -> None:
        options = connections.options
        super().__init__(
            server, loop=loop, keepalive_timeout=options.keep_alive_s, access_log=None, lingering_time=LINGER_S,
            auto_decompress=False,
        )  # fmt: skip
        self._all = connections
        self._is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._wire: asyncio.Transport | None = None  # stays known while aiohttp closes it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        transport.set_write_buffer_limits(high=1)  # at 0, TLS pauses without anything to write, and never resumes
        self._wire = transport
        if self._all.is_full:
            self._refuse(transport)
            return
        self._all.open.add(self)
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
            self._all.open.discard(self)
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
            self._head_timer = self._loop.call_later(self._all.options.header_timeout_s, self._head_is_late)

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
            self._write_timer = self._loop.call_later(self._all.options.write_timeout_s, self._look)

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
