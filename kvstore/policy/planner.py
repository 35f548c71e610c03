"""Load or recompute, decided from measured rates. Knows numbers only.

Also both at once: the head of what is stored is computed while its tail is read from a slow disk, until they meet.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

LEAST_SAVING_S = 0.020
LEAST_OPEN_SAVING_S = 0.002  # for a request that is computing anyway
LEAST_SHARE = 0.10
LEAST_CHUNK_TOKENS = 128  # computed before asking again how far the reads are: a smaller step costs as much
MEMORY_S = 1.0  # of measured time, after which what was measured before counts for a third
MOST_KEPT = 0.9  # of what was measured before, after any measurement: a rate may have become much faster
NUM_SAMPLES = 7  # of steps
STEP_TOKENS = 32  # a step more costs as much as so many tokens, whatever its size
ASSUMED_READ_RATE = 500e6  # bytes/s of a disk that was not measured yet
_RETRY_EVERY = 16  # of the requests that are better computed so many are loaded all the same: rates change
_COMPUTE_AFTER = 8  # requests that waited for the disk while nothing was computed by which it could be measured


class Way(Enum):
    """How a request is to get blocks that are stored."""

    LOAD = "load"  # all of them, and wait for those on disk
    COMPUTE = "compute"  # what is not in memory yet
    BOTH = "both"  # compute the first ones while the others are read


@dataclass(frozen=True, slots=True)
class Choice:
    """num_blocks: to be computed before those that are loaded; num_next: of them before asking again."""

    way: Way
    num_blocks: int = 0
    num_next: int = 0


class Rate:
    """Amount per second, as a mean that forgets: what took long counts more than what took no time."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        seconds = max(seconds, 1e-9)
        keep = min(MOST_KEPT, math.exp(-seconds / MEMORY_S))
        self._amount = keep * self._amount + amount
        self._seconds = keep * self._seconds + seconds

    @property
    def per_s(self) -> float | None:
        """None: nothing was measured."""
        return self._amount / self._seconds if self._amount else None


