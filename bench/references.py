"""Exact caches of one tier to compare our policies with: fifo, lru, lfu, s3fifo, belady, and one that forgets nothing.

They see only the names of blocks: no time, no queue, no store. The rules: a request's hits are counted before its own
insertions, as the longest present prefix of its prompt's blocks; then its blocks are touched or inserted from tail to
head, so that the head is the most recent.
"""
# The tests compare with libcachesim. It is not used here, because its LFU forgets the counts of evicted blocks, its
# S3-FIFO works from 20 blocks on and aborts the process below 10, and its names cannot be negative.

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.planning.traces import Trace, TraceRequest

REFERENCES = ("fifo", "lru", "lfu", "s3fifo", "belady")
PROGRESS_EVERY = 1000  # requests


def prompt_blocks(request: TraceRequest, block_size: int) -> Sequence[int]:
    """The names of the prompt's blocks, with the partial one if the trace names it."""
    full = request.chain[: request.num_tokens // block_size] if request.has_answer else request.chain
    return full if request.partial is None else [*full, request.partial]


class Cache(Protocol):
    """A cache of blocks by their names."""

    @property
    def blocks(self) -> Container[int]:
        """The blocks that are present."""
        ...

    def use(self, names: Sequence[int]) -> None:
        """Touch or insert the blocks of one request, given from the head on, from tail to head."""
        ...


class Fifo:
    """Evicts the block that came first."""

    def __init__(self, capacity: int) -> None:
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self._capacity = capacity

    def use(self, names: Sequence[int]) -> None:
        blocks = self.blocks
        for name in reversed(names):
            if name not in blocks:
                if len(blocks) >= self._capacity:
                    blocks.popitem(last=False)
                blocks[name] = None


class Lru:
    """Evicts the block that was touched the longest time ago."""

    def __init__(self, capacity: int) -> None:
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self._capacity = capacity

    def use(self, names: Sequence[int]) -> None:
        blocks = self.blocks
        for name in reversed(names):
            if name in blocks:
                blocks.move_to_end(name)
                continue
            if len(blocks) >= self._capacity:
                blocks.popitem(last=False)
            blocks[name] = None


class Lfu:
    """Evicts the block that was touched least often since the trace began; of equals, the least recently touched.

    The heap has one entry per present block, with the count and time at which it was pushed. Both only grow, so an
    outdated entry comes too early, never too late, and is corrected then.
    """

    def __init__(self, capacity: int) -> None:
        self.blocks: dict[int, int] = {}  # -> time of the last touch
        self._counts: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []  # count, time, name
        self._capacity = capacity
        self._clock = 0

    def use(self, names: Sequence[int]) -> None:
        blocks, counts = self.blocks, self._counts
        for name in reversed(names):
            self._clock += 1
            count = counts[name] = counts.get(name, 0) + 1
            if name not in blocks:
                if len(blocks) >= self._capacity:
                    self._evict()
                heapq.heappush(self._heap, (count, self._clock, name))
            blocks[name] = self._clock

    def _evict(self) -> None:
        while True:
            _, pushed, name = self._heap[0]
            touched = self.blocks[name]
            if touched == pushed:
                break
            heapq.heapreplace(self._heap, (self._counts[name], touched, name))
        heapq.heappop(self._heap)
        del self.blocks[name]


class S3Fifo:
    """S3-FIFO (Yang et al., SOSP 2023) with the sizes and the order of libcachesim 0.3.

    A tenth is a small queue for new blocks, the rest is the main queue; a ghost queue of nine tenths remembers names. A
    block that was touched twice in the small queue moves to the main queue, where a touch gives another round, three at
    most.
    """

    SMALL, MAIN = 0, 1

    def __init__(self, capacity: int) -> None:
        self.blocks: dict[int, int] = {}  # -> touches since it was put into its queue
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._capacity = capacity
        self._small_size = max(capacity // 10, 1)
        self._num_ghosts = capacity * 9 // 10
        self._has_evicted = False

    def use(self, names: Sequence[int]) -> None:
        blocks = self.blocks
        for name in reversed(names):
            if name in blocks:
                blocks[name] += 1
            else:
                self._insert(name)

    def _insert(self, name: int) -> None:
        known = name in self._ghosts
        if known:
            del self._ghosts[name]
        while len(self.blocks) >= self._capacity:
            self._evict()
        fills_up = not self._has_evicted and len(self._small) >= self._small_size
        (self._main if known or fills_up else self._small).append(name)
        self.blocks[name] = 0

    def _evict(self) -> None:
        self._has_evicted = True
        if len(self._main) > self._capacity - self._small_size or not self._small:
            self._evict_main()
        else:
            self._evict_small()

    def _evict_small(self) -> None:
        """May only move blocks to the main queue, and evict none."""
        while self._small:
            name = self._small.popleft()
            if self.blocks[name] < 2:
                del self.blocks[name]
                self._remember(name)
                return
            self.blocks[name] = 0
            self._main.append(name)

    def _evict_main(self) -> None:
        while self._main:
            name = self._main.popleft()
            if self.blocks[name] == 0:
                del self.blocks[name]
                return
            self.blocks[name] = min(self.blocks[name], 3) - 1
            self._main.append(name)

    def _remember(self, name: int) -> None:
        if not self._num_ghosts:
            return
        if len(self._ghosts) >= self._num_ghosts:
            self._ghosts.popitem(last=False)
        self._ghosts[name] = None


class Belady:
    """Evicts the block that is requested again last, or never; of equals, the most recently touched.

    It knows the future: present blocks are on stacks by the number of their next request. A stack is needed until that
    request is done, which touches all blocks left on it. The head of a request's blocks is touched last and so evicted
    first, as in the published figures; tails first would hit more in small caches.
    """

    def __init__(self, capacity: int, requests: Sequence[Sequence[int]]) -> None:
        self.blocks: dict[int, int] = {}  # -> the number of its next request
        self._capacity = capacity
        self._next = _next_requests(requests)
        self._place = 0  # in self._next
        self._number = 0  # number of the next request
        self._stacks: dict[int, list[int]] = {}
        self._heap: list[int] = []  # negative numbers of stacks, so that the last comes first

    def use(self, names: Sequence[int]) -> None:
        blocks = self.blocks
        for distance, name in enumerate(reversed(names), 1):
            if name not in blocks and len(blocks) >= self._capacity:
                self._evict()
            following = self._next[self._place + len(names) - distance]
            blocks[name] = following
            if following not in self._stacks:
                self._stacks[following] = []
                heapq.heappush(self._heap, -following)
            self._stacks[following].append(name)
        self._stacks.pop(self._number, None)
        self._place += len(names)
        self._number += 1

    def _evict(self) -> None:
        while True:
            number = -self._heap[0]
            stack = self._stacks.get(number)
            while stack:
                name = stack.pop()
                if self.blocks.get(name) == number:
                    del self.blocks[name]
                    return
            self._stacks.pop(number, None)
            heapq.heappop(self._heap)


def _next_requests(requests: Sequence[Sequence[int]]) -> array[int]:
    """For every block of every request: the number of the next request with it; if none, the number of all requests."""
    num_places = sum(map(len, requests))
    following = array("i", bytes(4 * num_places))
    seen: dict[int, int] = {}
    place = num_places
    for number in range(len(requests) - 1, -1, -1):
        names = requests[number]
        place -= len(names)
        for i, name in enumerate(names):
            following[place + i] = seen.get(name, len(requests))
        seen.update(dict.fromkeys(names, number))
    return following


class Ideal:
    """Forgets nothing."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()

    def use(self, names: Sequence[int]) -> None:
        self.blocks.update(names)


# -- a trace through a cache -----------------------------------------------------------------------------------------
@dataclass(slots=True)
class Hits:
    """How much was requested, and how much of it was hit, after the warm-up."""

    num_blocks: int = 0
    num_hit_blocks: int = 0
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0

    def count(self, num_blocks: int, num_hits: int, num_tokens: int, block_size: int) -> None:
        """Count a request, of whose prompt the first `num_hits` blocks were present."""
        self.num_blocks += num_blocks
        self.num_hit_blocks += num_hits
        self.num_prompt_tokens += num_tokens
        self.num_hit_tokens += min(num_hits * block_size, num_tokens)

    @property
    def block_hit_rate(self) -> float:
        return self.num_hit_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def token_hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


@dataclass
class References:
    """A trace as the references see it: the blocks of its prompts, made once for all references."""

    trace: Trace
    warm_up: int = 0  # requests at the start that are not counted
    _requests: list[Sequence[int]] = field(init=False)

    def __post_init__(self) -> None:
        self._requests = [prompt_blocks(request, self.trace.block_size) for request in self.trace.requests]

    def replay(self, policy: str, capacity_blocks: int, progress: Callable[[int], None] | None = None) -> Hits:
        """`policy` is one of REFERENCES; `progress` is told the number of requests done so far."""
        return self._through(self._cache(policy, capacity_blocks), progress)

    def ideal(self, progress: Callable[[int], None] | None = None) -> tuple[Hits, int]:
        """The hits of a cache that forgets nothing, and how many blocks it holds at the end: all distinct ones."""
        cache = Ideal()
        return self._through(cache, progress), len(cache.blocks)

    def _cache(self, policy: str, capacity_blocks: int) -> Cache:
        assert policy in REFERENCES and capacity_blocks >= 1
        if policy == "belady":
            return Belady(capacity_blocks, self._requests)
        simple: dict[str, Callable[[int], Cache]] = {"fifo": Fifo, "lru": Lru, "lfu": Lfu, "s3fifo": S3Fifo}
        return simple[policy](capacity_blocks)

    def _through(self, cache: Cache, progress: Callable[[int], None] | None) -> Hits:
        hits, block_size, blocks = Hits(), self.trace.block_size, cache.blocks
        for number, names in enumerate(self._requests):
            if number >= self.warm_up:
                num_tokens = self.trace.requests[number].num_tokens
                num_hits = sum(1 for _ in itertools.takewhile(blocks.__contains__, names))
                hits.count(len(names), num_hits, num_tokens, block_size)
            cache.use(names)
            if progress is not None and (number + 1) % PROGRESS_EVERY == 0:
                progress(number + 1)
        return hits
