"""Paged attention against its torch twin, over every kind of batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kernels.attention import paged_attention
from kvstore.kernels.paged_batch import VIEW_TOKENS, Scoring
from tests.support.paged import SCORINGS, Paged, scoring_of

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16


class Case(Paged):
    """Attended to on a CPU, where pages have to be finite: torch masks what it has read."""

    def __init__(self, requests, block_size=4, dtype=torch.float32, in_order=False, seed=0, head_dims=(HEAD_DIM,)):
        super().__init__(requests, (HEADS, KV_HEADS, *head_dims), block_size, dtype, "cpu", in_order, 0.0, seed)

    def attend(self, scoring):
        return paged_attention(self.query, self.key, self.value, self.key_cache, self.value_cache, self.batch, scoring)


@pytest.mark.parametrize("name", SCORINGS)
@pytest.mark.parametrize("in_order", [True, False])
def test_mixed_batch_equals_reference(name, in_order):
    Case([(1, 1), (30, 1), (9, 1), (17, 17), (40, 13), (5, 2)], in_order=in_order).check(scoring_of(name, HEADS))


@pytest.mark.parametrize("name", SCORINGS)
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_values_may_be_smaller(name, in_order, dtype):
    requests = [(1, 1), (30, 1), (9, 1), (17, 17), (40, 13), (5, 2)]
    Case(requests, 4, dtype, in_order, head_dims=(32, 16)).check(scoring_of(name, HEADS))
    Case(requests[:3], 4, dtype, in_order, head_dims=(32, 16)).check(scoring_of(name, HEADS))


@pytest.mark.parametrize("name", SCORINGS)
def test_long_prefill_goes_in_pieces(name):
    Case([(300, 300), (700, 290), (1000, 600)]).check(scoring_of(name, HEADS))


def test_a_long_run_of_blocks_is_read_in_place():
    case = Case([(VIEW_TOKENS + 3, 1), (VIEW_TOKENS + 60, 1), (20, 1)], in_order=True)
    groups = case.batch.decode_groups(None, torch.float32)
    assert [group.run is not None for group in groups] == [True, True, True]
    case.check()
    scattered = Case([(VIEW_TOKENS + 3, 1), (VIEW_TOKENS + 60, 1)])
    assert [group.size for group in scattered.batch.decode_groups(None, torch.float32)] == [2]
    scattered.check()


def test_requests_of_very_different_length_are_not_padded_to_the_longest():
    case = Case([(400, 1), (390, 1), (20, 1), (18, 1), (3, 1)])
    assert sorted(group.size for group in case.batch.decode_groups(None, torch.float32)) == [1, 2, 2]
    case.check()


@pytest.mark.parametrize("name", SCORINGS)
def test_bf16_is_as_close_as_bf16_allows(name):
    Case([(60, 1), (33, 1), (200, 200), (50, 20)], dtype=torch.bfloat16).check(scoring_of(name, HEADS))


def test_another_requests_nan_stays_its_own():
    case = Case([(3, 1), (9, 1)])
    bad = case.table[1, : -(-9 // 4)]
    case.key_cache[bad], case.value_cache[bad] = float("nan"), float("nan")
    out = case.attend(Scoring(0.25))
    assert out[0].isfinite().all() and out[1].isnan().all()


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)).map(lambda p: (max(p), min(p))), min_size=1, max_size=6),
    st.sampled_from(SCORINGS),
    st.integers(1, 8),
    st.integers(0, 1000),
)
def test_any_batch_equals_reference(requests, name, block_size, seed):
    requests = sorted(requests, key=lambda request: request[1] > 1)
    Case(requests, block_size, seed=seed).check(scoring_of(name, HEADS))
