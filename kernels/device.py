"""Copies small tensors to a device and back, without waiting."""

import torch
from torch import Tensor


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor to the device without a wait. A copy from pageable memory would wait for everything queued.

    A tensor that is already there is returned as it is.
    """
    if device.type != "cuda" or numbers.device.type == "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def start_to_host(numbers: Tensor) -> Tensor:
    """A copy on the host, complete when the device has reached it. Never waits. On a CPU: the tensor itself."""
    if numbers.device.type != "cuda":
        return numbers
    pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    pinned.copy_(numbers, non_blocking=True)
    return pinned
