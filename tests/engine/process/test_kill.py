"""kill -9 on either side of the border: nobody waits for ever, nothing outlives its parent, no stored turn is lost."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvstore import AsyncChat, AsyncEngine, CacheTiers, Engine, SamplingParams, StructuredOutputsParams
from kvstore.admin.control import ask
from kvstore.disk import directory as directory_module
from kvstore.disk.directory import StoreDirectory, read_lock_info
from kvstore.engine.engine import open_waiting_for_lock
from kvstore.errors import EngineDiedError, StoreError, StoreLockedError
from kvstore.sessions.record import SessionKey
from tests.support.ranks import is_gone
from tests.support.waiting import wait_in_loop, wait_until

MODEL = {"tokenizer": True, "max_position_embeddings": 2048}
HERE = Path(__file__).parents[2]
TEN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)  # a second, and more
MATCHING = SamplingParams(max_tokens=1500, seed=1, structured_outputs=StructuredOutputsParams(regex="[a-f]{3000}"))
PROMPT = list(range(3, 40))


def tiers(path: Path) -> CacheTiers:
    return CacheTiers(hbm="2MiB", cpu="2MiB", disk="32MiB", path=path)


async def killed_in_the_middle(engine: Engine, front: AsyncEngine) -> list[object]:
    """Streams and a turn run when the process is killed: what each of them got."""
    chat = engine.chat("talk")
    answer = await AsyncChat(front, chat).start("and then?", LONG)
    first, in_grammar = asyncio.Event(), asyncio.Event()

    async def read(prompt):
        async for _ in front.stream(prompt, LONG):
            first.set()

    async def read_matching():
        async for piece in front.stream(PROMPT, MATCHING):
            assert re.fullmatch("[a-f]*", piece.text)
            in_grammar.set()

    async def turn():
        async with answer:
            async for _ in answer:
                first.set()

    tasks = [asyncio.create_task(read(PROMPT[:n])) for n in range(5, 13)] + [asyncio.create_task(turn())]
    tasks.append(asyncio.create_task(read_matching()))
    await asyncio.gather(first.wait(), in_grammar.wait())
    os.kill(engine.core.pid, signal.SIGSTOP)
    tasks.append(asyncio.create_task(front.call(engine.flush)))  # a call on its way, as a commit could be
    await wait_in_loop(lambda: engine.core._calls)
    os.kill(engine.core.pid, signal.SIGKILL)
    return await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Shared:
    """An engine, and where its model's weights and its store are."""

    engine: Engine
    weights: Path
    store: Path


@pytest.fixture(scope="module")
def shared(model, tmp_path_factory):
    """For tests that leave an engine that runs, perhaps with another process; the last one closes it. Its store was
    somebody else's before.
    """
    folder = tmp_path_factory.mktemp("shared")
    own, store = Path(shutil.copytree(model, folder / "model")), folder / "store"
    holder = Engine(own, tiers(store), device="cpu")
    holder.chat("known").send("Hello", TEN)
    closing = threading.Timer(0.1, holder.close)
    closing.start()
    try:
        with Engine(own, tiers(store), device="cpu", process="own") as engine:
            yield Shared(engine, own / "model.safetensors", store)
    finally:
        closing.join()
        holder.close()


def test_a_new_process_waits_for_a_lock_that_is_given_up(shared):
    assert shared.engine.chat("known").num_turns == 1


def test_the_owners_socket_is_answered_by_the_front(shared):
    engine, path = shared.engine, shared.store
    chat = engine.chat("asked")
    chat.send("Hello, this is long enough to fill a block of tokens, and then another one.", TEN)
    engine.flush()
    assert ask(path, "stats", {}, 60)["process"]["pid"] == engine.core.pid
    assert ask(path, "evict", {"all": True}, 60)["tiers"]["disk"]["blocks"] > 0
    assert ask(path, "verify", {}, 60)["sessions"]["problems"] == []
    found = ask(path, "sessions.delete", {"session": {"session_id": "asked"}}, 60)
    assert found["deleted"] and chat.is_deleted and engine.chat("asked").num_turns == 0


