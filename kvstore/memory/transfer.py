"""The CPU tier's memory, and on a CPU what moves KV between it and HBM: loads a layer before its attention, saves it as
it is computed.

The computing thread does both, as another thread on its cores would cost it more. Knows arena blocks and
tensors, but no block ids and no requests, and decides nothing. For CUDA see `device_transfer`.
"""

from __future__ import annotations

import math
import mmap
import os
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch

from kvstore.blocks.records import Load, Save, SaveFence, SplicedState, StatePiece, TransferPlan, Transferred
from kvstore.config import format_size
from kvstore.errors import ConfigError
from kvstore.kernels.cpu.threads import FirstTouch
from kvstore.kernels.kv import BlockLoad, save_layers
from kvstore.memory.layout import KVLayout, OwnPart, States
from kvstore.stats import Histogram

# Portable: pinned for every CUDA context of the process. Mapped: kernels read and write it over the bus. Where the
# device shares its addresses with the host, both are the default; here they are needed, so they are asked for.
_REGISTER_FLAGS = 1 | 2
STATE_GROUP_BYTES = 64 << 20  # of states that are packed at a time
SMALL_STEP_TOKENS = 64  # steps of at most so many tokens are saved in one go, when their forward has ended


class Arena:
    """tensor: [num_arena_blocks, numbers of a block], see `KVLayout`; keys are raw. runs: the parts of all blocks, with
    one view for those in a row that have one width, [num_arena_blocks, num_parts, block_size, width]. layers: keys and
    values of the layers and heads that this process moves to and from HBM, [num_arena_blocks, block_size, num_kv_heads,
    head_dim] each.

    Memory comes from mmap, exactly as much as asked for, and is registered with CUDA if the model runs there: torch's
    own pinned allocator rounds up to powers of two. Pages are touched when they are first used; registering touches and
    locks all of them in one call, so a large arena takes seconds to open, and all of its memory from the beginning.
    """

    def __init__(self, layout: KVLayout, num_arena_blocks: int, pin: bool, descriptor: int | None = None) -> None:
        """descriptor: of memory that other processes map, too. The first of them sets its size."""
        self.layout = layout
        self.num_arena_blocks = num_arena_blocks
        size_bytes = num_arena_blocks * layout.block_bytes
        try:
            self._memory = _private(size_bytes) if descriptor is None else _shared(size_bytes, descriptor)
        except (OSError, ValueError, OverflowError) as error:
            value = f"{format_size(size_bytes)}, which this machine does not give: {error}"
            raise ConfigError("cpu", value, "give less") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        with torch.inference_mode(False):  # whatever mode the caller is in: threads outside of it write here, too
            flat = torch.frombuffer(self._memory, dtype=torch.uint8)
            self.rows = flat.view(num_arena_blocks, layout.block_bytes)
            self.tensor = flat.view(layout.dtype).view(num_arena_blocks, layout.block_numbers)
            self.runs = list(_runs(self.tensor, layout))
            self.layers = _layers(self.runs, layout)
        self._bytes = memoryview(self._memory)
        self._unpin: weakref.finalize | None = None
        self._first_touch: FirstTouch | None = None
        if pin:
            self._pin(flat)
        else:
            self._first_touch = FirstTouch(self.tensor)

    def _pin(self, flat: torch.Tensor) -> None:
        """Pin it until `close`, or until the arena is collected: memory that is unmapped while registered stays
        locked.
        """
        cudart = torch.cuda.cudart()
        code = int(cudart.cudaHostRegister(flat.data_ptr(), flat.numel(), _REGISTER_FLAGS))
        if code == 0:
            self._unpin = weakref.finalize(self, cudart.cudaHostUnregister, flat.data_ptr())
            self._unpin.atexit = False  # a process that ends gives its memory back faster
        if code != 0 or not flat.is_pinned():
            self.close()
            _forget_cuda_error()
            raise ConfigError(
                f"CUDA cannot pin {format_size(flat.numel())} for the CPU tier (error {code}); give a smaller cpu, or "
                "raise what this process may lock (ulimit -l, a container's memory)"
            )

    def reach(self, arena_block: int) -> None:
        """Blocks up to this one are in use: make the memory behind them ready."""
        if self._first_touch is not None:
            self._first_touch.reach(arena_block)

    def view(self, arena_block: int) -> memoryview:
        """The bytes of one block, writable."""
        size = self.layout.block_bytes
        return self._bytes[arena_block * size : (arena_block + 1) * size]

    def erase(self, arena_blocks: Sequence[int]) -> None:
        for arena_block in arena_blocks:
            self.tensor[arena_block].zero_()

    def load_states(self, pieces: Sequence[StatePiece], states: States) -> None:
        """Load states, each from all of its pieces, in the current stream."""
        for rows, some in self._grouped(pieces):
            packed = states.blank(len(rows))
            self.read_states(packed, some, self.layout.own)
            states.unpack(rows, packed)

    def save_states(self, pieces: Sequence[StatePiece], states: States) -> None:
        """The other way round."""
        for rows, some in self._grouped(pieces):
            self.write_states(states.packed(rows), some, self.layout.own)

    def read_states(self, packed: torch.Tensor, pieces: Sequence[StatePiece], own: OwnPart | None) -> None:
        """Read packed states from their pieces, in the order of these. own: what they have of each, None for all."""
        for part, memory in self._parts(packed, pieces, own):
            part.copy_(memory[: len(part)], non_blocking=own is None)  # heads lie apart: torch copies them twice

    def write_states(self, packed: torch.Tensor, pieces: Sequence[StatePiece], own: OwnPart | None) -> None:
        """The other way round. Nothing of what was there before is left."""
        for part, memory in self._parts(packed, pieces, own):
            memory[: len(part)].copy_(part, non_blocking=own is None)
            if len(part) < len(memory):
                memory[len(part) :].zero_()

    def _grouped(self, pieces: Sequence[StatePiece]) -> Iterator[tuple[list[int], list[StatePiece]]]:
        """Rows that are moved together, and their pieces."""
        of_row: dict[int, list[StatePiece]] = {}
        for piece in pieces:
            of_row.setdefault(piece.row, []).append(piece)
        rows, most = list(of_row), max(1, STATE_GROUP_BYTES // self.layout.state_bytes)
        for first in range(0, len(rows), most):
            some = rows[first : first + most]
            yield some, [piece for row in some for piece in of_row[row]]

    def _parts(
        self, packed: torch.Tensor, pieces: Sequence[StatePiece], own: OwnPart | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each piece's part of packed states, and its place in the arena, uint8: [num_bytes, 1, 1], and for ranks
        [num_tokens, num_heads, num_bytes]. A state's last part may be shorter.
        """
        layout, heads, each, own_range = self.layout, slice(None), (1, 1), (0, self.layout.state_bytes)
        if own is not None:
            shape, tokens = layout.shapes[0], 2 * layout.block_size  # keys and values of a layer
            heads, each = slice(*own.heads), (shape.num_kv_heads, shape.key_dim * layout.dtype.itemsize)
            own_range = own.windows[0] * tokens, own.windows[1] * tokens
        start, stop = own_range
        memory = self.rows.view(self.num_arena_blocks, -1, *each)[:, :, heads]
        packed = packed.view(len(packed), stop - start, *memory.shape[2:])
        size, is_last = memory.shape[1], stop * math.prod(each) == layout.state_bytes
        place = {row: number for number, row in enumerate(rows_of(pieces))}
        for piece in pieces:
            first = piece.index * size
            low, high = max(first, start), min(first + size, stop)
            if low < high:
                part = packed[place[piece.row], low - start : high - start]
                yield part, memory[piece.arena_block, low - first : size if is_last else high - first]

    def splice(self, pieces: Sequence[tuple[int, int, int, int, int]], states: Sequence[SplicedState] = ()) -> None:
        """Copy runs of tokens in every layer: (source block, source offset, block, offset, number of tokens); and make
        states of layers with a window, in which nothing of what was there before is left.
        """
        for source, source_offset, arena_block, offset, count in pieces:
            for run in self.runs:
                run[arena_block, :, offset : offset + count] = run[source, :, source_offset : source_offset + count]
        for state in states:
            self._splice_state(state)

    def _splice_state(self, state: SplicedState) -> None:
        layout, size = self.layout.windowed, self.layout.block_bytes
        assert layout is not None
        packed = torch.zeros(len(state.arena_blocks) * size, dtype=torch.uint8)
        layers = _layers_of(packed, layout)
        for run in state.runs:
            sources = _layers_of(torch.cat([self.rows[one] for one in run.sources]), layout)
            own, there = (slice(first, first + run.length) for first in (run.source_offset, run.offset))
            at, to = (torch.arange(run.length) + first for first in (run.source_position, run.position))
            for (keys, values), source, rotation in zip(layers, sources, layout.rotations, strict=True):
                moved = source[0][0, own]
                keys[0, there] = moved if rotation is None else rotation.turn(moved, at, to)
                values[0, there] = source[1][0, own]
        for part, one in zip(packed.split(size), state.arena_blocks, strict=True):
            self.rows[one].copy_(part)

    def close(self) -> None:
        """Unpin; no transfer may be running. The mapping goes when the last tensor and view of it are collected."""
        self._first_touch = None
        if self._unpin is not None:
            self._unpin()


def rows_of(pieces: Sequence[StatePiece]) -> list[int]:
    """The rows of their states."""
    return list(dict.fromkeys(piece.row for piece in pieces))


def _runs(tensor: torch.Tensor, layout: KVLayout) -> Iterator[torch.Tensor]:
    start = 0
    for width, parts in groupby(layout.widths):
        shape = (len(list(parts)), layout.block_size, width)
        end = start + math.prod(shape)
        yield tensor[:, start:end].unflatten(1, shape)
        start = end


def _layers(runs: Sequence[torch.Tensor], layout: KVLayout) -> list[tuple[torch.Tensor, torch.Tensor]]:
    parts = [part for run in runs for part in run.unbind(1)]
    own, heads = layout.own, slice(None) if layout.own is None else slice(*layout.own.heads)
    found = []
    for shape, *pair in zip(layout.shapes, parts[::2], parts[1::2], strict=True):
        keys, values = (part.unflatten(2, (shape.num_kv_heads, -1))[:, :, heads] for part in pair)
        found.append((keys, values))
    return found if own is None else found[slice(*own.layers)]


def _layers_of(packed: torch.Tensor, layout: KVLayout) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The keys and values of a packed block, [1, block_size, num_kv_heads, head_dim] each."""
    numbers = packed[: layout.block_bytes].view(layout.dtype)[None]
    return _layers(list(_runs(numbers, layout)), layout)


def _private(size_bytes: int) -> mmap.mmap:
    """Private memory, for which Linux gives huge pages more readily than for shared memory: fewer to touch and lock.

    A forked child does not get it. Otherwise the parent's next write would go to a copy, and the device's to the
    original.
    """
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)
    return memory


def _shared(size_bytes: int, descriptor: int) -> mmap.mmap:
    """Shared memory: what one process writes, the others see."""
    if os.fstat(descriptor).st_size == 0:
        os.truncate(descriptor, size_bytes)
    memory = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED)
    memory.madvise(mmap.MADV_DONTFORK)
    return memory


