"""bfloat16 in 8.25 bits an element, with loss: groups of 32 elements with one power of two, and 8 bits for each.

It is MXINT8 of the OCP Microscaling Formats (MX) Specification 1.0, for whatever lies side by side: of KV, 32 channels
of a token. A stored payload: for each group the largest exponent of its elements, as bfloat16 has it; then for each
element a signed byte, its multiple of 2 ** (exponent - 133), rounded to even and at most 127. Elements below 2 ** -120
become 0. So an element is off by at most 2 ** -7 of the largest of its group, and what comes back has these very bytes:
to store it again loses nothing. C does it (`cpu/int8.c`); without a compiler, numpy. Knows no block and loads no torch.
"""

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvstore.kernels.cpu import native

Uint8 = npt.NDArray[np.uint8]
GROUP = 32
LEAST, NOT_FINITE = 7, 255  # exponents: of what does not become 0, and of infinities and NaN
UNIT = 133  # the exponent whose step is 1: that of 64, 127 + 6
_TYPES = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


def compiled() -> tuple[Callable[..., int], Callable[..., int]] | None:
    """The two functions in C, or None."""
    return native.codec_functions("int8", _TYPES)


def encode(raw: Uint8) -> Uint8 | None:
    """The elements of `raw`, contiguous bytes; None if they are no whole groups, or not finite."""
    num_groups, rest = divmod(len(raw), 2 * GROUP)
    if num_groups == 0 or rest:
        return None
    stored = np.empty(num_groups * (1 + GROUP), np.uint8)
    if (functions := compiled()) is None:
        return stored if encode_in_numpy(raw, stored) else None
    return stored if functions[0](raw.ctypes.data, stored.ctypes.data, num_groups) else None


def decode(stored: Uint8, out: Uint8) -> bool:
    """Fill `out`, contiguous bytes, with the elements. False if these bytes, which may be any, are not just those."""
    num_groups, rest = divmod(len(out), 2 * GROUP)
    if rest or len(stored) != num_groups * (1 + GROUP):
        return False
    if (functions := compiled()) is None:
        return decode_in_numpy(stored, out)
    return bool(functions[1](stored.ctypes.data, out.ctypes.data, num_groups))


# -- the twin --------------------------------------------------------------------------------------------------------
def encode_in_numpy(raw: Uint8, stored: Uint8) -> bool:
    """As C."""
    groups = raw.view("<u2").reshape(-1, GROUP)
    largest = (groups >> 7 & 0xFF).max(1)
    if np.any(largest == NOT_FINITE):
        return False
    largest[largest < LEAST] = 0
    values = (groups.astype("<u4") << 16).view("<f4")
    steps = np.rint(values * _power(largest, UNIT - largest.astype(np.int32))).clip(-127, 127)
    stored[: len(groups)] = largest
    stored[len(groups) :] = steps.astype(np.int8).view(np.uint8).ravel()
    return True


def decode_in_numpy(stored: Uint8, out: Uint8) -> bool:
    """As C."""
    num_groups = len(stored) // (1 + GROUP)
    largest, steps = stored[:num_groups], stored[num_groups:].view(np.int8).reshape(-1, GROUP)
    if np.any(largest == NOT_FINITE):
        return False
    with np.errstate(over="ignore"):  # of bytes that nobody has encoded
        values = steps.astype("<f4") * _power(largest, largest.astype(np.int32) - UNIT)
    out.view("<u2").reshape(-1, GROUP)[:] = values.view("<u4") >> 16
    return True


def _power(largest: npt.NDArray[np.unsignedinteger], exponents: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """2 to each of these, as a column; 0 for groups of zeros."""
    powers = np.ldexp(np.float32(1), np.where(largest < LEAST, 0, exponents)).astype("<f4")
    return np.where(largest < LEAST, np.float32(0), powers)[:, None]
