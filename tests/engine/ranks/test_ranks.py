"""Two processes compute one model: the same tokens as one does, over the same store.

`--long` compares all kinds of models instead of one. What each rank computes: `tests/engine/model/parallel`.
"""

import os
from pathlib import Path

import pytest

from kvstore import CacheTiers, Engine, SamplingParams
from kvstore.engine.process import child
from kvstore.engine.ranks.launch import started_here
from kvstore.engine.ranks.ranks import Ranks
from kvstore.errors import ConfigError, KVStoreError, ModelError, UnsupportedModelError
from tests.support.engines import Plain, ask, counters, greedy, open_engine, save_model, settle, tokens
from tests.support.ranks import children
from tests.support.redis_server import RedisServer, wait_for_answers

MODEL = {"tokenizer": True}
FEW = ["Phi3"]  # packed products that are gathered
KINDS = ["Llama", "Qwen2", "Qwen3Moe", "Mistral", "Mixtral", "Phi", "Gemma2", "Gemma3", "Olmo2", "Cohere", "Glm4",
         "GPTNeoX", *FEW]  # fmt: skip
PROMPTS = [tokens(seed, 30 + 9 * seed) for seed in range(6)]


def open_two(model: str, path: Path | None = None, **options) -> Engine:
    return open_engine(model, path, tensor_parallel_size=2, **options)


@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_say_what_one_does(name, request, tmp_path):
    if name not in FEW and not request.config.getoption("--long"):
        pytest.skip("needs --long")
    model = save_model(tmp_path / "model", name)
    plain = Plain(model)
    expected = [plain(prompt, 12) for prompt in PROMPTS]
    plain.engine.close()
    with open_two(model, tmp_path / "store") as engine:
        for _ in range(2):  # computed, then loaded by both
            assert [out.token_ids for out in engine.generate(PROMPTS, greedy(12))] == expected
            settle(engine)
            engine.loop.call(engine.loop.pool.evict_all)
        assert counters(engine)["loaded"] > 0


def test_servers_of_any_number_of_ranks_share_a_remote_tier(model, plain, tmp_path, monkeypatch):
    monkeypatch.setenv("KVSTORE_FLEET_SECRET", "the secret of this fleet, 32 characters")
    wait_for_answers(monkeypatch)
    redis, told = RedisServer(tmp_path), list(PROMPTS)
    try:
        for number, size in enumerate((2, 1, 2)):
            tiers = CacheTiers("2MiB", "2MiB", remote=redis.url)
            with Engine(model, tiers, device="cpu", load="always", tensor_parallel_size=size) as engine:
                outs = engine.generate(told, greedy(20))
                assert [out.token_ids for out in outs] == [plain(prompt, 20) for prompt in told]
                if number:
                    found = [out.usage.cached_tokens_details.remote for out in outs]
                    assert found == [(len(prompt) - 1) // 16 * 16 for prompt in told]
                told = [[*prompt, *out.token_ids] for prompt, out in zip(told, outs, strict=True)]
                settle(engine)
    finally:
        redis.kill()


def test_the_bytes_of_a_block_do_not_tell_how_many_ranks_computed_it(model, tmp_path):
    """As far as sums in another order leave them alone: the heads are in their places."""
    found = []
    for size in (1, 2):
        with open_engine(model, tmp_path / str(size), tensor_parallel_size=size) as engine:
            ask(engine, PROMPTS[5])
            settle(engine)
            parts = engine.connector.parts
            with parts.lock:
                cpu, tensor = parts.cpu, parts.arena.tensor
                found.append({cpu.record(one).tokens: tensor[one].clone() for one in cpu.pool.cached_blocks()})
    one, two = found
    assert len(one) == 4 and one.keys() == two.keys()
    assert all((one[name] - two[name]).abs().max() < 1e-4 < one[name].abs().max() for name in one)


def test_choices_copy_blocks_on_both_ranks(model):
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)
    with open_engine(model) as one:
        expected = [choice.token_ids for choice in one.generate([PROMPTS[1]], params)[0].choices]
    with open_two(model) as engine:
        assert [choice.token_ids for choice in engine.generate([PROMPTS[1]], params)[0].choices] == expected


# -- what cannot be ----------------------------------------------------------------------------------------------------
def test_what_cannot_be_divided_is_refused_and_leaves_nothing(tmp_path):
    before, model = children(os.getpid()), save_model(tmp_path / "model", "StableLm")
    with pytest.raises(UnsupportedModelError, match="has no plan of tensor parallelism"):
        open_two(model)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        open_engine(model, tensor_parallel_size=0)
    assert children(os.getpid()) <= before


def test_what_keeps_another_rank_from_starting_is_told_with_its_number(tmp_path):
    before = children(os.getpid())
    arguments = [{"model": str(tmp_path / "none"), "cache_tiers": {}}]
    with started_here(arguments, 600.0, {}) as launch, pytest.raises(ModelError, match=r"rank 1 of 2: .*none"):
        Ranks(launch, 16).wait_loaded()
    assert children(os.getpid()) <= before


@pytest.mark.parametrize(("how", "told"), [("killed", r"ended \(signal 9\)"), ("raises", "no way to the others")])
def test_a_rank_that_is_lost_while_all_join_is_not_waited_for(model, monkeypatch, how, told):
    """It has loaded. The first rank waits in gloo, which would wait for a day."""
    before = children(os.getpid())

    monkeypatch.setattr(child, "PROGRAM", "tests.children.lost_rank")
    monkeypatch.setenv("LOST_RANK", how)
    with pytest.raises(KVStoreError, match=f"rank 1 of 2.* {told}"):
        open_two(model)
    assert children(os.getpid()) <= before
