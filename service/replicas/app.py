"""The application that Ray Serve deploys: `serve run kvstore.service.replicas.app:app model=... replicas=2`."""

import os
from collections.abc import Mapping
from typing import Any

from kvstore.errors import ConfigError
from kvstore.service.settings.config_file import effective, text_of
from kvstore.service.settings.engine_options import arguments_of, engine_command, with_tiers
from kvstore.service.settings.options import key_of, suggestion
from kvstore.service.settings.serve_options import ServeOptions

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
OF_RAY = ("autoscaling_config", "ray_actor_options")  # arguments that go to Ray as they are
MOST_STARTS = 3  # of a replica that fails while it starts
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 5.0, 10.0  # three of these in vain, and a replica is replaced
CLOSE_S = 90.0  # for a replica that ends, after its answers: KV is flushed, the engine ends


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
