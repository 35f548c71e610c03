"""RESP2 over one socket: commands in pipelines, and values straight from and into the caller's memory.

For one thread at a time. Knows no keys, and no commands but those that begin a connection. Never retries. Protocol:
https://redis.io/docs/latest/develop/reference/protocol-spec
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence

from kvstore.errors import RemoteError
from kvstore.forks import leave_to_parent
from kvstore.remote.address import PASSWORD_VARIABLE, RedisAddress
from kvstore.remote.resp_replies import ErrorReply, Replies, Reply

CONNECT_S = 2.0
MAX_BUFFERS = 512  # in one call of sendmsg; every system takes at least 1024

Arg = bytes | bytearray | memoryview | str | int


class RespClient:
    """A connection. It is made when it is first needed, and again after it was lost.

    timeout_s: for a whole call, unless the call has its own. Raises RemoteError if the server cannot be reached,
    refuses user, password or database, is one of a cluster, does not answer in time, or does not speak the protocol. It
    is then unknown how much of the call was done. In a pipeline, an error in an answer raises nothing.
    """

    def __init__(self, address: RedisAddress, timeout_s: float = 5.0) -> None:
        self.address, self.timeout_s = address, timeout_s
        self._socket: socket.socket | None = None
        self._tls = _tls_context(address) if address.tls else None
        self._replies = Replies(self._receive)
        self._deadline_s = 0.0
        leave_to_parent(self, str(address), _socket=None)

    def let_go(self) -> None:
        """In a forked child: drop the parent's connection without sending anything, not even the end of TLS."""
        if self._socket is not None:
            socket.close(self._socket.detach())

    def __enter__(self) -> RespClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def call(self, *command: Arg, timeout_s: float | None = None) -> Reply:
        """Send one command. Raises RemoteError also if the server answers with an error."""
        (reply,) = self.pipeline([command], timeout_s=timeout_s)
        if isinstance(reply, ErrorReply):
            raise RemoteError(f"{self.address} answered: {reply.message}")
        return reply

    def pipeline(
        self,
        commands: Sequence[Sequence[Arg]],
        into: Sequence[memoryview | None] = (),
        timeout_s: float | None = None,
    ) -> list[Reply]:
        """Send all commands, then return the answer of each in order.

        into: memory for the answer of each command. A value at least as large fills it with its end, and the answer is
        `Landed`. A smaller value is returned as bytes. Unless its answer is `Landed`, the memory may hold anything.
        Commands and answers of one pipeline should be a few megabytes, as the server keeps the answers until they are
        read.
        """
        self._deadline_s = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        is_whole = False
        try:
            self._connect()
            self._send(encode(commands))
            replies = self._replies.to(into or [None] * len(commands), self._tls is None)
            is_whole = True
        except (OSError, ValueError) as error:
            raise RemoteError(f"{self.address}: {_words(error)}") from error
        finally:
            if not is_whole:  # unread answers would be taken for those to the next commands
                self.close()
        return replies

    # -- connecting --------------------------------------------------------------------------------------------------
    @property
    def _is_connected(self) -> bool:
        """Whether there is a connection with nothing to read: unasked bytes are its end, or garbage."""
        if self._socket is None or not self._replies.is_empty:
            return False
        self._socket.settimeout(0)
        try:
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False

    def _connect(self) -> None:
        if self._is_connected:
            return
        self.close()
        at, left_s = self.address, max(self._deadline_s - time.monotonic(), 0.001)
        if at.is_unix:
            self._socket = found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            found.settimeout(min(CONNECT_S, left_s))
            found.connect(at.host)
        else:
            self._socket = found = socket.create_connection((at.host, at.port), timeout=min(CONNECT_S, left_s))
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._tls is not None:
            self._socket = self._tls.wrap_socket(found, server_hostname=at.host)
        self._replies.forget()
        greeting: dict[str, Sequence[Arg]] = {}
        if at.password is not None:
            greeting["AUTH"] = ("AUTH", *([at.user] if at.user else []), at.password)
        greeting["INFO"] = ("INFO", "cluster")
        if at.database:
            greeting["SELECT"] = ("SELECT", at.database)
        self._send(encode(list(greeting.values())))
        for name, reply in zip(greeting, self._replies.to([None] * len(greeting), False), strict=True):
            if isinstance(reply, ErrorReply) and reply.code == "NOAUTH":
                raise ValueError(f"it wants a password (NOAUTH); set ${PASSWORD_VARIABLE}, or give ?password_file=FILE")
            if isinstance(reply, ErrorReply) and name != "INFO":  # a user may lack the right to that
                raise ValueError(f"{name} was refused: {reply.message}")
            if isinstance(reply, bytes) and b"cluster_enabled:1" in reply:
                raise ValueError("it is part of a Redis Cluster, which KV does not follow; give several that run alone")

    # -- sending -----------------------------------------------------------------------------------------------------
    def _send(self, buffers: list[memoryview]) -> None:
        assert self._socket is not None
        if self._tls is not None:  # TLS encrypts a copy anyway, and has no sendmsg
            for buffer in buffers:
                self._wait()
                self._socket.sendall(buffer)
            return
        first = 0
        while first < len(buffers):
            self._wait()
            sent = self._socket.sendmsg(buffers[first : first + MAX_BUFFERS])
            while first < len(buffers) and sent >= buffers[first].nbytes:
                sent -= buffers[first].nbytes
                first += 1
            if sent:
                buffers[first] = buffers[first][sent:]

    def _wait(self) -> None:
        """Let the next socket call take as long as is left."""
        assert self._socket is not None
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)

    def _receive(self, buffers: Sequence[memoryview]) -> int:
        assert self._socket is not None
        self._wait()
        if len(buffers) == 1:  # which TLS has, too
            received = self._socket.recv_into(buffers[0])
        else:
            received = self._socket.recvmsg_into(buffers)[0]
        if not received:
            raise ConnectionError("the connection was closed")
        return received


def encode(commands: Sequence[Sequence[Arg]]) -> list[memoryview]:
    """The commands as buffers; large values are not copied."""
    buffers: list[memoryview] = []
    text = bytearray()
    for command in commands:
        text += b"*%d\r\n" % len(command)
        for arg in command:
            value = arg if isinstance(arg, bytes | bytearray | memoryview) else str(arg).encode()
            view = memoryview(value).cast("B")
            text += b"$%d\r\n" % view.nbytes
            if view.nbytes < 4096:
                text += view
            else:
                buffers += [memoryview(text), view]
                text = bytearray()
            text += b"\r\n"
    return [*buffers, memoryview(text)] if text else buffers


def _tls_context(address: RedisAddress) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=address.ca_file)
        if address.cert_file is not None:
            context.load_cert_chain(address.cert_file, address.key_file)
    except OSError as error:
        raise RemoteError(f"{address}: its certificates cannot be read: {_words(error)}") from error
    return context


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
