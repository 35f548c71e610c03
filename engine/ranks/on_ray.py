"""Ranks that Ray starts, on any number of machines: an actor for each, in a place that a placement group has reserved.

Ray starts and ends them. Steps go through connections of our own.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from kvstore.engine.child import be_child
from kvstore.engine.process import SLOW_FACTOR, Channel, spin_briefly
from kvstore.engine.ranks.ranks import Door, Ranks, children, entered
from kvstore.errors import ConfigError, EngineDiedError

ANSWER_S = 60.0  # for Ray to answer, and to reserve the places: those of an engine that has just ended become free
KEY_BYTES = 32
LINE_CHARS = 200


class RankActor:
    """In a process of Ray's, which becomes the rank."""

    def run(self, rank: int, host: str, port: int, key: bytes) -> None:
        """Ends the process. host, port: of the first rank's door. Raises as `entered`."""
        spin_briefly(os.environ)
        be_child(Channel(entered(host, port, rank, key)), _follow)


def _follow(*started: Any) -> int:
    from kvstore.engine.ranks.follower import follow  # loads torch

    return follow(*started)


@contextmanager
def others_on_ray(
    arguments: Sequence[Mapping[str, Any]], silence_s: float, num_partners: int, num_threads: int
) -> Iterator[Ranks]:
    """For the first rank, on a machine of the cluster. They end with this context, as do their places.

    num_partners: see `Ranks`. num_threads: with how many each rank computes. Raises ConfigError without a cluster, or
    if it has too little room, and EngineDiedError if a rank does not come within ten times the silence that is allowed
    to one that runs.
    """
    from kvstore.engine.model.parallel.group import tcp_store  # loads torch

    size, key = len(arguments) + 1, secrets.token_bytes(KEY_BYTES)
    with ExitStack() as opened:
        ray = opened.enter_context(connected("distributed_executor", "ray"))
        host = ray.util.get_node_ip_address()
        group = opened.enter_context(_places(ray, size, num_threads, host))
        store = tcp_store(host, 0, is_host=True)
        actors: list[Any] = []  # Ray ends one that nobody holds
        ends: dict[Any, int] = {}  # rank of each result, which comes only if the rank fails

        def check() -> None:
            for end in ray.wait(list(ends), timeout=0)[0]:
                try:
                    ray.get(end)
                except ray.exceptions.RayError as error:
                    raise EngineDiedError(f"rank {ends[end]} of {size} does not start: {_line(error)}") from error

        with Door(host, key) as door:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            for rank in range(1, size):
                place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
                actors.append(ray.remote(num_cpus=num_threads, scheduling_strategy=place)(RankActor).remote())
                ends[actors[-1].run.remote(rank, host, door.port, key)] = rank
            found = door.others(size, SLOW_FACTOR * silence_s, check)
        rendezvous = f"tcp://{host}:{store.port}/ranks"
        others = opened.enter_context(children(arguments, silence_s, rendezvous, ends=found))
        yield Ranks(others, num_partners, rendezvous, host=host)


@contextmanager
def connected(field: str, value: str) -> Iterator[Any]:
    """Ray, connected to the cluster that this machine belongs to. field, value: the option that needs it.

    Raises ConfigError.
    """
    try:
        import ray
        import ray.util
    except ImportError:
        raise ConfigError(field, f"{value}, but Ray is not installed", "pip install ray on each machine") from None
    is_own = not ray.is_initialized()  # else by the program
    if is_own:
        try:
            _connect(ray)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ConfigError(
                field, f"{value}, but this machine belongs to no cluster that answers ({_line(error)})",
                "ray start --head on one machine, ray start --address=HOST:6379 on the others",
            ) from error  # fmt: skip
    try:
        yield ray
    except ray.exceptions.RayError as error:
        raise ConfigError(
            f"the Ray cluster has ended, or fails ({_line(error)}); look at it with ray status"
        ) from error
    finally:
        if is_own:
            ray.shutdown()


def _connect(ray: Any) -> None:
    """In a thread of its own, because Ray waits for minutes, and takes SIGTERM for itself in the main thread."""
    done: Future[None] = Future()

    def connect() -> None:
        try:
            ray.init(address="auto", logging_level=logging.WARNING)
        except Exception as error:
            if done.set_running_or_notify_cancel():
                done.set_exception(error)
            return
        if done.set_running_or_notify_cancel():
            done.set_result(None)
        else:  # nobody waits any more: left connected, it would be taken for the program's own
            ray.shutdown()

    logging.getLogger("ray._private.worker").setLevel(logging.ERROR)  # it warns that it leaves signals to us
    threading.Thread(target=connect, name="kvstore-ray", daemon=True).start()
    wait([done], ANSWER_S)
    if done.cancel():
        raise TimeoutError(f"nothing within {ANSWER_S:g} s")
    done.result()


@contextmanager
def _places(ray: Any, size: int, num_threads: int, host: str) -> Iterator[Any]:
    """A placement group with a bundle for each rank, the first one's on this machine. Raises ConfigError."""
    here = f"node:{host}"  # Ray gives each machine one of it
    if here not in ray.cluster_resources():  # connected by Ray's client from outside
        raise ConfigError(f"{host} is no machine of the Ray cluster; ray start --address=HOST:6379 on it")
    bundles = [{"CPU": num_threads, **({here: 0.001} if rank == 0 else {})} for rank in range(size)]
    group = ray.util.placement_group(bundles, strategy="PACK")  # ranks of one stage follow one another
    try:
        if not group.wait(ANSWER_S):
            total, free = (found.get("CPU", 0) for found in (ray.cluster_resources(), ray.available_resources()))
            raise ConfigError(
                f"Ray has no room for {size} ranks of {num_threads} threads: it has {total:g} CPUs, {free:g} of them "
                "free; add machines (ray start --address), or set OMP_NUM_THREADS to fewer threads of each rank"
            )
        yield group
    finally:
        with suppress(ray.exceptions.RayError):  # its cluster has ended
            ray.util.remove_placement_group(group)


def _line(error: Exception) -> str:
    """The last line, which is the error itself; what is before it is a trace."""
    return str(error).strip().rpartition("\n")[2].strip()[:LINE_CHARS]
