"""Steps that are launched before the tokens of the one before are read: the same answers, the same blocks kept."""

import random
from collections import Counter, deque
from dataclasses import replace

import pytest
import torch

from kvstore import SamplingParams
from kvstore.blocks.ids import BlockId
from kvstore.engine.core.step_loop import PipelinedSteps
from tests.support.by_hand import by_hand
from tests.support.engines import cached, counters, evict_cpu, open_engine, settle, tokens

MODEL = {"name": "Qwen3", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
BLOCK_SIZE = 4
VOCAB = 160
NUM_SEEDS = 4
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # K and V, layers, KV heads, head_dim, float32


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def params_of(rng: random.Random) -> SamplingParams:
    count, stops = rng.randrange(1, 24), tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 20, 60])))
    ways = [
        {"temperature": 0.0}, {"temperature": 0.0, "frequency_penalty": 1.5}, {"top_k": 20, "top_p": 0.8},
        {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.5}, {"min_tokens": min(count, 5)},
        {"logit_bias": {7: 3.0}, "min_p": 0.02}, {"temperature": 0.0, "logprobs": 2}, {"n": 3},
        {"temperature": 9.0, "top_p": 0.999},  # most tokens cannot be drawn at the first look
    ]  # fmt: skip
    return SamplingParams(max_tokens=count, stop_token_ids=stops, seed=rng.randrange(99), **rng.choice(ways))


def stored(engine) -> set[tuple[bytes, ...]]:
    """Every block of the CPU tier by its tokens and those before it."""
    with engine.connector.parts.lock:
        cpu = engine.connector.parts.cpu
        records = {record.block_id: record for record in map(cpu.record, cpu.pool.cached_blocks())}

    def path(block_id: BlockId) -> tuple[bytes, ...]:
        record = records.get(block_id)
        return () if record is None else (*path(record.parent_id), record.tokens)

    return {path(block_id) for block_id in records}


def talk(engine, seed: int, aborts: bool, num_rounds: int = 6) -> tuple[list, set]:
    """Requests in rounds, some on what others have said; some aborted once they have said so much."""
    rng, said, found = random.Random(seed), [tokens(stem, 18) for stem in range(3)], []
    for _ in range(num_rounds):
        asked = []
        for _ in range(rng.randrange(1, 6)):
            prompt = [*rng.choice(said), *tokens(rng.randrange(50), rng.randrange(1, 9))][:60]
            params, longest = params_of(rng), rng.choice([None, None, rng.randrange(1, 12)]) if aborts else None
            asked.append((engine.submit(prompt, params), longest, rng.randrange(params.n)))
        while engine.has_work:
            engine.step()
            engine.check_integrity()
            for handle, longest, index in asked:
                choice = handle.output.choices[index]
                if longest is not None and len(choice.token_ids) >= longest and choice.finish_reason is None:
                    engine.core.end(handle.request_id, index)
        for handle, _, _ in asked:
            assert handle.done
            choices = [
                (choice.token_ids, choice.finish_reason, choice.stop_reason, [
                    (one.token_id, sorted(one.top)) for one in choice.logprobs or ()
                ]) for choice in handle.output.choices
            ]  # fmt: skip
            hbm, *below = cached(handle.output)  # a read that is under way counts as disk: that is a matter of time
            found.append((choices, hbm, sum(below), handle.output.usage.completion_tokens, len(handle.chain)))
            said.append([*handle.output.prompt_token_ids, *handle.output.choices[0].token_ids])
        settle(engine)
        where = rng.randrange(3)
        if where:
            engine.loop.pool.evict_all()
        if where == 2:
            before = stored(engine)
            evict_cpu(engine)
            assert before
    return found, stored(engine)


reached: Counter[str] = Counter()


def watch(engine) -> None:
    """Counts what must happen, or the comparison says little."""
    runner, scheduler = engine.loop.runner, engine.loop.scheduler
    forward, again = runner._forward, scheduler.compute_again

    def forwarded(inputs, plan, sampled):
        reached["ahead"] += sampled is not None
        reached["at once"] += sampled is None
        reached["ahead with saves"] += sampled is not None and plan is not None
        return forward(inputs, plan, sampled)

    def computed_again(request_id):
        reached["computed again"] += 1
        again(request_id)

    runner._forward, scheduler.compute_again = forwarded, computed_again


