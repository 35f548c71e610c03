"""bfloat16 in 12 bits an element, without loss: the 16 most frequent exponents of a piece have codes of 4 bits.

The idea is SplitZip's. The form: pieces of 4,096 elements, the last one shorter, each adapting to its part of a layer.
A piece: its 16 exponents, as bytes; the number of escapes (u16); for each 32 elements, the last ones filled up, 16
bytes of codes (of element j in the low half of byte j, of element 16 + j in the high one), then 32 bytes of sign and
mantissa; for each escape, an element with another exponent, its number in the piece (u16) and its exponent. Low bytes
come first. C does it (`cpu/exact12.c`); without a compiler, numpy. Knows no block and loads no torch.
"""

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvstore.kernels.cpu import native

Uint8 = npt.NDArray[np.uint8]
PIECE, GROUP, CODES = 4096, 32, 16
HEAD_BYTES, GROUP_BYTES, ESCAPE_BYTES = CODES + 2, GROUP // 2 + GROUP, 3
_TYPES = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)


def compiled() -> tuple[Callable[..., int], Callable[..., int]] | None:
    """The two functions in C, or None."""
    return native.codec_functions("exact12", _TYPES)


def encode(raw: Uint8) -> Uint8 | None:
    """The elements of `raw`, contiguous bytes; None if they do not get smaller, or are no whole elements."""
    if len(raw) == 0 or len(raw) % 2:
        return None
    if (functions := compiled()) is None:
        stored = encode_in_numpy(raw)
        return stored if len(stored) < len(raw) else None
    out = np.empty(len(raw), np.uint8)
    num_bytes = functions[0](raw.ctypes.data, len(raw) // 2, out.ctypes.data, len(raw) - 1)
    return out[:num_bytes] if num_bytes >= 0 else None


def decode(stored: Uint8, out: Uint8) -> bool:
    """Fill `out`, contiguous bytes, with the elements. False if these bytes, which may be any, are not just those."""
    if len(out) % 2:
        return False
    if (functions := compiled()) is None:
        return decode_in_numpy(stored, out)
    return bool(functions[1](stored.ctypes.data, len(stored), out.ctypes.data, len(out) // 2))


# -- the twin --------------------------------------------------------------------------------------------------------
def encode_in_numpy(raw: Uint8) -> Uint8:
    """As C, however large it becomes."""
    elements = raw.view("<u2")
    pieces = [_encode_piece(elements[first : first + PIECE]) for first in range(0, len(elements), PIECE)]
    return np.concatenate([np.zeros(0, np.uint8), *pieces])


def _encode_piece(elements: npt.NDArray[np.uint16]) -> Uint8:
    exponents = (elements >> 7).astype(np.uint8)
    counts = np.bincount(exponents, minlength=256)
    chosen = np.argsort(-counts, kind="stable")[:CODES]
    chosen = chosen[counts[chosen] > 0]
    code_of = np.zeros(256, np.uint8)
    code_of[chosen] = range(len(chosen))
    (escaped,) = np.nonzero(~np.isin(exponents, chosen))
    head = np.zeros(HEAD_BYTES, np.uint8)
    head[: len(chosen)] = chosen
    head[CODES:] = np.array([len(escaped)], "<u2").view(np.uint8)
    codes, rest = np.zeros((2, -(-len(elements) // GROUP) * GROUP), np.uint8)
    codes[: len(elements)] = code_of[exponents]
    rest[: len(elements)] = elements & 0x7F | elements >> 8 & 0x80
    halves = codes.reshape(-1, 2, GROUP // 2)
    groups = np.concatenate([halves[:, 0] | halves[:, 1] << 4, rest.reshape(-1, GROUP)], axis=1)
    escapes = np.concatenate([escaped.astype("<u2").view(np.uint8).reshape(-1, 2), exponents[escaped, None]], axis=1)
    return np.concatenate([head, groups.ravel(), escapes.ravel()])


def decode_in_numpy(stored: Uint8, out: Uint8) -> bool:
    elements = out.view("<u2")
    for first in range(0, len(elements), PIECE):
        num_bytes = _decode_piece(stored, elements[first : first + PIECE])
        if num_bytes is None:
            return False
        stored = stored[num_bytes:]
    return len(stored) == 0


def _decode_piece(stored: Uint8, elements: npt.NDArray[np.uint16]) -> int | None:
    """Fill in a piece. Returns the bytes read, or None."""
    num_groups = -(-len(elements) // GROUP)
    end = HEAD_BYTES + num_groups * GROUP_BYTES
    if len(stored) < end:
        return None
    groups = stored[HEAD_BYTES:end].reshape(num_groups, GROUP_BYTES)
    packed, rest = groups[:, : GROUP // 2], groups[:, GROUP // 2 :].ravel()
    codes = np.concatenate([packed & 15, packed >> 4], axis=1).ravel()
    exponents = stored[:CODES][codes].astype(np.uint16)
    num_escapes = int(stored[CODES:HEAD_BYTES].copy().view("<u2")[0])
    escapes = stored[end : end + num_escapes * ESCAPE_BYTES]
    if len(escapes) < num_escapes * ESCAPE_BYTES:
        return None
    escapes = escapes.reshape(num_escapes, ESCAPE_BYTES)
    at = escapes[:, 0] | escapes[:, 1].astype(np.uint16) << 8
    if np.any(at >= len(elements)):
        return None
    exponents[at] = escapes[:, 2]
    signs = rest.astype(np.uint16)
    elements[:] = ((signs & 0x80) << 8 | exponents << 7 | signs & 0x7F)[: len(elements)]
    return end + len(escapes) * ESCAPE_BYTES
