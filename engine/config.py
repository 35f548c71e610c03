"""The engine's options: built once, checked here. No torch: device and dtype stay names until the model is loaded."""

import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from kvstore.config import (
    PLACE,
    REDIS,
    SESSION_DURABILITIES,
    SWITCH,
    CacheTiers,
    SharedSessions,
    ValueForm,
    check_settings,
    checked,
    matching,
    one_of,
    parse_endpoint,
    setting,
    whole,
)
from kvstore.engine.text.response_template import families_of
from kvstore.errors import ConfigError
from kvstore.remote.names import fleet_secret

MIN_SILENCE_S = 2.0  # of the engine's process before it counts as hung; a shorter silence may be chance
DTYPES = ("auto", "float32", "bfloat16", "float16")
POLICIES = ("fcfs", "priority")
EXECUTORS = ("here", "ray")
EVICTIONS = ("auto", "fifo", "lru", "return")
ENGINES = whole(1, 64)  # of one front
SHARE = ValueForm("SHARE", float, "a number from 0.05 to 0.95", 0.05, 0.95, types=(int, float))
MODEL = replace(PLACE, accepts="a directory or a hub id, or leave it out for the built-in model", types=(str, Path))


DEVICES = "auto, cpu, cuda or cuda:N"


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


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
    state_share: float = 0.5  # of the HBM tier at most, for states
    num_state_slots: int = 0  # for the states of a model that keeps some beside its KV
    checkpoint_tokens: int = 0  # that have KV of as many bytes as a checkpoint of such a model
    num_window_slots: int = 0  # for the KV of layers with a window; 0: they have as many blocks as others


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The arguments of `Engine(...)`, and the command's flags for them."""

    model: str | Path | None = setting(
        None, MODEL, "a local directory or a hub id", flag="MODEL", shown="the built-in model"
    )
    tiers: CacheTiers = field(default_factory=CacheTiers)
    device: str = setting("auto", ValueForm(parse=matching("auto|cpu|cuda(:[0-9]+)?"), accepts=DEVICES), DEVICES)
    dtype: str = setting("auto", one_of(*DTYPES), "auto, float32, bfloat16 or float16", shown="auto, the model's")
    block_size: int = setting(16, whole(1, 256), "tokens per KV block")
    max_model_len: int | None = setting(None, whole(2, 2**24), "context window in tokens", shown="the model's")
    max_num_seqs: int = setting(64, whole(1, 4096), "requests running at once")
    max_num_batched_tokens: int = setting(2048, whole(1, 2**20), "tokens computed in one step")
    load: str = setting(
        "auto", one_of("auto", "always"),
        "stored KV: auto computes it anew where that is clearly faster, always loads it",
    )  # fmt: skip
    seed: int = setting(0, whole(1 - 2**63, 2**63 - 1), "seed of the engine's sampling")
    policy: str = setting(
        "fcfs", one_of(*POLICIES), "which request of a tenant goes first: fcfs, or priority, lower numbers first",
        flag="--scheduling-policy",  # vLLM's name
    )  # fmt: skip
    eviction: str = setting(
        "auto", one_of(*EVICTIONS), "whose KV goes first: auto, fifo, lru or return, the least likely to come back",
        flag="--policy", aliases=("--eviction",),
    )  # fmt: skip
    tokenizer: str | None = setting(None, PLACE, "directory or hub id of another tokenizer", shown="the model's")
    revision: str | None = setting(
        None, PLACE, "branch, tag or commit of a model of the hub, and of its tokenizer", shown="its main branch"
    )
    enforce_eager: bool = setting(False, SWITCH, "no CUDA graphs; for debugging, or to save their memory")
    chat_template: str | None = setting(
        None, PLACE, "file with a Jinja chat template, or its text", shown="the model's"
    )
    kv_events: str | None = setting(
        None, checked(parse_endpoint),
        "endpoint, such as tcp://*:5557, where routers are told which KV is held; the next port repeats what "
        "they missed. Token ids are text: whoever can connect can read all conversations",
    )  # fmt: skip
    kv_events_topic: str | None = setting(
        None, PLACE, "topic of these messages, as routers expect it", shown="kv@HOST@MODEL"
    )
    session_store: str | None = setting(
        None, REDIS,
        "Redis in which several servers share sessions: redis://host:6379/0, redis+sentinel://host,host/SERVICE or "
        "redis+cluster://host,host; needs the fleet's secret",
        shown="this server's own",
    )  # fmt: skip
    session_durability: str = setting(
        "always", one_of(*SESSION_DURABILITIES),
        "what that Redis must promise of a stored turn: always, everysec (a second may be lost) or unchecked",
    )  # fmt: skip
    session_replicas: int | None = setting(
        None, whole(0, 16), "replicas of that Redis that must have a turn before it is acknowledged",
        shown="1 that is connected, with Sentinel or a Cluster; else 0",
    )  # fmt: skip
    tensor_parallel_size: int = setting(1, whole(1, 64), "processes that share each layer's weights and KV heads")
    pipeline_parallel_size: int = setting(1, whole(1, 64), "processes, or groups of them, that share the layers")
    distributed_executor: str = setting(
        "here", one_of(*EXECUTORS), "who starts these processes: here, this one; ray, on any number of machines"
    )
    tool_call_parser: str | None = setting(
        None, PLACE, "how the model writes calls of tools, by vLLM's name, such as hermes", shown="as its template says"
    )
    state_dtype: str = setting(
        "auto", one_of("auto", "bfloat16"),
        "how the states of linear attention and Mamba are stored below HBM: auto, as they are; bfloat16 halves them",
    )  # fmt: skip
    state_share: float = setting(
        0.5, SHARE, "how much of the HBM tier states take at most; half of that is for checkpoints"
    )
    # Of one of several engines behind one front, which `client.opening` sets: no flags.
    data_parallel_size: int = setting(1, ENGINES)
    data_parallel_rank: int = 0
    root_secret: str | None = field(default=None, repr=False)  # hexadecimal: what their lineage roots are made with
    disk_owner: str | None = None  # the socket of the process that owns their disk; None: there is no such disk

    def __post_init__(self) -> None:
        if self.policy in EVICTIONS:
            raise ConfigError("policy", f"{self.policy!r}, an order of eviction", {"eviction": self.policy})
        check_settings(self)
        if self.tool_call_parser is not None:
            families_of(self.tool_call_parser)
        if self.tiers.codec == "int8" and self.data_parallel_size > 1:
            raise ConfigError("codec", "int8, but several engines share the disk", "give exact12 or raw")
        if self.num_processes > 1 and self.device.startswith("cuda:"):
            value = f"{self.device}, but each of {self.num_processes} processes needs its own"
            raise ConfigError("device", value, "give cuda")

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
        arguments = _plain(asdict(self))
        arguments["cache_tiers"] = _plain(arguments.pop("tiers"))
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
            self.state_share,
        )
