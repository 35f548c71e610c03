"""Input and output of a replay: sizes of tiers, speeds of the service, counts. Knows nothing of how it is done."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from kvstore.errors import ConfigError
from kvstore.policy.policies import POLICIES

TIERS = ("hbm", "cpu", "disk")


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """How fast requests are served; math.inf takes no time.

    prefill_tokens_per_s: of one server through which all prompts go, one after the other. decode_tokens_per_s: of one
    request, at any batch. max_batch: requests that run at a time. load_bytes_per_s: CPU to HBM. read_bytes_per_s: disk
    to CPU. write_bytes_per_s: CPU to disk. The defaults are round guesses for a model of 8 billion parameters on a
    large accelerator.
    """

    prefill_tokens_per_s: float = 20_000.0
    decode_tokens_per_s: float = 40.0
    max_batch: int = 64
    load_bytes_per_s: float = 25e9
    read_bytes_per_s: float = 3e9
    write_bytes_per_s: float = 1.5e9

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not value > 0:
                raise ConfigError(one.name, str(value), "give a number above 0")


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """Tiers in blocks of the trace, 0 for none below HBM. block_bytes: KV of one block.

    look_ahead: whether the store hears of waiting requests; else only of those that could start. ttl_s: a conversation
    that is idle for longer is evicted first; None: no limit. warm_up: the first so many requests are not counted.
    state_blocks, window_blocks: of a model that can begin behind checkpoints only, see `kvstore.store.stored.Identity`.
    """

    hbm_blocks: int
    cpu_blocks: int
    disk_blocks: int
    block_bytes: int
    policy: str = "auto"
    look_ahead: bool = True
    service: ServiceModel = field(default_factory=ServiceModel)
    ttl_s: float | None = None
    warm_up: int = 0
    state_blocks: int = 0
    window_blocks: int = 0

    @property
    def checkpoint_blocks(self) -> int:
        """The blocks that a request needs beside its KV to begin somewhere."""
        return self.state_blocks * max(self.window_blocks, 1)

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"unknown policy {self.policy!r}; known are {', '.join(POLICIES)}")
        least = {"hbm_blocks": 1, "cpu_blocks": 0, "disk_blocks": 0, "block_bytes": 1, "warm_up": 0}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ConfigError(name, str(getattr(self, name)), f"give {smallest} or more")
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ConfigError("ttl_s", str(self.ttl_s), "give seconds above 0, or None to keep conversations")


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay counted, without the requests of the warm-up.

    num_refused: requests larger than HBM, in no other count. num_blocks, num_hit_blocks: of prompts. hits_at_arrival:
    tokens hit, by the tier that held them when the request arrived; hits_at_schedule: when it was first looked at with
    a place in the batch free, where "disk" still had to be waited for. bytes_moved: save, load, write, read.
    num_evicted: blocks by tier. num_dropped_saves: blocks for which the CPU tier had no room, and what builds on them;
    num_dropped_writes: for which the disk had none. duration_s: from the first arrival that counts to the end of the
    last request.
    """

    num_requests: int
    num_refused: int
    num_prompt_tokens: int
    num_hit_tokens: int
    num_blocks: int
    num_hit_blocks: int
    hits_at_arrival: dict[str, int]
    hits_at_schedule: dict[str, int]
    bytes_moved: dict[str, int]
    num_evicted: dict[str, int]
    num_dropped_saves: int
    num_dropped_writes: int
    ttft_mean_s: float
    ttft_p90_s: float
    duration_s: float

    @property
    def token_hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def block_hit_rate(self) -> float:
        return self.num_hit_blocks / self.num_blocks if self.num_blocks else 0.0
