"""Steps of a model: their arrays as tensors, which thread runs them, what is warmed up before, when they may wait."""

import itertools
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvstore import Engine
from kvstore.engine.config import SchedulerConfig
from kvstore.engine.core.input_batch import StepInputs
from kvstore.engine.model.devices import step_forms, warm_up
from kvstore.engine.model.probe import intercept
from kvstore.engine.model.step.runner import ModelRunner
from kvstore.engine.model.step.tensors import StepLayout, step_tensors
from kvstore.errors import ModelError
from kvstore.kernels.attention import attend_paged
from kvstore.kernels.kv import has_triton
from kvstore.kernels.paged_batch import PagedBatch, Scoring
from tests.support.engines import ask, evict_hbm, greedy, open_engine, save_model, tokens
from tests.support.faults import before_each_step
from tests.support.models import make_model
from tests.support.paged import without_foreign_kernels

NAMES = ("token_ids", "positions", "slots", "sample_tokens", "query_start", "context_lens")
MAX_LEN = 4096
needs_triton = pytest.mark.skipif(not has_triton(), reason="needs Triton")


def test_the_thread_that_steps_is_the_one_that_is_warmed_up(tmp_path, monkeypatch):
    """cuBLAS keeps a handle and a workspace for each thread: the first request would wait for them."""
    threads, prepare = [], ModelRunner.prepare

    def note(runner=None):
        threads.append(threading.current_thread().name)
        return runner and prepare(runner)

    monkeypatch.setattr(ModelRunner, "prepare", note)
    with open_engine(save_model(tmp_path)) as engine, before_each_step(engine, note):
        assert len(engine.generate([tokens(1, 20)], greedy(5))[0].token_ids) == 5
    assert len(threads) == 6 and set(threads) == {"kvstore-engine"}


class Mark:
    """A time on a device's clock that counts the steps."""

    def __init__(self, log: list, number: int) -> None:
        self._log, self.number = log, number

    def synchronize(self) -> None:
        self._log.append(("waited for", self.number))

    def elapsed_time(self, end: "Mark") -> float:
        return 1000.0 * (end.number - self.number)


def test_a_step_that_samples_nothing_is_waited_for_and_timed_by_the_next(model, monkeypatch):
    """Else a long prompt would be queued whole, and all of its activations kept alive for their saves."""
    log: list[object] = []
    with open_engine(model, max_num_batched_tokens=32) as engine:
        runner, forward = engine.loop.runner, engine.loop.runner._forward
        marks = iter(range(100))
        monkeypatch.setattr(runner.clock, "mark", lambda: Mark(log, next(marks)))
        monkeypatch.setattr(runner, "_forward", lambda *step: (log.append("forward"), forward(*step))[1])
        get_finished = engine.connector.get_finished

        def logged(prefilled):
            log.extend((step.num_tokens, step.seconds) for step in prefilled)
            return get_finished(prefilled)

        monkeypatch.setattr(engine.connector, "get_finished", logged)
        ask(engine, tokens(800, 100), 2)
    assert log == [
        "forward", ("waited for", 1), "forward", ("waited for", 3), "forward", (32, 1.0), ("waited for", 5), "forward",
        ("waited for", 7), (32, 1.0), (4, 1.0), "forward", ("waited for", 9),
    ]  # fmt: skip


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


def test_forms_of_steps():
    config = SchedulerConfig(MAX_LEN, max_num_batched_tokens=600)
    forms = list(step_forms(config))
    assert forms[:3] == [(600, 600), (1, 1), (1, MAX_LEN)] and forms[-1] == (128, MAX_LEN)
    assert all(num_tokens <= context_len for num_tokens, context_len in forms)
    assert set(step_forms(SchedulerConfig(3, max_num_batched_tokens=2))) == {(1, 1), (1, 3), (2, 2), (2, 3)}


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GptOss", "SmolLM3"])
def test_nothing_is_left_of_it(name):
    model = intercept(make_model(name), 256)
    caches = model.new_caches(3, 16)
    warm_up(model, caches, SchedulerConfig(256, max_num_seqs=2))
    assert all((cache == 0).all() for layer in caches for cache in layer)


