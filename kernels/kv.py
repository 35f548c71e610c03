"""Moves keys and values: a step's into the paged HBM cache, and blocks between cache and CPU arena.

Writing rotates queries and keys, loading the keys of blocks. An arena is given by its layers: the raw keys and the
values of each, [num_arena_blocks, block_size, num_kv_heads, head_dim], views of one memory. Layers may have different
shapes, and so may keys and values. CUDA uses Triton kernels, a CPU compiled C; without these, the twins in
`kvstore.kernels.reference` do the same, bit for bit.
"""

import importlib.util
import logging
from collections.abc import Sequence
from functools import cache
from itertools import groupby

import torch
from torch import Tensor

from kvstore.kernels import reference
from kvstore.kernels.cpu import attention as attention_native
from kvstore.kernels.cpu import block_copy as copy_native
from kvstore.kernels.paged_batch import to_device
from kvstore.rope.rotary import Rotation

log = logging.getLogger(__name__)
ArenaLayers = Sequence[tuple[Tensor, Tensor]]
RawLayer = tuple[int, Tensor, Tensor]  # layer, raw keys and values, [num_tokens, num_kv_heads, head_dim]


@cache
def has_triton() -> bool:
    """Whether Triton is installed and can launch kernels. Without it, a CUDA device computes with torch operations."""
    if importlib.util.find_spec("triton") is None:
        return False
    return not torch.cuda.is_available() or _launches()