def both(model: str, path, seed: int, aborts: bool = False, **options) -> tuple[tuple, tuple]:
    """In the order of a CPU, and in that of a device."""
    results = []
    for runs_ahead in (False, True):
        with open_engine(model, path / str(runs_ahead), block_size=BLOCK_SIZE, max_model_len=96, **options) as engine:
            by_hand(engine)
            engine.loop.steps.runs_ahead = runs_ahead
            watch(engine)
            results.append(talk(engine, seed, aborts))
            assert counters(engine)["load_failures"] == counters(engine)["dropped_saves"] == 0
            settle(engine)
            reached["preempted"] += engine.loop.scheduler.roster.num_preemptions
    return results[0], results[1]


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_the_same_answers_usage_and_blocks(model, tmp_path, seed):
    expected, got = both(model, tmp_path, seed, max_num_seqs=20)
    for before, after in zip(expected[0], got[0], strict=True):
        assert before == after
    assert expected[1] == got[1]
    reached["runs"] += 1


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_the_same_answers_with_aborts_preemption_and_a_queue(model, tmp_path, seed):
    """Who is aborted has computed one token more: a block that this one fills is kept, too. Who is admitted later finds
    more of what others compute at the same time."""
    expected, got = both(model, tmp_path, seed, aborts=True, max_num_seqs=3, hbm=26 * BLOCK_SIZE * TOKEN_BYTES)
    for before, after in zip(expected[0], got[0], strict=True):
        assert (before[0], before[3:]) == (after[0], after[3:])
    assert expected[1] <= got[1]
    reached["runs"] += 1


# -- in a pipeline -----------------------------------------------------------------------------------------------------
class FirstStage:
    """A model whose logits come back later, in the order of its forwards."""

    def __init__(self, model) -> None:
        self._model, self._logits = model, deque()

    def __getattr__(self, name):
        return getattr(self._model, name)

    def begin(self, *args) -> None:
        if len(logits := self._model.begin(*args)):
            self._logits.append(logits)
            reached["at once in flight"] = max(reached["at once in flight"], len(self._logits))

    def end(self, num_samples: int) -> torch.Tensor:
        logits = self._logits.popleft()
        assert len(logits) == num_samples
        return logits


def piped(model: str, path, seed: int, num: int, **options) -> tuple[tuple, tuple]:
    """One step at a time, and so many steps in flight."""
    results = []
    for name in ("one", "piped"):
        with open_engine(model, path / name, block_size=BLOCK_SIZE, max_model_len=96, **options) as engine:
            loop = by_hand(engine).loop
            if name == "piped":
                loop.runner.model = FirstStage(loop.runner.model)
                loop.scheduler.config = replace(loop.scheduler.config, steps_in_flight=num)
                loop.steps = PipelinedSteps(loop.scheduler, loop.runner)
            results.append(talk(engine, seed, options["max_num_seqs"] == 4))
            assert counters(engine)["load_failures"] == counters(engine)["dropped_saves"] == 0
            settle(engine)
            reached["preempted in a pipeline"] += loop.scheduler.roster.num_preemptions * (name == "piped")
    return results[0], results[1]


@pytest.mark.parametrize("limits", [
    {"max_num_seqs": 20}, {"max_num_seqs": 20, "max_num_batched_tokens": 16},
    {"max_num_seqs": 4, "max_num_batched_tokens": 16, "hbm": 24 * BLOCK_SIZE * TOKEN_BYTES},
])  # fmt: skip
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_the_same_answers_with_several_steps_in_flight(model, tmp_path, seed, limits):
    """Requests are computed beside others, and find what these have computed earlier or later."""
    expected, got = piped(model, tmp_path, seed, 2 + seed % 2, **limits)
    for before, after in zip(expected[0], got[0], strict=True):
        assert (before[0], before[3:]) == (after[0], after[3:])
    if limits["max_num_seqs"] == 20:
        assert expected[1] == got[1]
    reached["piped"] += 1


def test_the_runs_in_a_pipeline_have_reached_everything():
    if reached["piped"] < 3 * NUM_SEEDS:
        pytest.skip("not all runs were made, or not all were sound")
    assert reached["at once in flight"] == 3 and reached["preempted in a pipeline"] > 0, reached


def test_the_runs_have_reached_everything():
    if reached["runs"] < 2 * NUM_SEEDS:
        pytest.skip("not all runs were made, or not all were sound")
    assert reached["ahead"] > 200 and reached["ahead with saves"] > 100, reached
    assert reached["computed again"] > 3 and reached["preempted"] > reached["computed again"], reached
