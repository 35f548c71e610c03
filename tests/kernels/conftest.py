"""Threads of torch, of which tests of kernels use more than one."""

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def use_threads() -> Iterator[Callable[[int], None]]:
    """How many there are from now on, to the test's end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
