"""Decode steps that are replayed: the same tokens and the same saves as without, whatever comes between two replays."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch

from kvstore import Engine
from kvstore.connector import NullConnector
from kvstore.engine.client.local import open_store
from kvstore.engine.config import EngineConfig, SchedulerConfig
from kvstore.engine.model.probe import intercept
from kvstore.engine.model.step.graphs import (
    MAX_SIZE,
    PREFILL_SIZES,
    CudaCapturer,
    NoWaits,
    StepOutput,
    Work,
    bytes_for_graphs,
    capture_graphs,
    graph_sizes,
)
from kvstore.engine.model.step.runner import ModelRunner
from kvstore.engine.model.step.tensors import StepTensors
from kvstore.errors import ConfigError
from kvstore.kernels.paged_batch import PagedBatch
from tests.support.by_hand import by_hand
from tests.support.engines import (
    ask,
    cached,
    evict_cpu,
    evict_hbm,
    greedy,
    open_engine,
    same_kv,
    save_model,
    settle,
    stored_kv,
    tokens,
)
from tests.support.faults import fail
from tests.support.models import check_answer, make_model, network_of
from tests.support.replaying import LateSaves, Rerun, Spoiling, live


@pytest.fixture
def open_with(model, monkeypatch):
    """An engine on the CPU whose decode steps go through this capturer; late: how its saves are done."""
    opened = []

    def open_(capturer, path=None, late: Callable[[object], object] | None = None, folder=model, **options):
        def runner(model, config, num_blocks, connector, _=None, _ranks=None, window_of=None):
            return ModelRunner(model, config, num_blocks, connector, capturer, None, window_of)

        with monkeypatch.context() as patch:
            patch.setattr("kvstore.engine.client.local.ModelRunner", runner)
            if late is not None:
                patch.setattr("kvstore.engine.client.local.open_store", lambda *arguments: late(open_store(*arguments)))
            engine = by_hand(open_engine(folder, path, **options))
        assert capturer is None or engine.loop.runner.graphs is not None
        if capturer is not None:
            capturer.num_replays.clear()
            capturer.num_prompts.clear()
        opened.append(engine)
        return engine

    yield open_
    for engine in opened:
        engine.close()


# -- sizes -----------------------------------------------------------------------------------------------------------
def test_sizes():
    assert graph_sizes(1) == [1]
    assert graph_sizes(3) == [1, 2, 3]
    assert graph_sizes(8) == [1, 2, 4, 8]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert graph_sizes(100)[-3:] == [64, 96, 100]
    assert graph_sizes(4096)[-1] == MAX_SIZE and len(graph_sizes(4096)) < 30


# -- the same tokens -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("capturer", [Rerun, Spoiling])
def test_tokens_are_those_of_the_plain_engine_while_the_batch_shrinks(open_with, plain, capturer):
    capturer = capturer()
    engine = open_with(capturer, max_num_seqs=6)
    prompts = [tokens(seed, length) for seed, length in enumerate((5, 40, 17, 90, 16, 33))]
    counts = [4, 9, 30, 14, 5, 20]
    outputs = engine.generate(prompts, [greedy(count) for count in counts])
    assert [o.token_ids for o in outputs] == [plain(p, n) for p, n in zip(prompts, counts, strict=True)]
    assert set(capturer.num_replays) == {1, 2, 4, 6}
    times = engine.loop.runner.times
    assert times.num_replays == sum(capturer.num_replays.values()) == max(counts) - 1 < times.num_steps
    shown = engine.stats()["step"]
    assert (shown["num_graphs"], shown["num_replays"]) == (4 + len(PREFILL_SIZES), times.num_replays)


def test_the_batch_grows_and_shrinks_while_others_prefill(open_with, plain):
    """Mixed steps run eagerly between replays, over the same blocks."""
    engine = open_with(Spoiling(), max_num_seqs=4, max_num_batched_tokens=24)
    waiting = [(tokens(100 + i, 7 + 13 * i), 3 + 5 * (i % 4)) for i in range(9)]
    running, step = [], 0
    while waiting or engine.has_work:
        if waiting and step % 3 == 0:
            prompt, count = waiting.pop()
            running.append((engine.submit(prompt, greedy(count)), prompt, count))
        engine.step()
        step += 1
    assert all(handle.output.token_ids == plain(prompt, count) for handle, prompt, count in running)
    assert 0 < engine.loop.runner.times.num_replays < engine.loop.runner.times.num_steps
    engine.check_integrity()


def test_preempted_requests_go_on_with_the_same_tokens(open_with, plain):
    engine = open_with(Spoiling(), hbm=14 * 6144 * 3, max_num_seqs=8)
    prompts = [tokens(200 + i, 20 + i) for i in range(6)]
    outputs = engine.generate(prompts, greedy(40))
    assert [o.token_ids for o in outputs] == [plain(p, 40) for p in prompts]
    assert engine.stats()["requests"]["preemptions"] > 0


@pytest.mark.parametrize("family", ["Gemma3", "GptOss"])
def test_layers_with_a_window_have_slots_and_a_block_table_of_their_own(open_with, saved_model, family):
    engine = open_with(Spoiling(), folder=saved_model(family), max_num_seqs=4, max_num_batched_tokens=48)
    prompts = [tokens(seed, length) for seed, length in enumerate((5, 100, 17, 64))]
    for asked, made in zip(prompts, engine.generate(prompts, greedy(60)), strict=True):
        check_answer(network_of(saved_model(family)), asked, made.token_ids)
    again = [*prompts[1], *tokens(9, 20)]  # a short prompt behind a hit is a replay, too
    check_answer(network_of(saved_model(family)), again, ask(engine, again, 4).token_ids)
    assert engine.loop.runner.times.num_replays > 60
    assert engine.stats()["hbm"]["window_slots"] < engine.stats()["hbm"]["blocks"]
    engine.check_integrity()


def test_choices_of_one_prompt(open_with):
    """Also where the prompt's last token is computed alone, and drawn from several times, by a replay."""
    prompt, found = tokens(300, 33), []
    for capturer in (None, Spoiling()):
        engine = open_with(capturer, max_num_seqs=4)
        params = greedy(12, n=3, temperature=0.8, seed=5)
        for _ in range(2):  # the second time all but the last token is cached
            found.append([c.token_ids for c in engine.generate([prompt], params)[0].choices])
    assert found[0] == found[1] == found[2] == found[3] and len({tuple(ids) for ids in found[0]}) == 3


