"""The C code of a decode step against its torch twins: the caches to the bit, attention and norms to rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kernels import reference
from kvstore.kernels.cpu.attention import MAX_REQUESTS, decode_step
from kvstore.kernels.paged_batch import PagedBatch, Scoring
from kvstore.rope.rotary import Rotation, Style
from tests.support.native import needs_compiler, no_compiler
from tests.support.paged import Paged

DTYPES = [torch.float32, torch.bfloat16]
MAX_LEN = 700
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


class Step(Paged):
    """Single tokens of some requests, views of one product, over shuffled pages; pages of nobody hold NaN."""

    def __init__(self, contexts, heads=(6, 2, 64), dtype=torch.float32, block_size=4, joined=True):
        super().__init__([(context, 1) for context in contexts], heads, block_size, dtype)
        self.caches = [self.key_cache, self.value_cache]
        parts = self.query, self.key, self.value
        self.raw = parts if joined else [part.contiguous() for part in parts]
        angles = torch.rand(MAX_LEN, heads[2] // 2, generator=torch.Generator().manual_seed(1)) * 6
        rotation = Rotation(angles.cos().to(dtype), angles.sin().to(dtype), Style.HALF)
        self.rotation = rotation.at(torch.tensor(contexts) - 1).spread_out()

    def pad(self, *rows):
        """These have no token, as in a batch that a graph was captured for."""
        for row in rows:
            self.contexts[row], self.slots[row] = 0, -1

    def twin(self, scoring, rotation):
        """The output and both caches."""
        caches = [cache.clone() for cache in self.caches]
        query, _ = reference.rotate_and_write(*self.raw, *caches, self.slots, rotation)
        out = torch.zeros(query.shape, dtype=query.dtype)
        kept = [i for i, context in enumerate(self.contexts) if context]
        contexts = [self.contexts[i] for i in kept]
        out[kept] = reference.paged_attention(
            query[kept], *caches, list(range(len(kept) + 1)), contexts, self.table[kept], scoring.scale, scoring.window
        )
        return out, *caches

    def check(self, scoring=None, rotated=True, tolerance=None):
        scoring = scoring or Scoring(self.raw[0].shape[-1] ** -0.5)
        rotation = self.rotation if rotated else None
        before = [part.clone() for part in self.raw]
        out, *caches = self.twin(scoring, rotation)
        step = decode_step(self.batch, [self.caches] * 2, [None, rotation])
        assert step is not None
        found = step.attend(1, *self.raw, *self.caches, scoring)
        for cache, wanted in zip(self.caches, caches, strict=True):
            assert torch.equal(bits(cache), bits(wanted))
        assert all(torch.equal(part, old) for part, old in zip(self.raw, before, strict=True))
        assert found.is_contiguous()
        tolerance = tolerance or TOLERANCE[found.dtype]
        torch.testing.assert_close(found, out, atol=tolerance, rtol=tolerance)


def bits(tensor):
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


@needs_compiler
def test_one_kv_head_may_have_any_stride():
    """As a model's own rotation leaves it."""
    step = Step([5, 90], heads=(4, 1, 64))
    step.raw = [step.raw[0], *(part.squeeze(1).unsqueeze(0).transpose(0, 1) for part in step.raw[1:])]
    assert step.raw[1].stride(1) != 64
    step.check()


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
def test_heads_of_every_shape(group, head_dim, dtype):
    Step([1, 5, 133, 300], (2 * group, 2, head_dim), dtype).check()
    Step([17], (group, 1, head_dim), dtype, joined=False).check()


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_requests", [*range(1, 10), MAX_REQUESTS])
def test_any_number_of_requests(num_requests, dtype):
    contexts = [1 + 61 * i % 290 for i in range(num_requests)]
    Step(contexts, dtype=dtype).check()
    Step(contexts, dtype=dtype).check(rotated=False)


