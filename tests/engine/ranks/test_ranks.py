"""A model in one process, in two that share its layers, in two stages, and in both: what must not depend on it.

`--long` compares all kinds of models in each way. What each rank computes: `tests/engine/model/parallel`.
"""

import os
from itertools import product

import pytest

from kvstore import CacheTiers, Engine
from kvstore.engine.ranks.ranks import started_here
from kvstore.errors import ConfigError, KVStoreError, ModelError, UnsupportedModelError
from tests.support.engines import (
    counters,
    greedy,
    open_engine,
    same_kv,
    settle,
    stored_kv,
)
from tests.support.ranks import BOTH, PROMPTS, SIZES, check_says, children, start_as
from tests.support.redis_server import wait_for_answers

MODEL = {"tokenizer": True}
WAYS = {**SIZES, "both": BOTH}
KINDS = ["Llama", "Qwen2", "Qwen3Moe", "Mistral", "Mixtral", "Phi", "Phi3", "Gemma2", "Gemma3", "Olmo2", "Cohere",
         "Glm4", "GPTNeoX"]  # fmt: skip
FEW = [("tensor", "Phi3"), ("pipeline", "Gemma3"), ("both", "Mixtral")]  # packed and gathered; tied, with a window


@pytest.fixture(autouse=True)
def nobody_is_left():
    before = children(os.getpid())
    yield
    assert children(os.getpid()) <= before


@pytest.mark.parametrize(("way", "name"), [*product(WAYS, KINDS)])
def test_several_ranks_say_and_store_what_one_process_does(way, name, request, saved_model, tmp_path):
    """As far as sums in another order leave the bytes of blocks alone: the heads are in their places."""
    if (way, name) not in FEW and not request.config.getoption("--long"):
        pytest.skip("needs --long")
    model = saved_model(name)
    with open_engine(model, tmp_path / "one") as one:
        expected = [out.token_ids for out in one.generate(PROMPTS, greedy(12))]
        stored, layout = stored_kv(one), one.loop.runner.model.layout(16)
    assert len(stored) > 20
    with open_engine(model, tmp_path / "several", max_num_batched_tokens=48, **WAYS[way]) as engine:
        check_says(engine, expected)
        has_all = layout.window_blocks > 0 and "pipeline_parallel_size" in WAYS[way]
        assert same_kv(stored_kv(engine), stored) != has_all, (
            "of a stage that has only layers with a window, all is kept"
        )


def test_servers_of_any_number_of_ranks_share_a_remote_tier(model, plain, redis, monkeypatch):
    """What one of them has stored is found by the next."""
    wait_for_answers(monkeypatch)
    said, tiers = PROMPTS, CacheTiers("2MiB", "2MiB", remote=redis.url)
    for number, size in enumerate((SIZES["tensor"], {}, SIZES["pipeline"])):
        with Engine(model, tiers, device="cpu", load="always", **size) as engine:
            outs = engine.generate(said, greedy(20))
            assert [out.token_ids for out in outs] == [plain(prompt, 20) for prompt in said]
            stored = [(len(prompt) - 1) // 16 * 16 if number else 0 for prompt in said]
            assert [out.usage.cached_tokens_details.remote for out in outs] == stored
            settle(engine)
        said = [[*prompt, *out.token_ids] for prompt, out in zip(said, outs, strict=True)]


def test_choices_and_preempted_requests_say_the_same(model, plain):
    """Blocks are copied on both ranks, and computed again."""
    params = greedy(24, n=3, temperature=1.0, seed=7)
    expected = [choice.token_ids for choice in plain.engine.generate([PROMPTS[1]], params)[0].choices]
    with open_engine(model, hbm="96KiB", max_num_batched_tokens=48, max_model_len=192, **SIZES["pipeline"]) as engine:
        assert [choice.token_ids for choice in engine.generate([PROMPTS[1]], params)[0].choices] == expected
        found = engine.generate(PROMPTS, greedy(40))
        assert engine.stats()["requests"]["preemptions"] > 0
        assert [out.token_ids for out in found] == [plain(prompt, 40) for prompt in PROMPTS]
        engine.check_integrity()


def test_a_conversation_is_truncated_and_goes_on_after_a_restart(model, tmp_path):
    said = []
    for sizes in (({}, {}), (SIZES["tensor"], SIZES["pipeline"])):
        store, turns = tmp_path / str(len(said)), []
        for size, few in zip(sizes, (range(10), range(10, 14)), strict=True):
            with open_engine(model, store, max_model_len=192, **size) as engine:
                chat = engine.chat("talk", system="Be brief.")
                turns += [chat.send(f"message number {turn} of a long talk", greedy(16)).token_ids for turn in few]
                assert chat.truncated_tokens > 0 and counters(engine)["spliced"] > 0
                settle(engine)
        said.append(turns)
    assert said[0] == said[1]


# -- what cannot be ----------------------------------------------------------------------------------------------------
def test_what_cannot_be_divided_is_refused_and_leaves_nothing(model, saved_model):
    for size in SIZES:
        with pytest.raises(UnsupportedModelError, match=f"no plan of {size} parallelism"):
            open_engine(saved_model("StableLm"), **SIZES[size])
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        open_engine(model, tensor_parallel_size=0)
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 4, but the model has 3 layers"):
        open_engine(model, pipeline_parallel_size=4)


def test_what_keeps_another_rank_from_starting_is_told_with_its_number(tmp_path):
    arguments = [{"model": str(tmp_path / "none"), "cache_tiers": {}}]
    with started_here(arguments, 600.0, 0, {}) as ranks, pytest.raises(ModelError, match=r"rank 1 of 2: .*none"):
        ranks.wait_loaded()


@pytest.mark.parametrize(("how", "told"), [("killed", r"ended \(signal 9\)"), ("raises", "no way to the others")])
def test_a_rank_that_is_lost_while_all_join_is_not_waited_for(model, monkeypatch, how, told):
    """It has loaded. The first rank waits in gloo, which would wait for a day."""
    start_as(monkeypatch, "lost_rank", LOST_RANK=how)
    with pytest.raises(KVStoreError, match=f"rank 1 of 2.* {told}"):
        open_engine(model, **SIZES["tensor"])
