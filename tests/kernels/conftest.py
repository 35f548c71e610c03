"""Threads of torch, of which tests of kernels use more than one, and the ways in which a codec is computed."""

from collections.abc import Callable, Iterator

import pytest
import torch

from kvstore.kernels.cpu import native
from tests.support.native import no_compiler


@pytest.fixture
def use_threads() -> Iterator[Callable[[int], None]]:
    """How many there are from now on, to the test's end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=["compiled", "numpy"])
def codec_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """A codec of stored blocks, in C and in numpy."""
    if request.param == "numpy":
        with no_compiler():
            yield
    elif native.codec_library() is None:
        pytest.skip("no compiler for C here")
    else:
        yield
