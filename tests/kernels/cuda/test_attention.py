"""Triton's paged attention against its torch twin: in the interpreter, and as compiled code on a CUDA device."""

import pytest
import torch

from kvstore.kernels.attention import attend_paged
from kvstore.kernels.paged_batch import DeviceBatch, PagedBatch, Scoring
from tests.support.paged import SCORINGS, Paged, scoring_of, without_foreign_kernels

NAN = float("nan")


class Case(Paged):
    """Attended to by kernels."""

    def __init__(self, requests, device, heads=(4, 2, 16), block_size=16, dtype=torch.float32):
        super().__init__(requests, heads, block_size, dtype, device)

    def attend(self, scoring, on_device=None):
        batch = self.batch
        if on_device is not None:
            host = (self.query_start, self.contexts, self.table, self.slots)
            batch = PagedBatch(*host, batch.block_size, on_device)
        return attend_paged(self.query, self.key_cache, self.value_cache, batch, scoring)


MIXED = [(1, 1), (33, 1), (150, 1), (12, 12), (140, 5), (26, 17)]
HEADS = [(2, 2, 16), (4, 1, 64), (7, 1, 16), (14, 2, 80), (4, 2, 48, 16)]


@pytest.fixture(autouse=True)
def no_foreign_kernels(monkeypatch):
    without_foreign_kernels(monkeypatch)


@pytest.fixture
def one_sm(monkeypatch):
    """As on a device that is full: nothing is split."""
    monkeypatch.setattr("kvstore.kernels.cuda.attention.num_sms", lambda device: 1)


@pytest.mark.parametrize("name", SCORINGS)
def test_mixed_batch_with_split_contexts(kernel_device, name):
    Case(MIXED, kernel_device).check(scoring_of(name, 4, kernel_device))


@pytest.mark.parametrize("name", SCORINGS)
def test_mixed_batch_without_splits(kernel_device, one_sm, name):
    Case(MIXED, kernel_device).check(scoring_of(name, 4, kernel_device))


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        *((heads, torch.bfloat16) for heads in HEADS),
        (HEADS[1], torch.float32),
        (HEADS[1], torch.float16),
        (HEADS[4], torch.float32),
    ],
    ids=str,
)
def test_head_sizes_groups_and_dtypes(kernel_device, heads, dtype):
    Case([(3, 1), (130, 1), (60, 20)], kernel_device, heads, dtype=dtype).check()


@pytest.mark.parametrize("contexts", [[15, 16, 17, 31, 32, 33, 63, 64, 65, 66, 127, 128], [129, 255, 256, 257], [513]])
def test_decode_around_borders_of_tiles_and_pages(kernel_device, contexts):
    """In one split, in some, in many."""
    Case([(context, 1) for context in contexts], kernel_device, (2, 1, 16), dtype=torch.float16).check()


@pytest.mark.parametrize("num_new", [1, 2, 31, 32, 33, 63, 64, 65, 129])
def test_prefill_around_borders_of_tiles(kernel_device, num_new):
    requests = [(before + num_new, num_new) for before in (0, 1, 64, 100)]
    Case([*requests, (5, 3)], kernel_device, (4, 2, 16), dtype=torch.float16).check()


def test_a_short_turn_over_a_long_context_is_split(kernel_device):
    Case([(1100, 6), (600, 9)], kernel_device, (4, 1, 16), dtype=torch.float16).check()


@pytest.mark.parametrize("block_size", [1, 5, 16, 48])
def test_pages_of_any_size(kernel_device, block_size):
    Case([(40, 1), (51, 20)], kernel_device, block_size=block_size).check(Scoring(0.25, window=17))


def test_many_short_requests_find_their_tiles(kernel_device):
    """Requests end in the middle of tiles, in every way: the search for a tile's request has no host table."""
    new_and_before = [(2, 0), (9, 3), (8, 1), (7, 0), (16, 2), (17, 0), (2, 30), (3, 3)]
    requests = [(new + before, new) for new, before in new_and_before]
    Case(requests, kernel_device, (4, 1, 16), dtype=torch.float16).check()
    Case([(4, 1)] * 5 + requests, kernel_device, (4, 1, 16)).check()


