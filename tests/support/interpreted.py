"""What Triton 3.6's interpreter lacks: loops over computed bounds with numpy 2.4; products and rounding of bfloat16."""

import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor
_create_dot = interpreter.InterpreterBuilder.create_dot
_convert_float = interpreter._convert_float


def _patch_with_index(tensor, scope):
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _widened(handle):
    if handle.dtype.scalar != tl.bfloat16:  # which numpy has not: its bits stand in uint16
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _dot(self, a, b, d, *options):
    return _create_dot(self, _widened(a), _widened(b), d, *options)


def _rounded(data, source, target, rounding_mode):
    """A device rounds float32 to the nearest bfloat16; the interpreter cuts it off."""
    if source != tl.float32 or target != tl.bfloat16:
        return _convert_float(data, source, target, rounding_mode)
    return torch.from_numpy(np.array(data, order="C")).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def repair():
    """To be called before a kernel runs; any number of times."""
    interpreter._patch_lang_tensor = _patch_with_index
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter._convert_float = _rounded
