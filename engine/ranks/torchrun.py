"""Ranks that torchrun starts, or whoever sets its environment: one process for each, on any number of machines.

The first rank opens a port and writes it into torchrun's store, where the others look. It is written anew when all are
started again, so a port that nobody answers at is asked for again.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvstore.engine.config import EngineConfig
from kvstore.engine.ranks.door import AGAIN_S, KINDS, Door, entered
from kvstore.engine.ranks.launch import Launch, awaited
from kvstore.errors import ConfigError, EngineDiedError

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ADDRESS = "kvstore-first-rank"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which rank this process is, and the address of the store. has_host: torchrun hosts it; else the first rank."""

    rank: int
    size: int
    host: str
    port: int
    has_host: bool

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> RankPlace:
        """Raises ConfigError if the environment is not torchrun's."""
        if missing := [name for name in NAMES if not environment.get(name)]:
            raise ConfigError(f"distributed_executor is torchrun, but ${missing[0]} is not set; start it with torchrun")
        rank, size, host, port = (environment[name] for name in NAMES)
        if not (rank.isdigit() and size.isdigit() and port.isdigit() and int(rank) < int(size)):
            raise ConfigError(f"RANK is {rank}, WORLD_SIZE {size}, MASTER_PORT {port}; start the command with torchrun")
        return cls(int(rank), int(size), host, int(port), environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True")

    def check(self, num_ranks: int) -> None:
        """Raises ConfigError if the number of processes is not that of the model's ranks."""
        if self.size != num_ranks:
            sizes = "tensor_parallel_size times pipeline_parallel_size"
            raise ConfigError(f"WORLD_SIZE is {self.size}, but {sizes} is {num_ranks}; start as many processes")


def num_processes_here(config: EngineConfig, environment: Mapping[str, str]) -> int:
    """Processes of this server that share this machine's memory: of several machines torchrun says how many it has
    started here; whoever else sets its environment may not say it, and then all ranks may be here.
    """
    told = environment.get("LOCAL_WORLD_SIZE", "") if config.distributed_executor == "torchrun" else ""
    num_ranks = min(int(told), config.num_ranks) if told.isdigit() and int(told) else config.num_ranks
    return num_ranks * config.data_parallel_size


@contextmanager
def others_by_torchrun(
    place: RankPlace, key: bytes, arguments: Sequence[Mapping[str, Any]], silence_s: float
) -> Iterator[Launch]:
    """For the first rank. Raises ConfigError, and EngineDiedError if a rank does not come in time."""
    from kvstore.engine.model.parallel.stores import tcp_store  # loads torch

    place.check(len(arguments) + 1)
    if place.rank:
        raise ConfigError(f"this is rank {place.rank}: only rank 0 has an engine; `kvstore serve` runs the others")
    try:
        store = tcp_store(place.host, place.port, is_host=not place.has_host)
    except RuntimeError as error:
        raise ConfigError(f"MASTER_ADDR {place.host}, MASTER_PORT {place.port}: {_line(error)}") from error
    rendezvous = f"tcp://{place.host}:{place.port}/{secrets.token_hex(8)}"

    def invite(door: Door) -> None:
        store.set(ADDRESS, f"{door.host} {door.port}")

    with awaited(Door(place.host, key), arguments, silence_s, rendezvous, invite) as launch:
        yield launch


def connected(place: RankPlace, key: bytes, timeout_s: float) -> dict[int, socket.socket]:
    """For another rank: its connections to the first one. Raises ConfigError if the secrets are not equal, and
    EngineDiedError if the first rank is not there in time.
    """
    from kvstore.engine.model.parallel.stores import tcp_store  # loads torch

    end = time.monotonic() + timeout_s
    store, where = None, f"MASTER_ADDR {place.host}, MASTER_PORT {place.port}"
    while time.monotonic() < end:
        try:
            socket.create_connection((place.host, place.port), AGAIN_S).close()  # torch would complain at length
            store = store or tcp_store(place.host, place.port, is_host=False)
            if store.check([ADDRESS]):
                host, _, port = store.get(ADDRESS).decode().rpartition(" ")
                return {kind: entered(host, int(port), place.rank, kind, key) for kind in KINDS}
        except OSError:  # not there yet, or no longer
            pass
        except RuntimeError:  # of torch: its store has ended
            store = None
        time.sleep(AGAIN_S)
    raise EngineDiedError(
        f"rank {place.rank} of {place.size} did not find the first rank within {timeout_s:g} s ({where}): "
        "start the same command on its machine"
    )


def _line(error: Exception) -> str:
    """Torch's messages bring a trace of its C++ frames."""
    return str(error).partition("\n")[0]