def test_a_step_that_samples_nothing_runs_eagerly(open_with, plain):
    capturer = Spoiling()
    engine = open_with(capturer, max_num_batched_tokens=1)
    assert ask(engine, tokens(400, 19), 5).token_ids == plain(tokens(400, 19), 5)
    assert capturer.num_replays == {1: 5}  # the last token of the prompt, and four more


def test_an_aborted_request_and_an_error_leave_nothing_behind(open_with, plain):
    capturer = Spoiling()
    engine = open_with(capturer, max_num_seqs=4)
    handles = [engine.submit(tokens(500 + i, 20), greedy(30)) for i in range(3)]
    for _ in range(6):
        engine.step()
    engine.abort(handles[1])
    capturer.fault = fail
    while engine.has_work:
        engine.step()
    capturer.fault = lambda: None
    assert [str(handle.error) for handle in handles] == ["injected", "None", "injected"]
    engine.check_integrity()
    assert ask(engine, tokens(510, 20), 9).token_ids == plain(tokens(510, 20), 9)


# -- short prompts ---------------------------------------------------------------------------------------------------
def test_the_end_of_a_prompt_is_replayed_after_what_hbm_holds(open_with, plain, tmp_path):
    """A turn of a conversation: its history is cached, and what is new is padded to the next size."""
    capturer = Spoiling()
    engine = open_with(capturer, tmp_path, late=LateSaves)
    history, num_cached = tokens(650, 20), 0
    for turn, length in enumerate((2, 8, 31, 70), start=1):
        history += tokens(650 + length, length)
        output = ask(engine, history, 5)
        assert output.token_ids == plain(history, 5) and cached(output)[0] == num_cached
        assert capturer.num_prompts.total() == turn
        history += output.token_ids
        num_cached = (len(history) - 1) // 16 * 16  # the last token was sampled, and not computed
    assert len(capturer.num_prompts) >= 3
    eager = open_with(None, tmp_path / "eager")
    ask(eager, history[:-5], 5)
    assert stored_kv(eager).keys() <= stored_kv(engine).keys()
    assert same_kv(stored_kv(eager), {ids: kv for ids, kv in stored_kv(engine).items() if ids in stored_kv(eager)})


