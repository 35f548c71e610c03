"""The engine's options: built once, checked here. No torch: device and dtype stay names until the model is loaded."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.config import CacheTiers, check_settings, setting
from kvstore.errors import ConfigError

MIN_SILENCE_S = 2.0  # of the engine's process, until it counts as hung: a shorter one would be chance
DTYPES = ("auto", "float32", "bfloat16", "float16")
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
    """What `Engine(...)` was given, and the flags of the command that say it."""

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

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | Path | None):
            raise ConfigError(f"model is {self.model!r}; give a directory, a hub id, or None for the built-in model")
        for name in ("tokenizer", "revision", "chat_template"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value.strip()):
                raise ConfigError(f"{name} is {value!r}; give a name, or None for the model's own")
        check_settings(self)
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", self.device):
            raise ConfigError(f"device is {self.device!r}; give auto, cpu, cuda or cuda:N")
        if not isinstance(self.enforce_eager, bool):
            raise ConfigError(f"enforce_eager is {self.enforce_eager!r}; give True or False")

    def scheduler(self, max_model_len: int) -> SchedulerConfig:
        """The scheduler's piece, for the window that the model was loaded with."""
        return SchedulerConfig(
            max_model_len, self.block_size, self.max_num_seqs, self.max_num_batched_tokens, self.policy
        )
