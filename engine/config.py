"""The engine's options: built once, checked here. No torch: device and dtype stay names until the model is loaded."""

import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from kvstore.config import (
    SESSION_DURABILITIES,
    CacheTiers,
    SharedSessions,
    check_settings,
    parse_endpoint,
    setting,
)
from kvstore.errors import ConfigError
from kvstore.remote.names import fleet_secret

MIN_SILENCE_S = 2.0  # of the engine's process before it counts as hung; a shorter silence may be chance
DTYPES = ("auto", "float32", "bfloat16", "float16")
POLICIES = ("fcfs", "priority")
EXECUTORS = ("here", "ray")
EVICTIONS = ("auto", "fifo", "lru", "return")


def default_topic(model: str) -> str:
    """The topic of KV events, as llm-d's routers expect it: this host's name and that of the model."""
    return f"kv@{socket.gethostname()}@{model}"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of the running set."""

    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048  # in one step, of all requests; may be smaller than max_num_seqs
    policy: str = "fcfs"
    steps_in_flight: int = 1  # in a pipeline: each takes its share of the running requests, and none twice


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The arguments of `Engine(...)`, and the command's flags for them."""

    model: str | Path | None = setting(None, "a local directory or a hub id", shown="the built-in model")
    tiers: CacheTiers = field(default_factory=CacheTiers)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    dtype: str = setting("auto", "auto, float32, bfloat16 or float16", among=DTYPES, shown="auto, the model's")
    block_size: int = setting(16, "tokens per KV block", low=1, high=256)
    max_model_len: int | None = setting(None, "context window in tokens", low=2, high=2**24, shown="the model's")
    max_num_seqs: int = setting(64, "requests running at once", low=1, high=4096)
    max_num_batched_tokens: int = setting(2048, "tokens computed in one step", low=1, high=2**20)
    load: str = setting(
        "auto", "stored KV: auto computes it anew where that is clearly faster, always loads it",
        among=("auto", "always"),
    )  # fmt: skip
    seed: int = setting(0, "seed of the engine's sampling", low=1 - 2**63, high=2**63 - 1)
    policy: str = setting(
        "fcfs", "which request of a tenant goes first: fcfs, or priority, lower numbers first", among=POLICIES
    )
    eviction: str = setting(
        "auto", "whose KV goes first: auto, fifo, lru or return, the least likely to come back", among=EVICTIONS
    )
    tokenizer: str | None = setting(None, "directory or hub id of another tokenizer", shown="the model's")
    revision: str | None = setting(
        None, "branch, tag or commit of a model of the hub, and of its tokenizer", shown="its main branch"
    )
    enforce_eager: bool = setting(False, "no CUDA graphs; for debugging, or to save their memory")
    chat_template: str | None = setting(None, "file with a Jinja chat template, or its text", shown="the model's")
    kv_events: str | None = setting(
        None, "endpoint, such as tcp://*:5557, where routers are told which KV is held; the next port repeats what "
        "they missed. Token ids are text: whoever can connect can read all conversations",
    )  # fmt: skip
    kv_events_topic: str | None = setting(None, "topic of these messages, as routers expect it", shown="kv@HOST@MODEL")
    session_store: str | None = setting(
        None, "Redis in which several servers share sessions: redis://host:6379/0; needs the fleet's secret",
        shown="this server's own",
    )  # fmt: skip
    session_durability: str = setting(
        "always", "what that Redis must promise of a stored turn: always, everysec (a second may be lost) or unchecked",
        among=SESSION_DURABILITIES,
    )  # fmt: skip
    session_replicas: int = setting(
        0, "replicas of that Redis that must have a turn before it is acknowledged", low=0, high=16
    )
    tensor_parallel_size: int = setting(1, "processes that share each layer's weights and KV heads", low=1, high=64)
    pipeline_parallel_size: int = setting(1, "processes, or groups of them, that share the layers", low=1, high=64)
    distributed_executor: str = setting(
        "here", "who starts these processes: here, this one; ray, on any number of machines", among=EXECUTORS
    )
    # Of one of several engines behind one front, which `RemoteEngine` sets: no flags.
    data_parallel_size: int = field(default=1, metadata={"low": 1, "high": 64})
    data_parallel_rank: int = 0
    root_secret: str | None = field(default=None, repr=False)  # hexadecimal: what their lineage roots are made with
    disk_owner: str | None = None  # the socket of the process that owns their disk; None: there is no such disk

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | Path | None):
            raise ConfigError(f"model is {self.model!r}; give a directory, a hub id, or None for the built-in model")
        for name in ("tokenizer", "revision", "chat_template", "kv_events_topic", "session_store"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value.strip()):
                raise ConfigError(f"{name} is {value!r}; give a text, or leave it out")
        if self.policy in EVICTIONS:
            raise ConfigError(f"policy is {self.policy!r}, an order of eviction: give eviction={self.policy} for that")
        check_settings(self)
        if self.kv_events is not None:
            parse_endpoint(self.kv_events, "kv_events")
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", self.device):
            raise ConfigError(f"device is {self.device!r}; give auto, cpu, cuda or cuda:N")
        if self.num_processes > 1 and self.device.startswith("cuda:"):
            raise ConfigError(
                f"device is {self.device}, but each of {self.num_processes} processes needs its own; give cuda"
            )
        if not isinstance(self.enforce_eager, bool):
            raise ConfigError(f"enforce_eager is {self.enforce_eager!r}; give True or False")

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_processes(self) -> int:
        """Processes of all engines behind one front. They share a machine's memory, unless Ray has other places."""
        return self.num_ranks * self.data_parallel_size

    def shared_sessions(self) -> SharedSessions | None:
        """How sessions are shared; None if they are this server's own."""
        if self.session_store is None:
            return None
        file = self.tiers.fleet_secret_file
        return SharedSessions(self.session_store, self.session_durability, self.session_replicas, file)

    def fleet_root(self) -> bytes | None:
        """The root of block ids that servers share. Raises ConfigError without the fleet's secret."""
        is_shared = self.session_store is not None or self.tiers.remote is not None
        return fleet_secret(self.tiers.fleet_secret_file).root if is_shared else None

    def common_root(self) -> bytes | None:
        """The root of block ids that other engines have, too; None: this one makes its own."""
        return self.fleet_root() if self.root_secret is None else bytes.fromhex(self.root_secret)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """The configuration from the arguments of `Engine`. Raises ConfigError."""
        options = dict(arguments)
        return cls(tiers=CacheTiers.of(options.pop("cache_tiers")), **options)

    def arguments(self) -> dict[str, Any]:
        """The arguments of `Engine`, as values for JSON."""
        arguments = asdict(self)
        tiers = arguments.pop("tiers")
        arguments["cache_tiers"] = {**tiers, "path": None if tiers["path"] is None else str(tiers["path"])}
        secret_file = tiers["fleet_secret_file"]
        arguments["cache_tiers"]["fleet_secret_file"] = None if secret_file is None else str(secret_file)
        arguments["model"] = None if self.model is None else str(self.model)
        return arguments

    def scheduler(self, max_model_len: int) -> SchedulerConfig:
        """The scheduler's configuration, for the window with which the model was loaded."""
        return SchedulerConfig(
            max_model_len,
            self.block_size,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.policy,
            self.pipeline_parallel_size,
        )