def test_a_process_that_cannot_be_understood_is_ended_and_started_again(shared, monkeypatch, caplog):
    """Nobody gets the store meanwhile, but it can be read."""

    def fails(message):
        raise ValueError("no such message")

    engine, ended = shared.engine, shared.engine.core.pid
    monkeypatch.setattr("kvstore.engine.client.remote.decode_outbound", fails)
    handle = engine.submit(PROMPT, TEN)
    with pytest.raises(EngineDiedError):
        list(engine.stream(handle))
    assert "cannot be understood" in caplog.text
    monkeypatch.undo()
    while engine.core.pid in (ended, None):
        with pytest.raises(StoreLockedError):
            StoreDirectory.open(shared.store)
        assert [head.num_turns for head in engine.admin.list_sessions()] == [1]
    assert engine.chat("known").num_turns == 1
    assert len(engine.generate([PROMPT], TEN)[0].token_ids) == 10


def test_a_restart_that_fails_is_tried_again(shared, caplog):
    """As where memory or descriptors are short for a while: here its weights are gone for a while."""
    engine, away = shared.engine, shared.weights.with_name("away")
    shared.weights.rename(away)
    os.kill(engine.core.pid, signal.SIGKILL)
    wait_until(lambda: "could not be started" in caplog.text, "a restart that fails")
    away.rename(shared.weights)
    wait_until(lambda: engine.core.state == "running", "one that succeeds")
    assert len(engine.generate([PROMPT], TEN)[0].token_ids) == 10


def test_nobody_gets_the_store_while_a_process_outlives_its_front(shared):
    """It hangs, and the front has given its locks up."""
    engine, path = shared.engine, shared.store
    stopped = engine.core.pid
    os.kill(stopped, signal.SIGSTOP)
    for part in (engine.sessions, engine.answers):
        part.close()
    for directory in [one for one in list(directory_module._directories) if one.path == path]:
        directory.close()
    with pytest.raises(StoreLockedError):
        StoreDirectory.open(path)
    os.kill(stopped, signal.SIGCONT)
    engine.close()
    StoreDirectory.open(path).close()


@pytest.mark.anyio
async def test_a_killed_process_is_started_again_as_often_as_it_may(model, tmp_path, caplog):
    engine = Engine(model, tiers(tmp_path / "store"), device="cpu", max_restarts=1, process="own")
    front = AsyncEngine(engine)
    old = engine.chat("talk")
    outs = [old.send(f"message {number}", TEN) for number in range(3)]
    engine.admin.pin("talk", 600)
    assert engine.admin.pinned_until(SessionKey("", "talk")) is not None
    errors = await killed_in_the_middle(engine, front)
    assert [type(error) for error in errors] == [EngineDiedError] * 11 and old.chats.claims.on(old.key) is None
    with pytest.raises(EngineDiedError, match="again"):  # at once, while it is being started
        await front.generate(PROMPT, TEN)
    await front.call(wait_until, lambda: engine.core.state == "running", "the restart")

    chat = engine.chat("talk")
    assert chat is not old and chat.num_turns == 3
    assert engine.admin.pinned_until(SessionKey("", "talk")) is None  # the new process knows nothing of it
    assert chat.messages[-1]["content"] == outs[-1].text
    out = chat.send("what was that?", TEN)
    known = outs[-1].prompt_token_ids + outs[-1].token_ids
    assert out.prompt_token_ids[: len(known)] == known
    assert engine.stats()["process"]["restarts"] == 1
    engine.flush()
    assert len((await front.generate(PROMPT, TEN)).token_ids) == 10
    assert re.fullmatch("[a-f]{9,}", (await front.generate(PROMPT, replace(MATCHING, max_tokens=9))).text)

    errors = await killed_in_the_middle(engine, front)
    assert [type(error) for error in errors] == [EngineDiedError] * 11
    assert engine.core.state == "failed" and engine.closed and engine.core.pid is None
    for wanted in (engine.stats, engine.flush, lambda: engine.chat("talk")):
        with pytest.raises(EngineDiedError, match="stays down"):
            wanted()
    await front.close()
    assert engine.core.state == "failed"
    following = ("is started again in 0 s, 1 of 1 an hour", "is not started again")
    assert len(caplog.messages) == 2
    for said, wanted in zip(caplog.messages, following, strict=True):
        assert f"(signal 9); it {wanted}" in said
    with Engine(model, tiers(tmp_path / "store"), device="cpu") as engine:
        assert engine.chat("talk").num_turns == 4 and engine.sessions.check().problems == ()


