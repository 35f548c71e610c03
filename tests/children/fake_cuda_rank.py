"""Another rank of a model, on a CUDA device that is none.

The environment has: rank, number of devices, whether there is Triton, bytes that are free, bytes of the device; and
in FAKE_CUDA_MUTE, whether the thread that waits for the device cannot tell that a load has ended.
"""

import errno
import os
import threading

import pytest
import torch

from kvstore.engine.model import devices
from kvstore.engine.process import Channel
from kvstore.engine.program import main
from kvstore.engine.ranks.wire import Moved, decode_from_rank
from tests.support import fake_cuda, fake_nccl

REPLACED = [
    (torch.distributed, "ProcessGroupNCCL", fake_nccl.FakeNccl),
    (devices, "_MOST_TOKENS", 1),  # as in the first rank
    (fake_cuda.Event, "late_s", 0.01),  # what it moves has not ended when the step has been launched
]
SEND_ALL = Channel.send_all


def send_all_but_loads(channel: Channel, message: bytes) -> None:
    said = decode_from_rank(message)
    if isinstance(said, Moved) and said.is_load and threading.current_thread().name == "kvstore-transfers":
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
    SEND_ALL(channel, message)


if os.environ.get("FAKE_CUDA_MUTE"):
    REPLACED.append((Channel, "send_all", send_all_but_loads))
with pytest.MonkeyPatch.context() as patch:
    number, count, has_triton, free, total = (int(part) for part in os.environ["FAKE_CUDA_RANK"].split())
    with fake_cuda.device(patch, bool(has_triton), number, count, REPLACED) as driver:
        driver.memory = (free, total)
        main()
