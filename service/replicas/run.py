"""`kvstore serve --replicas`: Ray on this machine alone, with the application on it, until a signal comes."""

import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import psutil

from kvstore.engine.model.files import check_speaks
from kvstore.errors import ConfigError, KVStoreError
from kvstore.service.http.logs import log, set_up_logging
from kvstore.service.replicas.app import CLOSE_S, application, check, resources
from kvstore.service.server import EXIT_ENGINE_FAILED
from kvstore.service.settings.serve_options import ServeOptions

Handler = Callable[[int, Any], None]
NAME = "kvstore"
DISORDER = "replicas did not end in order"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
WATCH_S = 5.0  # between looks whether Ray is there
OBJECT_BYTES = 256 * 2**20  # of Ray's shared memory: it carries large bodies only
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}  # nothing is sent out; each line is shown


def run_replicas(model: Any, arguments: Mapping[str, Any], options: ServeOptions) -> int:
    """Serve until a signal comes: 0 after SIGTERM, 130 after SIGINT. EXIT_ENGINE_FAILED when Ray dies.

    Raises ConfigError before anything is started, and KVStoreError when the port or the replicas cannot be.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _, most = options.replicas or (1, 1)
    check(most, arguments)
    check_speaks(model, arguments, chats=False)
    set_up_logging(options.log_format, options.log_level)
    if most > 1 and arguments["cache_tiers"].remote is None:
        told = "no --remote: a conversation that comes to another replica is computed there again"
        log(told, {}, logging.WARNING)
    return _run(model, arguments, replace(options, port=_free_port(options)))


def _run(model: Any, arguments: Mapping[str, Any], options: ServeOptions) -> int:
    """All calls to Ray are made in one thread: they do not stand a signal, and Ray's processes die with the thread that
    has started them.
    """
    news: SimpleQueue[int | Exception | None] = SimpleQueue()  # how the start went, then the signal
    is_ready, is_over = threading.Event(), threading.Event()

    def run() -> None:
        import ray

        try:
            _start_ray(options)
            news.put(None)
            _deploy(model, arguments, options)
            news.put(None)
            is_ready.set()
            is_over.wait()
            _end(options)
        except Exception as error:  # the waiting thread raises it
            news.put(error)
        finally:
            ray.shutdown()

    received, before = _hearing(news, is_ready), {number: signal.getsignal(number) for number in SIGNALS}
    thread = threading.Thread(target=run, name="kvstore-ray", daemon=True)
    _hear(received)
    thread.start()
    try:
        for _ in ("Ray is started", "the replicas are ready"):
            failure = _next(news)
            if isinstance(failure, Exception):
                raise failure
            _hear(received)  # Ray has put a handler over it, by which SIGTERM aborts the process after three seconds
        host = f"[{options.host}]" if ":" in options.host else options.host
        log("ready", {"address": f"http://{host}:{options.port}", "replicas": (options.replicas or (1, 1))[0]})
        number = _next(news)
        assert isinstance(number, int)
        log("stopping", {"exit_code": _code(number)})
        return _code(number)
    finally:
        is_over.set()
        thread.join()
        for number, handler in before.items():
            signal.signal(number, handler)


def _start_ray(options: ServeOptions) -> None:
    import ray

    _, most = options.replicas or (1, 1)
    logging.getLogger("ray._private.worker").setLevel(logging.ERROR)  # it warns that it leaves signals to us
    ray.init(
        address="local", include_dashboard=False, num_cpus=max(os.cpu_count() or 1, most),
        object_store_memory=OBJECT_BYTES, logging_level=logging.WARNING,
    )  # fmt: skip


def _deploy(model: Any, arguments: Mapping[str, Any], options: ServeOptions) -> None:
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    deployed = application(model, arguments, options, {"ray_actor_options": _resources(arguments, options)})
    http = {"host": options.host, "port": options.port, "keep_alive_timeout_s": int(options.keep_alive_s)}
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    serve.start(proxy_location="HeadOnly", http_options=http, logging_config=quiet)
    try:
        serve.run(deployed, name=NAME, route_prefix="/")
    except RuntimeError:
        raise KVStoreError(f"the replicas do not start: {_cause()}") from None


def _end(options: ServeOptions) -> None:
    """End all replicas in order at once, and then Serve, which finds nothing left to wait for."""
    from ray import serve

    with _telling():
        closing = serve.get_deployment_handle("Replica", NAME).broadcast("close")
        ends = closing.results(timeout_s=options.shutdown_timeout_s + CLOSE_S, return_exceptions=True)
        failed = [type(one).__name__ for one in ends if isinstance(one, Exception)]
        if failed:
            log(DISORDER, {"errors": ", ".join(failed)}, logging.WARNING)
        serve.delete(NAME)
    with _telling():
        serve.shutdown()


@contextmanager
def _telling() -> Iterator[None]:
    """Tell whatever goes wrong at the end: nobody waits for it any more, and all processes end all the same."""
    try:
        yield
    except Exception as error:
        log(DISORDER, {"errors": f"{type(error).__name__}: {error}"[:300]}, logging.WARNING)


def _resources(arguments: Mapping[str, Any], options: ServeOptions) -> dict[str, Any]:
    """Of one replica, where all share this machine. Raises ConfigError where there are fewer GPUs than they need."""
    import ray

    num_gpus, (_, most) = int(ray.cluster_resources().get("GPU", 0)), options.replicas or (1, 1)
    num_cpus = max(1, (os.cpu_count() or 1) // most)  # Ray makes as many computing threads of it
    found = resources(num_cpus, num_gpus > 0 and arguments["device"] != "cpu", arguments)
    if found.get("num_gpus", 0) * most > num_gpus:
        raise ConfigError(
            f"--replicas {most} need {found['num_gpus'] * most} GPUs, and this machine has {num_gpus}; give fewer, or "
            "--device cpu"
        )
    return found


def _free_port(options: ServeOptions) -> int:
    """Ray would tell of a port in use late and at length. Raises KVStoreError."""
    try:
        with closing(socket.create_server((options.host, options.port))) as found:
            return int(found.getsockname()[1])
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise KVStoreError(f"port {options.port} on {options.host} cannot be opened: {reason}") from error


def _cause() -> str:
    """What Ray has from the replica that failed: the last line of a trace, which is the error itself."""
    from ray import serve

    told = serve.status().applications[NAME].deployments["Replica"].message
    lines = [line.strip() for line in told.splitlines() if re.match(r"\S*(Error|Exception)\b.*: ", line.strip())]
    return lines[-1] if lines else told[-300:]


def _hearing(news: "SimpleQueue[Any]", is_ready: threading.Event) -> Handler:
    """A handler: the first signal is news. A second one, or one before anything was accepted, ends the process and all
    that it has started at once.
    """
    seen: list[int] = []

    def received(number: int, _: Any) -> None:
        if seen or not is_ready.is_set():
            _end_at_once(_code(number) if not seen else 128 + number)
        seen.append(number)
        news.put(number)

    return received


def _next(news: "SimpleQueue[Any]") -> Any:
    """What comes next. Ends the process when Ray's own on this machine has died, which nothing here can bring back."""
    import ray

    while True:
        with suppress(Empty):
            return news.get(timeout=WATCH_S)
        if ray.is_initialized() and not any(node["Alive"] for node in ray.nodes()):
            log("Ray has died on this machine", {"exit_code": EXIT_ENGINE_FAILED}, logging.ERROR)
            _end_at_once(EXIT_ENGINE_FAILED)


def _end_at_once(code: int) -> NoReturn:
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(code)


def _hear(received: Handler) -> None:
    for number in SIGNALS:
        signal.signal(number, received)


def _code(number: int) -> int:
    """A signal to end is no failure."""
    return 0 if number == signal.SIGTERM else 128 + number
