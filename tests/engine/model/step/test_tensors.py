"""A step's arrays in one buffer, and as tensors."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvstore.engine.core.input_batch import StepInputs
from kvstore.engine.model.step.tensors import StepLayout, step_tensors

NAMES = ("token_ids", "positions", "slots", "sample_tokens", "query_start", "context_lens")


def made_up(counts: list[int], width: int, seed: int = 0) -> tuple[StepInputs, np.ndarray]:
    """Requests of so many tokens each, every one sampling but those with an even number of tokens above 1."""
    rng = np.random.default_rng(seed)
    num_tokens, num_requests = sum(counts), len(counts)
    query_start = np.cumsum([0, *counts])
    samples = np.flatnonzero([count == 1 or count % 2 for count in counts])
    inputs = StepInputs(
        token_ids=rng.integers(2**40, size=num_tokens), positions=rng.integers(2**20, size=num_tokens),
        slots=rng.integers(2**33, size=num_tokens), query_start=query_start,
        context_lens=np.asarray(counts) + rng.integers(100, size=num_requests), rows=np.arange(num_requests),
        sample_tokens=query_start[1:][samples] - 1, sample_rows=samples, order=np.arange(num_requests),
    )  # fmt: skip
    return inputs, rng.integers(2**30, size=(num_requests, width)).astype(np.int32)


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [7], [1, 1, 5, 2], [2, 4], [1] * 33 + [9]])
@pytest.mark.parametrize("width", [1, 3, 8])
def test_what_is_packed_is_unpacked(counts, width):
    inputs, table = made_up(counts, width)
    layout = StepLayout(sum(counts), len(counts), len(inputs.sample_tokens), width)
    *arrays, blocks = layout.unpack(layout.pack(inputs, table, pinned=False))
    for name, array in zip(NAMES, arrays, strict=True):
        assert array.tolist() == getattr(inputs, name).tolist(), name
    assert [a.dtype for a in arrays] == [torch.int64] * 4 + [torch.int32] * 2
    assert blocks.dtype == torch.int32 and blocks.tolist() == table.tolist()


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 2, 1, 5), (33, 33, 33, 0), (5, 1, 0, 7)])
def test_arrays_begin_at_16_bytes_and_do_not_overlap(sizes):
    places = StepLayout(*sizes).places()
    assert all(place.start % 4 == 0 for place in places)
    assert all(a.stop <= b.start < a.stop + 4 for a, b in itertools.pairwise(places))


def test_a_layout_for_more_requests_is_filled_up():
    inputs, table = made_up([1, 1, 1], 2)
    ordinals = np.arange(9)
    layout = StepLayout(8, 8, 8, 2)
    buffer = layout.pack(replace(inputs, query_start=ordinals, sample_tokens=ordinals[:8]), table, pinned=False)
    token_ids, positions, slots, samples, query_start, lens, blocks = (part.tolist() for part in layout.unpack(buffer))
    assert token_ids == [*inputs.token_ids, 0, 0, 0, 0, 0] and positions[3:] == [0] * 5
    assert slots == [*inputs.slots, -1, -1, -1, -1, -1] and lens == [*inputs.context_lens, 0, 0, 0, 0, 0]
    assert blocks == [*table.tolist(), *[[0, 0]] * 5]
    assert (samples, query_start) == (list(range(8)), list(range(9)))


def check(device: torch.device) -> None:
    inputs, table = made_up([1, 1, 4, 7], 5)
    step = step_tensors(inputs, table, 16, device)
    for name, tensor in (("token_ids", step.token_ids), ("positions", step.positions), ("slots", step.batch.slots)):
        assert tensor.device.type == device.type and tensor.tolist() == getattr(inputs, name).tolist()
    assert step.sample_tokens.tolist() == inputs.sample_tokens.tolist()
    batch, at = step.batch, step.batch.device_batch
    assert batch.query_start == at.query_start.tolist() == inputs.query_start.tolist()
    assert batch.context_lens == at.context_lens.tolist() == inputs.context_lens.tolist()
    assert batch.block_table.tolist() == at.block_table.tolist() == table.tolist()
    assert (at.num_decodes, at.max_query_len, at.max_context_len) == (2, 7, max(inputs.context_lens))


def test_tensors_of_a_step():
    check(torch.device("cpu"))


@pytest.mark.gpu
def test_tensors_of_a_step_on_cuda():
    check(torch.device("cuda"))
