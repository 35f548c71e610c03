"""Conversations at their edges: full windows, deletions during a turn, time to live, forks; how engines end."""

import gc
import os
import threading
import time
import weakref
from contextlib import contextmanager

import pytest

import kvstore.store.tiered
from kvstore import Engine
from kvstore.engine import admin
from kvstore.engine.lifetime import shut_dropped
from kvstore.engine.sessions.chat import ChatSession
from kvstore.errors import ContextLengthError, RequestError, StoreError
from tests.support.by_hand import by_hand, ended_at_once
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
    tokens,
)
from tests.support.waiting import wait_until

MODEL = {"tokenizer": True}
PARAMS = greedy(10)
SYSTEM = "Be brief."
LONG = "This is message number one of a talk."


@pytest.fixture
def engine(model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        yield engine
        engine.check_integrity()


def fill(chat: ChatSession) -> None:
    """Turns until LONG does not fit any more."""
    chat.truncation = "disabled"
    while True:
        try:
            chat._window.next_turn(chat._engine, chat._template, LONG, PARAMS, "", "disabled", "reencode")
        except ContextLengthError:
            break
        chat.send(f"This is message number {chat.num_turns} of a talk.", PARAMS)
    chat.truncation = "auto"


@contextmanager
def failing(monkeypatch, engine: Engine):
    """Turns cannot be stored in here."""
    with monkeypatch.context() as patch:
        patch.setattr(engine.sessions, "commit_turn", lambda *_: (_ for _ in ()).throw(StoreError("injected")))
        yield


def stored(engine: Engine) -> int:
    engine.flush()
    return check_closed(engine, {engine.root("")})


def nothing_is_left(engine: Engine) -> bool:
    """Neither in a tier nor in HBM's bytes."""
    caches = [cache for layer in engine.loop.runner.caches for cache in layer]
    return stored(engine) == 0 and engine.loop.pool.num_cached == 0 and not any(bool(cache.any()) for cache in caches)


# -- the window --------------------------------------------------------------------------------------------------------
def of_length(engine: Engine, system: str | None, length: int) -> str:
    """A first message whose prompt has so many tokens."""
    text = "a"
    while True:
        head = [] if system is None else [{"role": "system", "content": system}]
        size = len(engine._template.prompt_ids([*head, {"role": "user", "content": text}]))
        if size == length:
            return text
        assert size < length
        text += " dog" if size < length - 8 else "!" if len(text) % 2 else " a"


@pytest.mark.parametrize("system", [None, SYSTEM], ids=["no system prompt", "system prompt"])
@pytest.mark.parametrize("truncation", ["auto", "disabled"])
def test_a_first_turn_may_fill_the_window_to_its_last_token(engine, system, truncation):
    window = engine.max_request_tokens
    for number, (size, max_tokens) in enumerate([(window - 1, None), (window - 20, None), (window - 10, 10)]):
        chat = engine.chat(f"fits-{number}", system=system, truncation=truncation)
        out = chat.send(of_length(engine, system, size), greedy(max_tokens))
        assert (out.usage.prompt_tokens, chat.truncated_tokens) == (size, 0)
        assert len(out.token_ids) == window - size
        assert engine.sessions.load(chat._key).num_dropped_messages == 0
        again = chat.send if truncation == "auto" else None
        if again is not None:
            out = again("Hi", greedy(4))
            first = engine._template.prompt_ids([*chat._system, {"role": "user", "content": "Hi"}])
            assert out.prompt_token_ids == first and chat._window.num_dropped == 2
    for number, (size, max_tokens) in enumerate([(window, None), (window + 30, None), (window - 9, 10), (20, window)]):
        chat = engine.chat(f"does-not-{number}", system=system, truncation=truncation)
        with pytest.raises(ContextLengthError, match=f"need {size + (max_tokens or 1)} tokens.* has {window}"):
            chat.send(of_length(engine, system, size), greedy(max_tokens))
        assert chat.num_turns == 0 and chat.send("Hi", PARAMS).usage.prompt_tokens < 60


# -- another model, failed loads -----------------------------------------------------------------------------------
def test_a_prefetch_of_a_session_of_another_model_reads_nothing(model, tmp_path):
    other = save_model(tmp_path / "other", tokenizer=True, seed=5)
    with open_engine(model, tmp_path / "store") as engine:
        engine.chat("one").send("Hello, this is long enough to fill a few blocks of tokens.", greedy(30))
        num_blocks = stored(engine)
    with open_engine(other, tmp_path / "store") as engine:
        engine.prefetch("one")
        settle(engine)
        assert (counters(engine)["prefetched"], engine.stats()["disk"]["blocks"]) == (0, num_blocks)
    with open_engine(model, tmp_path / "store") as engine:
        engine.prefetch("one")
        settle(engine)
        assert counters(engine)["prefetched"] > 0


def test_tokens_computed_after_a_failed_load_do_not_count_as_cached(engine, monkeypatch):
    import kvstore.kernels.block_copy

    first = ask(engine, tokens(1, 100, 100), 8)
    settle(engine)
    engine.loop.pool.evict_all()

    def broken(*_):
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(kvstore.kernels.block_copy.BlockLoad, "load_layer", broken)
        again = ask(engine, tokens(1, 100, 100), 8)
    assert again.token_ids == first.token_ids and cached(again) == (0, 0, 0, 0)
    assert counters(engine)["load_failures"] > 0


def test_after_a_given_up_splice_the_tiers_are_those_of_what_is_used(engine):
    from kvstore.blocks.records import Evict

    chat = engine.chat("one", system=SYSTEM)
    while not chat.truncated_tokens:
        chat.send(f"This is message number {chat.num_turns} of a talk.", PARAMS)
    settle(engine)
    exact = chat.lineage.splice_index
    chain = list(chat.chain)
    engine.admin.evict(Evict(block_ids=frozenset(chain[exact:])))
    evict_cpu(engine)
    engine.loop.pool.evict_all()
    out = chat.send("And now?", PARAMS)
    hbm, cpu, disk, reencoded = cached(out)
    assert hbm == cpu == reencoded == 0 and disk >= 16 * max(exact, 1) and chat.lineage.splice_index is None


# -- what turns leave behind -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("end", ["not stored", "step fails", "no token"])
def test_a_truncating_turn_that_is_not_stored_leaves_no_reused_kv(engine, monkeypatch, end):
    chat = engine.chat("one", system=SYSTEM)
    fill(chat)
    before = stored(engine)
    stream, spliced, splice = chat.stream(LONG, PARAMS), [], engine.connector.splice
    engine.connector.splice = lambda *arguments: (spliced.append(splice(*arguments)), spliced[-1])[1]
    with failing(monkeypatch, engine), monkeypatch.context() as patch:
        if end == "step fails":
            patch.setattr(engine.loop.runner, "launch", lambda _: (_ for _ in ()).throw(RuntimeError("injected")))
        if end == "no token":
            patch.setattr(engine, "submit", ended_at_once(engine))
        if end == "no token":
            list(stream)
        else:
            with pytest.raises((StoreError, RuntimeError), match="injected"):
                list(stream)
    assert spliced and spliced[0] is not None
    assert stored(engine) <= before + 1
    engine.admin.delete_session("one")
    assert nothing_is_left(engine)


def test_a_truncating_turn_can_be_tried_again(engine, monkeypatch):
    chat = engine.chat("one", system=SYSTEM)
    fill(chat)
    text = LONG
    with failing(monkeypatch, engine), pytest.raises(StoreError):
        chat.send(text, PARAMS)
    out = chat.send(text, PARAMS)
    assert cached(out)[3] > 0
    lineage = chat.lineage
    assert cached(chat.send("Hi", PARAMS))[3] > 0 and chat.lineage == lineage


def test_a_splice_whose_sources_are_deleted_meanwhile_is_abandoned(engine):
    chat = engine.chat("one", system=SYSTEM)
    fill(chat)
    settle(engine)
    copying, go_on = threading.Event(), threading.Event()
    copy = engine.connector._store._splicer._copy

    def slow(pieces):
        copying.set()
        assert go_on.wait(10)
        copy(pieces)

    engine.connector._store._splicer._copy = slow
    stream = chat.stream(LONG, PARAMS)
    reader = threading.Thread(target=lambda: list(stream))
    reader.start()
    assert copying.wait(10)
    engine.connector.forget(chat.chain[1:])
    go_on.set()
    reader.join(30)
    assert counters(engine)["spliced"] == 0 and counters(engine)["given_up_splices"] == 1
    assert chat.lineage.splice_index is None


@pytest.mark.parametrize("num_turns", [0, 2])
@pytest.mark.parametrize("truncates", [False, True])
def test_a_deletion_during_a_turn_takes_that_turn_too(engine, num_turns, truncates):
    chat = engine.chat("one", system=SYSTEM)
    for _ in range(num_turns):
        chat.send("Hello", PARAMS)
    if truncates:
        fill(chat)
    stream = chat.stream("Tell me everything about it, and then some more of the same.", greedy(40))
    for _ in range(25):
        next(stream)
    engine.admin.delete_session("one")
    assert not engine.has_work
    with pytest.raises(StoreError, match="deleted"):
        list(stream)
    head = len(engine._template.head_ids(chat._system)) // 16
    engine.admin.forget(engine_chain(engine, chat)[:head])
    assert nothing_is_left(engine)
    with pytest.raises(RequestError, match="deleted"):
        chat.send("Hi")
    assert engine.chat("one").num_turns == 0


def engine_chain(engine: Engine, chat: ChatSession) -> list[bytes]:
    from kvstore.blocks.ids import extend_chain

    chain: list[bytes] = []
    extend_chain(chain, engine.root(""), engine._template.head_ids(chat._system), 16)
    return chain


def test_a_deletion_keeps_the_kv_of_a_fork_but_not_of_the_turn_that_runs(engine):
    chat = engine.chat("one", system=SYSTEM)
    chat.send("Hello, this is long enough to fill a few blocks of tokens.", PARAMS)
    fork = chat.fork("two")
    before = stored(engine)
    stream = chat.stream("Tell me everything about it, and then some more of the same.", greedy(40))
    for _ in range(25):
        next(stream)
    assert engine.admin.delete_session("one") == 0
    with pytest.raises(StoreError):
        list(stream)
    assert stored(engine) == before
    assert cached(fork.send("Hi", PARAMS))[0] == (len(fork.chain[:before])) * 16


def test_a_deletion_ends_a_turn_that_another_thread_waits_for(engine):
    chat = engine.chat("one", system=SYSTEM)
    chat.send("Hello", PARAMS)
    errors = []

    def talk():
        try:
            chat.send("Tell me everything.", greedy(150))
        except StoreError as error:
            errors.append(error)

    thread = threading.Thread(target=talk)
    thread.start()
    wait_until(lambda: engine.has_work)
    time.sleep(0.05)
    engine.admin.delete_session("one")
    thread.join(10)
    assert not thread.is_alive() and len(errors) == 1
    assert not engine.sessions.exists(chat._key)


def test_hbm_blocks_that_were_held_when_forgotten_are_erased_when_released(engine):
    by_hand(engine)
    handle = engine.submit(tokens(1, 100, 100), greedy(20))
    for _ in range(8):
        engine.step()
    (request,) = engine.loop.scheduler.requests.values()
    blocks = list(request.block_numbers)
    engine.admin.forget(request.chain[:1])
    assert engine.loop.pool.lookup(request.chain[0]) is None and engine.loop.erasure.pending
    while not handle.done:
        engine.step()
    assert not engine.loop.erasure.pending
    assert not any(bool(cache[blocks[0]].any()) for layer in engine.loop.runner.caches for cache in layer)


# -- deletions that do not succeed at once, time to live ---------------------------------------------------------------
def test_a_failed_deletion_leaves_the_session_as_it_was(engine, monkeypatch):
    chat = engine.chat("one")
    chat.send("Hello", PARAMS)
    with monkeypatch.context() as patch:
        patch.setattr(engine.sessions, "delete", lambda _: (_ for _ in ()).throw(StoreError("injected")))
        with pytest.raises(StoreError, match="injected"):
            engine.admin.delete_session("one")
    chat.send("Still there?", PARAMS)
    assert engine.chat("one") is chat and chat.num_turns == 2


def test_a_session_without_a_turn_can_be_deleted(engine):
    chat = engine.chat("one")
    assert engine.admin.delete_session("one") == 0
    with pytest.raises(RequestError, match="deleted"):
        chat.send("Hi", PARAMS)
    with pytest.raises(RequestError, match="no session"):
        engine.admin.delete_session("one")
    assert engine.chat("one").send("Hi", PARAMS).finish_reason == "length"


def test_pending_deletions_hold_up_neither_the_start_nor_a_chat(model, tmp_path, monkeypatch):
    monkeypatch.setattr(admin, "RETRY_S", 0.2)
    with open_engine(model, tmp_path / "store") as first:
        for name in "abc":
            first.chat(name).send(f"Hello {name}, this is long enough to fill a block of tokens.", PARAMS)
        settle(first)
        with monkeypatch.context() as patch:
            patch.setattr(first.connector, "forget", lambda *_: (frozenset(), False))
            for name in "abc":
                first.admin.delete_session(name)

    def slow(self, block_ids, timeout_s=60.0):
        time.sleep(timeout_s)
        return frozenset(block_ids), False

    with monkeypatch.context() as patch:
        patch.setattr(kvstore.store.tiered.TieredConnector, "forget", slow)
        started = time.monotonic()
        second = open_engine(model, tmp_path / "store")
        assert time.monotonic() - started < 30
        assert len(second.sessions.pending_deletions()) == 3
    with second:
        second.admin._last_expiry_s = -1e9
        second.chat("new")
        assert list(second.sessions.pending_deletions()) == []


def test_an_expired_session_is_deleted_with_its_object_unless_a_turn_runs(engine):
    chat = engine.chat("one")
    chat.send("Hello", PARAMS)
    chat.set_ttl(0.0)
    stream = chat.stream("Hi", PARAMS)
    next(stream)
    time.sleep(0.01)
    engine.admin._last_expiry_s = -1e9
    assert engine.chat("one") is chat
    engine.admin._last_expiry_s = -1e9
    engine.admin.expire()
    list(stream)
    assert chat.num_turns == 2 and not chat.deleted
    time.sleep(0.01)
    engine.admin._last_expiry_s = -1e9
    engine.admin.expire()
    assert chat.deleted and not engine.sessions.exists(chat._key)
    assert engine.chat("one").num_turns == 0


# -- objects of sessions -----------------------------------------------------------------------------------------------
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


# -- the end of an engine ----------------------------------------------------------------------------------------------
def test_a_dropped_engine_ends_at_once_without_the_collector(model, tmp_path):
    gc.collect()
    gc.disable()
    try:
        dropped = open_engine(model, tmp_path / "store")
        chat = dropped.chat("one")
        chat.send("Hello", PARAMS)
        alive = weakref.ref(dropped)
        del chat
        del dropped
        assert alive() is None
        open_engine(model, tmp_path / "store").close()
    finally:
        gc.enable()


def test_an_engine_that_one_of_our_threads_drops_is_closed_in_another(model, tmp_path):
    engine = open_engine(model, tmp_path / "store")
    parts = (engine._gate, engine.loop, engine.connector, engine.sessions)
    ended_in: list[str] = []
    close = engine.connector.close
    engine.connector.close = lambda: (ended_in.append(threading.current_thread().name), close())
    thread = threading.Thread(target=shut_dropped, args=parts, name="kvstore-housekeeping")
    thread.start()
    thread.join(10)
    wait_until(lambda: ended_in)
    (ender,) = [t for t in threading.enumerate() if t.name == "engine-shut"] or [None]
    if ender is not None:
        ender.join(10)
    assert ended_in == ["engine-shut"] and engine.closed
    open_engine(model, tmp_path / "store").close()


@pytest.mark.parametrize("part", ["resume", "serve"])
def test_a_constructor_that_fails_late_leaves_nothing_open(model, tmp_path, monkeypatch, part):
    owner = admin.Admin if part == "resume" else kvstore.store.tiered.TieredConnector
    with monkeypatch.context() as patch:
        patch.setattr(owner, part, lambda *_: (_ for _ in ()).throw(OSError("injected")))
        with pytest.raises(OSError, match="injected") as caught:
            open_engine(model, tmp_path / "store")
    open_engine(model, tmp_path / "store").close()
    del caught


def test_a_forked_child_leaves_the_engine_alone(engine):
    ask(engine, tokens(1, 50, 100))
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        code = 1
        try:
            engine.close()
            engine._finalizer()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert not engine.closed and ask(engine, tokens(1, 50, 100)).token_ids
