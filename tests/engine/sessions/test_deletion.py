"""Sessions that are deleted, or whose time is over: nothing of them is left in any tier, whatever runs or fails."""

import threading
import time
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from operator import ne

import pytest

from kvstore import Engine, SamplingParams
from kvstore.admin.offline import OfflineStore
from kvstore.blocks.ids import token_bytes
from kvstore.engine import admin as admin_module
from kvstore.engine import engine as engine_module
from kvstore.engine.client.messages import Forget
from kvstore.engine.sessions.recall import Keys, Recall
from kvstore.errors import RequestError, SessionNotFoundError, StoreError
from kvstore.sessions.record import Parent, SessionKey
from tests.support.by_hand import by_hand
from tests.support.conversations import (
    PARAMS,
    SYSTEM,
    check_gone,
    check_there,
    failing_to_store,
    fill,
    kv_of,
    nothing_is_left,
    num_stored,
    talk,
)
from tests.support.engines import ask, cached, chain_of, check_closed, greedy, open_engine, settle, tokens
from tests.support.faults import before_each, before_each_call, constants, stuck_disk
from tests.support.waiting import TIMEOUT_S, wait_until

MODEL = {"tokenizer": True}


@pytest.mark.parametrize("flushed", [True, False], ids=["flushed", "still in the write queue"])
def test_deleting_a_session_leaves_nothing_of_it_anywhere(opened, tmp_path, flushed):
    engine = opened()
    chat = engine.chat("secret", system="Be brief.")
    talk(chat, 5, "secret matter")
    if flushed:
        settle(engine)
    needles = [part for parts in kv_of(engine, chat.window.chain).values() for part in parts]
    needles += [token_bytes(chat.token_ids[i : i + 16]) for i in range(0, len(chat.token_ids) - 16, 16)]
    needles.append(b"secret matter")
    if flushed:
        check_there(engine, tmp_path / "store", needles)
    assert engine.admin.delete_session("secret") == len(chat.window.chain)
    check_gone(engine, tmp_path / "store", needles)
    with pytest.raises(RequestError, match="deleted"):
        chat.send("Still there?", PARAMS)
    with pytest.raises(RequestError, match="no session"):
        engine.admin.delete_session("secret")
    assert engine.sessions.load(SessionKey("", "secret")) is None
    out = engine.chat("secret", system="Be brief.").send("This is message number 0 of a secret matter.", PARAMS)
    assert cached(out) == (0, 0, 0, 0)
    assert check_closed(engine, {engine.facts.root("")}) > 0


def break_off(engine: Engine, chat, said: str) -> None:
    """A turn of which something is said, and nothing stored."""
    with failing_to_store(engine), pytest.raises(StoreError, match="injected"):
        chat.send(said, PARAMS)


@pytest.mark.parametrize("is_fork", [True, False], ids=["fork", "first turn"])
@pytest.mark.parametrize("how", ["known", "opened again", "behind copies"])
def test_a_turn_that_was_not_stored_is_gone_with_its_session_too(opened, is_fork, how):
    """What stands in front of it is others', too, so that no deletion would find it from there."""
    options = {"codec": "int8", "dtype": "bfloat16"} if how == "behind copies" else {}
    engine, secret = opened(**options), "My secret lies below the third stone. " * 3
    chat = engine.chat("kept", system="Be brief, whatever people ask you.")
    talk(chat, 2)
    other = chat.fork("gone") if is_fork else engine.chat("gone", system="Be brief, whatever people ask you.")
    if options:
        engine = opened(**options)
        other = engine.chat("gone", system=None if is_fork else "Be brief, whatever people ask you.")
    break_off(engine, other, secret)
    settle(engine)
    prompt = other.window.next_turn(
        engine.client, engine.chats.language.chat_template(), [{"role": "user", "content": secret}], PARAMS, "", "auto",
        "exact",
    ).prompt  # fmt: skip
    num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, chat.token_ids, strict=False)))
    if not is_fork:
        talk(other, 1)
    if how != "known":
        engine = opened(**options)
    engine.admin.delete_session("gone")
    assert ask(engine, prompt).usage.cached_tokens <= num_shared // 16 * 16 < len(prompt) - 32


