"""Rotation and write of a step in C: the bits of its torch twin, and nothing written that should not be."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kernels import reference, write_kv
from kvstore.kernels.cpu.decode import rotate_and_write
from kvstore.rope.rotary import Style
from tests.kernels.test_write_kv import Step, check
from tests.support.native import needs_compiler, no_compiler
from tests.support.rotations import rotation

DTYPES = [torch.float32, torch.bfloat16]


def halves(step, style=Style.HALF):
    return rotation(step.key.dtype, style, rotary_dim=step.key.shape[-1])


@needs_compiler
@settings(max_examples=60)
@given(
    st.integers(1, 200),
    st.tuples(st.integers(1, 6), st.integers(1, 4), st.sampled_from([8, 16, 48, 64, 80, 128])),
    st.sampled_from(DTYPES),
)
def test_the_bits_are_those_of_torch(count, heads, dtype):
    group, num_kv_heads, head_dim = heads
    step = Step(count, (group * num_kv_heads, num_kv_heads, head_dim), dtype, seed=count)
    before = step.key.clone()
    check(step, halves(step), rotate_and_write)
    assert torch.equal(step.key, before)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_and_nan(dtype):
    step = Step(3, (6, 2, 64), dtype)
    for part in (step.query, step.key):
        part[0, 0, :4] = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0])
    results = (step.run(function, halves(step)) for function in (rotate_and_write, reference.rotate_and_write))
    for one, twin in zip(*results, strict=True):
        assert torch.equal(one.isnan(), twin.isnan())
        assert torch.equal(one[~one.isnan()], twin[~twin.isnan()])


@needs_compiler
@pytest.mark.parametrize("what", ["interleaved", "half floats", "slot"])
def test_what_c_does_not_know_is_left_to_torch(what):
    step = Step(4, (6, 2, 64), torch.float16 if what == "half floats" else torch.bfloat16)
    turn = halves(step, Style.INTERLEAVED if what == "interleaved" else Style.HALF).at(step.positions).spread_out()
    for bad in (-2, step.shape[0] * step.shape[1]) if what == "slot" else (0,):
        step.slots[2], caches = bad, step.caches()
        assert rotate_and_write(step.query, step.key, step.value, *caches, step.slots, turn) is None
        assert all(bool((cache == 5.0).all()) for cache in caches)
    if what == "slot":
        with pytest.raises(IndexError):
            write_kv.rotate_and_write(step.query, step.key, step.value, *caches, step.slots, turn)


def test_without_a_compiler_torch_does_it():
    step = Step(20, (6, 2, 64), torch.bfloat16)
    with no_compiler():
        check(step, halves(step), write_kv.rotate_and_write)
