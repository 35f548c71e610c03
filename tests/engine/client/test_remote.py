"""A core in a process of its own: what goes out and comes in, more than it takes, and its end. See `test_core`, too."""

import asyncio
import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from kvstore import AsyncEngine, CacheTiers, Engine, SamplingParams
from kvstore.blocks.ids import Lineage
from kvstore.engine import async_engine
from kvstore.engine.client.messages import End, Facts, Opened, Submit, Updates, decode_outbound, encode
from kvstore.engine.client.remote import MAX_DELAY_S, MAX_REQUESTS, READ, WINDOW_S, RemoteCore, Restarts
from kvstore.engine.client.requests import CoreClient
from kvstore.engine.core.news import Said, Update
from kvstore.engine.process.channel import Channel
from kvstore.engine.process.child import Child, Heart
from kvstore.engine.process.wire import Start
from kvstore.engine.program import CoreServer
from kvstore.errors import (
    ConfigError,
    EngineClosedError,
    EngineOverloadedError,
    ModelError,
    RequestError,
)
from kvstore.sessions.record import SessionKey
from tests.support.by_hand import held
from tests.support.faults import before_each, before_each_step, fail
from tests.support.redis_server import RedisServer
from tests.support.waiting import TIMEOUT_S, wait_until

MODEL = {"tokenizer": True}
TIERS = {"hbm": "2MiB", "cpu": "2MiB", "disk": "32MiB"}
TEN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
LONGER = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)  # a second, and more
PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    tiers = CacheTiers(**TIERS, path=tmp_path_factory.mktemp("remote") / "store")
    with Engine(model, tiers, seed=1, device="cpu", load="always", process="own") as engine:
        yield engine
        assert not engine.has_work and engine.stats()["requests"]["running"] == 0
    assert engine.core.state == "closed"


@pytest.fixture(scope="module")
def here(model, tmp_path_factory):
    tiers = CacheTiers(**TIERS, path=tmp_path_factory.mktemp("here") / "store")
    with Engine(model, tiers, seed=1, device="cpu", load="always") as engine:
        yield engine


def is_unread(front: AsyncEngine) -> bool:
    return not any(port.readers for port in front._ports.values())


def test_the_loop_takes_in_by_itself_what_the_process_says(saved_model, here, monkeypatch):
    """Without a thread: ids, long ones and texts, an answer that is left and one that is stopped, an error, the end."""
    prompts = [[i % 150 + 3] * (5 + i % 30) for i in range(32)]
    known = [out.token_ids for out in here.generate(prompts, TEN)]
    [text] = here.generate(["Hello there"], TEN)

    async def scenario():
        model = saved_model(tokenizer=True, max_position_embeddings=2048)
        engine = Engine(model, {"hbm": "2MiB"}, device="cpu", process="own")
        front = AsyncEngine(engine, reads=True)
        outs = await asyncio.gather(*(front.generate(prompt, TEN) for prompt in prompts))
        said = await front.generate("Hello there", TEN)
        monkeypatch.setattr(async_engine, "MAX_IDS_AT_ONCE", 10)
        again = await asyncio.gather(*(front.generate(prompt, TEN) for prompt in prompts))
        async with await front.start(PROMPT, LONGER) as left:
            await anext(left)
        async with await front.start(PROMPT, LONGER) as stopped:
            await anext(stopped)
            await stopped.stop()
            assert [piece.finish_reason async for piece in stopped][-1] == "abort"
        with pytest.raises(RequestError, match="token ids"):
            await front.start([10**6], TEN)
        assert left.output.finish_reason == "abort" and is_unread(front)
        assert not [thread for thread in threading.enumerate() if thread is engine.core.reader and thread.name == READ]
        await front.close()
        with pytest.raises(EngineClosedError):
            await front.start(PROMPT, TEN)
        return outs, said, again

    outs, said, again = asyncio.run(scenario())
    assert [out.token_ids for out in outs] == [out.token_ids for out in again] == known
    assert (said.text, said.token_ids) == (text.text, text.token_ids)


