"""Sessions through the engine: resumed token by token, forked, deleted everywhere, truncated with their KV.

Small random models in float32, real stores, greedy answers.
"""

import time

import pytest

from kvstore import Engine
from kvstore.blocks.ids import token_bytes
from kvstore.engine.sessions.chat import ChatSession
from kvstore.errors import ContextLengthError, RequestError, StoreError
from kvstore.sessions.record import SessionKey
from tests.support.engines import (
    ask,
    cached,
    check_closed,
    counters,
    evict_cpu,
    greedy,
    open_engine,
    save_model,
    settle,
)

MODEL = {"tokenizer": True}
PARAMS = greedy(10)


@pytest.fixture
def opened(model, tmp_path):
    """Opens the same store again and again; what was open before is closed in order."""
    engines: list[Engine] = []

    def again(**options) -> Engine:
        close(engines)
        engines.append(open_engine(options.pop("model", model), tmp_path / "store", **options))
        return engines[-1]

    yield again
    close(engines)


def close(engines: list[Engine]) -> None:
    while engines:
        engines[-1].check_integrity()
        engines.pop().close()


def talk(chat: ChatSession, num_turns: int, word: str = "talk") -> list:
    first = chat.num_turns
    return [chat.send(f"This is message number {first + i} of a {word}.", PARAMS) for i in range(num_turns)]


def fill(chat: ChatSession, word: str = "talk"):
    """Turns until one is truncated; that one's output."""
    before = chat.truncated_tokens
    while chat.truncated_tokens == before:
        (out,) = talk(chat, 1, word)
    return out


# -- resuming ----------------------------------------------------------------------------------------------------------
def test_invariant_5_a_session_is_resumed_with_its_exact_ids_after_a_restart(opened, plain):
    chat = opened().chat("one", system="Be brief.")
    talk(chat, 4)
    messages, token_ids, chain = list(chat.messages), list(chat.token_ids), list(chat.chain)
    again = opened().chat("one")
    assert (again.messages, again.token_ids, again.chain, again.num_turns) == (messages, token_ids, chain, 4)
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


def test_sessions_are_listed_the_last_used_first_and_per_tenant(opened):
    engine = opened()
    for name, tenant in (("a", ""), ("b", ""), ("c", "other"), ("a", "")):
        talk(engine.chat(name, tenant), 1)
    assert [head.key.session_id for head in engine.admin.list_sessions()] == ["a", "b"]
    assert [head.num_turns for head in engine.admin.list_sessions()] == [2, 1]
    engine = opened()
    assert [head.key.session_id for head in engine.admin.list_sessions("other")] == ["c"]


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


def test_invariant_5_a_turn_is_durable_before_its_last_piece(opened):
    engine = opened()
    chat = engine.chat("one")
    for number in (1, 2):
        for piece in chat.stream("Hello", PARAMS):
            state = engine.sessions.load(SessionKey("", "one"))
            assert (state.turn if state else 0) == (number if piece.finish_reason else number - 1)
    state = engine.sessions.load(SessionKey("", "one"))
    assert (state.messages, state.token_ids, state.chain) == (chat.messages, chat.token_ids, chat.chain)


def test_a_turn_that_cannot_be_stored_is_not_part_of_the_conversation(opened, monkeypatch):
    engine = opened()
    chat = engine.chat("one")
    talk(chat, 1)
    before = list(chat.messages), list(chat.token_ids), chat.num_turns
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.sessions), "commit_turn", lambda *_: (_ for _ in ()).throw(StoreError("injected")))
        with pytest.raises(StoreError, match="injected"):
            chat.send("Not stored", PARAMS)
    assert (chat.messages, chat.token_ids, chat.num_turns) == before
    out = chat.send("Stored", PARAMS)
    assert out.prompt_token_ids[: len(before[1])] == before[1] and chat.num_turns == 2


# -- forks -------------------------------------------------------------------------------------------------------------
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
    fill(chat)
    last = chat.num_turns
    before, after = chat.fork("before", turn=last - 1), chat.fork("after", turn=last)
    settle(engine)
    engine = opened()
    before, after = engine.chat("before"), engine.chat("after")
    assert before.lineage.splice_index is None and after.lineage.splice_index is not None
    assert before.truncated_tokens == 0 and after.truncated_tokens == engine.chat("one").truncated_tokens > 0
    known = len(after.token_ids)
    mine = after.send("More?", PARAMS)
    assert cached(mine)[3] + cached(mine)[2] == (known - 1) // 16 * 16 and cached(mine)[3] > 0
    theirs = engine.chat("one").send("More?", PARAMS)
    assert theirs.token_ids == mine.token_ids and theirs.prompt_token_ids == mine.prompt_token_ids
    out = before.send("More?", PARAMS)  # its window is full, too
    assert before.truncated_tokens > 0 and len(out.token_ids) == 10


