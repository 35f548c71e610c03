"""What of a simulated store is time and memory: clock, arena, pools that are watched, and what every byte should be.

A token's KV is 8 bytes made of everything before it, so that a block of another history, or half of one, is seen.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from kvstore.blocks.ids import BlockId, is_quantised, quantised_id, state_chain
from kvstore.blocks.pool import BlockPool
from kvstore.blocks.records import SplicedState
from kvstore.engine.core.request import Request
from kvstore.engine.core.window_slots import WindowSlots
from kvstore.memory.tier import CpuTier

TOKEN_BYTES = 8
PAGE_BYTES = 16
VOCABULARY = 97
GARBAGE = b"\xee" * TOKEN_BYTES
MARKED = bytes(byte | 0x80 for byte in range(256))
START_S = 1.7e9


class Agenda:
    """What is to happen, in order of time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (max(time_s, self._clock.now_s), next(self._numbers), call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.at(self._clock.now_s + seconds, call)

    @property
    def next_s(self) -> float:
        return self._calls[0][0] if self._calls else float("inf")

    def run_due(self) -> None:
        while self._calls and self._calls[0][0] <= self._clock.now_s:
            heapq.heappop(self._calls)[2]()

    def clear(self) -> None:
        self._calls.clear()


class Clock:
    """Virtual time. `io` goes on whenever time passes; `people` wait until a step has ended."""

    def __init__(self) -> None:
        self.now_s = START_S
        self.io, self.people = Agenda(self), Agenda(self)
        read = lambda: self.now_s  # noqa: E731
        self.module = SimpleNamespace(time=read, monotonic=read, perf_counter=read, sleep=self.advance)

    def advance(self, seconds: float) -> None:
        self.advance_to(self.now_s + seconds)

    def advance_to(self, time_s: float) -> None:
        while self.io.next_s <= time_s:
            self.now_s = max(self.now_s, self.io.next_s)
            self.io.run_due()
        self.now_s = max(self.now_s, time_s)


class Condition:
    """Of `threading`, for the only thread that there is: waiting lets time pass."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __enter__(self) -> Condition:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float | None = None) -> bool:
        deadline = self._clock.now_s + (3600.0 if timeout_s is None else timeout_s)
        while not predicate() and self._clock.now_s < deadline:
            self._clock.advance_to(min(self._clock.io.next_s, deadline))
        return predicate()


class Thread:
    """Of `threading`: nothing runs by itself."""

    def __init__(self, **_: object) -> None: ...

    def start(self) -> None: ...

    def join(self, timeout_s: float | None = None) -> None:
        pass


# -- what every byte should be -----------------------------------------------------------------------------------------
def next_key(key: int, token: int) -> int:
    return (key * 1_000_003 + token + 1) % (2**61 - 1)


def key_after(content: bytes | bytearray) -> int:
    """The key of its last token."""
    return int.from_bytes(content[-TOKEN_BYTES:], "little")


def next_token(key: int, choice: int = 0) -> int:
    return (key // 7 + choice * 31) % VOCABULARY


def state_content(key: int, index: int, num_bytes: int) -> bytes:
    """What a part of the state after a token with this key is stored as."""
    return struct.pack("<QQ", key, index) * (num_bytes // (2 * TOKEN_BYTES))


def window_part(content: bytes | bytearray, index: int) -> bytes:
    """What a part of the KV of layers with a window is stored as, for the tokens of this content; and back."""
    return content.translate(_of_part(index))


@functools.cache
def _of_part(index: int) -> bytes:
    return bytes(byte ^ (index + 1) for byte in range(256))


def quantised(content: bytes | bytearray) -> bytes:
    """What is left of this content after a lossy codec. To lose it again changes nothing."""
    rest = bytearray(content)
    rest[7::TOKEN_BYTES] = rest[7::TOKEN_BYTES].translate(MARKED)
    return bytes(rest)


class Book:
    """The content of every block that was ever named, and of every request. num_state_blocks: that a state takes.
    has_windows: it is the KV of layers with a window.
    """

    def __init__(self, block_size: int, num_state_blocks: int = 0, has_windows: bool = False) -> None:
        self.block_bytes, self.num_state_blocks = block_size * TOKEN_BYTES, num_state_blocks
        self.stored_bytes = self.block_bytes + PAGE_BYTES  # that a block takes on disk
        self.has_windows = has_windows
        self.blocks: dict[BlockId, bytes] = {}
        self.parents: dict[BlockId, BlockId] = {}
        self.names: dict[bytes, list[BlockId]] = {}  # of each content, to which a splice gives another
        self.roots: set[BlockId] = set()
        self.states: set[BlockId] = set()
        self._stories: dict[str, tuple[object, bytearray]] = {}

    def name(self, block_id: BlockId, parent_id: BlockId, content: bytes) -> None:
        if block_id not in self.blocks:
            self.names.setdefault(content, []).append(block_id)
        assert self.blocks.setdefault(block_id, content) == content, "one id for two contents"
        self.parents[block_id] = parent_id
        if not self.num_state_blocks and not is_quantised(block_id):
            self.name(quantised_id(block_id), quantised_id(parent_id), quantised(content))

    def begin_with(self, root: BlockId) -> None:
        """A chain, or a splice in it, is built on this."""
        self.roots |= {root, quantised_id(root)}

    def story(self, request: Request) -> bytearray:
        """KV of all of its tokens. A splice that was given up begins it anew."""
        lineage, keys = self._stories.get(request.request_id, (None, bytearray()))
        if lineage != request.lineage:
            lineage, keys = request.lineage, bytearray()
            self.begin_with(lineage.root)
            if lineage.splice_index is not None:
                for run in lineage.splices:
                    self.begin_with(run.parent)
                for block_id in request.chain[: lineage.splice_end]:
                    keys += self.blocks[block_id]
            self._stories[request.request_id] = (lineage, keys)
        if len(keys) < len(request.token_ids) * TOKEN_BYTES:
            self._go_on(request, keys)
        return keys

    def _go_on(self, request: Request, keys: bytearray) -> None:
        root = request.lineage.root
        key = int.from_bytes(keys[-TOKEN_BYTES:] if keys else root[:7], "little")
        first = len(keys) // self.block_bytes
        fresh = []
        for token in request.token_ids[len(keys) // TOKEN_BYTES :]:
            key = next_key(key, token)
            fresh.append(key)
        keys += struct.pack(f"<{len(fresh)}Q", *fresh)
        for index in range(first, len(request.chain)):
            content = bytes(keys[index * self.block_bytes : (index + 1) * self.block_bytes])
            self.name(request.chain[index], request.lineage.parent(request.chain, index), content)
            self.name_state(request.chain[index], content)

    def name_state(self, block_id: BlockId, content: bytes) -> None:
        """Name what may be stored behind this block."""
        parent_id = block_id
        for index, one in enumerate(state_chain(block_id, self.num_state_blocks, self.block_bytes // TOKEN_BYTES)):
            self.name(one, parent_id, self.state_part(content, index))
            self.states.add(one)
            parent_id = one

    def state_part(self, content: bytes, index: int) -> bytes:
        """A part of the state behind a block with this content."""
        if self.has_windows:
            return window_part(content, index)
        return state_content(key_after(content), index, self.block_bytes)

    def garbage(self) -> bytearray:
        """What a block holds after it was handed out."""
        return bytearray(GARBAGE * (self.block_bytes // TOKEN_BYTES))

    def close(self, request: Request) -> None:
        self._stories.pop(request.request_id, None)


# -- memory ------------------------------------------------------------------------------------------------------------
class Arena:
    """The CPU tier's bytes. busy: what is being done with an arena block by somebody who is not the control plane."""

    def __init__(self, book: Book, num_arena_blocks: int) -> None:
        self.book, self.size = book, book.block_bytes
        self._memory = bytearray(num_arena_blocks * self.size)
        self._bytes = memoryview(self._memory)
        self.busy: Counter[tuple[int, str]] = Counter()
        self.busy_arena_blocks: Counter[int] = Counter()
        self.movers: dict[int, str] = {}  # of each arena block, what filled it last

    def view(self, arena_block: int) -> memoryview:
        return self._bytes[arena_block * self.size : (arena_block + 1) * self.size]

    def content(self, arena_block: int) -> bytes:
        return bytes(self.view(arena_block))

    def begin(self, arena_block: int, what: str) -> None:
        self.busy[arena_block, what] += 1
        self.busy_arena_blocks[arena_block] += 1

    def end(self, arena_block: int, what: str) -> None:
        self.busy[arena_block, what] -= 1
        self.busy_arena_blocks[arena_block] -= 1
        assert self.busy[arena_block, what] >= 0
        if not self.busy_arena_blocks[arena_block]:
            del self.busy_arena_blocks[arena_block]
        if not self.busy[arena_block, what]:
            del self.busy[arena_block, what]

    def check_not_busy(self, arena_block: int, why: str) -> None:
        if arena_block in self.busy_arena_blocks:
            doing = [what for one, what in self.busy if one == arena_block]
            raise AssertionError(f"arena block {arena_block} is {why} during a {' and a '.join(doing)}")

    def erase(self, arena_blocks: Sequence[int]) -> None:
        for arena_block in arena_blocks:
            self.check_not_busy(arena_block, "erased")
            self.view(arena_block)[:] = bytes(self.size)

    def splice(self, pieces: Sequence[tuple[int, int, int, int, int]], states: Sequence[SplicedState] = ()) -> None:
        parts = [
            (source, run.source_offset, arena_block, run.offset, run.length)
            for state in states
            for run in state.runs
            for source, arena_block in zip(run.sources, state.arena_blocks, strict=True)
        ]
        for source, source_offset, arena_block, offset, count in [*pieces, *parts]:
            start, end = source_offset * TOKEN_BYTES, (source_offset + count) * TOKEN_BYTES
            self.view(arena_block)[offset * TOKEN_BYTES : (offset + count) * TOKEN_BYTES] = self.view(source)[start:end]
            self.movers[arena_block] = "splice"

    def close(self) -> None:
        self.busy.clear()
        self.busy_arena_blocks.clear()


class WatchedCpu(CpuTier):
    """Sees that what is handed out is not in use, and that what is published is what its record says."""

    def watch(self, arena: Arena, counts: Counter[str], may_fail: Callable[[str], None]) -> WatchedCpu:
        self.arena, self.counts, self.may_fail, self.is_planning = arena, counts, may_fail, False
        return self

    def reserve(self) -> int | None:
        if self.is_planning:
            self.may_fail("reserve")
        arena_block = super().reserve()
        if arena_block is not None:
            self.arena.check_not_busy(arena_block, "handed out")
            self.arena.view(arena_block)[:] = GARBAGE * (self.arena.size // TOKEN_BYTES)
            self.arena.movers.pop(arena_block, None)
        return arena_block

    def publish(self, arena_block: int) -> None:
        super().publish(arena_block)
        record = self.record(arena_block)
        assert record is not None
        self.counts[f"published by {self.arena.movers.get(arena_block)}"] += 1
        self.check_content(arena_block)

    def check_content(self, arena_block: int) -> None:
        record = self.record(arena_block)
        book, name = self.arena.book, f"arena block {arena_block}"
        assert record is not None and self.arena.content(arena_block) == book.blocks[record.block_id], (
            f"{name} does not hold what its record says"
        )
        assert record.parent_id == book.parents[record.block_id], f"{name}: the parent is another one"


class WatchedPool(BlockPool):
    """The engine's pool with its bytes, which are garbage after a block was handed out."""

    def watch(self, book: Book) -> WatchedPool:
        self.book, self.contents = book, [bytearray() for _ in range(self.num_blocks)]
        self.fresh: set[int] = set()
        return self

    def allocate(self, count: int) -> list[int]:
        blocks = super().allocate(count)
        self.fresh.update(blocks)
        return blocks

    def spoil(self) -> None:
        """What was handed out holds nothing; not before the copies of the step have been read."""
        for block in self.fresh:
            self.contents[block] = self.book.garbage()
        self.fresh.clear()

    def check_content(self, failed: set[int]) -> None:
        """failed: blocks of a step in flight whose loads have failed, which is not known to the scheduler yet."""
        for block in set(self.cached_blocks()) - failed:
            block_id = self.block_id(block)
            assert block_id is not None
            assert self.contents[block] == self.book.blocks[block_id], f"HBM block {block} is not what its id says"


class WatchedWindows(WindowSlots):
    """The engine's window slots with their bytes, as those of the pool. Nobody sees the first one."""

    def watch(self, book: Book) -> WatchedWindows:
        self.book, self.contents = book, [book.garbage() for _ in range(self.num_slots + 1)]
        self.fresh: set[int] = set()
        return self

    def give(self, blocks: Sequence[int]) -> None:
        super().give(blocks)
        self.fresh.update(self.of[blocks].tolist())

    def spoil(self) -> None:
        for slot in self.fresh:
            self.contents[slot] = self.book.garbage()
        self.fresh.clear()

    def check_content(self, pool: WatchedPool, failed: set[int]) -> None:
        """failed: see `WatchedPool.check_content`."""
        for block in set(pool.cached_blocks()) - failed:
            slot, block_id = int(self.of[block]), pool.block_id(block)
            is_sound = block_id is not None and self.contents[slot] == self.book.blocks[block_id]
            assert not slot or is_sound, f"window slot {slot} of HBM block {block} is not what its id says"