def test_a_part_of_a_prompt_and_one_beside_others_run_eagerly(open_with, plain):
    """The first does not sample; in the second a decode has its row."""
    capturer = Spoiling()
    engine = open_with(capturer, max_num_batched_tokens=24)
    assert ask(engine, tokens(660, 60), 3).token_ids == plain(tokens(660, 60), 3)
    assert capturer.num_prompts == {16: 1}  # the last 12 tokens, after two parts of 24
    first = engine.submit(tokens(661, 10), greedy(9))
    engine.step()
    second = engine.submit(tokens(662, 10), greedy(9))
    while engine.has_work:
        engine.step()
    assert first.output.token_ids == plain(tokens(661, 10), 9)
    assert second.output.token_ids == plain(tokens(662, 10), 9)
    assert capturer.num_prompts == {16: 2}


class NoPrompts(Rerun):
    def begin(self, output: StepOutput) -> None:
        if len(output.logits) == 1 and len(output.layers[0][0]) == 64:
            raise RuntimeError("a prompt waits")


def test_prompts_that_cannot_be_captured_leave_decoding_its_graphs(open_with, plain, caplog):
    capturer = NoPrompts()
    engine = open_with(capturer, max_num_seqs=2)
    assert ask(engine, tokens(670, 20), 5).token_ids == plain(tokens(670, 20), 5)
    assert "short prompts are computed without CUDA graphs: RuntimeError: a prompt waits" in caplog.text
    assert engine.loop.runner.times.num_graphs == 2 and (capturer.num_replays, capturer.num_prompts) == ({1: 4}, {})


# -- saves -----------------------------------------------------------------------------------------------------------
def talk(engine) -> None:
    prompts = [tokens(600 + i, 10 + 9 * i) for i in range(5)]
    engine.generate(prompts, [greedy(70 - 12 * i) for i in range(5)])


def test_saves_of_replays_are_those_of_eager_steps(open_with, plain, tmp_path):
    """A conversation goes on with what was saved of it: from the CPU tier, from disk, and after a restart."""
    eager = open_with(None, tmp_path / "eager")
    talk(eager)
    engine = open_with(Spoiling(), tmp_path / "graphs", late=LateSaves)
    talk(engine)
    assert len(stored_kv(engine)) > 15 and same_kv(stored_kv(engine), stored_kv(eager))
    history = tokens(600, 10) + plain(tokens(600, 10), 70)
    answer = plain([*history, 3], 8)
    for tier, num_cached in ((1, 64), (2, 80)):  # the last token that is sampled is not computed
        evict_hbm(engine)
        if tier == 2:
            evict_cpu(engine)
        output = ask(engine, [*history, 3], 8)
        assert cached(output)[tier] == num_cached and output.token_ids == answer
    engine.close()
    again = open_with(Spoiling(), tmp_path / "graphs", late=LateSaves)
    output = ask(again, [*history, 3], 8)
    assert cached(output)[2] == 80 and output.token_ids == answer


def test_without_the_fence_saves_are_torn(open_with, tmp_path):
    """What the test above relies on: a replay that begins before the last step's save has ended is seen."""
    eager = open_with(None, tmp_path / "eager")
    talk(eager)
    engine = open_with(Spoiling(), tmp_path / "graphs", late=partial(LateSaves, obeys=False))
    talk(engine)
    assert engine.connector.num_late > 0 and not same_kv(stored_kv(engine), stored_kv(eager))


