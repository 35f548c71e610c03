"""`kvstore serve`: opens the port, loads the model beside it, serves, and ends in order. Owns the process' signals."""

import asyncio
import ctypes
import errno
import gc
import logging
import math
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import web

from kvstore.config import CacheTiers
from kvstore.engine.async_engine import AsyncEngine
from kvstore.engine.client.opening import check_divisible
from kvstore.engine.config import EngineConfig, default_topic
from kvstore.engine.model.files import check_speaks, local_path
from kvstore.engine.outputs import describe_tiers
from kvstore.engine.sessions.recall import Recall
from kvstore.errors import ConfigError, KVStoreError
from kvstore.remote.names import PREFILL_KEY, fleet_secret
from kvstore.service.api import prefill
from kvstore.service.api.exchange import Context
from kvstore.service.api.health import watch
from kvstore.service.app import ROUTES, make_app
from kvstore.service.http.access import Access
from kvstore.service.http.errors import Route, unavailable
from kvstore.service.http.limits import SEND_BUFFER_BYTES, AcceptErrors, Connection, Limits, ensure_descriptors
from kvstore.service.http.listening import tls_context, unix_socket
from kvstore.service.http.telling import Metrics, Traces, log, set_up_logging
from kvstore.service.settings.serve_options import ServeOptions

OpenEngine = Callable[[], Any]
EXIT_ENGINE_FAILED = 5  # the engine has ended too often; a supervisor should start this process again
FAILURE_POLL_S = 0.5
LAST_WORDS_S = 2.0  # for error events and closing, after the time of running requests
POLL_S = 0.02


def run_serve(model: str | None, engine_arguments: Mapping[str, Any], options: ServeOptions) -> int:
    """Serve until a signal comes: 0 after SIGTERM, 130 after SIGINT. EXIT_ENGINE_FAILED when the engine stays down.

    SIGHUP reads the file of keys again; where there is none, it is as SIGTERM. Raises ConfigError and ModelError before
    anything is opened, and KVStoreError when the port or the model cannot be.
    """
    check_engine(model, engine_arguments, options)
    server = Server(options, fleet_key=fleet_key_of(engine_arguments))
    do_without_torch()
    ensure_descriptors(options.max_connections)
    set_up_logging(options.log_format, options.log_level)
    warnings.showwarning = _log_warning
    store = store_of(engine_arguments)
    return asyncio.run(_serve(server, store, lambda: open_engine(model, engine_arguments, options)))


def check_engine(model: str | None, engine_arguments: Mapping[str, Any], options: ServeOptions) -> None:
    """Tell what the engine would refuse before torch is loaded, which takes seconds; of a model of the hub, what needs
    no network. Raises ConfigError and ModelError.
    """
    given = {"cache_tiers": None, "model": model, "data_parallel_size": options.data_parallel_size}
    config = EngineConfig.of({**given, **engine_arguments})
    check_divisible(config)
    config.fleet_root()
    config.tiers.check_disk()
    if config.device.startswith("cuda") and not has_driver():
        value = f"{config.device}, but this machine has no driver for CUDA devices"
        raise ConfigError("device", value, "give cpu or auto")
    if model is None or local_path(model) is not None:
        check_speaks(model, engine_arguments, chats=False)


def do_without_torch() -> None:
    """From now on `import torch` fails in this process, unless it is loaded already. transformers is imported for its
    tokenizers only, would load torch where it finds it, and has no setting for that. The engine's process has torch.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # Python's documented way to forbid an import
    logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())


def has_driver() -> bool:
    """Whether there is NVIDIA's driver, which torch will load."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def fleet_key_of(engine_arguments: Mapping[str, Any]) -> bytes | None:
    """What servers sign in with whose prompts this one computes; None: it does not."""
    tiers = CacheTiers.of(engine_arguments.get("cache_tiers"))
    return fleet_secret(tiers.fleet_secret_file).derived(PREFILL_KEY) if tiers.role == "prefill" else None


def store_of(engine_arguments: Mapping[str, Any]) -> str | None:
    """The directory of the disk tier and of sessions; None: nothing is kept on disk."""
    tiers = CacheTiers.of(engine_arguments.get("cache_tiers"))
    return os.path.abspath(tiers.path) if tiers.disk and tiers.path is not None else None


