"""One layer of N blocks between the CPU arena and the paged HBM cache; loading rotates the keys on the way.

The arena, [num_slots, num_layers, 2, block_size, num_kv_heads, head_dim], holds raw keys (index 0 of the third axis)
and values. A Triton kernel on CUDA, compiled C on a CPU, torch operations where these are missing; results are those of
the twins in `kvstore.kernels.reference`, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from kvstore.kernels import reference
from kvstore.kernels.cpu import block_copy as copy_native
from kvstore.kernels.cuda.triton_support import runs_kernels
from kvstore.kernels.device import to_device
from kvstore.rope.rotary import Rotation, Style

CHUNK_BYTES = (
    1 << 19
)  # keys of one layer rotated at a time on a CPU: with two buffers of that size about a core's cache
STAGING_BYTES = 1 << 25  # pinned memory for one copy to the device
STACKED_TOKENS = 64  # up to so many tokens a save of several layers is one indexed write

RawLayer = tuple[int, torch.Tensor, torch.Tensor]  # layer, raw keys and values, [num_tokens, num_kv_heads, head_dim]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Blocks [start, end) of a load. source, target: their place, a slice where it is one run."""

    start: int
    end: int
    source: slice | torch.Tensor
    target: slice | torch.Tensor


@dataclass(frozen=True, slots=True)
class _Turn:
    """cos, and sin with the sign it is added with, of every element: [N, block_size, num_kv_heads, rotary_dim].

    Spread over the heads, so that products run over whole blocks. first, second: the elements of the pairs.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    first: slice
    second: slice


class BlockLoad:
    """The load of N blocks in every layer, layer by layer, by one thread; what layers share is prepared at first use.

    slots, block_numbers: arena slot and HBM block of each. positions: of each block's first token. rotations: per
    layer the full table, None where keys are not rotated. On a CPU each rotation's tables take as much memory as the
    KV of one layer of the load, twice that with upcast, until it is dropped. On CUDA it works in the current stream.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        slots: Sequence[int] | torch.Tensor,
        block_numbers: Sequence[int] | torch.Tensor,
        positions: Sequence[int] | torch.Tensor,
        rotations: Sequence[Rotation | None],
    ) -> None:
        self._arena = arena
        self._slots = torch.as_tensor(slots, dtype=torch.int64)
        self._block_numbers = torch.as_tensor(block_numbers, dtype=torch.int64)
        self._positions = torch.as_tensor(positions, dtype=torch.int64)
        assert len(self._slots) == len(self._block_numbers) == len(self._positions)
        self._rotations = rotations
        self._turns: dict[int, _Turn] = {}
        self._rows: dict[int, Rotation] = {}
        self._places: torch.Tensor | None = None
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._chunks: list[_Chunk] = []
        self._native: copy_native.NativeLoad | None = None

    def load_layer(self, layer: int, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
        """Fill this layer's HBM blocks; caches: [num_blocks, block_size, num_kv_heads, head_dim]."""
        if not len(self._slots):
            return
        if key_cache.device.type == "cpu":
            self._load_on_cpu(layer, key_cache, value_cache)
        elif runs_kernels(key_cache):
            self.load_by_kernel(layer, [(key_cache, value_cache)])
        else:
            self.load_by_copy(layer, key_cache, value_cache)

    def load_layers(self, first: int, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """As `load_layer` for the layers from `first` on; by kernels, one launch for those that rotate alike."""
        if not len(self._slots):
            return
        if caches and runs_kernels(caches[0][0]):
            self.load_by_kernel(first, caches)
            return
        for layer, pair in enumerate(caches, first):
            self.load_layer(layer, *pair)

    # -- on a CPU ----------------------------------------------------------------------------------------------------
    def _load_on_cpu(self, layer: int, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
        if self._native is None:
            self._native = copy_native.NativeLoad(self._arena, self._slots, self._block_numbers, self._positions)
        if not self._native.load_layer(layer, key_cache, value_cache, self._rotations[layer]):
            self._load_by_torch(layer, key_cache, value_cache)

    def _load_by_torch(self, layer: int, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
        keys, values = self._arena[:, layer, 0], self._arena[:, layer, 1]  # [num_slots, block_size, num_kv_heads, ...]
        turn = self._turn(self._rotations[layer])
        if not self._chunks:
            self._chunks = self._split(max(1, CHUNK_BYTES // (keys[0].numel() * keys.element_size())))
        for chunk in self._chunks:
            if turn is None:
                self._copy(keys, key_cache, chunk)
            else:
                self._rotate(keys, key_cache, chunk, turn)
            self._copy(values, value_cache, chunk)

    def _split(self, size: int) -> list[_Chunk]:
        count = len(self._slots)
        bounds = [(start, min(start + size, count)) for start in range(0, count, size)]
        return [_Chunk(a, b, _run(self._slots[a:b]), _run(self._block_numbers[a:b])) for a, b in bounds]

    def _turn(self, rotation: Rotation | None) -> _Turn | None:
        if rotation is None:
            return None
        if id(rotation) not in self._turns:
            self._turns[id(rotation)] = self._make_turn(rotation)
        return self._turns[id(rotation)]

    def _make_turn(self, rotation: Rotation) -> _Turn:
        block_size, num_kv_heads = self._arena.shape[3:5]
        dtype = torch.promote_types(rotation.cos.dtype, torch.float32 if rotation.upcast else self._arena.dtype)
        at = rotation.at(self._token_positions())
        half = at.cos.shape[-1]
        first, second = slice(0, half), slice(half, 2 * half)
        if rotation.style is Style.INTERLEAVED:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        cos = torch.empty(len(self._slots), block_size, num_kv_heads, 2 * half, dtype=dtype)
        sin = torch.empty_like(cos)
        at_cos, at_sin = (t.view(-1, block_size, 1, half) for t in (at.cos, at.sin))
        cos[..., first] = cos[..., second] = at_cos
        sin[..., first], sin[..., second] = -at_sin, at_sin  # a - b is a + (-b), and rounding is symmetric
        return _Turn(cos, sin, first, second)

    def _token_positions(self) -> torch.Tensor:  # [N * block_size]
        return (self._positions[:, None] + torch.arange(self._arena.shape[3])).flatten()

    def _rotate(self, source: torch.Tensor, cache: torch.Tensor, chunk: _Chunk, turn: _Turn) -> None:
        """One multiplication of all elements, one of all partners, one sum: each rounded, as
        `kvstore.rope.rotary.rotate`."""
        raw = self._gather(source, chunk)
        rotary_dim, dtype = turn.cos.shape[-1], turn.cos.dtype
        out = cache[chunk.target] if isinstance(chunk.target, slice) else self._buffer("out", raw.shape, raw.dtype)
        x, into = raw[..., :rotary_dim], out[..., :rotary_dim]
        if dtype != raw.dtype:
            x = self._buffer("x", x.shape, dtype).copy_(x)
        cos, sin = turn.cos[chunk.start : chunk.end], turn.sin[chunk.start : chunk.end]
        own, other = self._buffer("own", x.shape, dtype), self._buffer("other", x.shape, dtype)
        torch.mul(x, cos, out=own)
        torch.mul(x[..., turn.second], sin[..., turn.first], out=other[..., turn.first])
        torch.mul(x[..., turn.first], sin[..., turn.second], out=other[..., turn.second])
        if dtype == raw.dtype:
            torch.add(own, other, out=into)
        else:
            into.copy_(own.add_(other))
        if rotary_dim < raw.shape[-1]:
            out[..., rotary_dim:].copy_(raw[..., rotary_dim:])
        if not isinstance(chunk.target, slice):
            _put_rows(cache, chunk.target, out)

    def _copy(self, source: torch.Tensor, cache: torch.Tensor, chunk: _Chunk) -> None:
        if not isinstance(chunk.target, slice):
            _put_rows(cache, chunk.target, self._gather(source, chunk))
        elif isinstance(chunk.source, slice):
            cache[chunk.target].copy_(source[chunk.source])
        else:
            torch.index_select(source, 0, chunk.source, out=cache[chunk.target])

    def _gather(self, source: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
        """The chunk's blocks, [n, block_size, num_kv_heads, head_dim]: a view where their slots are one run."""
        if isinstance(chunk.source, slice):
            return source[chunk.source]
        shape = torch.Size((chunk.end - chunk.start, *source.shape[1:]))
        return torch.index_select(source, 0, chunk.source, out=self._buffer("raw", shape, source.dtype))

    def _buffer(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Scratch memory that chunks and layers reuse: it stays in the core's cache."""
        size, held = shape.numel(), self._buffers.get((name, dtype))
        if held is None or held.numel() < size:
            held = self._buffers[name, dtype] = torch.empty(size, dtype=dtype)
        return held[:size].view(shape)

    # -- to a device -------------------------------------------------------------------------------------------------
    def load_by_kernel(self, first: int, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """As `load_layers`, by a kernel that reads the arena, pinned memory, over the bus."""
        from kvstore.kernels.cuda import kv as kv_triton

        places = self._places_on(caches[0][0].device)
        layers = [(layer, *pair) for layer, pair in enumerate(caches, first)]
        for _, group in groupby(layers, lambda layer: id(self._rotations[layer[0]])):
            alike = list(group)
            kv_triton.load(self._arena, alike, places, self._rotations[alike[0][0]])

    def load_by_copy(self, layer: int, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
        """As `load_layer`, by the device's copy engine from blocks gathered in pinned memory; rotated afterwards."""
        device, source = key_cache.device, self._arena[:, layer]
        rotation, numbers = self._rows_on(device, self._rotations[layer]), self._places_on(device)[1]
        block_size, size = source.shape[2], max(1, STAGING_BYTES // (source[0].numel() * source.element_size()))
        for start in range(0, len(self._slots), size):
            slots = self._slots[start : start + size]
            # Pinned memory comes from torch's pool, which hands it out again only after the copy has ended.
            staging = torch.empty(len(slots), *source.shape[1:], dtype=source.dtype, pin_memory=device.type == "cuda")
            torch.index_select(source, 0, slots, out=staging)
            blocks = staging.to(device, non_blocking=True)
            key = blocks[:, 0]
            if rotation is not None:
                tokens = slice(start * block_size, (start + len(slots)) * block_size)
                part = Rotation(rotation.cos[tokens], rotation.sin[tokens], rotation.style, rotation.upcast)
                key = part.apply(key.flatten(0, 1)).view(key.shape)
            targets = numbers[start : start + size]
            key_cache.index_copy_(0, targets, key)
            value_cache.index_copy_(0, targets, blocks[:, 1])

    def _places_on(self, device: torch.device) -> torch.Tensor:
        """[3, N] int64: slots, block numbers, positions; brought to the device once, in the stream of the loads."""
        if self._places is None:
            self._places = to_device(torch.stack([self._slots, self._block_numbers, self._positions]), device)
        return self._places

    def _rows_on(self, device: torch.device, rotation: Rotation | None) -> Rotation | None:
        """The table's rows of this load's tokens, gathered once on the device for all layers that share them."""
        if rotation is None:
            return None
        if id(rotation) not in self._rows:
            self._rows[id(rotation)] = rotation.at(to_device(self._token_positions(), device))
        return self._rows[id(rotation)]


def save_layers(
    arena: torch.Tensor, layers: Sequence[RawLayer], rows: torch.Tensor | None, slots: torch.Tensor
) -> None:
    """Several layers of one step. rows: which of its tokens are saved, [n] int64, None for all; slots: where, [n]."""
    if not layers or not len(slots):
        return
    if copy_native.save_layers(arena, layers, 0 if rows is None else rows, slots):
        return
    blocks, offsets = slots // arena.shape[3], slots % arena.shape[3]
    if len(slots) <= STACKED_TOKENS:
        parts = [part for _, key, value in layers for part in (key, value)]
        stacked = torch.stack(parts if rows is None else _select(parts, rows), dim=1).to(arena.device)
        numbers = torch.tensor([layer for layer, _, _ in layers])
        new = stacked.view(len(slots), len(layers), 2, *arena.shape[4:])
        arena, new = _widen(arena, new)
        arena[blocks[:, None], numbers, :, offsets[:, None]] = new
        return
    for layer, *pair in layers:
        for part, new in enumerate(pair if rows is None else _select(pair, rows)):
            target, source = _widen(arena, new.to(arena.device))
            target[blocks, layer, part, offsets] = source


def save_to_arena(
    arena: torch.Tensor, layers: Sequence[RawLayer], rows: torch.Tensor | None, slots: torch.Tensor
) -> None:
    """As `save_layers`, in the order of the current stream: on CUDA a kernel writes to the arena over the bus.

    rows, slots: int64, on the device of the keys; a slot of -1 is skipped. The arena is pinned, and the keys and values
    must stay as they are until the stream has passed. A CUDA device needs Triton for this.
    """
    if not layers or not len(slots):
        return
    if layers[0][1].device.type == "cpu":
        for layer, key, value in layers:
            pair = (key, value) if rows is None else (key[rows], value[rows])
            reference.save_tokens(arena, layer, *pair, slots)
        return
    from kvstore.kernels.cuda import kv as kv_triton

    kv_triton.save(arena, layers, rows, slots)


def save_few(arena: torch.Tensor, layers: Sequence[RawLayer], rows: slice, slots: Sequence[int]) -> None:
    """All layers, in order, of a run of a few tokens: as `save_layers`, with as few calls as possible.

    rows: which of the step's tokens; slots: where each goes. A decode step takes milliseconds: every call counts.
    """
    assert len(layers) == arena.shape[1]
    if len(slots) > 1 and copy_native.save_layers(arena, layers, rows.start, torch.tensor(slots)):
        return  # a single token takes as long either way
    block_size = arena.shape[3]
    stacked = torch.stack([part[rows] for _, key, value in layers for part in (key, value)], dim=1)
    new = stacked.view(len(slots), len(layers), 2, *arena.shape[4:])
    for token, slot in enumerate(slots):
        arena[slot // block_size, :, :, slot % block_size] = new[token]


def _select(tensors: Sequence[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
    run = _run(rows)
    if isinstance(run, slice):
        return [tensor[run] for tensor in tensors]
    rows = rows.to(tensors[0].device)
    return [tensor.index_select(0, rows) for tensor in tensors]


def _run(numbers: torch.Tensor) -> slice | torch.Tensor:
    """The slice that these numbers, [n], are, or the numbers as they come."""
    first = int(numbers[0])
    if int(numbers[-1]) - first == len(numbers) - 1 and bool((numbers.diff() == 1).all()):
        return slice(first, first + len(numbers))
    return numbers


def _put_rows(cache: torch.Tensor, rows: torch.Tensor, blocks: torch.Tensor) -> None:
    cache, blocks = _widen(cache, blocks)
    cache[rows] = blocks


def _widen(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The same memory as 16-byte elements where that is possible: indexed writes cost by the element, not the byte."""
    ratio = 16 // tensors[0].element_size()
    for tensor in tensors:
        *strides, last = tensor.stride()
        if last != 1 or any(n % ratio for n in (tensor.shape[-1], tensor.storage_offset(), *strides)):
            return list(tensors)
        if tensor.data_ptr() % 16:
            return list(tensors)
    return [tensor.view(torch.complex128) for tensor in tensors]