def test_a_fork_that_tried_what_its_parent_said_leaves_it_to_that(opened):
    engine, long = opened(), "Tell me all about the harbour in winter. " * 6
    chat = engine.chat("kept", system="Be brief.")
    talk(chat, 1)
    fork = chat.fork("gone")
    chat.send(long, PARAMS)
    break_off(engine, fork, long)
    engine.admin.delete_session("gone")
    known = len(chat.token_ids)
    assert chat.send("Go on", PARAMS).usage.cached_tokens == (known - 1) // 16 * 16


def test_deleting_a_fork_that_began_with_copies_keeps_them(opened):
    options = {"codec": "int8", "dtype": "bfloat16"}
    engine = opened(**options)
    chat = engine.chat("kept", system="Be brief.")
    talk(chat, 4)
    chat.fork("gone")
    settle(engine)
    engine = opened(**options)
    break_off(engine, engine.chat("gone"), "Something else")
    engine.admin.delete_session("gone")
    known = len(engine.chat("kept").token_ids)
    assert engine.chat("kept").send("Go on", PARAMS).usage.cached_tokens == (known - 1) // 16 * 16


def test_a_turn_that_is_broken_off_while_it_waits_leaves_its_session_what_that_began_with(opened):
    """It has computed nothing; its session goes on behind quantised copies."""
    options = {"codec": "int8", "dtype": "bfloat16", "max_num_seqs": 1}
    talk(opened(**options).chat("one", system="Be brief."), 4)
    engine = opened(**options)
    chat = engine.chat("one")
    talk(chat, 1)
    assert chat.window.lineage.sources
    with waiting_turn(engine, chat) as (hold, _):
        chat.end(hold, keep=False)
    known = len(chat.token_ids)
    assert chat.send("Go on", PARAMS).usage.cached_tokens == (known - 1) // 16 * 16


@contextmanager
def waiting_turn(engine, chat):
    """The hold of a turn that waits until another request has ended, and what ends that."""
    before = engine.submit(tokens(1, 60, 100), greedy(400))
    hold = engine.chats.claims.hold(chat.key)
    try:
        chat.begin(hold, chat.check([{"role": "user", "content": "And what else is there?"}], PARAMS), PARAMS)
        yield hold, partial(engine.client.abort, before)
    finally:
        engine.chats.claims.release(hold)
        engine.client.abort(before)


def test_what_begins_as_a_fork_of_a_deleted_session_leaves_nothing_of_it(opened):
    """It has computed again what was deleted while it waited, and cannot be stored."""
    engine = opened(max_num_seqs=1)
    talk(engine.chat("gone", system="Be brief."), 3)
    key = SessionKey("", "version")
    fork = engine.sessions.version(Parent("gone", 2, is_version=True), key)
    chat = engine.chats.open(key, is_new=True, fork=fork)
    with waiting_turn(engine, chat) as (hold, let_go):
        engine.admin.delete_session("gone")
        let_go()
        list(engine.client.stream(hold.turn.handle))
        with pytest.raises(SessionNotFoundError):
            chat.end(hold)
    assert ask(engine, hold.turn.handle.output.prompt_token_ids).usage.cached_tokens <= 16


def test_a_deletion_that_is_carried_out_late_leaves_a_later_session_its_kv(opened):
    engine = opened()
    talk(engine.chat("gone", system="Be brief."), 3)
    cut_off_deletion(engine, "gone")
    chat = engine.chat("new", system="Be brief.")
    talk(chat, 3)
    engine.admin.resume()
    assert not engine.sessions.pending_deletions()
    known = len(chat.token_ids)
    assert chat.send("Go on", PARAMS).usage.cached_tokens == (known - 1) // 16 * 16


