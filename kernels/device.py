"""How small tensors come to a device, and back."""

import torch
from torch import Tensor


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A small tensor on the device without a wait: from pageable memory, a copy waits for all that is queued.

    What is there already comes back as it is.
    """
    if device.type != "cuda" or numbers.device.type == "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def start_to_host(numbers: Tensor) -> Tensor:
    """A copy on the host that is there when the device has come to it; nothing waits. On a CPU the tensor itself."""
    if numbers.device.type != "cuda":
        return numbers
    pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    pinned.copy_(numbers, non_blocking=True)
    return pinned