def _forget_cuda_error() -> None:
    """CUDA keeps the error of a failed call, and torch would raise it at the next kernel that anybody launches."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


@dataclass(slots=True)
class _LoadJob:
    """Loads of one step; layers [0, num_layers_done) have landed."""

    ticket: int
    blocks: BlockLoad
    num_blocks: int
    num_layers_done: int = 0
    failed: bool = False
    seconds: float = 0.0


@dataclass(slots=True)
class _SaveStep:
    """Saves of one step: `rows` of its tokens go to these `places` in the arena."""

    ticket: int
    rows: torch.Tensor
    places: torch.Tensor
    failed: bool = False
    waiting: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)  # layer, raw keys, values


def token_places(saves: Sequence[Save], row_starts: Sequence[int], block_size: int) -> np.ndarray:
    """For every token that a step saves, its row in the step and its place in the arena: [2, num_tokens] int64."""
    counts = np.fromiter((s.num_tokens for s in saves), np.int64, len(saves))
    rows = np.fromiter((row_starts[s.scheduled] + s.first for s in saves), np.int64, len(saves))
    places = np.fromiter((s.arena_block * block_size + s.offset for s in saves), np.int64, len(saves))
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([np.repeat(rows, counts) + within, np.repeat(places, counts) + within])


def block_load(arena: Arena, loads: Sequence[Load]) -> BlockLoad:
    arena_blocks, numbers = [load.arena_block for load in loads], [load.block_number for load in loads]
    positions = [load.position for load in loads]
    return BlockLoad(arena.layers, arena_blocks, numbers, positions, arena.layout.own_rotations)


class Transfer:
    """Has no thread of its own: what is begun ends within the step."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._caches: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
        self._states: States | None = None
        self._load: _LoadJob | None = None
        self._save: _SaveStep | None = None
        self.load_seconds = Histogram()  # of all loads of a step
        self._done: deque[Transferred] = deque()

    def register(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], states: States | None = None) -> None:
        """See `KVConnector.register_kv_caches`."""
        self._caches, self._states = caches, states

    def begin(self, plan: TransferPlan, row_starts: Sequence[int]) -> None:
        """Prepare the plan's loads and saves. row_starts: first token of each scheduled request's part."""
        if plan.saves:
            self.arena.reach(max(save.arena_block for save in plan.saves))
        save = None
        if plan.saves:
            rows, places = torch.from_numpy(token_places(plan.saves, row_starts, self.arena.layout.block_size))
            save = _SaveStep(plan.ticket, rows, places)
        self._load = _LoadJob(plan.ticket, block_load(self.arena, plan.loads), len(plan.loads)) if plan.loads else None
        self._save = save
        if self._states is not None and self._load is not None:
            started = time.perf_counter()
            self._load.num_blocks += len(plan.states)
            try:
                self.arena.load_states(plan.states, self._states)
            except Exception:  # as for blocks
                self._load.failed = True
            self._load.seconds = time.perf_counter() - started

    def save_states(self, plan: TransferPlan) -> None:
        """Save the plan's states. Called between two steps."""
        assert self._states is not None
        succeeded = False
        with suppress(Exception):  # as for loads: the turn has no checkpoint
            self.arena.reach(max(piece.arena_block for piece in plan.states))
            self.arena.save_states(plan.states, self._states)
            succeeded = True
        self._done.append(Transferred(plan.ticket, False, succeeded))

    def wait_for_layer_load(self, layer: int) -> None:
        """Returns when this layer's blocks are in HBM, or its step's loads have failed.

        Loads them just before their attention, which then finds them in the cores' caches.
        """
        if self._load is not None:
            self._load_layers(self._load, layer + 1)

    def _load_layers(self, job: _LoadJob, num_layers: int) -> None:
        """Load the first `num_layers` layers, as far as they have not landed. If one fails, the step's loads have
        failed.
        """
        if job.failed or job.num_layers_done >= num_layers:
            return
        started = time.perf_counter()
        try:
            with torch.inference_mode():
                while job.num_layers_done < num_layers:
                    job.blocks.load_layer(job.num_layers_done, *self._caches[job.num_layers_done])
                    job.num_layers_done += 1
        except Exception:  # out of memory, or a bug: the requests compute these blocks
            job.failed = True
        job.seconds += time.perf_counter() - started

    def save_kv_layer(self, layer: int, raw_key: torch.Tensor, value: torch.Tensor) -> None:
        """Raw keys and values of the step's tokens, [num_tokens, num_kv_heads, head_dim], which nobody writes again."""
        step = self._save
        if step is None:
            return
        step.waiting.append((layer, raw_key, value))
        if len(raw_key) > SMALL_STEP_TOKENS:  # at once: otherwise the next layer would have to allocate new memory
            self._copy(step)

    def end(self, succeeded: bool = True) -> SaveFence | None:
        """The forward has ended: save what is left of it. succeeded False: none of its saves count.

        Loads what the forward did not: the HBM blocks are in the map as if they held it. If interrupted, it can be
        called again.
        """
        if (load := self._load) is not None:
            self._load_layers(load, len(self._caches))
            size = load.num_blocks * self.arena.layout.block_bytes
            self.load_seconds.observe(load.seconds)
            self._done.append(Transferred(load.ticket, True, not load.failed, size, load.seconds))
            self._load = None
        if (step := self._save) is not None:
            step.failed = step.failed or not succeeded
            self._copy(step)
            self._done.append(Transferred(step.ticket, False, not step.failed))
            self._save = None
        return None

    def _copy(self, step: _SaveStep) -> None:
        """Copy into the arena. If this fails, the step's saves have failed."""
        layers, step.waiting = step.waiting, []
        if not layers or step.failed:
            return
        try:
            with torch.inference_mode():
                save_layers(self.arena.layers, layers, step.rows, step.places)
        except Exception:  # as for loads: the step's blocks are computed and saved again later
            step.failed = True

    @property
    def can_save(self) -> bool:
        """Always: what is saved is copied where it is computed."""
        return True

    def completed(self) -> list[Transferred]:
        """Steps whose loads or saves have ended since the last call."""
        done: list[Transferred] = []
        while self._done:  # one at a time, as the computing thread appends meanwhile
            done.append(self._done.popleft())
        return done

    def close(self) -> None:
        """Forget the caches: nothing is in flight between steps."""
        self._caches, self._states = (), None