def test_deleting_a_fork_keeps_what_it_shares(opened, tmp_path, plain):
    engine = opened()
    chat = engine.chat("kept", system="Be brief.")
    talk(chat, 3)
    fork = chat.fork("gone")
    talk(fork, 3, "secret matter")
    settle(engine)
    shared, own = chat.window.chain, [block_id for block_id in fork.window.chain if block_id not in chat.window.chain]
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
def unrecorded(opened):
    """A session with a turn that was computed and saved but could not be recorded; and what to look for of it all."""
    engine = opened()
    chat = engine.chat("secret")
    talk(chat, 2)
    with failing_to_store(engine), pytest.raises(StoreError):
        chat.send("This is never stored, and is long enough to fill more than one block of tokens.", greedy(30))
    settle(engine)
    with engine.connector.parts.lock:
        cpu = engine.connector.parts.cpu
        every = [cpu.record(arena_block).block_id for arena_block in cpu.pool.cached_blocks()]
    assert len(every) > len(chat.window.chain) + 1
    return engine, [part for parts in kv_of(engine, every).values() for part in parts]


def test_deleting_a_session_takes_what_its_record_never_named_from_hbm_too(unrecorded, tmp_path):
    engine, needles = unrecorded
    engine.admin.delete_session("secret")
    check_gone(engine, tmp_path / "store", needles)


@pytest.mark.parametrize("num_turns", [0, 2])
def test_deleting_a_session_takes_its_turns_that_were_not_stored(engine, num_turns):
    chat = engine.chat("secret")
    talk(chat, num_turns)
    with failing_to_store(engine), pytest.raises(StoreError):
        chat.send("This is never stored, and is long enough to fill more than one block of tokens.", greedy(30))
    talk(chat, 1)
    engine.admin.delete_session("secret")
    assert nothing_is_left(engine)


def test_a_deletion_keeps_what_another_session_has_stored_of_a_turn_that_was_sent_twice(engine):
    chat = engine.chat("secret")
    with failing_to_store(engine), pytest.raises(StoreError):
        chat.send("This is stored at the second time, and fills a few blocks of tokens.", PARAMS)
    chat.send("This is stored at the second time, and fills a few blocks of tokens.", PARAMS)
    fork = chat.fork("kept")
    engine.admin.delete_session("secret")
    assert num_stored(engine) == len(fork.window.chain) > 1


def cut_off_deletion(engine, name):
    """What a crash leaves: the session's record is gone, its KV is not."""
    assert engine.sessions.delete(SessionKey("", name)).wait() is not None


def test_a_deletion_that_a_crash_cut_off_is_carried_out_at_the_next_start(opened, tmp_path):
    engine = opened()
    chat = engine.chat("secret")
    talk(chat, 4, "secret matter")
    settle(engine)
    needles = [part for parts in kv_of(engine, chat.window.chain).values() for part in parts]
    cut_off_deletion(engine, "secret")
    assert len(engine.sessions.pending_deletions()) == 1
    blocks = tmp_path / "store" / "blocks" / "data.mdb"
    assert all(needle in blocks.read_bytes() for needle in needles)
    engine = opened()
    assert list(engine.sessions.pending_deletions()) == []
    check_gone(engine, tmp_path / "store", needles)


def test_a_deletion_is_finished_once_the_answers_are_forgotten(model, tmp_path):
    """Their file is gone while the store is open, and nothing can be taken out of it."""
    key = SessionKey("", "secret")
    with open_engine(model, tmp_path / "store") as engine:
        talk(engine.chat("secret"), 1, "secret matter")
        (tmp_path / "store/answers/data.mdb").unlink()
        engine.admin.delete_session("secret")
        assert [one.key for one in engine.sessions.pending_deletions()] == [key]
    with open_engine(model, tmp_path / "store") as engine:
        assert list(engine.sessions.pending_deletions()) == []


def test_a_session_whose_time_is_over_is_deleted(opened, tmp_path):
    engine = opened()
    chat = engine.chat("short")
    with pytest.raises(RequestError, match="no turn"):
        chat.set_ttl(1.0)
    talk(chat, 3)
    talk(engine.chat("long"), 1)
    chat.set_ttl(0.01)
    settle(engine)
    needles = [part for parts in kv_of(engine, chat.window.chain[1:]).values() for part in parts]
    wait_until(lambda: not engine.sessions.exists(chat.key), "it has expired")
    assert [head.key.session_id for head in engine.admin.list_sessions()] == ["long"]
    engine.admin.resume()
    check_gone(engine, tmp_path / "store", needles)