def test_a_step_with_a_load_runs_eagerly(open_with, plain, tmp_path):
    """One token after two blocks that are loaded: were it not for the load, a replay would do."""
    capturer, prompt = Spoiling(), tokens(700, 33)
    engine = open_with(capturer, tmp_path, late=LateSaves)
    ask(engine, prompt, 4)
    settle(engine)
    for evicted, num_replays in ((True, 0), (False, 1)):
        if evicted:
            engine.loop.pool.evict_all()
        capturer.num_replays.clear()
        output = ask(engine, prompt, 1)
        assert output.token_ids == plain(prompt, 1) and output.usage.cached_tokens == 32
        assert sum(capturer.num_replays.values()) == num_replays


# -- models and devices that cannot ----------------------------------------------------------------------------------
class Refusing(Rerun):
    def begin(self, output: StepOutput) -> None:
        if len(output.logits) == 4:
            raise RuntimeError("called a synchronizing CUDA operation\nand more")


class Frozen(Rerun):
    """Replays with the lists of the capture, as attention would that looks at the host's."""

    def capture(self, work: Work, tensors: StepTensors) -> Callable[[], StepOutput]:
        then = live(tensors)
        then = replace(then, batch=PagedBatch(*(getattr(then.batch, name) for name in (
            "query_start", "context_lens", "block_table", "slots", "block_size"))))  # fmt: skip
        then.batch.block_table = then.batch.block_table.clone()
        return lambda: work(then)


class Idle(Rerun):
    """Replays nothing: what the work done eagerly has left is still there."""

    def again(self, work: Work, tensors: StepTensors) -> StepOutput:
        self.left.logits.mul_(1)
        return self.left

    def begin(self, output: StepOutput) -> None:
        self.left = output


class CompilationError(Exception):
    """As Triton's, which is no RuntimeError."""


class Uncompiled(Rerun):
    def begin(self, output: StepOutput) -> None:
        raise CompilationError("at 1:1: out of resources\nmore")


@pytest.mark.parametrize(
    ("capturer", "reason"),
    [
        (Refusing(), "RuntimeError: called a synchronizing CUDA operation"),
        (Frozen(), "a replay of 6 requests gives logits that differ by"),
        (Idle(), "a replay of 6 requests gives logits that differ by nan"),
        (Uncompiled(), "CompilationError: at 1:1: out of resources"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Rerun) else "",
)
def test_what_cannot_be_captured_runs_eagerly_and_says_why(capturer, reason, caplog):
    network = intercept(make_model(), 256)
    config = SchedulerConfig(256, max_num_seqs=6)
    with caplog.at_level(logging.WARNING, "kvstore.engine"):
        runner = ModelRunner(network, config, 32, NullConnector(), capturer)
        runner.prepare()
    assert runner.graphs is None and runner.times.num_graphs == 0
    (record,) = caplog.records
    assert record.getMessage().startswith("decode runs without CUDA graphs: ") and reason in record.getMessage()
    assert "\n" not in record.getMessage()
    assert all((cache == 0).all() for layer in runner.caches for cache in layer)


def test_a_replay_is_compared_with_as_many_rows_as_it_has(caplog):
    """A mixture of experts in bfloat16 may send a token elsewhere when a product of other rows is rounded otherwise."""
    network = intercept(make_model(), 256)
    forward = network.forward
    network.forward = lambda token_ids, *parts: forward(token_ids, *parts) * (1 + 0.3 * (len(token_ids) % 2))
    caches, config = network.new_caches(32, 16), SchedulerConfig(256, max_num_seqs=6)
    assert capture_graphs(network, caches, config, Rerun()) is not None, caplog.text


@pytest.mark.parametrize(
    ("name", "num_blocks", "block_size"),
    [("Llama", 2, 16), ("Gemma3", 40, 3), ("Gemma3", 2, 16), ("SmolLM3", 9, 256), ("GptOss", 9, 256)],
)
def test_capturing_leaves_the_pool_as_it_was_whatever_its_size(name, num_blocks, block_size):
    network = intercept(make_model(name), 100)
    config = SchedulerConfig(100, block_size, max_num_seqs=40, num_window_slots=2 * bool(network.spec.windows))
    caches = network.new_caches(num_blocks, block_size, config.num_window_slots)
    assert capture_graphs(network, caches, config, Spoiling()) is not None
    assert all((cache == 0).all() for layer in caches for cache in layer)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 1],
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 1),
        lambda x: x.unique(),
        lambda x: x.index_put_((x > 1,), torch.ones(3)),
        lambda x: torch.bincount(x.long()),
    ],
)
def test_what_waits_is_refused_before_it_is_captured(wait):
    """In this thread alone: other engines go on with theirs."""
    x = torch.arange(4.0)
    with NoWaits():
        x.masked_fill_(x > 9, 0.0).add_(1.0)
        x[x > 9] = 0.0
        with ThreadPoolExecutor(1) as other:
            other.submit(wait, x.clone()).result()
        with pytest.raises(RuntimeError, match="waits for the device"):
            wait(x)


