"""How small tensors come to a device."""

import torch


def to_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small tensor on the device without a wait: from pageable memory, a copy waits for all that is queued.

    What is there already comes back as it is.
    """
    if device.type != "cuda" or numbers.device.type == "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)
