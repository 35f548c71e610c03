"""The application that Ray Serve deploys: `serve run kvstore.service.replicas.app:app model=... replicas=2`; and
`kvstore serve --replicas`, which deploys it on the cluster of this machine until a signal comes.
"""

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
from kvstore.service.http.listening import tls_context
from kvstore.service.http.telling import log, set_up_logging
from kvstore.service.server import EXIT_ENGINE_FAILED
from kvstore.service.settings.config_file import effective, text_of
from kvstore.service.settings.engine_options import arguments_of, engine_command, with_tiers
from kvstore.service.settings.options import key_of, suggestion
from kvstore.service.settings.serve_options import ServeOptions

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
OF_RAY = ("autoscaling_config", "ray_actor_options")  # arguments that go to Ray as they are
MOST_STARTS = 3  # of a replica that fails while it starts
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 5.0, 10.0  # three of these in vain, and a replica is replaced
CLOSE_S = 90.0  # for a replica that ends, after its answers: KV is flushed, the engine ends
NAME = "kvstore"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
WATCH_S = 5.0  # between looks whether the application is there


def app(args: Mapping[str, Any]) -> Any:
    """args: flags of `kvstore serve` without their dashes, and OF_RAY. Flags that are not given come from the
    environment and the configuration, as for the command. Raises ConfigError.
    """
    own = {name: value for name, value in args.items() if name not in OF_RAY}
    command = engine_command("serve")
    known = [option.key for option in command.options]
    for name in own:
        if key_of(name) not in known:
            raise ConfigError(f"{name!r} is no flag of kvstore serve{suggestion(key_of(name), known)}")
    given = {key_of(name): text_of(value) for name, value in own.items()}
    settings = with_tiers(effective("serve", command.options, given, os.environ), keeps=True)
    arguments, options = arguments_of("serve", settings)
    return application(arguments.pop("model", None), arguments, options, {n: args[n] for n in OF_RAY if n in args})


def check(most: int, arguments: Mapping[str, Any]) -> None:
    """most: replicas. Raises ConfigError for what they cannot be started with."""
    if (executor := arguments.get("distributed_executor", "here")) != "here":
        raise ConfigError(
            f"--distributed-executor is {executor}, which starts one server, and --replicas several; give one"
        )
    if most > 1 and arguments.get("session_store") is None:
        raise ConfigError(
            f"--replicas {most} without --session-store: a session would be on one replica alone, and gone for its "
            "next turn when that one ends; give --session-store redis://HOST:6379/0"
        )
    try:
        import ray.serve  # noqa: F401
    except ImportError:
        raise ConfigError("--replicas needs Ray Serve, which is not installed; pip install 'ray[serve]'") from None


def application(
    model: Any, arguments: Mapping[str, Any], options: ServeOptions, of_ray: Mapping[str, Mapping[str, Any]]
) -> Any:
    """The application of these settings. of_ray: by OF_RAY, what goes before our own. Raises ConfigError."""
    scaling = {**_scaling(arguments, options), **of_ray.get("autoscaling_config", {})}
    needs_gpus = str(arguments["device"]).startswith("cuda")
    check(scaling["max_replicas"], arguments)
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from kvstore.service.replicas.ingress import Ingress
    from kvstore.service.replicas.replica import Replica

    common = {
        "graceful_shutdown_timeout_s": options.request_timeout_s + CLOSE_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "logging_config": {"enable_access_log": False},  # each request has its line in a server's log
    }
    replicas = serve.deployment(Replica).options(
        max_ongoing_requests=options.max_queue + options.max_connections,  # a server's own limits come first
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        autoscaling_config=scaling,
        ray_actor_options={**resources(1, needs_gpus, arguments), **of_ray.get("ray_actor_options", {})},
        max_constructor_retry_count=MOST_STARTS,
        **common,
    )
    ingress = serve.deployment(Ingress).options(
        max_ongoing_requests=options.max_connections, ray_actor_options={"num_cpus": 0}, **common
    )
    is_named, secret_file = arguments.get("session_store") is not None, arguments["cache_tiers"].fleet_secret_file
    return ingress.bind(replicas.bind(model, arguments, options), options, is_named, secret_file)


def resources(num_cpus: int, has_gpus: bool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of one replica. Ray hides the GPUs that a replica does not ask for."""
    num_ranks = arguments["tensor_parallel_size"] * arguments["pipeline_parallel_size"]
    return {"num_cpus": num_cpus, **({"num_gpus": num_ranks} if has_gpus else {})}


def _scaling(arguments: Mapping[str, Any], options: ServeOptions) -> dict[str, Any]:
    """Ray's settings of how many replicas there are."""
    least, most = options.replicas or (1, 1)
    half = max(1, arguments["max_num_seqs"] // 2)  # of what a step computes: another one comes before it is full
    return {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": half}


def run_replicas(model: Any, arguments: Mapping[str, Any], options: ServeOptions) -> int:
    """Serve until a signal comes: 0 after SIGTERM, 130 after SIGINT. EXIT_ENGINE_FAILED when others end what it serves.

    Raises ConfigError without a cluster that can be used, and KVStoreError when the replicas do not start.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # each line is shown
    _, most = options.replicas or (1, 1)
    check(most, arguments)
    check_speaks(model, arguments, chats=False)
    tls_context(options.ssl_certfile, options.ssl_keyfile)  # Ray would tell of bad files late, and elsewhere
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
        log("ready", {"address": options.address(options.port), "replicas": (options.replicas or (1, 1))[0]})
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

    http: dict[str, Any] = {"host": options.host, "port": options.port}
    http["keep_alive_timeout_s"] = int(options.keep_alive_s)
    if options.ssl_certfile is not None:
        http["ssl_certfile"] = str(options.ssl_certfile)
        http["ssl_keyfile"] = str(options.ssl_keyfile or options.ssl_certfile)  # Ray takes no certificate alone
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
