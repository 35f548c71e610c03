"""An engine with `device="cuda"` on a device that is none: from loading to erasing, every tensor where it belongs."""

import gc
import importlib.util
import os
import re
import weakref
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from kvstore import CacheTiers, Engine, SamplingParams, StructuredOutputsParams
from kvstore.engine.model.step.graphs import CudaCapturer, NoWaits
from kvstore.engine.model.step.sampler import Sampler
from kvstore.errors import KVStoreError
from kvstore.kernels import reference
from kvstore.kernels.kv import write_kv
from kvstore.memory.device_transfer import Pace
from tests.support import fake_cuda
from tests.support.engines import (
    Plain,
    ask,
    cached,
    counters,
    evict_cpu,
    evict_hbm,
    greedy,
    open_engine,
    save_model,
    settle,
    tokens,
)
from tests.support.fake_cuda import DEVICE, FakeCudaError, device

if torch.cuda.is_available():
    pytest.skip("there is a CUDA device", allow_module_level=True)
has_interpreter = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(not has_interpreter, reason="needs Triton's interpreter")
WAYS = [pytest.param(True, marks=needs_triton, id="kernels"), pytest.param(False, id="no Triton")]
ONE = {"max_model_len": 12, "max_num_seqs": 1, "max_num_batched_tokens": 5}
OPTIONS = {"block_size": 4, "max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 9}


@pytest.fixture(autouse=True)
def short_probe(monkeypatch) -> None:
    """A millisecond on a device is a second in the interpreter."""
    monkeypatch.setattr("kvstore.engine.model.devices._MOST_TOKENS", 1)


def engine_on_cuda(model: str, path=None, hbm="2MiB", cpu="2MiB", disk="32MiB", **options) -> Engine:
    tiers = CacheTiers(hbm=hbm) if path is None else CacheTiers(hbm=hbm, cpu=cpu, disk=disk, path=path)
    return Engine(model, tiers, device="cuda", load="always", **{**OPTIONS, **options})


TINY, SMALL = {"num_hidden_layers": 1}, {"num_hidden_layers": 2}
GEMMA = {**SMALL, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
WINDOWED = {**TINY, "layer_types": ["sliding_attention"], "sliding_window": 9}
CASES = [
    pytest.param("Llama", TINY, True, marks=needs_triton, id="Llama, kernels"),
    pytest.param("Gemma3", WINDOWED, True, marks=needs_triton, id="Gemma3, kernels"),
    *(pytest.param(name, SMALL, False, id=name) for name in ("Mixtral", "StableLm", "GptOss")),
    pytest.param("Gemma3", GEMMA, False, id="Gemma3"),
]


@pytest.mark.parametrize(("name", "changes", "has_triton"), CASES)
def test_the_same_tokens_from_every_tier(name, changes, has_triton, tmp_path, monkeypatch):
    model = save_model(tmp_path / "model", name, **changes)
    plain, histories = Plain(model, block_size=4), [tokens(1, 14), tokens(2, 6)]
    answers = [plain(history, 3) for history in histories]
    nexts = [[*history, *answer] for history, answer in zip(histories, answers, strict=True)]
    expected = [plain(history, 2) for history in nexts]
    plain.engine.close()
    pace = Pace(layers_ahead=1, group_bytes=1)  # a save per layer, as of long steps
    monkeypatch.setattr("kvstore.memory.device_transfer.Pace", lambda: pace)
    with device(monkeypatch, has_triton), engine_on_cuda(model, tmp_path / "store") as engine:
        assert all(cache.device == DEVICE for layer in engine.loop.runner.caches for cache in layer)
        outputs = engine.generate(histories, [greedy(3)] * 2)
        assert [output.token_ids for output in outputs] == answers
        for tier in (1, 2):
            evict_hbm(engine)
            if tier == 2:
                evict_cpu(engine)
            for history, answer in zip(nexts, expected, strict=True):
                output = ask(engine, history, 2)
                assert output.token_ids == answer and cached(output)[tier] == (len(history) - 1) // 4 * 4
        assert counters(engine)["load_failures"] == 0 and counters(engine)["dropped_saves"] == 0


def test_an_engine_on_the_second_device_leaves_hbm_when_it_is_closed(saved_model, monkeypatch):
    model = saved_model(**SMALL)
    expected = Plain(model, block_size=4)(tokens(1, 14), 3)
    with device(monkeypatch, index=1, count=2):
        engine = Engine(model, CacheTiers(hbm="2MiB", cpu="2MiB"), device="cuda:1", **OPTIONS)
        with engine:
            assert ask(engine, tokens(1, 14), 3).token_ids == expected
            caches = [weakref.ref(cache) for layer in engine.loop.runner.caches for cache in layer]
        gc.collect()
        assert caches and not any(cache() for cache in caches)


EDITED = {"logit_bias": {3: 5.0, 9: -9.0}, "min_tokens": 3, "stop_token_ids": [7]}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
SAMPLING = [
    SamplingParams(max_tokens=5, temperature=0.0, logprobs=3, **EDITED),
    SamplingParams(max_tokens=5, temperature=0.9, seed=1, ignore_eos=True, **PENALTIES),
    SamplingParams(max_tokens=5, temperature=0.7, seed=2, top_k=12, top_p=0.8, min_p=0.05, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=1.1, seed=3, n=2, ignore_eos=True, **PENALTIES),
]


def test_every_way_to_sample(saved_model, tmp_path, monkeypatch):
    model, prompts = saved_model(**SMALL), [tokens(seed, 5 + seed) for seed in range(4)]

    def answers(engine) -> list[list[list[int]]]:
        with engine:
            outputs = engine.generate(prompts, SAMPLING)
            return [[choice.token_ids for choice in output.choices] for output in outputs]

    options = {**OPTIONS, "max_num_seqs": 5}
    expected = answers(open_engine(model, **options))
    with device(monkeypatch):
        assert answers(engine_on_cuda(model, **options)) == expected


def test_constrained_rows_beside_free_ones(saved_model, tmp_path, monkeypatch):
    """Their steps are computed ahead and drawn later; so are the others' of such a step."""
    model, prompts = saved_model(tokenizer=True, **SMALL), [tokens(seed, 5 + seed) for seed in range(4)]
    wanted = StructuredOutputsParams(regex="[a-c]{2,4}-[0-9]+")
    params = [replace(one, max_tokens=9, structured_outputs=wanted) for one in SAMPLING[1:]]

    def answers(engine) -> list[list[tuple[str, list[int]]]]:
        with engine:
            outputs = engine.generate(prompts, [SAMPLING[0], *params])
            return [[(choice.text, choice.token_ids) for choice in output.choices] for output in outputs]

    options = {**OPTIONS, "max_num_seqs": 5}
    expected = answers(open_engine(model, **options))
    assert all(re.match("[a-c]{2,4}-[0-9]*", text) for choices in expected[1:] for text, _ in choices)
    with device(monkeypatch):
        assert answers(engine_on_cuda(model, **options)) == expected


def test_a_conversation_that_outgrows_its_window_and_is_deleted(saved_model, tmp_path, monkeypatch):
    """Loads at new positions, and what is erased."""
    model, greedy_turn = saved_model(tokenizer=True, **SMALL), greedy(4)
    options = {"block_size": 4, "max_model_len": 96, "max_num_batched_tokens": 64}

    def talk(engine) -> list[tuple[list[int], int]]:
        chat = engine.chat("one")
        turns = []
        while chat.truncated_tokens == 0:
            output = chat.send(f"This is message number {len(turns)}.", greedy_turn)
            turns.append((output.token_ids, cached(output)[3]))
            settle(engine)
        return turns

    with open_engine(model, tmp_path / "cpu", **options) as engine:
        expected = talk(engine)
    assert expected[-1][1] > 0
    with device(monkeypatch), engine_on_cuda(model, tmp_path / "cuda", **options) as engine:
        assert talk(engine) == expected
        caches = [cache for layer in engine.loop.runner.caches for cache in layer]
        assert all(bool(cache.any()) for cache in caches)
        engine.admin.delete_session("one")
        assert not any(bool(cache.any()) for cache in caches)


@pytest.mark.parametrize("has_triton", WAYS)
def test_the_pool_is_sized_by_what_is_free(saved_model, has_triton, tmp_path, monkeypatch):
    model = saved_model(**TINY)
    monkeypatch.setattr("kvstore.engine.model.devices.CUDA_WINDOWS", 1 << 40)
    with device(monkeypatch, has_triton), engine_on_cuda(model, hbm="auto", **ONE) as engine:
        num_bytes = engine.loop.pool.num_blocks * engine.facts.block_bytes
        assert 0.25 * fake_cuda.FREE_BYTES < num_bytes < fake_cuda.FREE_BYTES
        assert (engine.loop.runner.graphs is not None) is has_triton


@needs_triton
def test_no_step_waits_for_the_device(saved_model, tmp_path, monkeypatch):
    """Its sample is read once the next step was launched; whatever else the host waited for would cost every step.

    The prompt's replay is padded by tokens that belong to no request: kernels leave them out, nobody attends to them.
    """
    model, prompt = saved_model(**TINY), tokens(5, 7)
    plain = Plain(model, block_size=4)
    expected = plain(prompt, 3)
    plain.engine.close()
    for enforce_eager in (False, True):
        options = {"max_model_len": 17, "max_num_seqs": 1, "max_num_batched_tokens": 16}
        with (
            device(monkeypatch, has_triton=True) as driver,
            engine_on_cuda(model, tmp_path / "store", enforce_eager=enforce_eager, **options) as engine,
        ):
            driver.waits.clear()
            assert ask(engine, prompt, 3).token_ids == expected
            assert driver.waits == [] and engine.loop.runner.times.num_steps == 3
            assert engine.loop.runner.times.num_replays == (0 if enforce_eager else 3)
            if not enforce_eager:  # after a block that HBM holds
                output = ask(engine, prompt, 1)
                assert output.token_ids == expected[:1] and cached(output)[0] == 4
                assert engine.loop.runner.times.num_replays == 4


SAMPLED = {
    "Qwen 2.5": SamplingParams(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05),
    "Qwen 3": SamplingParams(temperature=0.6, top_p=0.95, top_k=20, presence_penalty=1.5),
    "Gemma": SamplingParams(temperature=1.0, top_p=0.95, top_k=64),
    "Llama": SamplingParams(temperature=0.6, top_p=0.9),
    "plain": SamplingParams(),
    "min-p": SamplingParams(min_p=0.1, frequency_penalty=0.3, min_tokens=9, logit_bias={3: 2.0}),
    "mixed": SamplingParams(temperature=1.2),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampling_waits_once(name, monkeypatch):
    """For the tokens themselves: a wait costs a step as much as many kernels do. In bfloat16 logits are often equal."""
    params = [SAMPLED[name], SAMPLED["Llama" if name == "mixed" else name]]
    logits, rows = torch.from_numpy(np.random.default_rng(1).normal(0, 4, (2, 600))).bfloat16(), np.arange(2)

    def sampled(place) -> tuple[Sampler, torch.Tensor]:
        sampler = Sampler(2, 600, place)
        for row in range(2):
            sampler.set_row(row, params[row], 7 + row, [5], np.array([1, 2]), np.array([3]))
        return sampler, logits.to(place)

    def tokens_of(sampler, there) -> list[list[int]]:
        found = []
        for _ in range(5):
            token_ids = sampler.sample(there, rows).token_ids
            sampler.append(rows, token_ids)
            found.append(token_ids.tolist())
        return found

    expected = tokens_of(*sampled(torch.device("cpu")))
    with device(monkeypatch) as driver:
        there = sampled(DEVICE)
        driver.waits.clear()
        assert tokens_of(*there) == expected
        assert driver.waits == ["a copy to the host"] * 5


@pytest.mark.parametrize("params", [SamplingParams(top_p=0.999, temperature=9.0), SamplingParams(top_k=300)], ids=str)
def test_rare_rows_are_looked_at_again(params, monkeypatch):
    """Flat logits, equal logits, and none that is usable: the tokens of a CPU, with more than one wait."""
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(np.stack([rng.normal(0, 1, 3000), np.zeros(3000), np.full(3000, np.nan)])).float()

    def sample(place) -> list[int]:
        sampler, none = Sampler(3, 3000, place), np.empty(0, np.int64)
        for row in range(3):
            sampler.set_row(row, params, row, [], none, none)
        return sampler.sample(logits.to(place), np.arange(3)).token_ids.tolist()

    expected = sample(torch.device("cpu"))
    with device(monkeypatch) as driver:
        assert sample(DEVICE) == expected and expected[2] == 0
        assert len(driver.waits) > 1


def test_a_capture_that_fails_leaves_the_allocator_as_it_was(monkeypatch):
    """Else memory that other streams give back is never used again. What failed is an operation that two trials did."""
    calls = []
    with device(monkeypatch) as driver:
        capturer, there, stream = CudaCapturer(DEVICE), torch.arange(3, device=DEVICE), torch.cuda.current_stream()

        def work(_):
            calls.append(1)
            return there.tolist() if len(calls) == 3 else there

        with pytest.raises(FakeCudaError, match="previous error"):
            capturer.capture(work, None)
        assert driver.pool is None and driver.recording is None and torch.cuda.current_stream() is stream
        assert driver.has_generator, "nobody could draw random numbers any more"
        capturer.capture(work, None)()
        monkeypatch.setattr(torch.cuda, "empty_cache", mock.Mock(side_effect=FakeCudaError("CUDA error: unspecified")))
        with pytest.raises(KVStoreError, match=r"not work any more \(CUDA error: unspecified\); .*--enforce-eager"):
            capturer._end_capture()


def test_what_waits_within_an_operation_is_refused_before_it_is_captured(monkeypatch):
    """Copies to the host; and experts, but for what torch has a kernel for: such a capture would fail at its end."""

    def run(name: str, *args: torch.Tensor, **options: object) -> None:
        operation = mock.Mock()
        operation.overloadpacket.__name__ = name
        NoWaits().__torch_dispatch__(operation, (), args, options)
        assert operation.called

    with device(monkeypatch):
        there, here, halves = torch.ones(4, device=DEVICE), torch.ones(4), torch.ones(4, device=DEVICE).bfloat16()
        for name, args, options in (
            ("_to_copy", (there,), {"device": torch.device("cpu")}), ("copy_", (here, there), {}),
            ("_grouped_mm", (there, there), {}),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match=f"{name} waits for the device"):
                run(name, *args, **options)
        run("_grouped_mm", halves, halves)
        run("_to_copy", there, dtype=torch.bfloat16)
        run("copy_", there, there)


def test_padding_is_skipped_where_there_are_no_kernels(monkeypatch):
    """An index below 0 is an error of the device there, after which nothing runs any more."""
    shape, slots = (3, 4, 2, 8), torch.tensor([5, -1, 2])
    key, value = torch.rand(3, 2, 8), torch.rand(3, 2, 8)
    expected = torch.zeros(shape), torch.zeros(shape)
    reference.write_kv(key, value, *expected, slots)
    with device(monkeypatch):
        key, value, slots, *caches = (t.to(DEVICE) for t in (key, value, slots, torch.zeros(shape), torch.zeros(shape)))
        write_kv(key, value, *caches, slots)
        assert all(torch.equal(cache.cpu(), wanted) for cache, wanted in zip(caches, expected, strict=True))