# -- deletion ----------------------------------------------------------------------------------------------------------
def kv_of(engine: Engine, chain: list[bytes]) -> dict[bytes, list[bytes]]:
    """What to look for of each block: a run of its values and its raw keys as the arena has them, and its ids."""
    connector, found = engine.connector, {}
    with connector._lock:
        for block_id in chain:
            slot = connector._cpu.find(block_id)
            if slot is not None:
                layer = connector._arena.tensor[slot, 1]
                found[block_id] = [layer[side, 3].numpy().tobytes() for side in (0, 1)]
    return found


def hbm_bytes(engine: Engine) -> bytes:
    return b"".join(cache.numpy().tobytes() for layer in engine.loop.runner.caches for cache in layer)


def places(engine: Engine, path) -> dict[str, bytes]:
    files = {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*.mdb") if p.name == "data.mdb"}
    return {"hbm": hbm_bytes(engine), "arena": bytes(engine.connector._arena._memory), **files}


def check_gone(engine: Engine, path, needles: list[bytes]) -> None:
    engine.admin.compact()
    for name, content in places(engine, path).items():
        assert not any(needle in content for needle in needles), f"something of the session is left in {name}"


def check_there(engine: Engine, path, needles: list[bytes]) -> None:
    found = places(engine, path).values()
    assert all(any(needle in content for content in found) for needle in needles), "the test looks for nothing"


@pytest.mark.parametrize("flushed", [True, False], ids=["flushed", "still in the write queue"])
def test_deleting_a_session_leaves_nothing_of_it_anywhere(opened, tmp_path, flushed):
    engine = opened()
    chat = engine.chat("secret", system="Be brief.")
    talk(chat, 5, "secret matter")
    if flushed:
        settle(engine)
    needles = [part for parts in kv_of(engine, chat.chain).values() for part in parts]
    needles += [token_bytes(chat.token_ids[i : i + 16]) for i in range(0, len(chat.token_ids) - 16, 16)]
    needles.append(b"secret matter")
    if flushed:
        check_there(engine, tmp_path / "store", needles)
    assert engine.admin.delete_session("secret") == len(chat.chain)
    check_gone(engine, tmp_path / "store", needles)
    with pytest.raises(RequestError, match="deleted"):
        chat.send("Still there?", PARAMS)
    with pytest.raises(RequestError, match="no session"):
        engine.admin.delete_session("secret")
    assert engine.sessions.load(SessionKey("", "secret")) is None
    out = engine.chat("secret", system="Be brief.").send("This is message number 0 of a secret matter.", PARAMS)
    assert cached(out) == (0, 0, 0, 0)
    assert check_closed(engine, {engine.root("")}) > 0


def test_deleting_a_fork_keeps_what_it_shares(opened, tmp_path, plain):
    engine = opened()
    chat = engine.chat("kept", system="Be brief.")
    talk(chat, 3)
    fork = chat.fork("gone")
    talk(fork, 3, "secret matter")
    settle(engine)
    shared, own = chat.chain, [block_id for block_id in fork.chain if block_id not in chat.chain]
    needles = [part for parts in kv_of(engine, own).values() for part in parts]
    assert len(needles) == 2 * len(own) > 4
    assert engine.admin.delete_session("gone") == len(own)
    check_gone(engine, tmp_path / "store", needles)
    check_there(engine, tmp_path / "store", [part for parts in kv_of(engine, shared).values() for part in parts])
    engine = opened()
    known = len(engine.chat("kept").token_ids)
    out = engine.chat("kept").send("Go on", PARAMS)
    assert cached(out)[2] == (known - 1) // 16 * 16 and out.token_ids == plain(out.prompt_token_ids, 10)


@pytest.fixture
def unrecorded(opened, monkeypatch):
    """A session with a turn that was computed and saved but could not be recorded; and what to look for of it all."""
    engine = opened()
    chat = engine.chat("secret")
    talk(chat, 2)
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.sessions), "commit_turn", lambda *_: (_ for _ in ()).throw(StoreError("injected")))
        with pytest.raises(StoreError):
            chat.send("This is never stored, and is long enough to fill more than one block of tokens.", greedy(30))
    settle(engine)
    with engine.connector._lock:
        cpu = engine.connector._cpu
        every = [cpu.record(slot).block_id for slot in cpu.blocks()]
    assert len(every) > len(chat.chain) + 1
    return engine, [part for parts in kv_of(engine, every).values() for part in parts]


