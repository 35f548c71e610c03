"""The engine's options: built once, checked here. No torch: device and dtype stay names until the model is loaded."""

from dataclasses import dataclass, field
from pathlib import Path

from kvstore.config import CacheTiers
from kvstore.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
POLICIES = ("fcfs", "priority")
EVICTIONS = ("auto", "fifo", "lru", "return")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of the running set.

    max_num_batched_tokens: tokens computed in one step, of all requests; may be smaller than max_num_seqs.
    """

    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    policy: str = "fcfs"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What `Engine(...)` was given. max_model_len None: the model's own window.

    tokenizer: directory or hub id of one that is not the model's. revision: branch, tag or commit of a hub id; both of
    the model and, where it is its own, of the tokenizer. enforce_eager: no CUDA graphs; means nothing on a CPU.
    chat_template: a file, or the text of one, instead of the tokenizer's.
    """

    model: str | Path | None = None
    tiers: CacheTiers = field(default_factory=CacheTiers)
    device: str = "auto"
    dtype: str = "auto"
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    load: str = "auto"
    seed: int = 0
    policy: str = "fcfs"
    eviction: str = "auto"
    tokenizer: str | None = None
    revision: str | None = None
    enforce_eager: bool = False
    chat_template: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | Path | None):
            raise ConfigError(f"model is {self.model!r}; give a directory, a hub id, or None for the built-in model")
        for name in ("tokenizer", "revision", "chat_template"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value.strip()):
                raise ConfigError(f"{name} is {value!r}; give a name, or None for the model's own")
        known = {"dtype": DTYPES, "load": ("auto", "always"), "policy": POLICIES, "eviction": EVICTIONS}
        for name, choices in known.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give one of {', '.join(choices)}")
        if not isinstance(self.device, str) or self.device.split(":")[0] not in DEVICES:
            raise ConfigError(f"device is {self.device!r}; give one of {', '.join(DEVICES)} or cuda:N")
        limits = {"block_size": 256, "max_num_seqs": 4096, "max_num_batched_tokens": 2**20, "max_model_len": 2**24}
        for name, highest in limits.items():
            value = getattr(self, name)
            if value is None and name == "max_model_len":
                continue
            lowest = 2 if name == "max_model_len" else 1
            if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
                raise ConfigError(f"{name} is {value!r}; give a whole number from {lowest} to {highest}")
        if not isinstance(self.enforce_eager, bool):
            raise ConfigError(f"enforce_eager is {self.enforce_eager!r}; give True or False")
        if not isinstance(self.seed, int) or abs(self.seed) >= 2**63:
            raise ConfigError(f"seed is {self.seed!r}; give a whole number below 2^63")

    def scheduler(self, max_model_len: int) -> SchedulerConfig:
        """The scheduler's piece, for the window that the model was loaded with."""
        return SchedulerConfig(
            max_model_len, self.block_size, self.max_num_seqs, self.max_num_batched_tokens, self.policy
        )
