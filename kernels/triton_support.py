"""Whether Triton is there, and the little that its kernels' callers share. Importing this imports no Triton."""

import importlib.util
from functools import cache

import torch

from rope.rotary import Rotation


@cache
def has_triton() -> bool:
    """Whether Triton is installed; without it a CUDA device computes with torch operations."""
    return importlib.util.find_spec("triton") is not None


def runs_kernels(tensor: torch.Tensor) -> bool:
    """Whether work on this tensor is done by Triton kernels."""
    return tensor.device.type == "cuda" and has_triton()


def to_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small tensor on the device without a wait: from pageable memory, a copy waits for all that is queued.

    What is there already comes back as it is.
    """
    if device.type != "cuda" or numbers.device.type == "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def rounds_once(rotation: Rotation, dtype: torch.dtype) -> bool:
    """Whether rotating elements of this dtype rounds the sum alone, as torch's type promotion would do it."""
    return rotation.upcast or torch.promote_types(rotation.cos.dtype, dtype) == torch.float32