def test_a_window_reads_no_page_before_it(kernel_device):
    case = Case([(100, 1), (100, 3)], kernel_device)
    for row, oldest in ((0, 92), (1, 90)):  # of the first token
        case.key_cache[case.table[row, : oldest // 16]] = NAN
        case.value_cache[case.table[row, : oldest // 16]] = NAN
    assert case.attend(Scoring(0.25, window=8)).isfinite().all()


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("capacity", [40, 1024])
def test_padding_of_a_captured_batch_is_zero(kernel_device, with_sinks, capacity):
    """A graph is captured for more requests and longer contexts than a replay has; its launches stay the same."""
    case = Case([(40, 1), (1, 1), (17, 1), (33, 1)], kernel_device)
    chosen = scoring_of("sinks" if with_sinks else "plain", 4, kernel_device)
    expected = case.expected(chosen)
    expected[1] = 0
    lens = torch.tensor([40, 0, 17, 33], dtype=torch.int32, device=kernel_device)
    case.table[1] = case.table[1, -1]
    starts = torch.arange(5, dtype=torch.int32, device=kernel_device)
    static = DeviceBatch(starts, lens, case.table.to(kernel_device, torch.int32), 4, 1, capacity)
    torch.testing.assert_close(case.attend(chosen, static), expected, atol=1e-5, rtol=1e-5)


def test_the_layout_is_on_the_device_as_on_the_host(kernel_device):
    case = Case(MIXED, kernel_device)
    layout = case.batch.device_batch
    assert layout is case.batch.device_batch
    assert layout.query_start.tolist() == case.query_start and layout.context_lens.tolist() == case.contexts
    assert torch.equal(layout.block_table.cpu().long(), case.table)
    assert (layout.num_requests, layout.num_decodes, layout.max_query_len, layout.max_context_len) == (6, 3, 17, 150)
    for tensor in (layout.query_start, layout.context_lens, layout.block_table):
        assert tensor.dtype == torch.int32


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8, 128), (14, 2, 64), (8, 4, 256), (32, 32, 96)], ids=str)
@pytest.mark.parametrize("name", SCORINGS)
def test_real_sizes(heads, name):
    requests = [(5000, 1), (17, 1), (1, 1), (1500, 1500), (9000, 40), (3000, 300)]
    Case(requests, "cuda", heads, dtype=torch.bfloat16).check(scoring_of(name, heads[0], "cuda"))


@pytest.mark.gpu
def test_a_pool_of_more_than_2_to_the_31_elements():
    """Offsets need 64 bits."""
    case = Case([(300, 1), (200, 90)], "cuda", (8, 8, 128), dtype=torch.bfloat16)
    pages, *shape = case.key_cache.shape
    far = 2**31 // case.key_cache[0].numel() + 7
    expected = case.expected(Scoring(0.1))
    for name in ("key_cache", "value_cache"):
        pool = torch.empty(far + pages, *shape, dtype=torch.bfloat16, device="cuda")
        pool[far:] = getattr(case, name)
        setattr(case, name, pool)
    case.batch = PagedBatch(case.query_start, case.contexts, case.table + far, case.slots, 16)
    torch.testing.assert_close(case.attend(Scoring(0.1)), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.gpu
def test_a_captured_decode_serves_other_lengths():
    case = Case([(900, 1), (40, 1), (300, 1)], "cuda", (8, 2, 64), dtype=torch.bfloat16)
    chosen = Scoring(0.125)
    table = case.table.to("cuda", torch.int32)
    lens = torch.ones(3, dtype=torch.int32, device="cuda")
    static = DeviceBatch(torch.arange(4, dtype=torch.int32, device="cuda"), lens, table, 3, 1, 1024)
    case.attend(chosen, static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.attend(chosen, static)
    for contexts in ([900, 40, 300], [5, 39, 257]):
        case.contexts = contexts
        lens.copy_(torch.tensor(contexts))
        graph.replay()
        torch.testing.assert_close(out, case.expected(chosen), atol=3e-2, rtol=3e-2)
