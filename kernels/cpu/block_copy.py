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
from kvstore.kernels.cpu.attention import is_in_rows
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
        *_numbers("block_size", "num_heads", "head_dim", "item_bytes", "value_bytes", "num_threads"),
    )


class _Rotate(ctypes.Structure):
    _fields_ = (
        *_pointers("cos", "sin"),
        *_numbers("num_positions", "num_pairs", "item_bytes", "interleaved", "rounds_each_product"),
    )


class _SaveTokens(ctypes.Structure):
    _fields_ = (
        *_pointers("rows", "places"),
        *_numbers("num_tokens", "num_rows", "num_arena_blocks", "arena_block_bytes", "block_size"),
    )


@cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.kvstore_load_layer.argtypes = [ctypes.c_void_p] * 6
    library.kvstore_save_layers.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return library


def _is_solid(part: Tensor) -> bool:
    """Whether the keys or values of an arena block in a layer have no gap, as those of some heads have."""
    _, _, num_heads, head_dim = part.shape
    return len(part) > 0 and part.stride()[1:] == (num_heads * head_dim, head_dim, 1)


class NativeLoad:
    """The blocks of a load, as the compiled code takes them. Block numbers and positions: int64 on the CPU, [N]."""

    def __init__(self, arena_blocks: Tensor, block_numbers: Tensor, positions: Tensor) -> None:
        self._held = [numbers.contiguous() for numbers in (arena_blocks, block_numbers, positions)]
        pointers = [numbers.data_ptr() for numbers in self._held]
        self._load = _LoadBlocks(*pointers, len(arena_blocks), num_threads=torch.get_num_threads())
        self._turns: dict[int, _Rotate | None] = {}

    def load_layer(
        self, layer: tuple[Tensor, Tensor], key_cache: Tensor, value_cache: Tensor, rotation: Rotation | None
    ) -> bool:
        """As `BlockLoad.load_layer`. layer: its keys and values in the arena. Raises IndexError, before anything is
        written, if a number is out of range.
        """
        library, load = native.library(), self._load
        if library is None:
            return False
        for part, cache_ in zip(layer, (key_cache, value_cache), strict=True):
            if cache_.dtype != part.dtype or cache_.shape[1:] != part.shape[1:] or not cache_.is_contiguous():
                return False
            if not _is_solid(part):
                return False
        keys, values = layer
        turn = None if rotation is None else self._turn(rotation, keys)
        if rotation is not None and turn is None:
            return False
        load.num_arena_blocks, load.block_size, load.num_heads, load.head_dim = keys.shape
        load.item_bytes = keys.element_size()
        load.arena_block_bytes, load.value_bytes = keys.stride(0) * load.item_bytes, values.stride(1) * load.item_bytes
        load.num_blocks = min(len(key_cache), len(value_cache))
        failed = _declared(library).kvstore_load_layer(
            ctypes.addressof(load), None if turn is None else ctypes.addressof(turn),
            keys.data_ptr(), values.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
        )  # fmt: skip
        if failed:
            raise IndexError("a load names an arena block, an HBM block or a position that is not there")
        return True

    def _turn(self, rotation: Rotation, keys: Tensor) -> _Rotate | None:
        if id(rotation) not in self._turns:
            self._turns[id(rotation)] = _turn_of(rotation, keys)
        return self._turns[id(rotation)]


def _turn_of(rotation: Rotation, keys: Tensor) -> _Rotate | None:
    """None if the compiled code does not know the dtypes. The rotation's tables must outlive the result."""
    cos, sin = rotation.cos, rotation.sin
    if cos.dtype != sin.dtype or cos.shape != sin.shape or not (cos.is_contiguous() and sin.is_contiguous()):
        return None
    if keys.dtype not in _ROTATED or cos.dtype not in _ROTATED or not cos.is_cpu or cos.shape[-1] > MAX_PAIRS:
        return None
    each = cos.dtype == keys.dtype == torch.bfloat16 and not rotation.upcast
    interleaved = rotation.style is Style.INTERLEAVED
    return _Rotate(cos.data_ptr(), sin.data_ptr(), *cos.shape, cos.element_size(), interleaved, each)


def save_layers(
    arena: Sequence[tuple[Tensor, Tensor]], layers: Sequence[tuple[int, Tensor, Tensor]], rows: Tensor | None,
    places: Tensor,
) -> bool:  # fmt: skip
    """As `kv.save_layers`. Raises IndexError as `load_layer` does."""
    library, one = native.library(), arena[0][0]
    if library is None or not (one.is_cpu and layers[0][1].is_cpu and _is_solid(one)):
        return False
    table = _part_table(arena, layers)
    if table is None:
        return False
    places, rows = places.contiguous(), None if rows is None else rows.contiguous()
    pointer = None if rows is None else rows.data_ptr()
    shape = (len(one), one.stride(0) * one.element_size(), one.shape[1])
    save = _SaveTokens(pointer, places.data_ptr(), len(places), len(layers[0][1]), *shape)
    if _declared(library).kvstore_save_layers(ctypes.addressof(save), ctypes.addressof(table), 2 * len(layers)):
        raise IndexError("a save names a row or a place that is not there")
    return True


def _part_table(
    arena: Sequence[tuple[Tensor, Tensor]], layers: Sequence[tuple[int, Tensor, Tensor]]
) -> "ctypes.Array[ctypes.c_int64] | None":
    """For the keys and the values of each layer: where they lie in the arena, the tokens' address, the bytes from one
    token to the next, and of one. All layers of an arena are cut alike."""
    one, num_rows = arena[0][0], layers[0][1].shape[0]
    dtype, item_bytes = one.dtype, one.element_size()
    token_bytes: dict[torch.Size, int] = {}  # by shapes that fit: most layers have the same
    found: list[int] = []
    for layer, *pair in layers:
        for part, tokens in zip(arena[layer], pair, strict=True):
            shape = tokens.shape
            if shape not in token_bytes:
                if shape != (num_rows, *part.shape[2:]):
                    return None
                token_bytes[shape] = part.stride(1) * item_bytes
            if tokens.dtype != dtype or not is_in_rows(tokens):
                return None
            found += (part.data_ptr(), tokens.data_ptr(), tokens.stride(0) * item_bytes, token_bytes[shape])
    return (ctypes.c_int64 * len(found))(*found)
