"""Whether Triton is installed and launches kernels. Importing this module imports no Triton."""

import importlib.util
import logging
from functools import cache

import torch

log = logging.getLogger(__name__)


@cache
def has_triton() -> bool:
    """Whether Triton is installed and can launch kernels. Without it, a CUDA device computes with torch operations."""
    if importlib.util.find_spec("triton") is None:
        return False
    return not torch.cuda.is_available() or _launches()


def _launches() -> bool:
    """Try it on the current device: Triton needs a C compiler and Python's headers, which small images lack."""
    from kvstore.kernels.cuda import kv as kv_triton

    try:
        head, slot = torch.zeros(1, 1, 16, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
        kv_triton.write(head, head, head[None].clone(), head[None].clone(), slot)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[:1]
        log.warning("Triton is installed but launches no kernel (%s): torch operations instead, slower", *reason or "?")
        return False
    return True


def runs_kernels(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda" and has_triton()
