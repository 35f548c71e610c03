"""What is warmed up: every form of a kernel that a step may launch, and nothing is left of it."""

import itertools
from collections import Counter

import pytest
import torch

from kvstore import Engine
from kvstore.engine.config import SchedulerConfig
from kvstore.engine.model.devices import step_forms, warm_up
from kvstore.engine.model.probe import intercept
from kvstore.errors import ModelError
from kvstore.kernels.attention import attend_paged
from kvstore.kernels.cuda.triton_support import has_triton
from kvstore.kernels.paged_batch import PagedBatch, Scoring
from tests.support.engines import ask, save_model, settle, tokens
from tests.support.models import make_model
from tests.support.paged import without_foreign_kernels

MAX_LEN = 4096
needs_triton = pytest.mark.skipif(not has_triton(), reason="needs Triton")


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
            settle(engine)
            engine.loop.pool.evict_all()
            ask(engine, [*tokens(length, length), *out.token_ids, 5], 20)
        assert num_compiled() == before
