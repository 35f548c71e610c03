"""The window of a conversation: filled to its last token, truncated with its KV, a splice that is given up."""

import threading
from contextlib import ExitStack

import pytest

from kvstore import Engine
from kvstore.blocks.records import Evict
from kvstore.errors import ContextLengthError, StoreError
from kvstore.sessions.record import SessionKey
from tests.support.by_hand import ending_at_once
from tests.support.conversations import (
    LONG,
    PARAMS,
    SYSTEM,
    failing_to_store,
    fill,
    fill_over,
    nothing_is_left,
    num_stored,
    talk,
)
from tests.support.engines import ask, cached, counters, evict_memory, greedy, open_engine, settle
from tests.support.faults import before_each_step, fail
from tests.support.waiting import TIMEOUT_S

MODEL = {"tokenizer": True}


def test_a_truncated_turn_keeps_its_kv(opened):
    engine = opened()
    chat = engine.chat("one", system="Be kind, and be brief, and never say anything that is not so, or else be silent.")
    talk(chat, 1)
    out = fill_over(chat)
    hbm, cpu, disk, reencoded = cached(out)
    head = chat.window.lineage.splice_index * 16
    assert head > 0 and reencoded > 0 and hbm == head and cpu == disk == 0
    assert out.usage.cached_tokens == chat.window.lineage.splice_end * 16
    assert counters(engine)["spliced"] == chat.window.lineage.splice_end - chat.window.lineage.splice_index
    computed = out.usage.prompt_tokens - out.usage.cached_tokens
    assert computed < 64 and out.usage.prompt_tokens <= 128


def test_invariant_1_the_same_splice_gives_the_same_tokens_in_every_run(model, tmp_path):
    """Cold from CPU, from disk after a restart, and preempted or not: re-encoded KV is what the splice made it."""
    outs, chunked = [], {"max_num_batched_tokens": 24, "max_num_seqs": 8}
    for name, changes in (("a", {}), ("b", {"hbm": 40 * 12288}), ("c", chunked)):
        with open_engine(model, tmp_path / name, **changes) as engine:
            chat = engine.chat("one", system="Be kind.")
            while chat.truncated_tokens == 0:
                if name == "c":
                    engine.loop.pool.evict_all()
                if name == "b":
                    evict_memory(engine)
                talk(chat, 1)
            first = chat.last
            engine.loop.pool.evict_all()
            exact = chat.window.chain[: chat.window.lineage.splice_index]
            outs.append((first.token_ids, exact, talk(chat, 1)[0].token_ids))
            engine.check_integrity()
    assert outs[0][0] == outs[1][0] == outs[2][0]
    assert outs[0][2] == outs[1][2] == outs[2][2]


def test_repeated_truncations_and_a_restart_after_each(opened):
    engine = opened()
    chat = engine.chat("one", system="Be kind.")
    for _ in range(3):
        out = fill_over(chat)
        assert cached(out)[3] > 0
        settle(engine)
        engine = opened()
        chat = engine.chat("one")
        known = len(chat.token_ids)
        (out,) = talk(chat, 1)
        assert sum(cached(out)) == (known - 1) // 16 * 16 and cached(out)[3] > 0
    assert counters(engine)["given_up_splices"] == 0


def test_a_truncation_keeps_the_kv_before_a_block_that_is_lost(opened):
    engine = opened()
    chat = engine.chat("one", system="Be kind.")
    fill(chat)
    settle(engine)
    engine.admin.evict(Evict(block_ids=frozenset(chat.window.chain[-1:])))
    out = chat.send(LONG, PARAMS)
    assert chat.truncated_tokens and cached(out)[3] > 0 and out.usage.prompt_tokens - out.usage.cached_tokens < 64
    known = len(chat.token_ids)
    settle(engine)
    (out,) = talk(opened().chat("one"), 1)
    assert sum(cached(out)) == (known - 1) // 16 * 16 and cached(out)[3] > 0


def test_truncation_disabled_refuses_and_changes_nothing(opened):
    engine = opened()
    chat = engine.chat("one", truncation="disabled")
    with pytest.raises(ContextLengthError, match="context window has 256"):
        for _ in range(50):
            talk(chat, 1)
    assert chat.truncated_tokens == 0
    chat = engine.chat("one", truncation="auto")
    talk(chat, 1)
    assert chat.truncated_tokens > 0