@pytest.mark.anyio
async def test_who_streams_in_the_loop_hears_of_the_end_and_of_the_next_process(model, tmp_path):
    engine = Engine(model, tiers(tmp_path / "store"), device="cpu", process="own")
    front = AsyncEngine(engine, reads=True)
    answers = [await front.start(PROMPT[:n], LONG) for n in range(5, 9)]
    for answer in answers:
        await anext(answer)
    os.kill(engine.core.pid, signal.SIGKILL)
    for answer in answers:
        with pytest.raises(EngineDiedError):
            async for _ in answer:
                pass
    with pytest.raises(EngineDiedError, match="again"):
        await front.generate(PROMPT, TEN)
    await front.call(wait_until, lambda: engine.core.state == "running", "the restart")
    assert len((await front.generate(PROMPT, TEN)).token_ids) == 10
    running = asyncio.create_task(front.generate(PROMPT, LONG))
    await wait_in_loop(lambda: engine.has_work)
    await front.close()
    assert (await running).finish_reason == "abort" and not any(port.readers for port in front._ports.values())
    assert engine.core.state == "closed" and engine.core.pid is None


def test_a_killed_parent_takes_the_process_with_it(model, tmp_path):
    """The store is locked until both have ended."""
    path = tmp_path / "store"
    command = [sys.executable, str(HERE / "children/remote_child.py"), model, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parent) as parent:
        assert parent.stdout is not None
        core = int(parent.stdout.readline())
        acknowledged = [int(parent.stdout.readline()) for _ in range(3)]
        assert not is_gone(core) and read_lock_info(path).pid == parent.pid
        parent.kill()
        acknowledged += [int(line) for line in parent.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        parent.wait()
        wait_until(lambda: is_gone(core), "the end of the engine's process")
    wait_until(lambda: read_lock_info(path) is None, "the end of its last thread, which holds the locks")
    with Engine(model, tiers(path), device="cpu") as engine:
        state = engine.sessions.load(SessionKey("", "killed"))
        assert state.turn >= acknowledged[-1] == len(acknowledged)
        assert engine.chat("killed").send("go on", TEN).usage.prompt_tokens > 0


def test_files_that_are_removed_under_a_front_are_told(model, tmp_path, caplog):
    path = tmp_path / "store"
    with Engine(model, tiers(path), device="cpu", process="own") as engine:
        engine.chat("lost").send("Hello", TEN)
        (path / "sessions" / "data.mdb").unlink()
        wait_until(lambda: "sessions/data.mdb was removed" in caplog.text, "the loss to be told")
        with pytest.raises(StoreError, match="was removed"):
            engine.chat("lost").send("Again", TEN)
        (path / "lock").unlink()
        wait_until(lambda: "lock was removed" in caplog.text, "the other loss to be told")
        wait_until(lambda: engine.stats()["lost"] is not None, "the core to see it")


def test_a_lock_is_waited_for_and_then_reported():
    tries = []

    def locked(until_try):
        def opened():
            tries.append(None)
            if len(tries) < until_try:
                raise StoreLockedError("locked by 42", 42)
            return "opened"

        return opened

    assert open_waiting_for_lock(locked(3), timeout_s=60) == "opened" and len(tries) == 3
    with pytest.raises(StoreLockedError) as told:
        open_waiting_for_lock(locked(10**9), timeout_s=0.0)
    assert told.value.pid == 42 and len(tries) == 4
    with pytest.raises(ZeroDivisionError):
        open_waiting_for_lock(lambda: 1 // 0)