@needs_compiler
@pytest.mark.parametrize("window", [1, 2, 5, 128, 129, 1000])
def test_a_window_hides_what_is_before_it(window):
    Step([1, 3, 128, 129, 130, 500]).check(Scoring(0.125, window=window))


@needs_compiler
def test_padding_writes_nothing_and_gives_zeros():
    step = Step([9, 5, 30, 1])
    step.pad(1, 3)
    step.check()


@needs_compiler
@pytest.mark.parametrize(("scale", "tolerance"), [(1e-3, 2e-6), (1.0, 5e-5), (30.0, 2e-3)])
def test_scores_near_each_other_and_far_apart(scale, tolerance):
    Step([260, 7], (4, 4, 64)).check(Scoring(scale), tolerance=tolerance)


@needs_compiler
def test_two_threads_give_what_one_gives(use_threads):
    use_threads(2)
    Step([600, 500, 300], (8, 4, 64)).check()


@needs_compiler
@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=9),
    st.tuples(st.integers(1, 9), st.integers(1, 4), st.sampled_from([16, 48, 64, 96])), st.sampled_from(DTYPES),
    st.sampled_from([1, 4, 16]), st.integers(0, 300), st.booleans(),
)  # fmt: skip
def test_any_step(contexts, heads, dtype, block_size, window, joined):
    group, num_kv_heads, head_dim = heads
    step = Step(contexts, (group * num_kv_heads, num_kv_heads, head_dim), dtype, block_size, joined)
    step.check(Scoring(head_dim**-0.5, window=window or None))


@needs_compiler
def test_what_c_does_not_know_is_left_to_torch():
    step = Step([9, 30])
    half = step.rotation
    other = Rotation(half.cos, half.sin, Style.INTERLEAVED).spread_out()
    upcast = Rotation(half.cos, half.sin, Style.HALF, upcast=True).spread_out()
    partial = Rotation(half.cos[:, :8], half.sin[:, :8], Style.HALF).spread_out()
    decode = decode_step(step.batch, [step.caches] * 4, [half, other, upcast, partial])
    before = [cache.clone() for cache in step.caches]
    plain, sinks = Scoring(1.0), torch.zeros(6)
    for layer, scoring in [
        (0, Scoring(1.0, softcap=2.0)), (0, Scoring(1.0, sinks=sinks)), (1, plain), (2, plain), (3, plain),
    ]:  # fmt: skip
        assert decode.attend(layer, *step.raw, *step.caches, scoring) is None
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(step.caches, before, strict=True))
    assert decode.attend(0, *step.raw, *step.caches, plain) is not None


def test_other_steps_are_left_to_torch():
    step = Step([9, 30])
    caches = [step.caches]
    prefill = PagedBatch([0, 1, 3], [9, 30], step.table, torch.tensor([0, 1, 2]), 4)
    assert decode_step(prefill, caches, [None]) is None
    many = PagedBatch(list(range(66)), [1] * 65, step.table[:1].expand(65, -1), step.slots[:1].expand(65), 4)
    assert decode_step(many, caches, [None]) is None
    assert decode_step(step.batch, [[cache.half() for cache in step.caches]], [None]) is None
    assert decode_step(step.batch, [torch.zeros(2, 20, 4, 2, 24)], [None]) is None
    assert decode_step(step.batch, [(torch.zeros(20, 4, 2, 32), torch.zeros(20, 4, 2, 16))], [None]) is None
    with no_compiler():
        assert decode_step(step.batch, caches, [None]) is None


@needs_compiler
@pytest.mark.parametrize("name", ["table", "slots", "contexts"])
def test_numbers_outside_of_the_caches_never_reach_c(name):
    step = Step([9, 30])
    assert decode_step(step.batch, [step.caches], [None]) is not None
    if name == "table":
        step.table[1, 0] = len(step.caches[0])
    elif name == "slots":
        step.slots[0] = step.caches[0][:, :, 0, 0].numel()
    else:
        step.contexts[1] = 4 * step.table.shape[1] + 1
    assert decode_step(step.batch, [step.caches], [None]) is None
