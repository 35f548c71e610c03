"""Sessions through the engine: resumed token by token, and forked.

Small random models in float32, real stores, greedy answers.
"""

from contextlib import nullcontext

import pytest

from kvstore.errors import RequestError, StoreError
from kvstore.sessions.record import SessionKey
from tests.support.by_hand import crawling, held
from tests.support.conversations import PARAMS, failing_to_store, fill_over, num_stored, talk
from tests.support.engines import ask, cached, counters, evict_hbm, greedy, open_engine, save_model, settle

MODEL = {"tokenizer": True}


def test_invariant_5_a_session_is_resumed_with_its_exact_ids_after_a_restart(opened, plain):
    chat = opened().chat("one", system="Be brief.")
    talk(chat, 4)
    messages, token_ids, chain = list(chat.messages), list(chat.token_ids), list(chat.window.chain)
    again = opened().chat("one")
    assert (again.messages, again.token_ids, again.window.chain, again.num_turns) == (messages, token_ids, chain, 4)
    out = again.send("And now?", PARAMS)
    assert out.prompt_token_ids[: len(token_ids)] == token_ids
    # The last answer's last token was never forwarded, so the block that ends with it is not stored.
    assert cached(out) == (0, 0, (len(token_ids) - 1) // 16 * 16, 0)
    assert out.token_ids == plain(out.prompt_token_ids, 10)


def test_a_system_prompt_given_again_does_not_change_a_known_session(opened):
    talk(opened().chat("one", system="Be brief."), 1)
    chat = opened().chat("one", system="Be long.")
    chat.send("Hi", PARAMS)
    assert [m["content"] for m in chat.messages if m["role"] == "system"] == ["Be brief."]


def test_another_model_continues_from_the_text(opened, plain, tmp_path):
    chat = opened().chat("one", system="Be brief.")
    talk(chat, 2)
    messages = list(chat.messages)
    other = save_model(tmp_path / "other", "Qwen3", tokenizer=True, seed=5)
    engine = opened(model=other)
    again = engine.chat("one")
    assert again.messages == messages and again.token_ids == []
    out = again.send("Go on", PARAMS)
    assert cached(out) == (0, 0, 0, 0)
    rendered = engine.tokenizer.apply_chat_template(again.messages[:-1], add_generation_prompt=True, return_dict=False)
    assert out.prompt_token_ids == rendered
    last = opened().chat("one")
    assert len(last.messages) == 7
    out = last.send("And back", PARAMS)
    assert out.token_ids == plain(out.prompt_token_ids, 10)


def test_a_turn_that_cannot_be_stored_is_not_part_of_the_conversation(opened):
    engine = opened()
    chat = engine.chat("one")
    talk(chat, 1)
    before = list(chat.messages), list(chat.token_ids), chat.num_turns
    with failing_to_store(engine), pytest.raises(StoreError, match="injected"):
        chat.send("Not stored", PARAMS)
    assert (chat.messages, chat.token_ids, chat.num_turns) == before
    out = chat.send("Stored", PARAMS)
    assert out.prompt_token_ids[: len(before[1])] == before[1] and chat.num_turns == 2


def test_a_fork_continues_at_its_turn_with_the_kv_of_its_source(opened, plain):
    engine = opened()
    chat = engine.chat("one", system="Be brief.")
    talk(chat, 4)
    ids = engine.sessions.load(SessionKey("", "one"), 2).token_ids
    fork = chat.fork("two", turn=2)
    assert (fork.token_ids, fork.num_turns, fork.messages) == (ids, 2, chat.messages[:5])
    settle(engine)
    engine = opened()
    out = engine.chat("two").send("Another way", PARAMS)
    assert cached(out)[2] == len(ids) // 16 * 16 and out.token_ids == plain(out.prompt_token_ids, 10)
    assert engine.chat("one").num_turns == 4
    with pytest.raises(RequestError, match="already"):
        engine.chat("one").fork("two")
    with pytest.raises(RequestError, match="turn is 9"):
        engine.chat("one").fork("three", turn=9)


def test_a_fork_before_and_after_a_truncation(opened, plain):
    engine = opened()
    chat = engine.chat("one", system="Be brief.")
    fill_over(chat)
    last = chat.num_turns
    before, after = chat.fork("before", turn=last - 1), chat.fork("after", turn=last)
    settle(engine)
    engine = opened()
    before, after = engine.chat("before"), engine.chat("after")
    assert before.window.lineage.splice_index is None and after.window.lineage.splice_index is not None
    assert before.truncated_tokens == 0 and after.truncated_tokens == engine.chat("one").truncated_tokens > 0
    known = len(after.token_ids)
    mine = after.send("More?", PARAMS)
    assert cached(mine)[3] + cached(mine)[2] == (known - 1) // 16 * 16 and cached(mine)[3] > 0
    theirs = engine.chat("one").send("More?", PARAMS)
    assert theirs.token_ids == mine.token_ids and theirs.prompt_token_ids == mine.prompt_token_ids
    out = before.send("More?", PARAMS)  # its window is full, too
    assert before.truncated_tokens > 0 and len(out.token_ids) == 10


@pytest.mark.parametrize("cpu, disk", [(0, "32MiB"), ("2MiB", 0), (0, 0)], ids=["no cpu", "no disk", "neither"])
def test_conversations_with_a_tier_switched_off(model, plain, tmp_path, cpu, disk):
    with open_engine(model, tmp_path / "s", cpu=cpu, disk=disk) as engine:
        chat = engine.chat("one", system="Be kind.")
        for out in talk(chat, 4):
            assert out.token_ids == plain(out.prompt_token_ids, 10)
        known = len(chat.token_ids)
        evict_hbm(engine)
        (out,) = talk(chat, 1)
        tier = {0: 2, 1: 1}[bool(cpu)] if cpu or disk else None
        expected = [0, 0, 0, 0]
        if tier is not None:
            expected[tier] = (known - 1) // 16 * 16
        assert list(cached(out)) == expected and out.token_ids == plain(out.prompt_token_ids, 10)
        out = fill_over(chat)
        if cpu:
            assert cached(out)[3] > 0
        else:  # without arena blocks to copy in, what is kept is computed
            assert cached(out)[3] == 0 and out.token_ids == plain(out.prompt_token_ids, 10)
        settle(engine)
        if disk and not cpu:
            assert engine.stats()["cpu"]["cached_blocks"] == 0, "a staging area keeps nothing"
        engine.check_integrity()


def test_a_prefetch_of_a_session_of_another_model_reads_nothing(model, tmp_path):
    other = save_model(tmp_path / "other", tokenizer=True, seed=5)
    with open_engine(model, tmp_path / "store") as engine:
        engine.chat("one").send("Hello, this is long enough to fill a few blocks of tokens.", greedy(30))
        num_blocks = num_stored(engine)
    with open_engine(other, tmp_path / "store") as engine:
        engine.prefetch("one")
        settle(engine)
        assert (counters(engine)["prefetched"], engine.stats()["disk"]["blocks"]) == (0, num_blocks)
    with open_engine(model, tmp_path / "store") as engine:
        engine.prefetch("one")
        settle(engine)
        assert counters(engine)["prefetched"] > 0


def test_a_fork_replaces_an_object_without_turns_and_keeps_the_way_to_truncate(engine):
    chat = engine.chat("one", truncation="disabled", truncation_reuse="exact")
    chat.send("Hello", PARAMS)
    empty = engine.chat("two")
    fork = chat.fork("two")
    assert fork is not empty and fork.num_turns == 1 and engine.chat("two") is fork
    assert (fork.truncation, fork.truncation_reuse) == ("disabled", "exact")
    fork.send("Hi", PARAMS)


def test_truncation_changes_only_when_it_is_given(engine):
    chat = engine.chat("one")
    assert (chat.truncation, chat.truncation_reuse) == ("auto", "reencode")
    engine.chat("one", truncation="disabled")
    engine.chat("one", truncation_reuse="exact")
    assert engine.chat("one") is chat and (chat.truncation, chat.truncation_reuse) == ("disabled", "exact")
    with pytest.raises(RequestError, match="truncation is ''"):
        engine.chat("one", truncation="")


@pytest.mark.parametrize("at_once", [True, False], ids=["computed twice", "computed once"])
@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "broken off, too"])
def test_a_turn_that_is_broken_off_leaves_a_running_one_what_they_have_in_common(opened, at_once, is_kept):
    """If nobody has that in the end, it goes with the session whose turn has computed it."""
    engine, said = opened(), [{"role": "user", "content": "Tell me all about the harbour in winter. " * 3}]
    chat, client = engine.chat("kept", system="Be brief."), engine.client
    talk(chat, 1)
    first, second = forks = [chat.fork("first"), chat.fork("second")]
    holds = [engine.chats.claims.hold(fork.key) for fork in forks]
    with crawling(engine):
        with held(engine) if at_once else nullcontext():
            streams = [client.stream(first.begin(holds[0], said, greedy(100)).handle)]
            streams += [client.stream(second.begin(holds[1], said, PARAMS).handle)] if at_once else []
        next(streams[0])
        streams += [] if at_once else [client.stream(second.begin(holds[1], said, PARAMS).handle)]
        next(streams[1])
        first.end(holds[0], keep=False)
    assert len(list(streams[1])) == PARAMS.max_tokens - 1 and (second.end(holds[1], is_kept) is not None) == is_kept
    for hold in holds:
        engine.chats.claims.release(hold)
    num_known = len(second.token_ids)
    if is_kept:
        assert second.send("Go on", PARAMS).usage.cached_tokens == (num_known - 1) // 16 * 16
    else:
        engine.admin.delete_session("first")
        assert ask(engine, holds[1].turn.handle.output.prompt_token_ids).usage.cached_tokens <= num_known