def test_a_close_ends_while_a_round_waits_for_the_process(model, tmp_path, monkeypatch):
    """It carries out a deletion, and the loop that is being closed is the one that reads the answer."""
    monkeypatch.setenv("KVSTORE_FLEET_SECRET", "the secret of this fleet, 32 characters")
    redis, asks = RedisServer(tmp_path), threading.Event()

    async def scenario():
        shared = {"session_store": redis.url, "session_durability": "unchecked"}
        engine = Engine(model, {"hbm": "2MiB"}, device="cpu", process="own", **shared)
        front = AsyncEngine(engine, reads=True)
        await front.call(engine.chat("deleted").send, "Hello", TEN)
        os.kill(engine.core.pid, signal.SIGSTOP)
        with before_each(engine.client, "call", asks.set):
            await front.call(engine.sessions.delete(SessionKey("", "deleted")).wait)  # as another server does it
            await front.call(wait_until, asks.is_set, "the next round")
            closing = asyncio.create_task(front.close())
            await front.call(wait_until, lambda: engine.closed, "it begins to close")
            os.kill(engine.core.pid, signal.SIGCONT)
            await asyncio.wait_for(closing, TIMEOUT_S)
        assert engine.core.state == "closed"

    asyncio.run(scenario())
    redis.kill()


