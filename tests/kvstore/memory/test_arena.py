"""The arena's memory where the model runs on CUDA: it is pinned for as long as somebody has it."""

import gc

import pytest
import torch

import kvstore.memory.transfer
from kvstore.errors import ConfigError
from kvstore.memory.layout import KVLayout, LayerShape
from kvstore.memory.transfer import Arena
from tests.support.arenas import alike

LAYOUT = KVLayout(alike(1, 1, 8), 4, torch.float32, (None,))


class FakeCudart:
    def __init__(self, code=0):
        self.code, self.pinned, self.flags, self.has_effect = code, set(), None, True

    def cudaHostRegister(self, address, size_bytes, flags):
        self.flags = flags
        if self.code == 0:
            self.pinned.add(address)
        return self.code

    def cudaHostUnregister(self, address):
        self.pinned.remove(address)


@pytest.fixture
def cudart(monkeypatch):
    fake = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: fake.has_effect and tensor.data_ptr() in fake.pinned)
    monkeypatch.setattr(kvstore.memory.transfer, "_forget_cuda_error", lambda: None)
    return fake


def test_an_arena_is_pinned_until_it_is_closed(cudart):
    arena = Arena(LAYOUT, 4, pin=True)
    assert cudart.pinned == {arena.tensor.data_ptr()} and cudart.flags == 3
    arena.close()
    arena.close()
    assert not cudart.pinned


def test_an_arena_that_nobody_has_any_more_is_not_pinned(cudart):
    """A store that failed to open after its arena: its memory would stay locked."""
    arena = Arena(LAYOUT, 4, pin=True)
    del arena
    gc.collect()
    assert not cudart.pinned


def test_memory_that_cannot_be_pinned_is_refused(cudart):
    cudart.code = 2
    with pytest.raises(ConfigError, match=r"CUDA cannot pin .* \(error 2\)"):
        Arena(LAYOUT, 4, pin=True)
    cudart.code, cudart.has_effect = 0, False
    with pytest.raises(ConfigError, match="CUDA cannot pin"):
        Arena(LAYOUT, 4, pin=True)
    assert not cudart.pinned


def test_layers_lie_one_after_the_other_and_tokens_are_copied_in_all_of_them():
    shapes = (LayerShape(2, 8, 8), LayerShape(1, 16, 4), LayerShape(2, 8, 8))
    arena = Arena(KVLayout(shapes, 4, torch.float32, (None,) * 3), 2, pin=False)
    parts = [part for layer in arena.layers for part in layer]
    for number, part in enumerate(parts, start=1):
        part[1] = number
    widths = (16, 16, 16, 4, 16, 16)
    assert arena.tensor[1].tolist() == [n for n, width in enumerate(widths, start=1) for _ in range(4 * width)]
    arena.splice([(1, 1, 0, 3, 1)])
    assert all(torch.equal(part[0, 3], part[1, 1]) for part in parts)
    assert arena.tensor[0].count_nonzero() == sum(widths)


@pytest.mark.gpu
def test_what_cuda_cannot_pin_leaves_no_error_behind():
    arena = Arena(LAYOUT, 4, pin=True)
    code = int(torch.cuda.cudart().cudaHostRegister(arena.tensor.data_ptr(), 512, 3))
    assert code != 0, "it is registered already"
    kvstore.memory.transfer._forget_cuda_error()
    assert int(torch.ones(4, device="cuda").sum()) == 4
    arena.close()
