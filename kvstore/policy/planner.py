"""Decides from measured rates whether to load or recompute.

The waiting order says whose blocks are read ahead, and whose must not be evicted. Its windows are those of
CachedAttention (Gao et al., USENIX ATC 2024, section 3.3): as many waiting requests as the CPU tier holds are
prefetched, as many as CPU and disk hold together are protected.

Knows numbers only. It can choose both at once: the head of what is stored is computed while its tail is read from a
slow disk, until they meet. Simulated for models of 8 billion parameters and disks of 0.5 to 5 GB/s, that saves 26 % of
the time to first token of a returning turn alone, 18 to 19 % of those that come at random, 7 % of four that come at
once, and 6 % beside other people's first prompts (bench/LOG.md, 2026-11-28).
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import Enum

from kvstore.policy.conversation import Conversation, QueueKey

LEAST_SAVING_S = 0.020
LEAST_OPEN_SAVING_S = 0.002  # for a request that computes anyway
LEAST_SHARE = 0.10
LEAST_CHUNK_TOKENS = 128  # computed before checking the reads again: a smaller step costs as much
MEMORY_S = 1.0  # of measured time, after which earlier measurements count for a third
MOST_KEPT = 0.9  # largest weight of earlier measurements after a new one: a rate may have become much faster
NUM_SAMPLES = 7  # of steps
STEP_TOKENS = 32  # one more step costs as much as this many tokens, whatever its size
ASSUMED_READ_RATE, ASSUMED_REMOTE_RATE = 500e6, 100e6  # bytes/s of a disk and a network without measurements yet
ASSUMED_PRICE, MOST_PRICE = 8.0, 16.0  # of computing, in loads; to attend to a loaded token is not free either
RETRY_EVERY = 16  # one in this many requests that are better computed is loaded all the same: rates change
_COMPUTE_AFTER = 8  # requests that waited for the disk without a measurement of computing
SAVE_SHARE = 4  # one in this many arena blocks is not for reading ahead, but for saving what is computed meanwhile


class Way(Enum):
    """How a request gets stored blocks."""

    LOAD = "load"  # all of them, and wait for those on disk
    COMPUTE = "compute"  # blocks that are not in memory yet
    BOTH = "both"  # compute the first ones while the others are read


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """num_blocks: to compute before the loaded ones; num_next: of these, before asking again."""

    way: Way
    num_blocks: int = 0
    num_next: int = 0


class Rate:
    """Amount per second, as a mean that forgets; weighted by time taken."""

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
    """Amount per second, as the weighted median of the last steps, so that one delayed step has no effect."""

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
    num_prompts: how many are being computed, which share the rate of computing; the store counts them. compute_price:
    what it costs to compute a token, in loads of one from the CPU tier; see `restore`.
    """

    def __init__(self, block_bytes: int, block_size: int, always: bool = False) -> None:
        self.block_bytes = block_bytes
        self._block_size = block_size
        self.always = always
        self._load = StepRate()  # bytes/s, CPU -> HBM
        self._read = Rate()  # bytes/s, disk -> CPU, of all readers together
        self._remote = Rate()  # the same from the remote tier
        self._prefill = StepRate()  # tokens/s
        self._num_computed = 0
        self._num_waited = 0
        self.num_prompts = 0
        self.compute_price = ASSUMED_PRICE

    def loaded(self, num_bytes: int, seconds: float) -> None:
        """Measure a step's ended loads."""
        self._load.add(num_bytes, seconds)

    def read(self, num_bytes: int, seconds: float, num_active: float = 1.0) -> None:
        """Measure an ended read, with this many reads running at once, itself included."""
        self._read.add(num_bytes, seconds / num_active)

    def read_remote(self, num_bytes: int, seconds: float, num_active: float = 1.0) -> None:
        """The same of a read from the remote tier."""
        self._remote.add(num_bytes, seconds / num_active)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Measure an ended step with a prefill of this many tokens; few tokens say only that more is possible."""
        if num_tokens >= LEAST_CHUNK_TOKENS // 2 or num_tokens > seconds * (self._prefill.per_s or 0.0):
            self._prefill.add(num_tokens, seconds)
            self._num_waited = 0

    def should_load(self, num_tokens: int, num_state: int = 0) -> bool:
        """Whether to load this many tokens from the CPU tier: yes, unless computing saves more than 20 ms and 10 %.

        num_state: blocks of a state that are loaded with them.
        """
        load_s, compute_s = self._load_s, self._compute_s(self.num_prompts)
        if self.always or load_s is None or compute_s is None:
            return True
        num_blocks = num_tokens / self._block_size
        if not _saves((num_blocks + num_state) * load_s, num_blocks * compute_s):
            return True
        self._num_computed += 1
        return self._num_computed % RETRY_EVERY == 0

    def should_read(self, num_blocks: int, num_unread: int, num_ahead: int = 0, may_try: bool = True) -> bool:
        """Whether to load blocks that are of use only together, of which so many come from disk: yes, unless computing
        is better. may_try: one in `RETRY_EVERY` for which it is are loaded all the same, as nothing else would measure
        the disk. num_ahead: see `choose`.
        """
        if self.choose(num_blocks + 1, num_unread, num_ahead, num_state=1).way is Way.LOAD:  # as if with a small state
            return True
        self._num_computed += may_try
        return may_try and self._num_computed % RETRY_EVERY == 0

    def choose(
        self, num_blocks: int, num_unread: int, num_ahead: int = 0, stalled_s: float = 0.0, is_open: bool = False,
        num_remote: int = 0, num_remote_ahead: int = 0, num_state: int = 0,
    ) -> LoadChoice:  # fmt: skip
        """How to get `num_blocks` stored blocks, of which the first `num_unread` have to come from disk.

        num_ahead: blocks of others that are read before. stalled_s: how long the oldest read has been running.
        is_open: the request runs already, computing. Then nobody is kept waiting for its place, and little is enough.
        num_remote: of the unread, that come from the remote tier; num_remote_ahead: of others, read there before.
        num_state: of the stored, the last ones, which hold a state: all are loaded, or all but these are computed.
        """
        compute_s = self._compute_s(self.num_prompts - is_open)
        if self.always or compute_s is None or not num_unread:
            return LoadChoice(Way.LOAD)
        load_s, share = self._load_s or 0.0, num_remote / num_unread
        read_s = (1 - share) * self.read_s + share * self.remote_s
        # A read that takes long is likely to go on.
        wait_s = num_ahead * self.read_s + num_remote_ahead * self.remote_s + max(0.0, stalled_s - read_s)
        all_load_s = wait_s + num_unread * read_s + num_blocks * load_s
        all_compute_s = (num_blocks - num_state) * compute_s
        meeting = math.ceil((wait_s + num_unread * read_s) / (compute_s + read_s))  # as long computed as read
        num_first = min(num_unread, max(1, meeting))
        steps_s = self._num_steps(num_first) * STEP_TOKENS / self._block_size * compute_s
        both_s = steps_s + num_first * compute_s + (num_blocks - num_first) * load_s
        least_s = LEAST_OPEN_SAVING_S if is_open else LEAST_SAVING_S
        if not _saves(all_load_s, all_compute_s if num_state else min(both_s, all_compute_s), least_s):
            return LoadChoice(Way.LOAD)
        if not num_state and _saves(all_compute_s, both_s, least_s):
            return self._both(num_first)
        return LoadChoice(Way.COMPUTE, num_blocks)

    def measure(self, num_unread: int) -> LoadChoice | None:
        """Let a request that would wait for the disk compute a little meanwhile, if computing was not measured for
        long.
        """
        if self.always or num_unread < 2 * self._least_chunk:
            return None
        self._num_waited += 1
        return self._both(self._least_chunk) if self._num_waited > _COMPUTE_AFTER else None

    def _both(self, num_blocks: int) -> LoadChoice:
        """Choose most of the remaining way at a time, since predictions are inexact."""
        return LoadChoice(Way.BOTH, num_blocks, min(num_blocks, max(self._least_chunk, 3 * num_blocks // 4)))

    @property
    def _least_chunk(self) -> int:
        return -(-LEAST_CHUNK_TOKENS // self._block_size)

    def _num_steps(self, num_blocks: int) -> int:
        """The number of steps in which `_both` computes this many blocks."""
        return 1 + max(0, math.ceil(math.log(num_blocks / self._least_chunk, 4)))

    @property
    def _load_s(self) -> float | None:
        rate = self._load.per_s
        return None if rate is None else self.block_bytes / rate

    @property
    def read_s(self) -> float:
        """Seconds to read a block from disk."""
        return self.block_bytes / (self._read.per_s or ASSUMED_READ_RATE)

    @property
    def remote_s(self) -> float:
        """Seconds to read a block from the remote tier."""
        return self.block_bytes / (self._remote.per_s or ASSUMED_REMOTE_RATE)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """None: no prefill was measured yet."""
        return self._prefill.per_s

    def _compute_s(self, num_others: int) -> float | None:
        """Seconds to compute a block beside other prompts."""
        rate = self._prefill.per_s
        return None if rate is None else (1 + max(0, num_others)) * self._block_size / rate

    def state(self) -> dict[str, float]:
        """The measurements, for JSON."""
        rates = {name: rate.per_s for name, rate in self._rates.items()}
        return {"price": self.compute_price} | {name: rate for name, rate in rates.items() if rate is not None}

    def restore(self, state: object) -> None:
        """Take over an earlier process' measurements until there are new ones, and its price of computing, on which
        prompts depend, unless that is more than twice or less than half of what was measured. Raises ValueError.
        """
        found = state if isinstance(state, Mapping) else {}
        for name, value in found.items():
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"rate {name!r} is {value!r}")
        for name, rate in self._rates.items():
            if name in found:
                rate.add(found[name] * MEMORY_S / 10, MEMORY_S / 10)
        self.compute_price = float(found.get("price", ASSUMED_PRICE))
        load_s, compute_s = self._load_s, self._compute_s(0)
        if load_s and compute_s:
            measured = min(max(1.0, 2.0 ** round(math.log2(compute_s / load_s))), MOST_PRICE)
            if not 1 / 2 <= measured / self.compute_price <= 2:
                self.compute_price = measured

    @property
    def _rates(self) -> dict[str, Rate | StepRate]:
        return {"load": self._load, "read": self._read, "remote": self._remote, "prefill": self._prefill}

    def as_dict(self) -> dict[str, float | None]:
        return {
            "load_bytes_per_s": self._load.per_s,
            "read_bytes_per_s": self._read.per_s,
            "remote_bytes_per_s": self._remote.per_s,
            "prefill_tokens_per_s": self._prefill.per_s,
        }


def _saves(slow_s: float, fast_s: float, least_s: float = LEAST_SAVING_S) -> bool:
    """Whether the other way is predicted to be faster by enough to leave this one."""
    return slow_s - fast_s > max(least_s, LEAST_SHARE * slow_s)


@dataclass(frozen=True, slots=True)
class Waiting:
    """One waiting request. num_blocks: of its prompt that are stored, which it wants in the CPU tier when it starts."""

    key: QueueKey
    request_id: Hashable
    conversation: Conversation
    num_blocks: int


class LookAhead:
    """Waiting requests in the order in which they are expected to start.

    num_cpu_blocks: what prefetching may fill; num_disk_blocks: capacity of the disk. refresh: called with a
    conversation whose place in the window has changed. The windows are counted in blocks of the requests that really
    wait, which is C / S of the paper with the exact sum in place of the mean. The larger one is kept up to date with
    every change: O(log n), and what enters or leaves it.
    """

    def __init__(self, num_cpu_blocks: int, num_disk_blocks: int, refresh: Callable[[Conversation], None]) -> None:
        self.num_cpu_blocks = num_cpu_blocks
        self._num_protected_blocks = num_cpu_blocks + num_disk_blocks
        self._refresh = refresh
        self._order: list[Waiting] = []
        self._by_id: dict[Hashable, Waiting] = {}
        # The larger window: the first `_end` of the order, their blocks, and the keys by which each is wanted.
        self._end = self._num_blocks = 0
        self._keys: dict[Conversation, list[QueueKey]] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._by_id

    def add(self, request_id: Hashable, key: QueueKey, conversation: Conversation, num_blocks: int) -> None:
        """Add a waiting request, or replace it."""
        self.remove(request_id)
        waiting = self._by_id[request_id] = Waiting(key, request_id, conversation, num_blocks)
        index = bisect.bisect_right(self._order, key, key=lambda other: other.key)
        self._order.insert(index, waiting)
        if index < self._end:
            self._end += 1
            self._enter(waiting)
        self._fit()

    def remove(self, request_id: Hashable) -> None:
        """Remove a request; ignores unknown ones."""
        if (waiting := self._by_id.pop(request_id, None)) is None:
            return
        index = bisect.bisect_left(self._order, waiting.key, key=lambda other: other.key)
        while self._order[index] is not waiting:  # different requests may have equal keys
            index += 1
        del self._order[index]
        if index < self._end:
            self._end -= 1
            self._exit(waiting)
        self._fit()  # it may also have been the one that no longer fitted

    def start(self, request_id: Hashable) -> None:
        """Note that a request runs, and needs its blocks more than any waiting one. Ignores unknown ones."""
        waiting = self._by_id.get(request_id)
        if waiting is not None:
            waiting.conversation.num_running += 1
            self.remove(request_id)
            self._refresh(waiting.conversation)

    def to_prefetch(self) -> list[Waiting]:
        """Requests whose blocks fit into the CPU tier together, in order of expected start; always the first one."""
        found: list[Waiting] = []
        left = self.num_cpu_blocks
        for waiting in self._order:
            left -= waiting.num_blocks
            if left < 0 and found:
                break
            found.append(waiting)
        return found

    def _fit(self) -> None:
        """Let the last ones leave the window, or the next ones enter; the first one is always in it."""
        most = self._num_protected_blocks
        while self._end > 1 and self._num_blocks > most:
            self._end -= 1
            self._exit(self._order[self._end])
        while self._end < len(self._order):
            waiting = self._order[self._end]
            if self._end and self._num_blocks + waiting.num_blocks > most:
                return
            self._end += 1
            self._enter(waiting)

    def _enter(self, waiting: Waiting) -> None:
        self._num_blocks += waiting.num_blocks
        bisect.insort(self._keys.setdefault(waiting.conversation, []), waiting.key)
        self._mark(waiting.conversation)

    def _exit(self, waiting: Waiting) -> None:
        self._num_blocks -= waiting.num_blocks
        keys = self._keys[waiting.conversation]
        keys.remove(waiting.key)
        if not keys:
            del self._keys[waiting.conversation]
        self._mark(waiting.conversation)

    def _mark(self, conversation: Conversation) -> None:
        wanted = next(iter(self._keys.get(conversation, ())), None)
        if conversation.wanted != wanted:
            conversation.wanted = wanted
            self._refresh(conversation)
