"""A Redis of a test's own on a free port, and what may happen to it."""

import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvstore.errors import RemoteError
from kvstore.remote.address import RedisAddress
from kvstore.remote.resp import RespClient
from kvstore.sessions.shared.address import SessionAddress
from kvstore.sessions.shared.connection import RefusedReply, SessionConnection
from tests.support.service.certificates import make_certificate
from tests.support.waiting import TIMEOUT_S, wait_until

PORTS = range(10_000, 32_000)  # below those that the kernel gives to whoever wants just any
BUS = 10_000  # a node of a Cluster listens on a second port, so much higher


def free_port(num: int = 1) -> int:
    """The first of so many in a row. Nobody gets them before they are used: no other test, and no connection."""
    while True:
        first = random.SystemRandom().choice(PORTS)
        if all(_is_reserved(first + index) for index in range(num)):
            return first


def _cluster_port() -> int:
    while True:
        port = free_port()
        if port + BUS in PORTS and _is_reserved(port + BUS):
            return port


def _is_reserved(port: int) -> bool:
    """Whether it was free; then a socket of that name, which this process has until it ends, tells other tests."""
    mark = socket.socket(socket.AF_UNIX)
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
            mark.bind(f"\0kvstore-test-port-{port}")
        except OSError:
            mark.close()
            return False
    mark.detach()
    return True


def wait_for_answers(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone, a shared tier of this process does not give a Redis up that is slow to answer."""
    for name in ("redis_blocks.ASK_S", "redis_blocks.TRANSFER_S", "resp.CONNECT_S"):
        patch.setattr(f"kvstore.remote.{name}", TIMEOUT_S)


class RedisServer:
    """Ends with its context. options: as on its command line; it keeps nothing unless these say so. url: without user
    and password.
    """

    def __init__(self, folder: Path, *options: str, scheme: str = "redis") -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            pytest.skip("neither redis-server nor valkey-server is installed")
        self.port, self.scheme = _cluster_port() if "--cluster-enabled" in options else free_port(), scheme
        port = ["--port", str(self.port)] if scheme == "redis" else ["--port", "0", "--tls-port", str(self.port)]
        self._command = [program, *port, "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def __enter__(self) -> "RedisServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/0"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        wait_until(self._listens, "redis-server does not listen")

    def _listens(self) -> bool:
        assert self.process.poll() is None, "redis-server has ended"
        with socket.socket() as found:
            return found.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def restart(self) -> None:
        """Empty, unless it keeps what it has."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """It takes connections, as the kernel does that, and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def client(self, **more: object) -> RespClient:
        return RespClient(RedisAddress("127.0.0.1", self.port, **more), TIMEOUT_S)  # type: ignore[arg-type]

    def ask(self, *command: str | bytes | int) -> object:
        """By a connection of its own. Raises RemoteError also if the server answers with an error."""
        client = SessionConnection(SessionAddress((RedisAddress("127.0.0.1", self.port),)), b"")
        try:
            (reply,) = client.pipeline([command], TIMEOUT_S)
        finally:
            client.close()
        if isinstance(reply, RefusedReply):
            raise RemoteError(reply)
        return reply

    def names(self) -> list[bytes]:
        return self.ask("KEYS", "*")  # type: ignore[return-value]

    def get(self, name: bytes) -> bytes:
        return self.ask("GET", name)  # type: ignore[return-value]

    def set(self, name: bytes, value: bytes) -> None:
        self.ask("SET", name, value)

    def delete(self, name: bytes) -> None:
        self.ask("DEL", name)

    def answers(self) -> bool:
        try:
            return self.ask("PING") == b"PONG"
        except RemoteError:
            return False


class SentinelServer(RedisServer):
    """Knows one Redis, and lets a replica of it take over as soon as it has not answered for a moment."""

    def __init__(self, folder: Path, primary: RedisServer) -> None:
        self.port, self.scheme, config = free_port(), "redis", folder / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor sessions 127.0.0.1 {primary.port} 1\n"
            "sentinel down-after-milliseconds sessions 500\n"
        )
        self._command = [primary._command[0], str(config), "--sentinel"]
        self.start()


def certificate(folder: Path) -> tuple[str, str]:
    """For 127.0.0.1, signed by itself."""
    cert, key = make_certificate(folder)
    return str(cert), str(key)


@contextmanager
def no_answer_after(seconds: float) -> Iterator[None]:
    """In here whoever asks a Redis gives up so soon, also on a connection that it had before."""

    def hasty(pipeline: Callable[..., Any]) -> Callable[..., Any]:
        return lambda client, commands, *into, **_: pipeline(client, commands, *into[:1], timeout_s=seconds)

    with ExitStack() as patched:
        for kind in (RespClient, SessionConnection):
            patched.enter_context(mock.patch.object(kind, "pipeline", hasty(kind.pipeline)))
        yield