def test_a_session_whose_time_is_over_is_not_resumed(opened):
    engine = opened()
    chat = engine.chat("short")
    talk(chat, 2)
    chat.set_ttl(1e-6)
    assert engine.chat("short") is not chat and engine.chat("short").num_turns == 0
    engine = opened()
    assert engine.chat("short").num_turns == 0


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
    head = engine.chats.language.template.head_ids(chat.window.system)
    engine.core.call(Forget(chain_of(engine, head), 2.0))
    assert nothing_is_left(engine)
    with pytest.raises(RequestError, match="deleted"):
        chat.send("Hi")
    assert engine.chat("one").num_turns == 0


def test_a_deletion_keeps_the_kv_of_a_fork_but_not_of_the_turn_that_runs(engine):
    chat = engine.chat("one", system=SYSTEM)
    chat.send("Hello, this is long enough to fill a few blocks of tokens.", PARAMS)
    fork = chat.fork("two")
    before = num_stored(engine)
    stream = chat.stream("Tell me everything about it, and then some more of the same.", greedy(40))
    for _ in range(25):
        next(stream)
    assert engine.admin.delete_session("one") == 0
    with pytest.raises(StoreError):
        list(stream)
    assert num_stored(engine) == before
    assert cached(fork.send("Hi", PARAMS))[0] == (len(fork.window.chain[:before])) * 16


def test_hbm_blocks_that_were_held_when_forgotten_are_erased_when_released(engine):
    by_hand(engine)
    handle = engine.submit(tokens(1, 100, 100), greedy(20))
    for _ in range(8):
        engine.step()
    (request,) = engine.loop.scheduler.roster.requests.values()
    blocks = list(request.block_numbers)
    engine.core.call(Forget(request.chain[:1], 2.0))
    assert engine.loop.pool.lookup(request.chain[0]) is None and engine.loop.erasure.pending
    while not handle.done:
        engine.step()
    assert not engine.loop.erasure.pending
    assert not any(bool(cache[blocks[0]].any()) for layer in engine.loop.runner.caches for cache in layer)


def test_a_failed_deletion_leaves_the_session_as_it_was(engine):
    chat = engine.chat("one")
    chat.send("Hello", PARAMS)
    with failing_to_store(engine, "delete"), pytest.raises(StoreError, match="injected"):
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


def test_pending_deletions_hold_up_neither_the_start_nor_a_chat(model, tmp_path):
    with open_engine(model, tmp_path / "store") as first:
        for name in "abc":
            first.chat(name).send(f"Hello {name}, this is long enough to fill a block of tokens.", PARAMS)
        settle(first)
        for name in "abc":
            cut_off_deletion(first, name)
    with stuck_disk() as go, constants(engine_module, ROUND_S=0.01):
        second = open_engine(model, tmp_path / "store")
        assert len(second.sessions.pending_deletions()) == 3
        second.chat("new")
        go.set()
        wait_until(lambda: not second.sessions.pending_deletions(), "a round has carried them out")
    second.close()


def test_an_expired_session_is_deleted_though_nobody_asks(model, tmp_path):
    with constants(engine_module, ROUND_S=0.01), open_engine(model, tmp_path / "store") as engine:
        chat = engine.chat("one")
        chat.send("Hello", PARAMS)
        chat.set_ttl(1e-6)
        wait_until(lambda: chat.is_deleted and not engine.sessions.pending_deletions(), "a round has deleted it")
        assert engine.sessions.stats()["sessions"] == 0 and nothing_is_left(engine)


def test_deletions_do_not_wait_for_sessions_that_expire(engine):
    """Here each of these takes as long as a round may."""
    for name in ("gone", "one", "two"):
        engine.chat(name).send("Hello", PARAMS)
    engine.sessions.delete(SessionKey("", "gone")).wait()
    for name in ("one", "two"):
        engine.chat(name).set_ttl(1e-6)
    with constants(admin_module, RETRY_S=0.5), before_each(engine.sessions, "delete", lambda: time.sleep(0.5)):
        engine.admin.resume()
    assert [one.key.session_id for one in engine.sessions.pending_deletions()] == []
    assert engine.sessions.stats()["sessions"] == 1


