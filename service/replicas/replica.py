"""One server of a fleet, as Ray runs it: the same as `kvstore serve` alone, on a socket that only its process uses.

Requests come over that socket as over a port. So limits, keys, streams, and what happens when a client goes are the
server's own, in one implementation. Its store is the first directory below a shared one that no other replica has, so
that one that is started again finds what the one before it left: Ray's own names are new each time.
"""

import asyncio
import fcntl
import gc
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec
from yarl import URL

from kvstore.config import parse_endpoint
from kvstore.errors import KVStoreError, StoreError
from kvstore.service.api.health import watch
from kvstore.service.http.errors import ApiError, unavailable
from kvstore.service.http.limits import ensure_descriptors
from kvstore.service.http.telling import log, set_up_logging
from kvstore.service.server import Server, open_engine, store_of
from kvstore.service.settings.options import default_store
from kvstore.service.settings.serve_options import ServeOptions

FLUSH_S = 60.0  # for KV that is not on disk or in the remote tier yet when a replica ends
OF_ONE_HOP = {  # headers that belong to a connection, not to what it carries
    "connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "expect",
}  # fmt: skip
Headers = list[tuple[bytes, bytes]]


class ReplicaPlace:
    """A replica's directory, its own until the process ends, however it does. name: "replica-0" and so on."""

    def __init__(self, store: Path, number: int, fd: int) -> None:
        self.number, self.name = number, f"replica-{number}"
        self.path = store / self.name
        self._fd = fd

    @classmethod
    def below(cls, store: Path) -> Self:
        """Raises StoreError where nothing can be made there."""
        store = store.expanduser()
        try:
            store.mkdir(mode=0o700, parents=True, exist_ok=True)
            for number in count():
                fd = os.open(store / f"replica-{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return cls(store, number, fd)
                except BlockingIOError:
                    os.close(fd)
        except OSError as error:
            raise StoreError(f"--store {store} cannot be used: {error.strerror or error}") from None
        raise AssertionError("unreachable")

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class PassedRequest:
    """An HTTP request. target: path and query as they came. headers: all that came, but those of one hop, in order."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of an answer."""

    status: int
    headers: Headers

    @property
    def is_stream(self) -> bool:
        return any(name.lower() == b"content-type" and b"event-stream" in value for name, value in self.headers)


@dataclass(frozen=True, slots=True)
class Whole:
    """A replica's whole answer to what all replicas are asked."""

    name: str
    head: Head
    body: bytes


def refusal(error: ApiError) -> tuple[Head, bytes]:
    """An error in the shape that all errors have."""
    named = {"Content-Type": "application/json; charset=utf-8", "Server": "kvstore", **error.headers}
    headers = [(name.encode(), value.encode()) for name, value in named.items()]
    return Head(error.status, headers), msgspec.json.encode(error.body())


class Replica:
    """Ray makes it, has `answer` called for each request and `check_health` every few seconds, and awaits `__del__`
    once all that had begun is answered.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, model: str | None, arguments: Mapping[str, Any], options: ServeOptions
    ) -> None:
        self._closing: asyncio.Task[None] | None = None
        ensure_descriptors(options.max_connections, ends=2)
        set_up_logging(options.log_format, options.log_level)
        self._place = ReplicaPlace.below(arguments["cache_tiers"].path or Path(default_store()))
        own = arguments_at(arguments, self._place)
        self._folder = tempfile.TemporaryDirectory(prefix="kvstore-")
        path = Path(self._folder.name) / "http"
        most = options.max_connections + 1  # one more than the ingress has requests, for Ray's look at the health
        here: dict[str, Any] = {"uds": path, "ssl_certfile": None, "ssl_keyfile": None, "replicas": None}
        self._server = Server(replace(options, takes_session_names=True, max_connections=most, **here))
        await self._server.listen()
        await self._server.load(lambda: open_engine(model, own, options))
        gc.collect()
        gc.freeze()
        self._client = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(path), limit=0), timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False, skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )  # fmt: skip
        self._watching = asyncio.create_task(watch(self._server.context))
        described = await self._server.context.engine.call(self._server.description)
        log("replica is ready", {"replica": self._place.name, **described, "store": store_of(own)})

    async def answer(self, call: PassedRequest) -> AsyncIterator[Head | bytes]:
        """The head of the answer, then its body as it comes. To end the iteration early is to abort the request."""
        if self._closing is not None:
            head, body = refusal(unavailable("the server is shutting down", "stopping"))
            yield head
            yield body
            return
        async with self._asked(call) as reply:
            yield head_of(reply)
            async for piece in reply.content.iter_any():
                yield piece

    async def whole(self, call: PassedRequest) -> Whole:
        """The whole answer, from a replica that is asked as all are."""
        async with self._asked(call) as reply:
            return Whole(self._place.name, head_of(reply), await reply.read())

    def _asked(self, call: PassedRequest) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        url = URL(f"http://localhost{call.target}", encoded=True)
        return self._client.request(
            call.method, url, headers=call.headers, data=call.body or None, allow_redirects=False
        )

    async def check_health(self) -> None:
        """Raises when the engine has failed for good: Ray then starts another replica at this one's place. An engine
        that is being started again is still this server's to wait for.
        """
        if self._closing is None:
            async with self._client.get("http://localhost/livez") as reply:
                if reply.status != 200:
                    raise KVStoreError(f"{self._place.name} has failed: {(await reply.text())[:200]}")

    async def close(self) -> None:
        """End in order: answers, then KV to the tiers below, then the engine. Twice does no harm."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._watching.cancel()
        await self._server.drain()
        engine = self._server.context.engine
        try:
            async with asyncio.timeout(FLUSH_S):
                await engine.flush()
        except (KVStoreError, TimeoutError) as error:
            log("not all KV was kept", {"replica": self._place.name, "error": str(error)}, logging.WARNING)
        await self._client.close()
        await self._server.close()
        self._folder.cleanup()
        self._place.close()
        log("replica has ended", {"replica": self._place.name})

    async def __del__(self) -> None:
        if hasattr(self, "_watching"):  # else it was loading, and has nothing to end
            await self.close()


def arguments_at(arguments: Mapping[str, Any], place: ReplicaPlace) -> dict[str, Any]:
    """Those of the engine at this place: a store and a port for events of its own."""
    found = dict(arguments)
    tiers = found["cache_tiers"]
    if tiers.path is not None:
        found["cache_tiers"] = replace(tiers, path=place.path)
    if found.get("kv_events") is not None:
        address, port = parse_endpoint(found["kv_events"])
        found["kv_events"] = f"{address}:{port + 2 * place.number}"  # each takes two
    return found


def head_of(reply: aiohttp.ClientResponse) -> Head:
    return Head(reply.status, [(name, value) for name, value in reply.raw_headers if not is_of_one_hop(name.decode())])


def is_of_one_hop(name: str) -> bool:
    return name.lower() in OF_ONE_HOP