def test_deleting_a_session_takes_what_its_record_never_named(unrecorded, tmp_path):
    engine, needles = unrecorded
    engine.admin.delete_session("secret")
    assert check_closed(engine, set()) == 0, "something of the session is still stored"
    engine.admin.compact()
    below = {name: content for name, content in places(engine, tmp_path / "store").items() if name != "hbm"}
    assert not any(needle in content for needle in needles for content in below.values())


def test_deleting_a_session_takes_what_its_record_never_named_from_hbm_too(unrecorded, tmp_path):
    engine, needles = unrecorded
    engine.admin.delete_session("secret")
    check_gone(engine, tmp_path / "store", needles)


def test_deleting_a_session_whose_turn_runs_leaves_nothing_of_that_turn(opened, tmp_path):
    engine = opened()
    chat = engine.chat("secret")
    talk(chat, 2)
    stream = chat.stream("Tell me everything about it, and then some more.", greedy(60))
    for _ in range(5):
        next(stream)
    engine.admin.delete_session("secret")
    with pytest.raises(StoreError):
        list(stream)
    settle(engine)
    assert check_closed(engine, set()) == 0, "something of the deleted session was stored afterwards"


def test_a_deletion_that_a_crash_cut_off_is_carried_out_at_the_next_start(opened, tmp_path, monkeypatch):
    engine = opened()
    chat = engine.chat("secret")
    talk(chat, 4, "secret matter")
    settle(engine)
    needles = [part for parts in kv_of(engine, chat.chain).values() for part in parts]
    monkeypatch.setattr(engine.connector, "forget", lambda *_: (frozenset(), False))
    engine.admin.delete_session("secret")
    assert len(engine.sessions.pending_deletions()) == 1
    blocks = tmp_path / "store" / "blocks" / "data.mdb"
    assert all(needle in blocks.read_bytes() for needle in needles)
    engine = opened()
    assert list(engine.sessions.pending_deletions()) == []
    check_gone(engine, tmp_path / "store", needles)


def test_a_session_whose_time_is_over_is_deleted(opened, tmp_path):
    engine = opened()
    chat = engine.chat("short")
    with pytest.raises(RequestError, match="no turn"):
        chat.set_ttl(1.0)
    talk(chat, 3)
    talk(engine.chat("long"), 1)
    chat.set_ttl(0.01)
    settle(engine)
    needles = [part for parts in kv_of(engine, chat.chain[1:]).values() for part in parts]
    time.sleep(0.05)
    engine.admin._last_expiry_s = -1e9
    assert [head.key.session_id for head in engine.admin.list_sessions()] == ["long"]
    check_gone(engine, tmp_path / "store", needles)


def test_a_session_whose_time_is_over_is_not_resumed(opened):
    engine = opened()
    chat = engine.chat("short")
    talk(chat, 2)
    chat.set_ttl(0.01)
    time.sleep(0.05)
    engine = opened()
    assert engine.chat("short").num_turns == 0


# -- truncation --------------------------------------------------------------------------------------------------------
def test_a_truncated_turn_keeps_its_kv(opened):
    engine = opened()
    chat = engine.chat("one", system="Be kind, and be brief, and never say anything that is not so, or else be silent.")
    talk(chat, 1)
    out = fill(chat)
    hbm, cpu, disk, reencoded = cached(out)
    head = chat.lineage.splice_index * 16
    assert head > 0 and reencoded > 0 and hbm == head and cpu == disk == 0
    assert out.usage.cached_tokens == chat.lineage.splice_end * 16
    assert counters(engine)["spliced"] == chat.lineage.splice_end - chat.lineage.splice_index
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
                    evict_cpu(engine)
                    engine.loop.pool.evict_all()
                talk(chat, 1)
            first = chat.last
            engine.loop.pool.evict_all()
            outs.append((first.token_ids, chat.chain[: chat.lineage.splice_index], talk(chat, 1)[0].token_ids))
            engine.check_integrity()
    assert outs[0][0] == outs[1][0] == outs[2][0]
    assert outs[0][2] == outs[1][2] == outs[2][2]


