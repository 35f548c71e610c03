"""What ranks with a device each say to each other. Elsewhere, with a device that is none: `test_cuda_ranks_fake`."""

import pytest
import torch

from kvstore.engine.model.parallel.group import ProcessGroup
from kvstore.engine.model.parallel.nccl import DeviceGroup, DevicePipe, part_of_process
from kvstore.errors import EngineDiedError


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda:5"])
def test_the_ranks_of_a_stage_have_consecutive_numbers(device):
    kinds = (DeviceGroup, DevicePipe) if device == "cuda:5" else (ProcessGroup, ProcessGroup)
    part = part_of_process(5, 2, 3, device)
    assert (type(part.group), type(part.pipe)) == kinds and part.num_ranks == 6
    assert (part.group.rank, part.group.size, part.pipe.rank, part.pipe.size) == (1, 2, 2, 3)
    alone = part_of_process(0, 1, 1, device)
    assert alone.group is None and alone.pipe is None


@pytest.mark.gpu
def test_nccl_with_one_rank(tmp_path):
    device = torch.device("cuda", 0)
    group = DeviceGroup(0, 1, "stage-0", device)
    group.join(tmp_path / "rendezvous")
    values = torch.arange(6, dtype=torch.bfloat16, device=device).view(2, 3)
    assert torch.equal(group.sum(values.clone()), values) and torch.equal(group.gather(values), values)
    assert group.gather(torch.tensor([7])).tolist() == [7]  # on the host
    group.cut()
    with pytest.raises(EngineDiedError):
        group.sum(values)
