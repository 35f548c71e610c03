"""States that must not be there any more, or must not go: after a deletion, an error, where there is little room."""

import pytest

from kvstore import Engine, SamplingParams
from kvstore.blocks.ids import Lineage, token_bytes
from kvstore.memory.transfer import Arena
from kvstore.store.stored import ChainContent
from tests.engine.model.test_states import opened
from tests.support.by_hand import by_hand
from tests.support.engines import chain_of, greedy, settle, tokens
from tests.support.faults import before_each, before_each_step, fail

NAMED = "My name is Ada, and I live in Turin."


def test_a_deletion_leaves_the_state_that_a_choice_has_not_copied_yet(saved_model):
    """The first choice ends with its first token, and has left its slot before the second one's first step."""
    model, prompt = saved_model("Qwen3_5Text", tokenizer=True), tokens(3, 40)
    with opened(model) as engine:
        for seed in range(50):
            params = SamplingParams(max_tokens=12, temperature=1.5, seed=seed, n=2)
            first, second = (choice.token_ids for choice in engine.generate([prompt], params)[0].choices)
            if first[0] not in second and len(second) == 12:
                break
        params = SamplingParams(max_tokens=12, temperature=1.5, seed=seed, n=2, stop_token_ids=[first[0]])
        expected = [choice.token_ids for choice in engine.generate([prompt], params)[0].choices]
    assert list(map(len, expected)) == [1, 12]
    with by_hand(opened(model)) as engine:
        loop, states, num_deletions = engine.loop, engine.loop.scheduler.manager.states, 0
        step = loop.round

        def stepping():
            nonlocal num_deletions
            step()
            if states._before:
                num_deletions += 1
                loop.inbox.put(loop.erasure.forget, (b"x" * 32,))  # another session's

        loop.round = stepping
        found = [choice.token_ids for choice in engine.generate([prompt], params)[0].choices]
    assert num_deletions and found == expected


def test_after_an_error_a_deletion_overwrites_states_too(saved_model):
    with opened(saved_model("Qwen3_5Text", tokenizer=True)) as engine:
        engine.chat("red").send(NAMED, greedy(20))
        rows = engine.loop.runner.states.rows
        assert rows.any()
        with before_each_step(engine, fail), pytest.raises(RuntimeError):
            engine.generate([tokens(1, 5)], greedy(2))
        engine.admin.delete_session("red")
        assert not rows.any()


def test_a_deletion_reaches_states_that_hbm_alone_has_behind_what_is_deleted(saved_model):
    with opened(saved_model("Qwen3_5Text", tokenizer=True)) as engine:
        chat = engine.chat("red")
        chat.send(NAMED, greedy(20))
        engine.generate([[*chat.window.token_ids, *tokens(5, 50)]], greedy(4))
        engine.admin.delete_session("red")
        assert not engine.loop.runner.states.rows.any()


def border(engine: Engine, ids: list[int]) -> int:
    """Behind how many blocks of this prompt a request could begin, by what CPU and disk have."""
    parts, chain = engine.connector.parts, chain_of(engine, ids)
    content = ChainContent(chain, token_bytes(ids), Lineage(engine.facts.root("")), "")
    with parts.lock:
        stored = parts.store.stored
        found = stored.restorable(content, 0, len(stored.tiers(chain, 0, len(chain))))
    return 0 if found is None else found.border


def test_whole_windows_stay_where_there_is_no_room_for_whole_new_ones(saved_model, tmp_path):
    model = saved_model("Gemma3", max_position_embeddings=512)
    with opened(model, path=tmp_path, cpu="4MiB", disk="64MiB") as engine:
        store, cpu, ids = engine.connector.parts.store, engine.connector.parts.cpu, tokens(1, 40)
        save = store.save_states

        def with_room_for_one(request, states):
            held = []
            while (one := cpu.reserve()) is not None:
                held.append(one)
            for one in held[: store.stored.num_state_blocks]:
                cpu.release(one)
            plan = save(request, states)
            for one in held[store.stored.num_state_blocks :]:
                cpu.release(one)
            return plan

        for turn in range(7):
            store.save_states = with_room_for_one if turn >= 3 else save
            (made,) = engine.generate([ids], greedy(40))
            settle(engine)
            ids = [*ids, *made.token_ids, *tokens(turn + 10, 5)]
            assert border(engine, ids) > 0


def test_a_state_whose_save_has_failed_is_no_hole(saved_model, tmp_path):
    with opened(saved_model("Qwen3_5Text"), path=tmp_path, cpu="8MiB", disk="64MiB") as engine:
        with before_each(Arena, "save_states", fail):
            engine.generate([tokens(1, 40)], greedy(20))
            settle(engine)
        assert engine.stats()["store"]["dropped_saves"] > 0 and engine.stats()["store"]["unsaved"] == 0