def _log_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    log(" ".join(str(message).split()), {}, logging.WARNING)


def open_engine(model: str | None, engine_arguments: Mapping[str, Any], options: ServeOptions) -> Any:
    """The engine that the service drives, in a process of its own."""
    if options.served_model_name and engine_arguments.get("kv_events"):  # routers know the name that clients give
        topic = engine_arguments.get("kv_events_topic") or default_topic(options.served_model_name)
        engine_arguments = {**engine_arguments, "kv_events_topic": topic}
    check_speaks(model, engine_arguments, chats=False)
    from kvstore.engine.engine import Engine

    return Engine(
        model, process="own", silence_s=options.engine_timeout_s, max_restarts=options.engine_restarts,
        data_parallel_size=options.data_parallel_size, **engine_arguments,
    )  # fmt: skip


async def _serve(server: "Server", store: str | None, open_engine: OpenEngine) -> int:
    ended = _signals(server)
    await server.listen()
    log("loading the model", {"address": server.address})
    loading: asyncio.Future[Any] = asyncio.ensure_future(server.load(open_engine))
    await asyncio.wait([loading, ended], return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():  # loading cannot be interrupted, and no request has been accepted yet
        _exit_now(_code(ended.result()))
    try:
        await loading
        gc.collect()
        gc.freeze()  # a full collection would spend a third of a second on what was loaded and stays
        notify("READY=1")
        log("ready", {**await server.context.engine.call(server.description), "store": store})
        is_down = _until(lambda: server.context.has_failed, math.inf, FAILURE_POLL_S)
        failing: asyncio.Future[Any] = asyncio.ensure_future(is_down)
        watching = asyncio.create_task(watch(server.context))
        await asyncio.wait((ended, failing), return_when=asyncio.FIRST_COMPLETED)
        failing.cancel()
        watching.cancel()
        code = _code(ended.result()) if ended.done() else EXIT_ENGINE_FAILED
        notify("STOPPING=1")
        log("stopping", {"running": server.context.limits.num_admitted, "exit_code": code})
    finally:
        await server.close()
    return code


def notify(state: str) -> None:
    """Tell systemd, if it has started this process with Type=notify (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as messages:
        messages.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)


def _code(number: int) -> int:
    """A signal to end is no failure."""
    return 0 if number in (signal.SIGTERM, signal.SIGHUP) else 128 + number


def _signals(server: "Server") -> asyncio.Future[int]:
    """A future that gets the first signal's number. The second signal ends the process at once."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def received(number: int) -> None:
        if ended.done():
            _exit_now(128 + number)
        ended.set_result(number)

    def hung_up() -> None:
        if not ended.done():  # a closed terminal sends it twice: by the kernel, and by the shell
            ended.set_result(signal.SIGHUP)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, received, number)
    if server.options.api_key_file is not None:
        loop.add_signal_handler(signal.SIGHUP, server.read_keys)
    elif signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        loop.add_signal_handler(signal.SIGHUP, hung_up)
    return ended