class StepRate:
    """Amount per second, as the weighted median of the last steps: one that was held up by others says nothing."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=NUM_SAMPLES)  # amount per second, amount

    def add(self, amount: float, seconds: float) -> None:
        self._samples.append((amount / max(seconds, 1e-9), amount))

    @property
    def per_s(self) -> float | None:
        """None: nothing was measured."""
        left = sum(amount for _, amount in self._samples) / 2
        for rate, amount in sorted(self._samples, reverse=True):
            left -= amount
            if left <= 0:
                return rate
        return None


class Planner:
    """Rates of this machine, and the decisions that follow from them.

    always: load whatever is stored. Until computing and loading have been measured, what is stored is loaded.
    """

    def __init__(self, block_bytes: int, block_size: int, always: bool = False) -> None:
        self.block_bytes = block_bytes
        self._block_size = block_size
        self._always = always
        self._load = StepRate()  # bytes/s, CPU -> HBM
        self._read = Rate()  # bytes/s, disk -> CPU, of all readers together
        self._prefill = StepRate()  # tokens/s
        self._num_computed = 0
        self._num_waited = 0

    def loaded(self, num_bytes: int, seconds: float) -> None:
        """A step's loads have ended."""
        self._load.add(num_bytes, seconds)

    def read(self, num_bytes: int, seconds: float, num_active: float = 1.0) -> None:
        """A read has ended, beside which so many others were running, itself included."""
        self._read.add(num_bytes, seconds / num_active)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step with a prefill of so many tokens has ended. Few tokens say nothing about many."""
        if num_tokens >= LEAST_CHUNK_TOKENS // 2 or self._prefill.per_s is None:
            self._prefill.add(num_tokens, seconds)
            self._num_waited = 0

    def should_load(self, num_tokens: int) -> bool:
        """Whether to load so many tokens that lie in the CPU tier: unless computing saves more than 20 ms and 10 %."""
        load_s, compute_s = self._load_s, self._compute_s
        if self._always or load_s is None or compute_s is None:
            return True
        num_blocks = num_tokens / self._block_size
        if not _saves(num_blocks * load_s, num_blocks * compute_s):
            return True
        self._num_computed += 1
        return self._num_computed % _RETRY_EVERY == 0

    def choose(
        self, num_blocks: int, num_unread: int, num_ahead: int = 0, stalled_s: float = 0.0, is_open: bool = False
    ) -> Choice:
        """How to get `num_blocks` stored blocks, of which the first `num_unread` have to come from disk.

        num_ahead: blocks of others that are read before. stalled_s: how long the oldest read has been running.
        is_open: the request runs already, computing. Then nobody is kept waiting for its place, and little is enough.
        """
        compute_s = self._compute_s
        if self._always or compute_s is None or not num_unread:
            return Choice(Way.LOAD)
        read_s, load_s = self.read_s, self._load_s or 0.0
        wait_s = num_ahead * read_s + max(0.0, stalled_s - read_s)  # what takes long is likely to go on
        all_load_s = wait_s + num_unread * read_s + num_blocks * load_s
        all_compute_s = num_blocks * compute_s
        meeting = math.ceil((wait_s + num_unread * read_s) / (compute_s + read_s))  # as long computed as read
        num_first = min(num_unread, max(1, meeting))
        steps_s = self._num_steps(num_first) * STEP_TOKENS / self._block_size * compute_s
        both_s = steps_s + num_first * compute_s + (num_blocks - num_first) * load_s
        least_s = LEAST_OPEN_SAVING_S if is_open else LEAST_SAVING_S
        if not _saves(all_load_s, min(both_s, all_compute_s), least_s):
            return Choice(Way.LOAD)
        if _saves(all_compute_s, both_s, least_s):
            return self._both(num_first)
        return Choice(Way.COMPUTE, num_blocks)

    def measure(self, num_unread: int) -> Choice | None:
        """For a request that would wait for the disk: compute a little meanwhile, if that was not measured for long."""
        if self._always or num_unread < 2 * self._least_chunk:
            return None
        self._num_waited += 1
        return self._both(self._least_chunk) if self._num_waited > _COMPUTE_AFTER else None

    def _both(self, num_blocks: int) -> Choice:
        """Most of the way at a time, since what is predicted comes otherwise."""
        return Choice(Way.BOTH, num_blocks, min(num_blocks, max(self._least_chunk, 3 * num_blocks // 4)))

    @property
    def _least_chunk(self) -> int:
        return -(-LEAST_CHUNK_TOKENS // self._block_size)

    def _num_steps(self, num_blocks: int) -> int:
        """In which `_both` computes so many."""
        return 1 + max(0, math.ceil(math.log(num_blocks / self._least_chunk, 4)))

    @property
    def _load_s(self) -> float | None:
        rate = self._load.per_s
        return None if rate is None else self.block_bytes / rate

    @property
    def read_s(self) -> float:
        """Of a block, from disk."""
        return self.block_bytes / (self._read.per_s or ASSUMED_READ_RATE)

    @property
    def _compute_s(self) -> float | None:
        rate = self._prefill.per_s
        return None if rate is None else self._block_size / rate

    def state(self) -> dict[str, float]:
        """What was measured, for JSON."""
        rates = {"load": self._load.per_s, "read": self._read.per_s, "prefill": self._prefill.per_s}
        return {name: rate for name, rate in rates.items() if rate is not None}

    def restore(self, state: object) -> None:
        """What an earlier process measured is believed until something is measured here. Raises ValueError."""
        found = state if isinstance(state, Mapping) else {}
        parts: dict[str, Rate | StepRate] = {"load": self._load, "read": self._read, "prefill": self._prefill}
        for name, rate in parts.items():
            value = found.get(name)
            if value is None:
                continue
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"rate {name!r} is {value!r}")
            rate.add(value * MEMORY_S / 10, MEMORY_S / 10)

    def as_dict(self) -> dict[str, float | None]:
        return {
            "load_bytes_per_s": self._load.per_s,
            "read_bytes_per_s": self._read.per_s,
            "prefill_tokens_per_s": self._prefill.per_s,
        }


def _saves(slow_s: float, fast_s: float, least_s: float = LEAST_SAVING_S) -> bool:
    """Whether the other way is predicted to be faster by enough to leave this one."""
    return slow_s - fast_s > max(least_s, LEAST_SHARE * slow_s)
