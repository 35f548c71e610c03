"""A running service in a thread of its own, and small clients for it."""

import asyncio
import http.client
import json
import math
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvstore.service.api.exchange import Dialect
from kvstore.service.app import ROUTES
from kvstore.service.http.errors import Route
from kvstore.service.server import Server
from kvstore.service.settings.serve_options import ServeOptions
from tests.support.waiting import TIMEOUT_S, wait_in_loop

KEY, ADMIN_KEY = "user-key-of-tests", "admin-key-of-tests"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


@dataclass
class Plain(Dialect):
    """Of a stream that says what its handler sends."""

    has_done: bool = True


@dataclass
class Reply:
    """One HTTP answer. headers: by their names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json()["error"]

    def events(self) -> list[Any]:
        """Data of the server-sent events; "[DONE]" as it is."""
        assert self.headers["content-type"].startswith("text/event-stream"), self.body
        data = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [one if one == "[DONE]" else json.loads(one) for one in data]


@dataclass
class Serving:
    """A server that runs. `key` is what its clients bring; None for none."""

    server: Server
    loop: asyncio.AbstractEventLoop
    key: str | None = None
    hosts: tuple[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.hosts = ("127.0.0.1", self.server.port)

    @property
    def context(self):
        return self.server.context

    @property
    def engine(self):
        """The engine itself, for tests that look into it."""
        return self.server.context.engine.engine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        """body: bytes as they are, anything else as JSON. A header of None is left out."""
        sent = {"Content-Type": "application/json"} if body is not None else {}
        if self.key is not None:
            sent["Authorization"] = f"Bearer {self.key}"
        sent = {name: value for name, value in (sent | (headers or {})).items() if value is not None}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(*self.hosts, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, data, sent)
            reply = connection.getresponse()
            found = {name.lower(): value for name, value in reply.getheaders()}
            return Reply(reply.status, found, reply.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.request("GET", path, None, headers)

    def post(self, path: str, body: Any = None, **headers: str) -> Reply:
        return self.request("POST", path, {} if body is None else body, headers)

    def connect(self, receive_bytes: int | None = None) -> socket.socket:
        """A raw connection; with receive_bytes, one that holds hardly more than that unread."""
        raw = socket.socket()
        if receive_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        raw.settimeout(TIMEOUT_S)
        raw.connect(self.hosts)
        return raw

    @contextmanager
    def held(self) -> Iterator[None]:
        """In here the event loop does nothing, so that it finds all at once what clients send."""
        is_held, go_on = threading.Event(), threading.Event()
        self.loop.call_soon_threadsafe(lambda: (is_held.set(), go_on.wait()))
        is_held.wait()
        try:
            yield
        finally:
            go_on.set()

    def run(self, coroutine: Any) -> Any:
        """In the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(2 * TIMEOUT_S)

    def wait_until(self, is_so: Callable[[], bool], what: str = "") -> None:
        """Asked in the server's event loop."""
        self.run(wait_in_loop(is_so, what))

    def wait_until_idle(self) -> None:
        """No request is there any more, and none of their blocks is held."""
        limits = self.context.limits
        self.wait_until(lambda: (limits.num_open, limits.num_admitted, limits.counts()) == (0, 0, {}), "idle")
        self.wait_until(lambda: not self.engine.has_work, "the engine is idle")
        if hasattr(self.engine.core, "loop"):  # not one in a process of its own
            self.engine.check_integrity()


def raw_request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """The bytes of a request; `X_Name=...` gives the header X-Name."""
    named = {"Host": "127.0.0.1", "Content-Length": str(len(body))}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def read_to_end(raw: socket.socket) -> bytes:
    """What comes until the other side closes."""
    parts = []
    try:
        while part := raw.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def read_answer(raw: socket.socket) -> Reply:
    """One answer; the connection may stay open."""
    with http.client.HTTPResponse(raw) as reply:
        reply.begin()
        return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())


@contextmanager
def serving(
    model: str | None = None,
    engine_factory: Callable[[], Any] | None = None,
    engine: dict[str, Any] | None = None,
    routes: Sequence[Route] = ROUTES,
    fleet_key: bytes | None = None,
    **options: Any,
) -> Iterator[Serving]:
    """A server on a free port, with the built-in model unless another is named.

    engine: arguments of the engine; routes: instead of the service's own; fleet_key: of Server; options: of
    ServeOptions. Clients bring options["api_key"].
    """
    known = {"shutdown_timeout_s": 0.0, **options, "port": 0}
    server = Server(ServeOptions(**known), routes, fleet_key)
    ready: list[Serving] = []
    up, over = threading.Event(), threading.Event()

    async def whole() -> None:
        try:
            await server.listen()
            await server.load(engine_factory or (lambda: _engine(model, engine or {})))
            ready.append(Serving(server, asyncio.get_running_loop(), options.get("api_key")))
            up.set()
            await wait_in_loop(over.is_set, timeout_s=math.inf)
        finally:
            await server.close()

    with ThreadPoolExecutor(1, "test-server") as pool:
        running = pool.submit(lambda: asyncio.run(whole()))
        running.add_done_callback(lambda _: up.set())
        try:
            assert up.wait(2 * TIMEOUT_S), "the server did not start"
            if not ready:
                running.result()
            yield ready[0]
        finally:
            over.set()
            wait([running], TIMEOUT_S)
        running.result(0)


def server_fixture(tiers: dict[str, str] | None = None, **options: Any) -> Any:
    """A fixture of a module's tests: `serving` with these options. tiers: with these, and a store of its own."""

    @pytest.fixture(scope="module")
    def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
        engine = {} if tiers is None else {"cache_tiers": {**tiers, "path": tmp_path_factory.mktemp("kv") / "store"}}
        with serving(engine=engine, **options) as found:
            yield found

    return server


def _engine(model: str | None, arguments: dict[str, Any]) -> Any:
    from kvstore import Engine

    return Engine(model, **{"device": "cpu", "cache_tiers": {"hbm": "8MiB"}, **arguments})