def test_invariant_1_exact_truncation_computes_what_was_kept(opened, plain):
    engine = opened()
    chat = engine.chat("one", system="Be kind.", truncation_reuse="exact")
    out = fill_over(chat)
    assert cached(out)[3] == 0 and chat.window.lineage.splice_index is None
    assert out.token_ids == plain(out.prompt_token_ids, 10)
    known = len(chat.token_ids)
    settle(engine)
    chat = opened().chat("one", truncation_reuse="exact")
    (out,) = talk(chat, 1)
    assert cached(out) == (0, 0, (known - 1) // 16 * 16, 0) and out.token_ids == plain(out.prompt_token_ids, 10)


def test_reencoded_blocks_never_serve_an_exact_prompt_of_the_same_tokens(opened, plain):
    engine = opened()
    chat = engine.chat("one", system="Be kind.")
    fill_over(chat)
    (last,) = talk(chat, 1)
    for evict in (lambda: None, engine.loop.pool.evict_all, lambda: evict_memory(engine)):
        evict()
        out = ask(engine, last.prompt_token_ids, 10)
        assert cached(out)[3] == 0 and out.token_ids == plain(last.prompt_token_ids, 10)
    exact = engine.chat("one", truncation_reuse="exact")
    assert exact is chat


def test_a_missing_reencoded_block_gives_up_the_splice_and_the_session_becomes_exact(opened, plain):
    engine = opened()
    chat = engine.chat("one", system="Be kind.")
    fill_over(chat)
    settle(engine)
    lineage = chat.window.lineage
    gone = frozenset(chat.window.chain[lineage.splice_end - 1 :])
    engine.admin.evict(Evict(block_ids=gone))
    engine = opened()
    chat = engine.chat("one")
    assert chat.window.lineage == lineage
    (out,) = talk(chat, 1)
    assert cached(out)[3] == 0 and out.token_ids == plain(out.prompt_token_ids, 10)
    assert chat.window.lineage.splice_index is None
    state = engine.sessions.load(SessionKey("", "one"))
    assert (state.first_reencoded, state.chain, state.token_ids) == (None, chat.window.chain, chat.token_ids)
    assert engine.sessions.turn(SessionKey("", "one"), chat.num_turns).base == "rebase"
    settle(engine)
    known = len(chat.token_ids)
    chat = opened().chat("one")
    (out,) = talk(chat, 1)
    assert cached(out) == (0, 0, (known - 1) // 16 * 16, 0) and out.token_ids == plain(out.prompt_token_ids, 10)


def of_length(engine: Engine, system: str | None, length: int) -> str:
    """A first message whose prompt has so many tokens."""
    text = "a" + " dog" * (length - 64)
    while True:
        head = [] if system is None else [{"role": "system", "content": system}]
        size = len(engine.chats.language.template.prompt_ids([*head, {"role": "user", "content": text}]))
        if size == length:
            return text
        assert size < length
        text += " dog" if size < length - 8 else "!" if len(text) % 2 else " a"


@pytest.mark.parametrize(("system", "truncation"), [(None, "auto"), (SYSTEM, "auto"), (SYSTEM, "disabled")])
def test_a_first_turn_may_fill_the_window_to_its_last_token(engine, system, truncation):
    window = engine.facts.max_request_tokens
    for number, (size, max_tokens) in enumerate([(window - 1, None), (window - 20, None), (window - 10, 10)]):
        chat = engine.chat(f"fits-{number}", system=system, truncation=truncation)
        out = chat.send(of_length(engine, system, size), greedy(max_tokens))
        assert (out.usage.prompt_tokens, chat.truncated_tokens) == (size, 0)
        assert len(out.token_ids) == window - size
        assert engine.sessions.load(chat.key).num_dropped_messages == 0
        again = chat.send if truncation == "auto" else None
        if again is not None:
            out = again("Hi", greedy(4))
            first = engine.chats.language.template.prompt_ids([*chat.window.system, {"role": "user", "content": "Hi"}])
            assert out.prompt_token_ids == first and chat.window.num_dropped == 2
    for size in (window, window + 30):
        chat = engine.chat(f"does-not-{size}", system=system, truncation=truncation)
        with pytest.raises(ContextLengthError, match=f"has {size} tokens.* has {window}"):
            chat.send(of_length(engine, system, size), PARAMS)
        assert chat.num_turns == 0 and chat.send("Hi", PARAMS).usage.prompt_tokens < 60


def test_who_asks_for_a_huge_answer_does_not_lose_the_conversation_for_it(engine):
    """max_tokens beyond what a truncation leaves room for counts as none: an eighth of the window is kept free."""
    window, chats = engine.facts.max_request_tokens, [engine.chat(name) for name in ("none", "more", "huge", "half")]
    for max_tokens, chat in zip((None, window // 2 + 1, 2**31, window // 2), chats, strict=True):
        chat.send(of_length(engine, None, window // 2), greedy(1))
        before = len(chat.token_ids)
        out = chat.send("Hi", greedy(max_tokens))
        if max_tokens == window // 2:  # which a truncation makes room for
            assert chat.truncated_tokens > 0 and len(out.token_ids) == window // 2
            continue
        assert chat.truncated_tokens == 0 and out.usage.prompt_tokens > before
        assert len(out.token_ids) == window - out.usage.prompt_tokens and out.finish_reason == "length"
        assert out.usage.capped_max_tokens == (None if max_tokens is None else len(out.token_ids))
        assert engine.sessions.turn(chat.key, 2).usage.get("capped_max_tokens") == out.usage.capped_max_tokens
        chat.send("Hi again", greedy(4 if max_tokens is None else max_tokens))
        assert chat.truncated_tokens > 0


def test_a_message_of_more_than_half_the_window_is_answered_with_what_is_left(engine):
    window, chat = engine.facts.max_request_tokens, engine.chat("long")
    talk(chat, 2)
    out = chat.send(of_length(engine, None, window - 9), PARAMS)
    assert (out.usage.prompt_tokens, len(out.token_ids), out.usage.capped_max_tokens) == (window - 9, 9, 9)


@pytest.mark.parametrize("end", ["not stored", "step fails", "no token"])
def test_a_truncating_turn_that_is_not_stored_leaves_no_reused_kv(engine, end):
    chat = engine.chat("one", system=SYSTEM)
    fill(chat)
    before = num_stored(engine)
    stream, spliced, splice = chat.stream(LONG, PARAMS), [], engine.connector.splice
    engine.connector.splice = lambda *arguments: (spliced.append(splice(*arguments)), spliced[-1])[1]
    with failing_to_store(engine), ExitStack() as faults:
        if end == "step fails":
            faults.enter_context(before_each_step(engine, fail))
        if end == "no token":
            faults.enter_context(ending_at_once(engine))
        if end == "no token":
            list(stream)
        else:
            with pytest.raises((StoreError, RuntimeError), match="injected"):
                list(stream)
    assert spliced and spliced[0] is not None
    assert num_stored(engine) <= before + 1
    engine.admin.delete_session("one")
    assert nothing_is_left(engine)


def test_a_truncating_turn_can_be_tried_again(engine):
    chat = engine.chat("one", system=SYSTEM)
    fill(chat)
    text = LONG
    with failing_to_store(engine), pytest.raises(StoreError):
        chat.send(text, PARAMS)
    out = chat.send(text, PARAMS)
    assert cached(out)[3] > 0
    lineage = chat.window.lineage
    assert cached(chat.send("Hi", PARAMS))[3] > 0 and chat.window.lineage == lineage


def test_a_splice_whose_sources_are_deleted_meanwhile_is_abandoned(engine):
    chat = engine.chat("one", system=SYSTEM)
    fill(chat)
    settle(engine)
    copying, go_on = threading.Event(), threading.Event()
    copy = engine.connector.parts.store.splicer._copy

    def slow(*copied):
        copying.set()
        assert go_on.wait(TIMEOUT_S)
        copy(*copied)

    engine.connector.parts.store.splicer._copy = slow
    stream = chat.stream(LONG, PARAMS)
    reader = threading.Thread(target=lambda: list(stream))
    reader.start()
    assert copying.wait(TIMEOUT_S)
    engine.connector.upkeep.forget(chat.window.chain[1:])
    go_on.set()
    reader.join(2 * TIMEOUT_S)
    assert counters(engine)["spliced"] == 0 and counters(engine)["given_up_splices"] == 1
    assert chat.window.lineage.splice_index is None