def test_requests_wait_for_a_process_that_does_not_read(engine, here):
    """More than the kernel holds back for it: the rest goes out once there is room, and nothing is lost."""
    prompts = [[i % 150 + 3, i // 150 + 3, 9] for i in range(1500)]
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    os.kill(engine.core.pid, signal.SIGSTOP)
    try:
        handles = [engine.submit(prompt, one) for prompt in prompts]
        assert engine.core._child.channel.num_unsent > 0
    finally:
        os.kill(engine.core.pid, signal.SIGCONT)
    for handle in handles:
        list(engine.stream(handle))
    assert engine.core._child.channel.num_unsent == 0
    sample = range(0, 1500, 97)
    known = here.generate([prompts[i] for i in sample], one)
    assert [handles[i].output.token_ids for i in sample] == [out.token_ids for out in known]


def test_more_requests_than_are_taken_are_refused(engine):
    engine.core.max_requests = 2
    os.kill(engine.core.pid, signal.SIGSTOP)  # so that none of them ends
    try:
        handles = engine.client.submit_all([(list(PROMPT), LONG)] * 2)
        with pytest.raises(EngineOverloadedError):
            engine.client.submit_all([(list(PROMPT), TEN)])
        for handle in handles:  # as `abort` says it, which then waits for the process
            engine.core.end(handle.request_id)
    finally:
        os.kill(engine.core.pid, signal.SIGCONT)
        engine.core.max_requests = MAX_REQUESTS
    for handle in handles:
        engine.client.abort(handle)
        assert handle.done and handle.output.finish_reason == "abort" and handle.lineage is not None
    assert len(engine.generate([PROMPT], TEN)[0].token_ids) == 10


def test_half_a_character_does_not_cross(engine):
    with pytest.raises(RequestError, match="surrogate"):
        engine.generate([PROMPT], TEN, tenant="half \ud83d")
    assert not engine.has_work


def fill(core) -> None:
    """Until the process, which is stopped, takes nothing more."""
    with pytest.raises(EngineOverloadedError):
        while True:
            with core.changed:
                core._send(core._child, encode(End("nobody's", None, None)))


def takes_more(engine) -> bool:
    try:
        engine.stats()
    except EngineOverloadedError:
        return False
    return True


def test_a_turn_is_stored_whole_while_the_process_takes_nothing_more(engine):
    chat = engine.chat("expiring")
    chat.send("Hello", TEN)
    chat.set_ttl(3600)
    hold = engine.chats.claims.hold(chat.key)
    turn = chat.begin(hold, chat.check([{"role": "user", "content": "More"}], TEN), TEN)
    for _ in engine.stream(turn.handle):
        pass
    os.kill(engine.core.pid, signal.SIGSTOP)
    try:
        fill(engine.core)
        assert chat.end(hold).number == 2
        engine.chats.claims.release(hold)
    finally:
        os.kill(engine.core.pid, signal.SIGCONT)
    wait_until(lambda: takes_more(engine), "it goes on")
    chat.send("And more", TEN)
    stored = engine.sessions.load(chat.key)
    assert (stored.turn, stored.token_ids, stored.messages) == (3, chat.token_ids, chat.messages)
    assert len(chat.messages) == 6


def test_nothing_of_the_configuration_is_in_the_list_of_processes(engine):
    shown = Path(f"/proc/{engine.core.pid}/cmdline").read_bytes()
    assert shown.endswith(b"\0-m\0kvstore.engine.program\0the engine's process\0")


def test_what_cannot_be_opened_says_why_and_leaves_nothing(model, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(ConfigError, match="block_size"):
        Engine(model, block_size=0, process="own")
    with pytest.raises(ModelError, match="not a directory"):
        Engine(str(tmp_path / "nothing"), process="own")
    with pytest.raises(ConfigError, match="made for 256 tokens"):  # said by the process
        Engine(model, device="cpu", max_model_len=100_000, process="own")
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_fails_there_is_told_to_every_request_and_the_engine_goes_on(here, capfd):
    front, there = map(Channel, socket.socketpair())
    before = here.loop.on_news
    server = CoreServer(here.core, there, Heart(None, 60.0))
    lineage = Lineage(here.facts.root(""))
    for number in range(2):
        front.send(encode(Submit(f"r{number}", list(PROMPT), TEN, 10, "", 0, (), lineage)))
    front.send(encode(End("unknown", None, None)))
    with before_each_step(here, fail):
        with held(here):  # both are in the same step
            server.take_in()
        told = []
        while len(told) < 2 and front.poll(120_000):
            told += [update for message in front.receive() for update in decode_outbound(message).updates]
    failures = {update.request_id: str(update.ended.error) for update in told}
    assert failures == {f"r{number}": "the engine failed: RuntimeError: injected" for number in (0, 1)}
    assert capfd.readouterr().err.count("injected") == 1
    front.close()
    there.close()
    here.loop.on_news = before
    assert len(here.generate([PROMPT], TEN)[0].token_ids) == 10


MANY = 5000  # requests, so that it takes a while to end them


# -- without a process -------------------------------------------------------------------------------------------------
class Telling(Child):
    """Says one token of one request, and lives until it is ended."""

    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair()
        super().__init__(Start(1e9, {}), end=ours)
        self.told = Channel(self._theirs)
        self.told.send_all(encode(Opened(Facts("none", 256, 256, 16, 1, 160, b"", b"", {}))))


@pytest.mark.parametrize("is_closed", [True, False])
def test_all_requests_are_told_of_the_end_though_the_reader_is_busy(is_closed):
    """The reader comes back from telling one of them while the others are being ended."""
    child, told, is_telling = Telling(), [], threading.Event()
    core = RemoteCore(lambda: child, 0, 0.0)
    core.started.result()
    client = CoreClient(core, None)
    over = ("closed", "failed")

    def hear(handles):
        is_telling.set()
        while core.state not in over:
            pass
        told.extend(handle.request_id for handle in handles)

    handles = client.submit_all([([3, 4], SamplingParams())] * MANY, listener=hear)
    child.told.send_all(encode(Updates([Update("request-0", [Said(0, 5)])])))
    is_telling.wait()
    core.close() if is_closed else child.kill()
    core.reader.join()
    assert sorted(told) == sorted(["request-0", *(handle.request_id for handle in handles)]), "the first twice"
    core.close()
    child.told.close()


# -- when a process that ended is started again ------------------------------------------------------------------------
def test_delays_double_until_their_limit():
    restarts = Restarts(10, clock=lambda: 0.0)
    delays = []
    while restarts.note_end("signal 9"):
        delays.append(restarts.delay_s)
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, *[MAX_DELAY_S] * 3]


def test_an_end_is_forgotten_after_an_hour(caplog):
    now = 0.0
    restarts = Restarts(2, clock=lambda: now)
    assert restarts.note_end("signal 9") and restarts.note_end("signal 11") and restarts.why == "signal 11"
    now = WINDOW_S
    assert not restarts.note_end("exit code 1")
    assert caplog.messages[-1].endswith("it is not started again: the limit of restarts an hour is 2")
    now = WINDOW_S + 1.0
    assert restarts.note_end("signal 9") and restarts.delay_s == 1.0
