"""Steps that are launched before the tokens of the one before are read: the same answers, the same blocks kept."""

import random
from collections import Counter

import pytest

from kvstore import SamplingParams
from kvstore.blocks.ids import BlockId
from tests.support.by_hand import by_hand
from tests.support.engines import cached, counters, evict_cpu, open_engine, settle, tokens
from tests.support.first_stage import FirstStage, pipelined

MODEL = {"name": "Qwen3", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
BLOCK_SIZE = 4
VOCAB = 160
SEEDS = (1, 2)
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # K and V, layers, KV heads, head_dim, float32


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
stages: list[FirstStage] = []


def watch(engine) -> None:
    """Counts what must happen, or the comparison says little."""
    runner, scheduler = engine.loop.runner, engine.loop.scheduler
    forward, again = runner._forward, scheduler.compute_again

    def forwarded(inputs, table, output, sampled):
        reached["ahead"] += sampled is not None
        reached["ahead with saves"] += sampled is not None and output.plan is not None
        return forward(inputs, table, output, sampled)

    def computed_again(request_id):
        reached["computed again"] += 1
        again(request_id)

    runner._forward, scheduler.compute_again = forwarded, computed_again


def as_on_a_cpu(engine, seed: int) -> None:
    """One step at a time."""


def as_on_a_device(engine, seed: int) -> None:
    engine.loop.steps.depth = 2
    watch(engine)


def in_a_pipeline(engine, seed: int) -> None:
    """Two steps in flight, or three."""
    stages.append(pipelined(engine, 2 + seed % 2))


WAYS = [
    (as_on_a_device, {"max_num_seqs": 20}),
    (as_on_a_device, {"max_num_seqs": 3, "hbm": 26 * BLOCK_SIZE * TOKEN_BYTES}),
    (in_a_pipeline, {"max_num_seqs": 20}),
    (in_a_pipeline, {"max_num_seqs": 20, "max_num_batched_tokens": 16}),
    (in_a_pipeline, {"max_num_seqs": 4, "max_num_batched_tokens": 16, "hbm": 24 * BLOCK_SIZE * TOKEN_BYTES}),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("way", "limits"), WAYS)
def test_the_same_answers_and_blocks_as_one_step_at_a_time(model, tmp_path, seed, way, limits):
    """Where some have to wait, requests are computed beside others and find what these have computed earlier or later.
    Who is aborted then has computed one token more: a block that this one fills is kept, too.
    """
    results, all_run = [], limits["max_num_seqs"] == 20
    for change in (as_on_a_cpu, way):
        path = tmp_path / change.__name__
        with by_hand(open_engine(model, path, block_size=BLOCK_SIZE, max_model_len=96, **limits)) as engine:
            change(engine, seed)
            results.append(talk(engine, seed, aborts=not all_run))
            assert counters(engine)["load_failures"] == counters(engine)["dropped_saves"] == 0
            settle(engine)
            reached[f"preempted {change.__name__}"] += engine.loop.scheduler.roster.num_preemptions
    (expected, expected_blocks), (found, blocks) = results
    for before, after in zip(expected, found, strict=True):
        assert (before[0], before[3:]) == (after[0], after[3:])
        assert before == after or way is in_a_pipeline or not all_run
    assert blocks == expected_blocks or not all_run
    assert blocks >= expected_blocks or way is in_a_pipeline
    reached["runs"] += 1


def test_the_runs_have_reached_everything():
    if reached["runs"] < len(WAYS) * len(SEEDS):
        pytest.skip("not all runs were made, or not all were sound")
    assert reached["ahead"] > 130 and reached["ahead with saves"] > 60, reached
    assert reached["computed again"] > 2 and reached["preempted as_on_a_device"] > 0, reached
    assert max(stage.most_in_flight for stage in stages) == 3 and reached["preempted in_a_pipeline"] > 0, reached