def test_what_fails_is_named():
    """Triton's errors are no RuntimeErrors, and say nothing of the step that met them."""
    model = intercept(make_model(), 256)

    def fail(network, args, kwargs):
        if kwargs["input_ids"].shape[1] == 16:
            raise type("OutOfResources", (Exception,), {})("shared memory, Required: 300000\nmore")

    model.network.register_forward_pre_hook(fail, with_kwargs=True)
    form = "a step of 16 tokens with a context of 16 fails on cpu in torch.float32 with OutOfResources: "
    with pytest.raises(ModelError, match=form + "shared memory, Required: 300000; give another dtype, or cpu as"):
        warm_up(model, model.new_caches(3, 16), SchedulerConfig(256))


class Launches:
    """In the place of a kernel: what Triton would compile for, of every launch."""

    def __init__(self) -> None:
        self.forms = Counter()

    def __getitem__(self, grid):
        assert all(count > 0 for count in grid)
        return self._launch

    def _launch(self, *args, **options):
        missing = tuple(i for i, arg in enumerate(args) if arg is None)
        self.forms[missing, tuple(sorted(options.items()))] += 1


@needs_triton
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (14, 2), (8, 1), (32, 1), (71, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 700])
def test_no_step_launches_attention_in_another_form(heads, dtype, window, monkeypatch):
    from kvstore.kernels.cuda import attention as attention_triton

    attend, join = Launches(), Launches()
    monkeypatch.setattr(attention_triton, "_attend", attend)
    monkeypatch.setattr(attention_triton, "_join", join)
    without_foreign_kernels(monkeypatch)
    caches = [torch.zeros(1, 16, heads[1], 64, dtype=dtype)] * 2

    def step(*requests):  # new tokens and context of each
        counts, contexts = zip(*sorted(requests), strict=True)
        starts, slots = [0, *itertools.accumulate(counts)], torch.zeros(sum(counts), dtype=torch.int64)
        table = torch.zeros(len(counts), -(-max(contexts) // 16), dtype=torch.int64)
        query = torch.zeros(sum(counts), heads[0], 64, dtype=dtype)
        attend_paged(query, *caches, PagedBatch(starts, list(contexts), table, slots, 16), Scoring(0.1, window))

    for form in step_forms(SchedulerConfig(MAX_LEN)):
        step(form)
    warm = set(attend.forms), set(join.forms)
    for num_tokens, context_len in itertools.product([*range(1, 140), 500, 2048], [0, 90, 400, 1100, 2000]):
        step((num_tokens, num_tokens + context_len))
        step((1, 1 + context_len), (1, 5), (num_tokens, num_tokens + context_len), (num_tokens, 2 * num_tokens))
    assert (set(attend.forms), set(join.forms)) == warm


@pytest.mark.gpu
@needs_triton
def test_no_request_on_cuda_waits_for_a_compiler(tmp_path):
    from kvstore.kernels.cuda import attention as attention_triton
    from kvstore.kernels.cuda import kv as kv_triton

    kernels = [attention_triton._attend, attention_triton._join, kv_triton._write_kernel]
    kernels += [kv_triton._load_kernel, kv_triton._save_kernel]

    def num_compiled():
        return [sum(len(caches[0]) for caches in kernel.device_caches.values()) for kernel in kernels]

    model = save_model(tmp_path / "model", max_position_embeddings=MAX_LEN)
    tiers = {"hbm": "64MiB", "cpu": "64MiB", "disk": "64MiB", "path": tmp_path / "store"}
    with Engine(model, tiers, device="cuda", dtype="bfloat16", load="always") as engine:
        before = num_compiled()
        assert all(before)
        for length in (1, 3, 20, 100, 900, 3000):
            out = ask(engine, tokens(length, length), 20)
            evict_hbm(engine)
            ask(engine, [*tokens(length, length), *out.token_ids, 5], 20)
        assert num_compiled() == before
