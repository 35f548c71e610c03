"""Rotation and write of a step in C: the bits of its torch twin, and nothing written that should not be."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kernels import reference, write_kv
from kvstore.kernels.cpu import native
from kvstore.kernels.cpu import write as write_native
from kvstore.rope.rotary import Rotation, Style

DTYPES = [torch.float32, torch.bfloat16]
NUM_BLOCKS, BLOCK_SIZE = 40, 8

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no compiler for C here")


class Tokens:
    """Views of one product, with distinct slots, of which some are -1."""

    def __init__(self, count, heads=(6, 2, 64), dtype=torch.bfloat16, padding=0, style=Style.HALF, seed=0):
        num_heads, num_kv_heads, head_dim = heads
        generator = torch.Generator().manual_seed(seed)
        joined = torch.randn(count, num_heads + 2 * num_kv_heads, head_dim, generator=generator)
        joined *= 10.0 ** torch.randint(-3, 3, joined.shape, generator=generator)
        self.parts = joined.to(dtype).split([num_heads, num_kv_heads, num_kv_heads], 1)
        shape = (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim)
        self.caches = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
        self.slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[:count]
        self.slots[:padding] = -1
        angles = torch.rand(500, head_dim // 2, generator=generator) * 6
        positions = torch.randint(500, (count,), generator=generator)
        self.rotation = Rotation(angles.cos().to(dtype), angles.sin().to(dtype), style).at(positions).spread_out()

    def by(self, function):
        """The rotated query and key, and what the caches hold then."""
        caches = [cache.clone() for cache in self.caches]
        done = function(*self.parts, *caches, self.slots, self.rotation)
        return None if done is None else (*done, *caches)


def bits(tensor):
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


@needs_compiler
@settings(max_examples=60)
@given(
    st.integers(1, 200),
    st.tuples(st.integers(1, 6), st.integers(1, 4), st.sampled_from([8, 16, 48, 64, 80, 128])),
    st.sampled_from(DTYPES),
    st.integers(0, 3),
)
def test_the_bits_are_those_of_torch(count, heads, dtype, padding):
    group, num_kv_heads, head_dim = heads
    tokens = Tokens(count, (group * num_kv_heads, num_kv_heads, head_dim), dtype, min(padding, count))
    before = [part.clone() for part in tokens.parts]
    found, expected = tokens.by(write_native.rotate_and_write), tokens.by(reference.rotate_and_write)
    assert found is not None
    for one, twin in zip(found, expected, strict=True):
        assert torch.equal(bits(one), bits(twin))
    assert all(torch.equal(part, old) for part, old in zip(tokens.parts, before, strict=True))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_and_nan(dtype):
    tokens = Tokens(3, dtype=dtype)
    for part in tokens.parts[:2]:
        part[0, 0, :4] = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0])
    for one, twin in zip(tokens.by(write_native.rotate_and_write), tokens.by(reference.rotate_and_write), strict=True):
        assert torch.equal(one.isnan(), twin.isnan())
        assert torch.equal(one[~one.isnan()], twin[~twin.isnan()])


@needs_compiler
def test_what_c_does_not_know_is_left_to_torch():
    assert Tokens(4, style=Style.INTERLEAVED).by(write_native.rotate_and_write) is None
    tokens = Tokens(4)
    for bad in (-2, NUM_BLOCKS * BLOCK_SIZE):
        tokens.slots[2] = bad
        caches = [cache.clone() for cache in tokens.caches]
        assert write_native.rotate_and_write(*tokens.parts, *caches, tokens.slots, tokens.rotation) is None
        assert all(torch.equal(a, b) for a, b in zip(caches, tokens.caches, strict=True))
    with pytest.raises(IndexError):
        tokens.by(write_kv.rotate_and_write)
    half = Tokens(4)
    half.parts = [part.half() for part in half.parts]
    assert half.by(write_native.rotate_and_write) is None


def test_without_a_compiler_torch_does_it(monkeypatch):
    tokens = Tokens(20)
    expected = tokens.by(reference.rotate_and_write)
    monkeypatch.setattr(native, "library", lambda: None)
    for one, twin in zip(tokens.by(write_kv.rotate_and_write), expected, strict=True):
        assert torch.equal(bits(one), bits(twin))
