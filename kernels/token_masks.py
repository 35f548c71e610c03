"""Which tokens of a vocabulary may be drawn, as one bit each: applied to logits in place."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from kvstore.kernels import reference
from kvstore.kernels.cpu import native
from kvstore.kernels.paged_batch import to_device

_NUMBER, _POINTER = ctypes.c_int64, ctypes.c_void_p
_TYPES = (_POINTER, _NUMBER, _NUMBER, _POINTER, _POINTER, _NUMBER, _NUMBER)


def forbid_tokens(logits: Tensor, rows: np.ndarray, masks: np.ndarray) -> None:
    """Make the tokens that masks [C, W] int32 have no bit for -inf in these rows [C] of logits [R, V] float32.

    No row occurs twice. Waits for nothing.
    """
    library = native.library() if logits.is_cpu and logits.stride(1) == 1 else None
    if library is None:
        there = (to_device(torch.from_numpy(array.copy()), logits.device) for array in (rows, masks))
        reference.forbid_tokens(logits, *there)
        return
    function = native.declared(library, {"kvstore_forbid_tokens": _TYPES})["kvstore_forbid_tokens"]
    rows, masks = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(masks)
    function(
        logits.data_ptr(), logits.stride(0), logits.shape[1], rows.ctypes.data, masks.ctypes.data, *masks.shape,
    )  # fmt: skip