def _exit_now(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Server:
    """One listening service. `listen`, then `load`, then `close`, all in one event loop.

    Raises ConfigError for options that cannot be used.
    """

    def __init__(self, options: ServeOptions, routes: Sequence[Route] = ROUTES, fleet_key: bytes | None = None) -> None:
        """fleet_key: other servers let this one compute their prompts, and sign in with it."""
        self.options = options
        self._routes = routes if fleet_key is None else (*routes, *prefill.ROUTES)
        self._tls = tls_context(options.ssl_certfile, options.ssl_keyfile)
        access = Access(options, fleet_key)
        limits = Limits(options, is_shared=len(access.tenants) > 1)
        traces = None if options.otlp_traces_endpoint is None else Traces(options.otlp_traces_endpoint)
        self.context = Context(options, access, limits, Metrics(), int(time.time()), traces)
        self.connections: set[Connection] = set()
        self._runner: web.AppRunner | None = None
        self._socket: asyncio.Server | None = None

    async def listen(self) -> None:
        """Open the port, or the Unix socket. /health and /ready answer 503 until the model is loaded.

        Raises KVStoreError when it cannot be opened.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(AcceptErrors())
        runner = web.AppRunner(
            make_app(self.context, self._routes), handle_signals=False, access_log=None, handler_cancellation=True,
            shutdown_timeout=LAST_WORDS_S,
        )  # fmt: skip
        await runner.setup()
        self._runner = runner
        try:
            connection = partial(Connection, runner.server, self.options, self.connections, loop)
            self._socket = await self._listening(connection)
        except OSError as error:
            await runner.cleanup()
            raise KVStoreError(self._why_not(error)) from error
        for one in self._socket.sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it

    async def _listening(self, protocol: Callable[[], asyncio.Protocol]) -> asyncio.Server:
        loop, options, tls = asyncio.get_running_loop(), self.options, dict[str, Any]()
        if self._tls is not None:
            tls = {"ssl": self._tls, "ssl_handshake_timeout": options.header_timeout_s}
            tls["ssl_shutdown_timeout"] = LAST_WORDS_S
        if options.uds is not None:
            return await loop.create_unix_server(protocol, sock=unix_socket(options.uds), **tls)
        return await loop.create_server(protocol, options.host, options.port, **tls)

    def _why_not(self, error: OSError) -> str:
        host, port, uds = self.options.host, self.options.port, self.options.uds
        if error.errno == errno.EADDRINUSE:
            where, other = (f"port {port} on {host}", "--port") if uds is None else (f"the socket {uds}", "--uds")
            return f"{where} is in use by another program; give another {other}"
        if isinstance(error, socket.gaierror):
            return f"--host {host} is no address of this machine"
        return f"{f'port {port} on {host}' if uds is None else f'--uds {uds}'} cannot be opened: {_cause(error)}"

    async def load(self, open_engine: OpenEngine) -> None:
        """Load the model in a thread. Requests are served once this returns."""
        engine = await asyncio.to_thread(open_engine)
        self.context.open(AsyncEngine(engine, reads=True), Recall(engine.chats))
        language = engine.chats.language
        if language.tokenizer is not None and language.template is None:
            log(f"{language.why_no_chat}: routes that chat answer 400", {}, logging.WARNING)

    @property
    def port(self) -> int:
        assert self._socket is not None
        return self._socket.sockets[0].getsockname()[1]

    @property
    def address(self) -> str:
        assert self._socket is not None
        return self.options.address(self.port) if self.options.uds is None else f"unix:{self.options.uds}"

    def description(self) -> dict[str, object]:
        engine = self.context.engine.engine
        return {
            "address": self.address,
            "model": self.context.model_name,
            "window": engine.facts.max_model_len,
            "tiers": describe_tiers(engine.stats()),
            "keys": "required" if self.context.access.needs_key else "none",
        }

    def read_keys(self) -> None:
        """Take the keys as their file has them now; requests of keys that are gone end with an error."""
        access, limits = self.context.access, self.context.limits
        try:
            access.read_keys()
        except ConfigError as error:
            log(f"{error}; the keys of before stay", {}, logging.ERROR)
            return
        limits.is_shared = len(access.tenants) > 1
        limits.end_refused()
        log("keys read again", {"tenants": len(access.tenants)})

    async def drain(self) -> None:
        """Take no more requests, wait a while for those that run, then end them."""
        self.context.state = "stopping"
        limits = self.context.limits
        await _until(lambda: limits.num_open == 0, self.options.shutdown_timeout_s)
        limits.end_all(unavailable("the server is shutting down", "stopping"))

    async def close(self) -> None:
        """Drain, then end the connections and the engine."""
        has_engine = self.context.state != "starting"
        await self.drain()
        limits = self.context.limits
        if self._socket is not None:
            self._socket.close()
            if self.options.uds is not None:
                self.options.uds.unlink(missing_ok=True)
        await _until(lambda: limits.num_open == 0, LAST_WORDS_S)
        if self._runner is not None:
            await self._runner.cleanup()
        if has_engine:
            await self.context.engine.close()
        if self.context.traces is not None:
            sending = self.context.traces.close()
            await _until(lambda: not sending.is_alive(), LAST_WORDS_S)


def _cause(error: OSError) -> str:
    return str(error) if error.errno is None else os.strerror(error.errno)


async def _until(is_so: Callable[[], bool], timeout_s: float, poll_s: float = POLL_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so() and time.monotonic() < deadline:
        await asyncio.sleep(poll_s)