def _launches() -> bool:
    """Try it on the current device: Triton needs a C compiler and Python's headers, which small images lack."""
    from kvstore.kernels.cuda import kv as kv_triton

    try:
        head, slot = torch.zeros(1, 1, 16, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
        kv_triton.write(head, head, head[None].clone(), head[None].clone(), slot)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[:1]
        log.warning("Triton is installed but launches no kernel (%s): torch operations instead, slower", *reason or "?")
        return False
    return True


def runs_kernels(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda" and has_triton()


class BlockLoad:
    """The load of N blocks, layer by layer, by one thread. What the layers share is prepared at its first use.

    arena_blocks, block_numbers: where each lies in the arena and in HBM. positions: of each block's first token.
    rotations: the full table of each layer, None if its keys are not rotated. On CUDA it works in the current stream.
    """

    def __init__(
        self, arena: ArenaLayers, arena_blocks: Sequence[int] | Tensor, block_numbers: Sequence[int] | Tensor,
        positions: Sequence[int] | Tensor, rotations: Sequence[Rotation | None],
    ) -> None:  # fmt: skip
        self._arena = arena
        self._arena_blocks = torch.as_tensor(arena_blocks, dtype=torch.int64)
        self._block_numbers = torch.as_tensor(block_numbers, dtype=torch.int64)
        self._positions = torch.as_tensor(positions, dtype=torch.int64)
        assert len(self._arena_blocks) == len(self._block_numbers) == len(self._positions)
        self._rotations = rotations
        self._blocks: Tensor | None = None
        self._native: copy_native.NativeLoad | None = None

    def load_layer(self, layer: int, key_cache: Tensor, value_cache: Tensor) -> None:
        """Fill this layer's HBM blocks. Caches: [num_blocks, block_size, num_kv_heads, head_dim]."""
        self.load_layers(layer, [(key_cache, value_cache)])

    def load_layers(self, first: int, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """As `load_layer`, for the layers from `first` on. Kernels launch once for layers with the same rotation and
        shape.
        """
        if not len(self._arena_blocks) or not caches:
            return
        if runs_kernels(caches[0][0]):
            self.load_by_kernel(first, caches)
            return
        for layer, pair in enumerate(caches, first):
            rotation = self._rotations[layer]
            if self._native is None:
                self._native = copy_native.NativeLoad(self._arena_blocks, self._block_numbers, self._positions)
            if not (pair[0].is_cpu and self._native.load_layer(self._arena[layer], *pair, rotation)):
                numbers = self._block_numbers, self._positions
                reference.load_blocks(self._arena[layer], self._arena_blocks, *pair, *numbers, rotation)

    def load_by_kernel(self, first: int, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """As `load_layers`, by a kernel that reads the arena, which is pinned memory, over the bus."""
        from kvstore.kernels.cuda import kv as kv_triton

        if self._blocks is None:  # copied to the device once, in the stream of the loads
            blocks = torch.stack([self._arena_blocks, self._block_numbers, self._positions])
            self._blocks = to_device(blocks, caches[0][0].device)
        layers = [(layer, *pair) for layer, pair in enumerate(caches, first)]
        for _, group in groupby(layers, lambda one: (id(self._rotations[one[0]]), one[1].shape, one[2].shape)):
            alike = list(group)
            kv_triton.load(self._arena, alike, self._blocks, self._rotations[alike[0][0]])


def save_layers(arena: ArenaLayers, layers: Sequence[RawLayer], rows: Tensor | None, places: Tensor) -> None:
    """Save several layers of one step. rows: the tokens to save, [n] int64, None for all; places: in the arena, [n]."""
    if not layers or not len(places):
        return
    if not copy_native.save_layers(arena, layers, rows, places):
        _save_by_torch(arena, layers, rows, places)


def save_to_arena(arena: ArenaLayers, layers: Sequence[RawLayer], rows: Tensor | None, places: Tensor) -> None:
    """As `save_layers`, in the order of the current stream: on CUDA a kernel writes to the arena over the bus.

    rows, places: int64, on the device of the keys; a place of -1 is skipped. The arena is pinned. Keys and values must
    not change until the stream has passed this point. A CUDA device needs Triton for this.
    """
    if not layers or not len(places):
        return
    if layers[0][1].is_cpu:
        _save_by_torch(arena, layers, rows, places)
        return
    from kvstore.kernels.cuda import kv as kv_triton

    kv_triton.save(arena, layers, rows, places)


def _save_by_torch(arena: ArenaLayers, layers: Sequence[RawLayer], rows: Tensor | None, places: Tensor) -> None:
    for layer, key, value in layers:
        pair = (key, value) if rows is None else (key[rows.to(key.device)], value[rows.to(key.device)])
        reference.save_tokens(arena[layer], *pair, places)


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """As `kvstore.kernels.reference.write_kv`: [num_tokens, num_kv_heads, head_dim] each; a slot of -1 is skipped."""
    if runs_kernels(key):
        from kvstore.kernels.cuda import kv as kv_triton

        kv_triton.write(key, value, key_cache, value_cache, slots)
        return
    if key.device.type != "cpu":  # on CUDA, a slot of -1 would be an error after which the device is lost
        reference.write_kv(key, value, key_cache, value_cache, slots)
        return
    try:
        key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slots, key)
        value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slots, value)
    except IndexError:  # a slot of -1: only padded steps have one, and all others should not search for it
        reference.write_kv(key, value, key_cache, value_cache, slots)


def rotate_and_write(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor,
    rotation: Rotation | None,
) -> tuple[Tensor, Tensor]:  # query and key, rotated  # fmt: skip
    """Rotate query and key by `rotation`, which has one row per token (see `Rotation.at`); write key and value.

    query: [num_tokens, num_heads, head_dim]; the rest as in `write_kv`. Rotated tensors are new. If rotation is None,
    query and key are returned as they are.
    """
    if runs_kernels(key):
        from kvstore.kernels.cuda import kv as kv_triton

        return kv_triton.rotate_and_write(query, key, value, key_cache, value_cache, slots, rotation)
    if rotation is not None:
        done = attention_native.rotate_and_write(query, key, value, key_cache, value_cache, slots, rotation)
        if done is not None:
            return done
        query, key = rotation.apply(query), rotation.apply(key)
    write_kv(key, value, key_cache, value_cache, slots)
    return query, key
