"""The owner's Unix socket: other processes ask for stats, evict, verify, compact and sessions, and the owner answers.

Owns the wire format; `commands` defines the commands. One connection carries one request, a line `{"version": 1,
"command": "stats", "arguments": {}}`. While the owner works, lines `{"progress": null}` say that it lives; the last
line is `{"ok": true, "result": {...}}` or `{"ok": false, "error": "one line", "kind": "config"}`, where the kind may
also be "store" or "failure".
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvstore.admin.private_folder import PrivateFolder
from kvstore.disk.check import SOCKET_NAME
from kvstore.disk.directory import read_lock_info
from kvstore.errors import ConfigError, KVStoreError, StoreError, StoreLockedError
from kvstore.forks import leave_to_parent
from kvstore.remote.unix_server import CLOSE_S, UnixServer

if TYPE_CHECKING:
    from kvstore.disk.directory import StoreDirectory

VERSION = 1
MAX_REQUEST_BYTES = 1 << 20
MAX_ANSWER_BYTES = 64 << 20
MAX_CONNECTIONS = 8
REQUEST_S = 5.0  # for a whole request to arrive, and for the reader to accept a part of the answer
PULSE_S = 1.0  # between two signs of life while a command runs
_LONGEST_PATH = 107  # bytes of sun_path, less its end

Handler = Callable[[str, dict[str, Any]], Mapping[str, Any]]
OnProgress = Callable[[float | None], None]


class NoOwner(StoreError):
    """No process owns the store: its files can be opened."""


class OwnerSilentError(StoreLockedError):
    """A process owns the store and does not answer."""


# -- the owner's side ------------------------------------------------------------------------------------------------
class ControlServer:
    """Answers other processes of the same user with handler(command, arguments), each in its own thread.

    The socket lies in the store's directory, or where that path is too long for one, in a private directory; the lock
    file names it. A KVStoreError of the handler is answered as one line. Raises StoreError when there can be no socket.
    """

    def __init__(
        self, directory: StoreDirectory, handler: Handler, request_s: float = REQUEST_S, pulse_s: float = PULSE_S
    ) -> None:
        self._handler, self._pulse_s, self._request_s = handler, pulse_s, request_s
        self.is_closed = False
        self.path, self._private = _place(Path(directory.path))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with ExitStack() as opened:
            opened.callback(self._remove)
            opened.callback(listener.close)
            _listen(listener, self.path)
            directory.announce(self.path)
            opened.pop_all()
        self._server = UnixServer("kvstore-control", listener, self._serve, MAX_CONNECTIONS, self._refuse)
        leave_to_parent(self, "the store's socket", is_closed=True)

    def close(self) -> None:
        """Stop answering, within about a second, and remove the socket. Twice, or in a forked child: no effect."""
        if not self.is_closed:
            self.is_closed = True
            try:
                self._server.close(grace_s=CLOSE_S)
            finally:
                self._remove()

    def _remove(self) -> None:
        with suppress(OSError):
            if stat.S_ISSOCK(self.path.lstat().st_mode):
                self.path.unlink()
        if self._private is not None:
            self._private.remove()

    def _refuse(self, connection: socket.socket) -> None:
        connection.settimeout(self._request_s)
        _send(connection, _error("failure", f"{MAX_CONNECTIONS} commands are running already; try again"))

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(self._request_s)
        # The connection breaks, or no thread can be started: the other side sees its end.
        with suppress(OSError, RuntimeError):
            if _peer_uid(connection) != os.getuid():
                _send(connection, _error("failure", "only the store's owner is answered"))
                return
            try:
                line = _receive_line(connection, MAX_REQUEST_BYTES, time.monotonic() + self._request_s)
                request = _parse(line)
            except (OSError, ValueError, msgspec.MsgspecError) as error:  # a timeout too
                connection.settimeout(self._request_s)
                _send(connection, _error("failure", f"not a request: {_one_line(error)}"))
                return
            connection.settimeout(self._request_s)
            with _pulse(connection, self._pulse_s):
                answer = self._answer(request)
            _send(connection, answer)

    def _answer(self, request: _Request) -> bytes:
        if self.is_closed:
            return _error("failure", "the store's owner is closing it; try again")
        try:
            answer = _line({"ok": True, "result": self._handler(request.command, request.arguments)})
        except ConfigError as error:
            return _error("config", _one_line(error))
        except StoreError as error:
            return _error("store", _one_line(error))
        except KVStoreError as error:
            return _error("failure", _one_line(error))
        except Exception as error:  # a bug of the handler must not look like a silent owner
            return _error("failure", f"the owner failed: {type(error).__name__}: {_one_line(error)}")
        if len(answer) > MAX_ANSWER_BYTES:
            return _error("failure", f"the answer has {len(answer):,} bytes, more than can be sent; ask for less")
        return answer


@contextmanager
def _pulse(connection: socket.socket, every_s: float) -> Iterator[None]:
    """Send the other side a sign of life at intervals."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(every_s) and _send(connection, _line({"progress": None})):
            pass

    thread = threading.Thread(target=run, name="kvstore-control-pulse", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _place(directory: Path) -> tuple[Path, PrivateFolder | None]:
    """The socket's path, and the directory made for it, if any."""
    path, private = Path(os.path.abspath(directory)) / SOCKET_NAME, None
    if len(os.fsencode(path)) > _LONGEST_PATH:
        private = PrivateFolder()
        path = private.path / SOCKET_NAME
    return path, private


def _listen(listener: socket.socket, path: Path) -> None:
    """Bind to `path`, mode 0600, in place of a stale socket."""
    try:
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise StoreError(f"{path} is not a socket, but one has to be there; remove it")
            path.unlink()
        os.fchmod(listener.fileno(), 0o600)  # the mode that bind gives the file
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(MAX_CONNECTIONS)
    except OSError as error:
        raise StoreError(f"the control socket {path} cannot be made: {error.strerror or error}") from error


def _peer_uid(connection: socket.socket) -> int:
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


class _Request(msgspec.Struct, frozen=True):
    version: int
    command: str
    arguments: dict[str, Any] = {}


_requests = msgspec.json.Decoder(_Request)


def _parse(line: bytes) -> _Request:
    try:
        request = _requests.decode(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if request.version != VERSION:
        raise ValueError(f"version {request.version} is not known here, {VERSION} is; use one kvstore")
    return request


# -- the asking side -------------------------------------------------------------------------------------------------
def ask(
    path: str | Path, command: str, arguments: Mapping[str, Any], timeout_s: float,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The owner's answer to a command; path: the store's directory. on_progress: called at every sign of life.

    timeout_s: how long the owner may be silent. Raises NoOwner when nobody owns the store, OwnerSilentError when the
    owner does not answer, and the owner's own error as ConfigError, StoreError or KVStoreError.
    """
    info = read_lock_info(path)
    if info is None:
        raise NoOwner(f"no process owns the store at {path}")
    who = f"the store at {path} is in use by process {info.pid}" if info.pid else f"the store at {path} is in use"
    if not info.socket_path:
        raise OwnerSilentError(f"{who}, which takes no commands (it starts, ends or runs one); try again", info.pid)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(info.socket_path))
            with suppress(BrokenPipeError, ConnectionResetError):  # refused before it was read: the answer says why
                connection.sendall(_line({"version": VERSION, "command": command, "arguments": dict(arguments)}))
            for answer in _answers(connection):
                if "progress" not in answer:
                    return _result(answer, who)
                if on_progress is not None:
                    on_progress(answer["progress"])
    except TimeoutError:
        raise OwnerSilentError(
            f"{who}, which was silent for {timeout_s:g} s; try again, or stop it", info.pid
        ) from None
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        why = _one_line(error)
        raise OwnerSilentError(f"{who}, which does not answer ({why}); try again, or stop it", info.pid) from error
    raise OwnerSilentError(f"{who}, which ended before it answered; try again", info.pid)


def _answers(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """The lines of an answer; ends with the connection."""
    with connection.makefile("rb") as lines:
        for line in lines:
            answer = json.loads(line)
            if not isinstance(answer, dict):
                raise ValueError("what it sent is no answer")
            yield answer


def _result(answer: dict[str, Any], who: str) -> dict[str, Any]:
    result = answer.get("result")
    if answer.get("ok") is True and isinstance(result, dict):
        return result
    if answer.get("ok") is not False:
        raise OwnerSilentError(f"{who}, which sent something else than an answer; use one kvstore for both")
    kinds = {"config": ConfigError, "store": StoreError}
    raise kinds.get(str(answer.get("kind")), KVStoreError)(str(answer.get("error")))


# -- lines -----------------------------------------------------------------------------------------------------------
def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _error(kind: str, message: str) -> bytes:
    return _line({"ok": False, "error": message, "kind": kind})


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


def _send(connection: socket.socket, line: bytes) -> bool:
    """Returns False when the other side is gone or does not read."""
    try:
        connection.sendall(line)
    except OSError:
        return False
    return True


def _receive_line(connection: socket.socket, max_bytes: int, deadline: float) -> bytes:
    """One line; b"" when the connection ends first.

    Raises TimeoutError at the deadline (of time.monotonic), ValueError for a line of more than max_bytes.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it was not complete in time")
        connection.settimeout(left_s)
        chunk = connection.recv(1 << 16)
        if not chunk:
            return b""
        line += chunk
        if len(line) > max_bytes:
            raise ValueError(f"more than {max_bytes:,} bytes")
    return bytes(line)
