"""Copies blocks between arena and paged cache by the compiled code of copy.c, whose structs are declared here.

Each function returns False if it cannot do it: without a compiler, or for a dtype or strides that the code does not
know. Then `kvstore.kernels.kv` does the same with torch operations, bit for bit.
"""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from kvstore.kernels.cpu import native
from kvstore.rope.rotary import Rotation, Style

MAX_PAIRS = 512  # as in copy.c
_ROTATED = (torch.bfloat16, torch.float32)


def _numbers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_int64) for name in names]


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names]


class _LoadBlocks(ctypes.Structure):
    _fields_ = (
        *_pointers("arena_blocks", "numbers", "positions"),
        *_numbers("num_loads", "num_arena_blocks", "num_blocks", "arena_block_bytes"),
        *_numbers("block_size", "num_heads", "head_dim", "item_bytes", "num_threads"),
    )


class _Rotate(ctypes.Structure):
    _fields_ = (
        *_pointers("cos", "sin"),
        *_numbers("num_positions", "num_pairs", "item_bytes", "interleaved", "rounds_each_product"),
    )


class _SaveTokens(ctypes.Structure):
    _fields_ = (
        *_pointers("rows", "places"),
        *_numbers("num_tokens", "num_rows", "num_arena_blocks", "arena_block_bytes", "block_size", "token_bytes"),
        *_pointers("arena"),
    )


@cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.kvstore_load_layer.argtypes = [ctypes.c_void_p] * 5
    library.kvstore_save_layers.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return library


def _is_solid(arena: Tensor) -> bool:
    """Whether the bytes of each arena block have no gap, as those of some layers in a row."""
    return len(arena) > 0 and arena[0].is_contiguous()


class NativeLoad:
    """The blocks of a load, as the compiled code takes them. Block numbers and positions: int64 on the CPU, [N]."""

    def __init__(self, arena: Tensor, arena_blocks: Tensor, block_numbers: Tensor, positions: Tensor) -> None:
        self._arena = arena
        self._held = [numbers.contiguous() for numbers in (arena_blocks, block_numbers, positions)]
        num_arena_blocks, _, _, *block_shape = arena.shape
        pointers = [numbers.data_ptr() for numbers in self._held]
        arena_block_bytes = arena.stride(0) * arena.element_size()
        counts = len(arena_blocks), num_arena_blocks, 0
        self._load = _LoadBlocks(
            *pointers, *counts, arena_block_bytes, *block_shape, arena.element_size(), torch.get_num_threads()
        )
        self._turns: dict[int, _Rotate | None] = {}

    def load_layer(self, layer: int, key_cache: Tensor, value_cache: Tensor, rotation: Rotation | None) -> bool:
        """As `BlockLoad.load_layer`. Raises IndexError, before anything is written, if a number is out of range."""
        library, arena = native.library(), self._arena
        if library is None or not _is_solid(arena):
            return False
        for cache_ in (key_cache, value_cache):
            if cache_.dtype != arena.dtype or cache_.shape[1:] != arena.shape[3:] or not cache_.is_contiguous():
                return False
        turn = None if rotation is None else self._turn(rotation)
        if rotation is not None and turn is None:
            return False
        self._load.num_blocks = min(len(key_cache), len(value_cache))
        failed = _declared(library).kvstore_load_layer(
            ctypes.addressof(self._load), None if turn is None else ctypes.addressof(turn),
            arena.data_ptr() + layer * arena.stride(1) * arena.element_size(), key_cache.data_ptr(),
            value_cache.data_ptr(),
        )  # fmt: skip
        if failed:
            raise IndexError("a load names an arena block, an HBM block or a position that is not there")
        return True

    def _turn(self, rotation: Rotation) -> _Rotate | None:
        if id(rotation) not in self._turns:
            self._turns[id(rotation)] = _turn_of(rotation, self._arena)
        return self._turns[id(rotation)]


def _turn_of(rotation: Rotation, arena: Tensor) -> _Rotate | None:
    """None if the compiled code does not know the dtypes. The rotation's tables must outlive the result."""
    cos, sin = rotation.cos, rotation.sin
    if cos.dtype != sin.dtype or cos.shape != sin.shape or not (cos.is_contiguous() and sin.is_contiguous()):
        return None
    if arena.dtype not in _ROTATED or cos.dtype not in _ROTATED or not cos.is_cpu or cos.shape[-1] > MAX_PAIRS:
        return None
    each = cos.dtype == arena.dtype == torch.bfloat16 and not rotation.upcast
    interleaved = rotation.style is Style.INTERLEAVED
    return _Rotate(cos.data_ptr(), sin.data_ptr(), *cos.shape, cos.element_size(), interleaved, each)


def save_layers(
    arena: Tensor, layers: Sequence[tuple[int, Tensor, Tensor]], rows: Tensor | None, places: Tensor
) -> bool:
    """As `kv.save_layers`. Raises IndexError as `load_layer` does."""
    library = native.library()
    if library is None or not (arena.is_cpu and layers[0][1].is_cpu and _is_solid(arena)):
        return False
    table = _layer_table(arena, layers)
    if table is None:
        return False
    item_bytes, head_dim = arena.element_size(), arena.shape[5]
    places, rows = places.contiguous(), None if rows is None else rows.contiguous()
    pointer = None if rows is None else rows.data_ptr()
    shape = (arena.shape[0], arena.stride(0) * item_bytes, arena.shape[3], arena.shape[4] * head_dim * item_bytes)
    save = _SaveTokens(pointer, places.data_ptr(), len(places), len(layers[0][1]), *shape, arena.data_ptr())
    if _declared(library).kvstore_save_layers(ctypes.addressof(save), ctypes.addressof(table), len(layers)):
        raise IndexError("a save names a row or a place that is not there")
    return True


def _layer_table(arena: Tensor, layers: Sequence[tuple[int, Tensor, Tensor]]) -> "ctypes.Array[ctypes.c_int64] | None":
    """For each layer: its number, the addresses of its keys and values, and the bytes from one token to the next."""
    dtype, item_bytes, shape = arena.dtype, arena.element_size(), layers[0][1].shape
    num_layers = arena.shape[1]
    if shape[1:] != arena.shape[4:]:
        return None
    found: list[int] = []
    for layer, *pair in layers:
        strides = []
        for part in pair:
            if not native.is_in_rows(part) or part.dtype != dtype or part.shape != shape:
                return None
            strides.append(part.stride(0) * item_bytes)
        if not 0 <= layer < num_layers:
            return None
        found += (layer, pair[0].data_ptr(), pair[1].data_ptr(), *strides)
    return (ctypes.c_int64 * len(found))(*found)