def test_repeated_truncations_and_a_restart_after_each(opened):
    engine = opened()
    chat = engine.chat("one", system="Be kind.")
    for _ in range(3):
        out = fill(chat)
        assert cached(out)[3] > 0
        settle(engine)
        engine = opened()
        chat = engine.chat("one")
        known = len(chat.token_ids)
        (out,) = talk(chat, 1)
        assert sum(cached(out)) == (known - 1) // 16 * 16 and cached(out)[3] > 0
    assert counters(engine)["given_up_splices"] == 0


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
    out = fill(chat)
    assert cached(out)[3] == 0 and chat.lineage.splice_index is None
    assert out.token_ids == plain(out.prompt_token_ids, 10)
    known = len(chat.token_ids)
    settle(engine)
    chat = opened().chat("one", truncation_reuse="exact")
    (out,) = talk(chat, 1)
    assert cached(out) == (0, 0, (known - 1) // 16 * 16, 0) and out.token_ids == plain(out.prompt_token_ids, 10)


def test_reencoded_blocks_never_serve_an_exact_prompt_of_the_same_tokens(opened, plain):
    engine = opened()
    chat = engine.chat("one", system="Be kind.")
    fill(chat)
    (last,) = talk(chat, 1)
    for evict in (lambda: None, engine.loop.pool.evict_all, lambda: (evict_cpu(engine), engine.loop.pool.evict_all())):
        evict()
        out = ask(engine, last.prompt_token_ids, 10)
        assert cached(out)[3] == 0 and out.token_ids == plain(last.prompt_token_ids, 10)
    exact = engine.chat("one", truncation_reuse="exact")
    assert exact is chat


def test_a_missing_reencoded_block_gives_up_the_splice_and_the_session_becomes_exact(opened, plain):
    from kvstore.blocks.records import Evict

    engine = opened()
    chat = engine.chat("one", system="Be kind.")
    fill(chat)
    settle(engine)
    lineage = chat.lineage
    gone = frozenset(chat.chain[lineage.splice_end - 1 :])
    engine.admin.evict(Evict(block_ids=gone))
    engine = opened()
    chat = engine.chat("one")
    assert chat.lineage == lineage
    (out,) = talk(chat, 1)
    assert cached(out)[3] == 0 and out.token_ids == plain(out.prompt_token_ids, 10)
    assert chat.lineage.splice_index is None
    state = engine.sessions.load(SessionKey("", "one"))
    assert (state.first_reencoded, state.chain, state.token_ids) == (None, chat.chain, chat.token_ids)
    assert engine.sessions.turn(SessionKey("", "one"), chat.num_turns).base == "rebase"
    settle(engine)
    known = len(chat.token_ids)
    chat = opened().chat("one")
    (out,) = talk(chat, 1)
    assert cached(out) == (0, 0, (known - 1) // 16 * 16, 0) and out.token_ids == plain(out.prompt_token_ids, 10)


@pytest.mark.parametrize("cpu, disk", [(0, "32MiB"), ("2MiB", 0), (0, 0)], ids=["no cpu", "no disk", "neither"])
def test_conversations_with_a_tier_switched_off(model, plain, tmp_path, cpu, disk):
    with open_engine(model, tmp_path / "s", cpu=cpu, disk=disk) as engine:
        chat = engine.chat("one", system="Be kind.")
        for out in talk(chat, 4):
            assert out.token_ids == plain(out.prompt_token_ids, 10)
        known = len(chat.token_ids)
        settle(engine)
        engine.loop.pool.evict_all()
        (out,) = talk(chat, 1)
        tier = {0: 2, 1: 1}[bool(cpu)] if cpu or disk else None
        expected = [0, 0, 0, 0]
        if tier is not None:
            expected[tier] = (known - 1) // 16 * 16
        assert list(cached(out)) == expected and out.token_ids == plain(out.prompt_token_ids, 10)
        out = fill(chat)
        if cpu:
            assert cached(out)[3] > 0
        else:  # without slots to copy in, what is kept is computed
            assert cached(out)[3] == 0 and out.token_ids == plain(out.prompt_token_ids, 10)
        settle(engine)
        if disk and not cpu:
            assert engine.stats()["cpu"]["cached_blocks"] == 0, "a staging area keeps nothing"
        engine.check_integrity()


def test_sessions_without_a_disk_live_as_long_as_the_engine(model, tmp_path):
    with open_engine(model) as engine:
        talk(engine.chat("one"), 2)
        assert engine.chat("one").num_turns == 2
        engine.admin.delete_session("one")
        assert engine.chat("one").num_turns == 0
