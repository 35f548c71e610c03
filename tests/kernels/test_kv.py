"""What is brought to a device, and how; and whether kernels are launched there."""

import importlib.util
import logging
import sys
from unittest import mock

import pytest
import torch

from kvstore.kernels.kv import has_triton
from kvstore.kernels.paged_batch import to_device

CUDA = torch.device("cuda", 0)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


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


@pytest.fixture
def nothing_is_remembered():
    has_triton.cache_clear()
    yield
    has_triton.cache_clear()


@needs_triton
@pytest.mark.usefixtures("nothing_is_remembered")
def test_triton_that_launches_nothing_is_left_alone_and_said_so(monkeypatch, caplog):
    zeros = torch.zeros

    outcomes = iter([RuntimeError("Failed to find C compiler.\nmore"), None])

    def write(*_):
        if (error := next(outcomes)) is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device, **kwargs: zeros(*shape, **kwargs))
    monkeypatch.setattr("kvstore.kernels.cuda.kv.write", write)
    with caplog.at_level(logging.WARNING):
        assert not has_triton()
    assert "Failed to find C compiler." in caplog.text and "more" not in caplog.text
    has_triton.cache_clear()
    assert has_triton()


@pytest.mark.usefixtures("nothing_is_remembered")
def test_without_the_package_there_is_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # as the import system notes a package that is not there
    assert not has_triton()