def test_an_expired_session_is_deleted_with_its_object_unless_a_turn_runs(engine):
    chat = engine.chat("one")
    chat.send("Hello", PARAMS)
    chat.set_ttl(1e-6)
    stream = chat.stream("Hi", PARAMS)
    next(stream)
    assert engine.chat("one") is chat
    engine.admin.resume()
    list(stream)
    assert chat.num_turns == 2 and not chat.is_deleted
    engine.admin.resume()
    assert chat.is_deleted and not engine.sessions.exists(chat.key)
    assert engine.chat("one").num_turns == 0


def test_a_deletion_by_whatever_way_forgets_the_answers(tmp_path):
    """By the library, by a time to live that is over, and on a store that nobody owns."""
    tiers = {"hbm": "16MiB", "cpu": "16MiB", "disk": "64MiB", "path": tmp_path}
    names = ("library", "ttl", "offline")
    with Engine(cache_tiers=tiers) as engine:
        recall, groups = Recall(engine.chats), {}
        for name in names:
            chat = engine.chat(name)
            params = SamplingParams(temperature=1.5, seed=8, max_tokens=20, ignore_eos=True)
            reply = chat.send(f"My name is {name}.", params)
            recall.note("", "", chat.messages[:-1], reply, session_id=name)
            keys = Keys(engine.facts.root(""), "")
            groups[name] = [keys.histories(keys.marks(chat.messages))[-1]]
        engine.answers.flush()
        assert all(engine.answers.find_ids(list(groups.values())))
        histories = [[*engine.chat(name).messages, {"role": "user", "content": "And?"}] for name in names]
        asked = [recall.prompt_ids("", "", one) for one in histories]
        engine.admin.delete_session("library")
        engine.chat("ttl").set_ttl(1e-9)
        engine.admin.resume()
        plain = [engine.chats.language.template.prompt_ids(one) for one in histories]
        now = [recall.prompt_ids("", "", one) for one in histories]
        assert all(map(ne, asked, plain)) and now == [*plain[:2], asked[2]], "nor are the ids in memory"
        assert [ids is None for ids in engine.answers.find_ids(list(groups.values()))] == [True, True, False]
    with OfflineStore(tmp_path) as store:
        store.delete_session(SessionKey("", "offline"))
    with Engine(cache_tiers=tiers) as engine:
        assert engine.answers.find_ids(list(groups.values())) == [None, None, None]


def test_a_deletion_is_told_when_a_write_that_was_under_way_is_deleted_too(saved_model, tmp_path):
    """The same blocks are deleted, computed again, and deleted while the first deletion still runs."""
    gate, batches = threading.Semaphore(0), list[tuple[int, int]]()

    def wait(puts, deletes=(), touched=None):
        if is_gated and (puts or deletes):
            batches.append((len(puts), len(deletes)))
            assert gate.acquire(timeout=TIMEOUT_S)

    is_gated, prompt, told = False, tokens(1, 50), list[bool]()
    with (
        open_engine(saved_model("Llama"), tmp_path / "s") as engine,
        before_each_call(engine.connector.parts.disk, "write", wait),
    ):
        parts, chain = engine.connector.parts, chain_of(engine, prompt)
        engine.generate([prompt], greedy(1))
        settle(engine)
        is_gated, threads = True, []
        for num_batches in (1, 2):
            engine.loop.call(engine.loop.erasure.forget, tuple(chain))
            threads.append(threading.Thread(target=lambda: told.append(parts.forget(chain)[1])))
            threads[-1].start()
            if num_batches == 1:
                wait_until(lambda: batches == [(0, 3)])
                engine.generate([prompt], greedy(1))
                wait_until(lambda: len(parts.store.disk.submitted) == 3)
        wait_until(lambda: parts.store.stats.forgotten == 6)
        gate.release()
        wait_until(lambda: batches == [(0, 3), (3, 0)])
        wait_until(lambda: not parts.store.disk.contents.removing.has_some({*chain}))
        with parts.lock:
            assert not parts.store.deletion.is_forgotten({*chain})
        is_gated = False
        gate.release(2)
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert told == [True, True] and not any(parts.disk.contains(one) for one in chain)
