"""Another rank of a model, on a CUDA device that is none.

The environment has: rank, number of devices, whether there is Triton, bytes that are free, bytes of the device.
"""

import os
import sys

import pytest
import torch

from kvstore.engine import rank_process
from kvstore.engine.model.step import warm_up
from tests.support import fake_cuda, fake_nccl

REPLACED = [
    (torch.distributed, "ProcessGroupNCCL", fake_nccl.FakeNccl),
    (warm_up, "_MOST_TOKENS", 1),  # as in the first rank
    (fake_cuda.Event, "late_s", 0.01),  # what it moves has not ended when the step has been launched
]

with pytest.MonkeyPatch.context() as patch:
    number, count, has_triton, free, total = (int(part) for part in os.environ["FAKE_CUDA_RANK"].split())
    with fake_cuda.device(patch, bool(has_triton), number, count, REPLACED) as driver:
        driver.memory = (free, total)
        code = rank_process.main()
sys.stderr.flush()
os._exit(code)
