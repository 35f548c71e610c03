"""`kvstore serve --replicas`: the application on the Ray cluster of this machine, until a signal comes."""

import logging
import os
import re
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from kvstore.engine.model.files import check_speaks
from kvstore.engine.ranks.on_ray import connected
from kvstore.errors import ConfigError, KVStoreError
from kvstore.service.http.logs import log, set_up_logging
from kvstore.service.replicas.app import CLOSE_S, application, check, resources
from kvstore.service.server import EXIT_ENGINE_FAILED
from kvstore.service.settings.serve_options import ServeOptions

NAME = "kvstore"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
WATCH_S = 5.0  # between looks whether the application is there


def run_replicas(model: Any, arguments: Mapping[str, Any], options: ServeOptions) -> int:
    """Serve until a signal comes: 0 after SIGTERM, 130 after SIGINT. EXIT_ENGINE_FAILED when others end what it serves.

    Raises ConfigError without a cluster that can be used, and KVStoreError when the replicas do not start.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # each line is shown
    _, most = options.replicas or (1, 1)
    check(most, arguments)
    check_speaks(model, arguments, chats=False)
    set_up_logging(options.log_format, options.log_level)
    if most > 1 and arguments["cache_tiers"].remote is None:
        told = "no --remote: a conversation that comes to another replica is computed there again"
        log(told, {}, logging.WARNING)
    with connected("replicas", "given") as ray:
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        if others := serve.status().applications.keys() - {NAME}:
            raise ConfigError(
                f"--replicas is given, but Ray Serve has {', '.join(sorted(others))} on this cluster; deploy beside it "
                "with serve deploy, see docs/fleet.md"
            )
        if serve.status().proxies:
            _end(options)  # what a command that was killed has left
        deployed = application(model, arguments, options, {"ray_actor_options": _resources(ray, arguments, most)})
        return _run(deployed, options)


def _run(deployed: Any, options: ServeOptions) -> int:
    news: SimpleQueue[int | Exception | None] = SimpleQueue()  # how the start went, then the signal's exit code

    def received(number: int, _: Any) -> None:
        for one in SIGNALS:
            signal.signal(one, lambda again, _: os._exit(128 + again))
        news.put(0 if number == signal.SIGTERM else 128 + number)

    for number in SIGNALS:
        signal.signal(number, received)  # over Ray's handler, by which SIGTERM aborts the process after three seconds
    threading.Thread(target=_deploy, args=(deployed, options, news), name="kvstore-ray", daemon=True).start()
    code = news.get()
    if code is None:
        host = f"[{options.host}]" if ":" in options.host else options.host
        log("ready", {"address": f"http://{host}:{options.port}", "replicas": (options.replicas or (1, 1))[0]})
        code = _awaited(news)
    cause = _cause(code) if isinstance(code, Exception) else None
    if code != EXIT_ENGINE_FAILED:
        log("stopping", {"exit_code": 1 if cause else code})
        _end(options)
    if isinstance(code, Exception):
        raise KVStoreError(f"the replicas do not start: {cause}") from None
    return code


def _deploy(deployed: Any, options: ServeOptions, news: "SimpleQueue[Any]") -> None:
    """In a thread of its own: a signal comes while the replicas load."""
    from ray import serve

    http = {"host": options.host, "port": options.port, "keep_alive_timeout_s": int(options.keep_alive_s)}
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    try:
        serve.start(proxy_location="HeadOnly", http_options=http, logging_config=quiet)
        serve.run(deployed, name=NAME, route_prefix="/")
        news.put(None)
    except Exception as error:  # the waiting thread tells it
        news.put(error)


def _awaited(news: "SimpleQueue[Any]") -> int:
    """The exit code of the first signal, or that of an application that is not there any more."""
    from ray import serve

    while True:
        with suppress(Empty):
            return news.get(timeout=WATCH_S)
        with suppress(Exception):  # Ray starts its controller again, and ends this process when its cluster ends
            if NAME not in serve.status().applications:
                log("others have ended the application", {"exit_code": EXIT_ENGINE_FAILED}, logging.ERROR)
                return EXIT_ENGINE_FAILED


def _end(options: ServeOptions) -> None:
    """End all replicas in order at once, and then Serve, which finds nothing left to wait for."""
    from ray import serve

    try:
        closing = serve.get_deployment_handle("Replica", NAME).broadcast("close")
        ends = closing.results(timeout_s=options.shutdown_timeout_s + CLOSE_S, return_exceptions=True)
        failed = [one for one in ends if isinstance(one, Exception)]
    except Exception as error:  # nobody waits for them any more
        failed = [error]
    if failed:
        told = ", ".join(f"{type(one).__name__}: {one}"[:300] for one in failed)
        log("replicas did not end in order", {"errors": told}, logging.WARNING)
    serve.shutdown()


def _resources(ray: Any, arguments: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Of one of so many replicas. Raises ConfigError where the cluster has fewer GPUs than they need."""
    cpus = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    num_each = -(-most // len(cpus))
    num_cpus = max(1, int(min(cpus) // num_each))  # Ray makes as many computing threads of it
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    found = resources(num_cpus, num_gpus > 0 and arguments["device"] != "cpu", arguments)
    if found.get("num_gpus", 0) * most > num_gpus:
        raise ConfigError(
            f"--replicas {most} need {found['num_gpus'] * most} GPUs, and the Ray cluster has {num_gpus}; give fewer, "
            "or --device cpu"
        )
    return found


def _cause(error: Exception) -> str:
    """What Ray has from the replica that failed: the last line of a trace, which is the error itself."""
    from ray import serve

    failed = serve.status().applications.get(NAME)
    told = str(error) if failed is None else failed.deployments["Replica"].message
    lines = [line.strip() for line in told.splitlines() if re.match(r"\S*(Error|Exception)\b.*: ", line.strip())]
    return lines[-1] if lines else told[-300:]