# -- the option ------------------------------------------------------------------------------------------------------
def test_graphs_can_be_switched_off_and_a_cpu_has_none(model):
    with pytest.raises(ConfigError, match="enforce_eager is 1; give true or false"):
        EngineConfig(enforce_eager=1)
    with open_engine(model) as engine:
        assert engine.loop.runner.graphs is None and engine.stats()["step"]["num_replays"] == 0


# -- CUDA ------------------------------------------------------------------------------------------------------------
def on_cuda(name: str, dtype: torch.dtype, experts: str | None = None):
    network = make_model(name, dtype=dtype).to("cuda")
    if experts is not None:
        network.set_experts_implementation(experts)
    return intercept(network, 256, pack=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Gemma3", "StableLm", "SmolLM3"])
def test_graphs_of_several_sizes_on_cuda(name, dtype, caplog):
    """Each is compared with the forward when it is captured; none of these models may be refused."""
    model, config = on_cuda(name, dtype), SchedulerConfig(256, max_num_seqs=20)
    graphs = capture_graphs(model, model.new_caches(64, 16), config, CudaCapturer(model.device))
    assert graphs is not None and graphs.num_graphs == len(graph_sizes(20)) + len(PREFILL_SIZES), caplog.text


@pytest.mark.gpu
def test_a_model_that_counts_tokens_runs_eagerly_on_cuda(caplog):
    model, config = on_cuda("Mixtral", torch.float32, "eager"), SchedulerConfig(256, max_num_seqs=8)
    caches = model.new_caches(64, 16)
    assert capture_graphs(model, caches, config, CudaCapturer(model.device)) is None
    assert "decode runs without CUDA graphs" in caplog.text
    sum_of_zeros = float(caches[0][0].sum())  # the device goes on working after a capture that failed
    assert sum_of_zeros == 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Mixtral"])
def test_engines_with_and_without_graphs_give_the_same_tokens_on_cuda(name, tmp_path):
    folder, found = save_model(tmp_path / "model", name), []
    prompts = [tokens(900 + i, 10 + 17 * i) for i in range(7)]
    for enforce_eager in (True, False):
        tiers = {"hbm": "4MiB", "cpu": "8MiB", "disk": "32MiB", "path": tmp_path / f"store-{enforce_eager}"}
        options = {"device": "cuda", "dtype": "float32", "load": "always", "max_num_seqs": 8}
        with Engine(folder, tiers, enforce_eager=enforce_eager, **options) as engine:
            answers = [o.token_ids for o in engine.generate(prompts, [greedy(40 - 3 * i) for i in range(7)])]
            evict_hbm(engine)
            again = [ask(engine, [*p, *a], 8) for p, a in zip(prompts, answers, strict=True)]
            found.append((answers, [o.token_ids for o in again], [cached(o)[1] for o in again]))
            assert enforce_eager is (engine.loop.runner.graphs is None) or name == "Mixtral"
            assert (engine.loop.runner.times.num_replays > 0) is (engine.loop.runner.graphs is not None)
    assert found[0] == found[1] and all(found[0][2])


@pytest.mark.gpu
def test_what_graphs_take_on_cuda_was_foreseen():
    model, config = on_cuda("Llama", torch.bfloat16), SchedulerConfig(256, max_num_seqs=64)
    caches = model.new_caches(64, 16)
    foreseen = bytes_for_graphs(model, config)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    graphs = capture_graphs(model, caches, config, CudaCapturer(model.device))
    assert graphs is not None and 0 <= free - torch.cuda.mem_get_info()[0] <= foreseen
