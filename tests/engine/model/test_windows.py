"""Layers with a window in HBM: they have KV where somebody sees it, and lose it elsewhere."""

import pytest
import torch

from kvstore.errors import ConfigError
from tests.support.by_hand import by_hand
from tests.support.conversations import nothing_is_left
from tests.support.engines import chain_of, evict_hbm, greedy, open_engine, settle, tokens
from tests.support.models import check_answer, network_of

BLOCK, CHUNK = 16, 48
SPAN = 2  # blocks that a token sees before its own: a window has 24 tokens
FAMILIES = ("Gemma3", "GptOss")  # by C on a CPU; in torch, as attention has sinks


FEW = {"hbm": "400KiB", "max_num_seqs": 1}  # some 80 blocks and 8 slots: for a step, and a window


def opened(model: str, path=None, hbm: str = "4MiB", **options: object):
    return open_engine(model, path, hbm, "8MiB", "64MiB", dtype="float32", max_num_batched_tokens=CHUNK, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_conversation_has_the_windows_of_its_step_and_of_its_last_turns(family, saved_model):
    asked, model = tokens(1, 400), saved_model(family, max_position_embeddings=1024)
    with by_hand(opened(model)) as engine:
        windows, held = engine.loop.scheduler.manager.windows, []
        handle = engine.submit(asked, greedy(100))
        while engine.has_work:
            engine.step()
            held.append(windows.num_slots - windows.num_free)
        assert max(held) <= CHUNK // BLOCK + SPAN + 2 < len(handle.output.token_ids) // BLOCK + 400 // BLOCK
        (again,) = engine.generate([asked + handle.output.token_ids + [7]], greedy(4))
        assert again.usage.cached_tokens_details.hbm == 496
        engine.check_integrity()
    check_answer(network_of(model), asked, handle.output.token_ids)
    check_answer(network_of(model), asked + handle.output.token_ids + [7], again.token_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_when_slots_run_out_before_blocks_requests_are_preempted_and_give_the_same_tokens(family, saved_model):
    model, prompts = saved_model(family), [tokens(seed, 5) for seed in range(16)]
    with opened(model, hbm="800KiB") as engine:
        made = engine.generate(prompts, greedy(60))
        (choices,) = engine.generate([tokens(80, 40)], greedy(20, n=3))
        stats = engine.stats()["hbm"]
        assert stats["blocks"] > 16 * 5 and stats["window_slots"] == stats["free_window_slots"] < 16 * (SPAN + 2)
        assert engine.loop.scheduler.roster.num_preemptions > 0
        engine.check_integrity()
    for asked, one in [*zip(prompts, made, strict=True), (tokens(80, 40), choices)]:
        for choice in one.choices:
            check_answer(network_of(model), asked, choice.token_ids)


def test_a_turn_whose_windows_went_to_others_loads_them_and_the_next_one_does_not(saved_model, tmp_path):
    model, history = saved_model("Gemma3"), tokens(1, 100)
    with opened(model, tmp_path, **FEW) as engine:
        for turn, tier in enumerate(("", "cpu", "hbm")):
            (made,) = engine.generate([history], greedy(4))
            assert [getattr(made.usage.cached_tokens_details, tier)] == [96] if tier else True, turn
            check_answer(network_of(model), history, made.token_ids)
            settle(engine)
            if not turn:
                for seed in range(2, 6):
                    engine.generate([tokens(seed, 100)], greedy(4))
                settle(engine)
                assert all(engine.loop.pool.lookup(block_id) is not None for block_id in chain_of(engine, history[:96]))


def test_without_tiers_below_a_lost_window_is_named(saved_model):
    with opened(saved_model("Gemma3", tokenizer=True), **FEW) as engine:
        chat = engine.chat("red")
        chat.send("My name is Ada, and I live in Turin, where it rains. " * 3, greedy(20))
        for seed in range(3):
            engine.generate([tokens(seed, 100)], greedy(4))
        usage = chat.send("What is my name?", greedy(4)).usage
        assert usage.cached_tokens == 0
        assert usage.miss is not None and (usage.miss.cause, usage.miss.tier) == ("no_checkpoint", "hbm")


@pytest.mark.parametrize("options", [{}, FEW])
def test_of_a_deleted_conversation_no_window_is_left(options, saved_model, tmp_path):
    model = saved_model("Gemma3", tokenizer=True, max_position_embeddings=1024)
    with opened(model, tmp_path, **options) as engine:
        chat = engine.chat("red")
        for _ in range(3):
            chat.send("My name is Ada, and I live in Turin. " * 4, greedy(20))
        caches = [cache for layer in engine.loop.runner.caches for cache in layer]
        assert {len(cache) for cache in caches} == {engine.loop.pool.num_blocks, windows_of(engine).num_slots + 1}
        assert all(bool(cache.any()) for cache in caches) and not any(
            bool(cache[0].any()) for cache in windowed(engine)
        )
        settle(engine)
        engine.admin.delete_session("red")
        assert nothing_is_left(engine)
        engine.check_integrity()


def windows_of(engine):
    return engine.loop.scheduler.manager.windows


def windowed(engine) -> list[torch.Tensor]:
    runner = engine.loop.runner
    layers = zip(runner.model.spec.numbers, runner.caches, strict=True)
    return [cache for number, pair in layers if number is None for cache in pair]


def test_a_loaded_window_lies_in_the_slots_of_its_last_blocks(saved_model, tmp_path):
    model, asked = saved_model("Gemma3"), tokens(1, 100)
    with by_hand(opened(model, tmp_path)) as engine:
        engine.generate([asked], greedy(4))
        evict_hbm(engine)
        engine.loop.erasure.go_on(always=True)
        assert not any(bool(cache.any()) for cache in windowed(engine))
        engine.submit(asked, greedy(4))
        engine.step()
        (request,) = engine.loop.scheduler.roster.requests.values()
        slots = windows_of(engine).of[request.block_numbers].tolist()
        assert slots[: 6 - SPAN] == [0] * (6 - SPAN) and 0 not in slots[6 - SPAN :]
        while engine.has_work:
            engine.step()


def test_a_pool_without_room_for_a_block_and_a_slot_is_refused(saved_model):
    with pytest.raises(ConfigError, match=r"hbm is 7\.0 KiB, but one block of this model needs"):
        open_engine(saved_model("Gemma3"), hbm="7KiB", dtype="float32")
