"""Attention of a prefill in C against its twin in float32, over pages of which those of nobody hold NaN."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kernels import attention_torch
from kvstore.kernels.cpu import layer as layer_native
from kvstore.kernels.cpu.prefill import prefill
from kvstore.kernels.paged_batch import Scoring
from tests.support.packed import without_tiles
from tests.support.paged import Paged

TOLERANCE = 0.02  # weights and values are bfloat16 and the values about 1

needs_products = pytest.mark.skipif(layer_native.num_columns() == 0, reason="no tiles, no vectors")


class Job(Paged):
    """Requests of several tokens each, with so many before them, in bfloat16."""

    def __init__(self, counts, befores, heads=(6, 2, 64), block_size=16, window=None, scale=1.0):
        requests = [(count + before, count) for count, before in zip(counts, befores, strict=True)]
        super().__init__(requests, heads, block_size, torch.bfloat16)
        self.caches = [self.key_cache, self.value_cache]
        self.scoring = Scoring(scale * heads[2] ** -0.5, window)

    def attend(self):
        arguments = (self.query, self.key, self.value, *self.caches, self.batch, self.scoring)
        return attention_torch.paged_attention(*arguments).float()

    def exact(self):
        return self.expected(self.scoring, torch.float32)

    def check(self):
        out = torch.full(self.query.shape, 7.0).bfloat16()
        before = self.query.clone()
        for i, (start, end) in enumerate(itertools.pairwise(self.query_start)):
            assert prefill(self.query[start:end], *self.caches, self.batch, i, self.scoring, out[start:end])
        assert torch.equal(self.query, before)
        torch.testing.assert_close(out.float(), self.exact(), atol=TOLERANCE, rtol=TOLERANCE)


@needs_products
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 7, 8])
def test_heads_of_every_shape(group, head_dim):
    Job([45], [290], (2 * group, 2, head_dim)).check()


@needs_products
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 130, 300])
@pytest.mark.parametrize("before", [0, 1, 240, 255, 256, 257, 600])
def test_any_number_of_tokens_and_of_those_before(count, before):
    Job([count], [before]).check()


@needs_products
@pytest.mark.parametrize("window", [1, 2, 16, 33, 255, 256, 257, 400, 5000])
@pytest.mark.parametrize("before", [0, 300, 700])
def test_a_window_hides_what_is_before_it(window, before):
    Job([100], [before], (4, 2, 32), window=window).check()


@needs_products
def test_scores_far_apart_and_growing():
    Job([70], [400], scale=30.0).check()
    job = Job([70], [600])
    for cache in job.caches[:1]:  # the later a key, the larger: what was summed before is made small again and again
        cache.flatten(0, 1)[:] *= torch.linspace(0.1, 4, len(cache.flatten(0, 1)))[:, None, None].bfloat16()
    job.check()


@needs_products
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(use_threads, threads):
    use_threads(threads)
    Job([200, 50], [300, 10], (8, 1, 64)).check()


@needs_products
@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(2, 90), st.integers(0, 400)), min_size=1, max_size=3),
    st.tuples(st.integers(1, 5), st.integers(1, 3), st.sampled_from([32, 64, 128])),
    st.sampled_from([1, 4, 16, 48]),
    st.integers(0, 300),
)
def test_any_job(sizes, heads, block_size, window):
    group, num_kv_heads, head_dim = heads
    counts, befores = zip(*sizes, strict=True)
    Job(counts, befores, (group * num_kv_heads, num_kv_heads, head_dim), block_size, window or None).check()


@needs_products
def test_attention_of_a_step_uses_it_where_it_can(monkeypatch):
    job, asked = Job([1, 40, 9], [70, 100, 0]), []

    def noted(*args):
        asked.append(args[4])
        return prefill(*args)

    monkeypatch.setattr(attention_torch, "prefill", noted)
    found = job.attend()
    assert asked == [1, 2]
    torch.testing.assert_close(found[1:], job.exact()[1:], atol=TOLERANCE, rtol=TOLERANCE)  # torch needs finite pages


@needs_products
def test_what_c_does_not_know_is_left_to_torch():
    job = Job([20], [50])
    out = torch.full(job.query.shape, 7.0).bfloat16()
    capped = Scoring(0.1, softcap=5.0)
    assert not prefill(job.query, *job.caches, job.batch, 0, capped, out)
    assert not prefill(job.query.float(), *job.caches, job.batch, 0, job.scoring, out)
    assert not prefill(
        job.query[..., :48], *(c[..., :48] for c in job.caches), job.batch, 0, job.scoring, out[..., :48]
    )
    whole, job.batch.block_table = job.batch.block_table, job.table[:, :2]
    assert not prefill(job.query, *job.caches, job.batch, 0, job.scoring, out)
    job.batch.block_table = whole
    for bad in (-1, len(job.caches[0])):
        job.table[0, 2] = bad
        assert not prefill(job.query, *job.caches, job.batch, 0, job.scoring, out)
    assert bool((out == 7).all())


def test_without_them_torch_computes_it():
    patch, job = without_tiles(), Job([20], [50])
    try:
        torch.testing.assert_close(job.attend(), job.exact(), atol=TOLERANCE, rtol=TOLERANCE)
    finally:
        patch.undo()
