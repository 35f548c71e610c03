"""What is brought to a device, and how."""

from unittest import mock

import torch

from kernels.triton_support import to_device

CUDA = torch.device("cuda", 0)


def test_numbers_go_to_cuda_from_pinned_memory_without_a_wait():
    numbers = mock.Mock(device=torch.device("cpu"))
    moved = to_device(numbers, CUDA)
    assert moved is numbers.pin_memory.return_value.to.return_value
    numbers.pin_memory.return_value.to.assert_called_once_with(CUDA, non_blocking=True)


def test_what_is_on_the_device_is_not_pinned_again():
    """That raises. The saves of a step come in groups, and their places are on the device from the first one on."""
    numbers = mock.Mock(device=CUDA)
    assert to_device(numbers, CUDA) is numbers.to.return_value
    numbers.pin_memory.assert_not_called()


def test_on_a_cpu_nothing_is_copied():
    numbers = torch.arange(3)
    assert to_device(numbers, torch.device("cpu")) is numbers
