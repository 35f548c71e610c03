"""Layers with a window in several ranks: in HBM and below it they have KV where somebody sees it, as in one process.

`--long` compares more kinds of models.
"""

import json

import pytest

from tests.support.by_hand import by_hand
from tests.support.conversations import nothing_is_left
from tests.support.engines import evict_hbm, greedy, open_engine, same_kv, save_model, settle, stored_kv, tokens
from tests.support.ranks import BOTH, FULL, SIZES, SLIDING, WINDOWED, check_reads, check_says, start_as
from tests.support.waiting import wait_until

WAYS = {**SIZES, "both": BOTH}
CASES = [("tensor", "Gemma3"), ("pipeline", "GptOss")]  # of gpt-oss there is no plan of tensor parallelism
MORE = [("pipeline", "Gemma3"), ("both", "Gemma3"), ("tensor", "Gemma2"), ("both", "Cohere2")]
BLOCK, CHUNK, SPAN = 16, 48, 2  # SPAN: blocks that a token sees before its own, as a window has 24 tokens
PROMPTS = [tokens(seed, 50 + 60 * seed) for seed in range(4)]
SHORT = 5  # a step of several processes costs ten of one


@pytest.fixture
def model_of(tmp_path):
    """Makes a model of these layers."""
    return lambda name, **changes: save_model(
        tmp_path / "model", name, **{"max_position_embeddings": 512, **WINDOWED, **changes}
    )


def opened(model: str, path=None, hbm: str = "8MiB", **options: object):
    return open_engine(model, path, hbm, "8MiB", "64MiB", dtype="float32", max_num_batched_tokens=CHUNK, **options)


SAMPLED = greedy(16, temperature=1.0, seed=7)


def answers(engine, prompts: list[list[int]], n: int = 1) -> list[list[int]]:
    outs = engine.generate(prompts, greedy(16, temperature=1.0, seed=7, n=n))
    return [choice.token_ids for out in outs for choice in out.choices]


@pytest.mark.parametrize(("way", "name"), CASES + MORE)
def test_what_one_process_has_stored_ranks_find_and_the_other_way_round(way, name, model_of, request, tmp_path):
    if (way, name) in MORE and not request.config.getoption("--long"):
        pytest.skip("needs --long")
    model, sizes = model_of(name), {}
    with opened(model, tmp_path / "one") as one:
        expected = [out.token_ids for out in one.generate(PROMPTS, greedy(SHORT))]
        stored, layout, spec = stored_kv(one), one.loop.runner.model.layout(BLOCK), one.loop.runner.model.spec
        sizes["one"] = one.stats()["disk"]["blocks"]
    assert len(layout.shapes) == 2 and layout.num_state_blocks == 3
    with opened(model, tmp_path / "several", **WAYS[way]) as engine:
        assert [out.token_ids for out in engine.generate(PROMPTS, greedy(SHORT))] == expected
        assert same_kv(stored_kv(engine), stored)
        sizes["several"] = engine.stats()["disk"]["blocks"]
        check_says(engine, expected, PROMPTS)
    all_kv = sum((len(prompt) + SHORT - 1) // BLOCK for prompt in PROMPTS) * BLOCK * spec.kv_bytes_per_token
    assert sizes["one"] == sizes["several"] and sizes["one"] * layout.block_bytes < 0.8 * all_kv
    for path, there in ((tmp_path / "one", WAYS[way]), (tmp_path / "several", WAYS[way]), (tmp_path / "several", {})):
        with opened(model, path, **there) as engine:
            check_reads(engine, expected, PROMPTS)


@pytest.mark.parametrize(("way", "name"), CASES)
def test_slots_go_to_others_are_copied_and_loaded_on_all_ranks(way, name, model_of, tmp_path):
    """HBM has more blocks than slots: requests are preempted, and a turn that has lost its windows loads them."""
    model, prompts, chosen = model_of(name), [tokens(seed, 40) for seed in range(16)], tokens(80, 40)
    with opened(model) as one:
        long = answers(one, [tokens(1, 200)])
        history = [*tokens(1, 200), *long[0], 7]
        expected = long, answers(one, [chosen], n=3), answers(one, prompts), answers(one, [history])
    with by_hand(opened(model, tmp_path / "store", hbm="700KiB", **WAYS[way])) as engine:
        windows, held = engine.loop.scheduler.manager.windows, []
        assert windows.num_slots < 16 * (SPAN + 2) < engine.loop.pool.num_blocks
        handle = engine.submit(tokens(1, 200), SAMPLED)
        while engine.has_work:
            engine.step()
            held.append(windows.num_slots - windows.num_free)
        assert max(held) <= 2 * CHUNK // BLOCK + SPAN + 2
        found = [handle.output.token_ids], answers(engine, [chosen], n=3), answers(engine, prompts)
        assert engine.loop.scheduler.roster.num_preemptions > 0
        settle(engine)
        (again,) = engine.generate([history], SAMPLED)
        assert (*found, [again.token_ids]) == expected
        assert again.usage.cached_tokens_details.cpu == len(history) // BLOCK * BLOCK


def test_a_conversation_is_truncated_as_in_one_process(model_of, tmp_path):
    """The first rank splices the windows of all layers, those of other stages too, and turns their keys."""
    model, said = model_of("Gemma3", tokenizer=True), []
    for size in ({}, SIZES["pipeline"]):
        with opened(model, tmp_path / str(len(said)), max_model_len=192, **size) as engine:
            chat, params = engine.chat("talk", system="Be brief."), greedy(16, temperature=1.0, seed=7)
            turns = [chat.send(f"message number {turn} of a long talk", params) for turn in range(10)]
            said.append([turn.token_ids for turn in turns])
            assert max(turn.usage.cached_tokens_details.reencoded for turn in turns) > 0
    assert said[0] == said[1]


@pytest.mark.parametrize("way", SIZES)
def test_of_a_deleted_conversation_no_window_is_left_on_any_rank(way, model_of, tmp_path, monkeypatch):
    looked_at = tmp_path / "looked_at"
    start_as(monkeypatch, "looking_rank", LOOKED_AT=str(looked_at))
    with opened(model_of("Gemma3", tokenizer=True), tmp_path / "store", **WAYS[way]) as engine:
        chat = engine.chat("red")
        for _ in range(2):
            chat.send("My name is Ada, and I live in Turin. " * 4, greedy(20))
        settle(engine)
        looked_at.unlink(missing_ok=True)
        engine.admin.delete_session("red")
        assert nothing_is_left(engine)
        wait_until(lambda: looked_at.exists() and looked_at.read_text().endswith("\n"))
        lines = [json.loads(line) for line in looked_at.read_text().splitlines()]
    num_full, num_windowed = lines[0][0]
    assert num_full > 0 and num_windowed > 0 and lines[-1][1] == [0, 0]


def test_where_a_stage_has_only_layers_with_a_window_all_kv_is_kept(model_of, tmp_path):
    model = model_of("Gemma3", num_hidden_layers=4, layer_types=[SLIDING, SLIDING, FULL, SLIDING])
    with opened(model) as one:
        expected = [out.token_ids for out in one.generate([tokens(1, 60)], greedy(SHORT))]
    with opened(model, tmp_path / "store", **SIZES["pipeline"]) as engine:
        assert "window_slots" not in engine.stats()["hbm"]
        for _ in range(2):
            assert [out.token_ids for out in engine.generate([tokens(1, 60)], greedy(SHORT))] == expected
            evict_hbm(engine)
