"""An engine whose core runs in a process of its own: the same answers, sessions and errors as in one process."""

import asyncio
import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from kvstore import AsyncEngine, CacheTiers, Engine, SamplingParams
from kvstore.engine import async_engine
from kvstore.engine.process.channel import Channel
from kvstore.engine.process.core import CoreServer
from kvstore.engine.process.link import READ
from kvstore.engine.process.pulse import Heart
from kvstore.engine.process.remote import RemoteCore
from kvstore.engine.process.wire import End, Submit, decode_outbound, encode, error_of, params_to_wire
from kvstore.engine.remote_engine import RemoteEngine
from kvstore.engine.sessions.core import stream
from kvstore.errors import (
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    EngineOverloadedError,
    ModelError,
    RequestError,
    SessionNotFoundError,
)
from kvstore.sessions.record import SessionKey
from tests.support.by_hand import held
from tests.support.engines import save_model
from tests.support.faults import before_each, before_each_step, fail
from tests.support.redis_server import RedisServer
from tests.support.waiting import TIMEOUT_S, wait_in_loop, wait_until

MODEL = {"tokenizer": True}
TIERS = {"hbm": "2MiB", "cpu": "2MiB", "disk": "32MiB"}
TEN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
LONGER = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)  # a second, and more
PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    tiers = CacheTiers(**TIERS, path=tmp_path_factory.mktemp("remote") / "store")
    with RemoteEngine(model, tiers, seed=1, device="cpu", load="always") as engine:
        yield engine
        assert not engine.has_work and engine.stats()["requests"]["running"] == 0
    assert engine.state == "closed"


@pytest.fixture(scope="module")
def here(model, tmp_path_factory):
    tiers = CacheTiers(**TIERS, path=tmp_path_factory.mktemp("here") / "store")
    with Engine(model, tiers, seed=1, device="cpu", load="always") as engine:
        yield engine


def text_of(engine) -> str:
    return engine.generate([PROMPT], TEN)[0].text


def plain(choice) -> tuple:
    return choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason, choice.logprobs is None


PARAMETERS = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 5, "top_k": 20},
    "three choices": {"n": 3, "seed": 7, "logprobs": 2},
    "penalties": {"temperature": 0, "presence_penalty": 1.5, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}},
    "least tokens": {"temperature": 0, "min_tokens": 6, "logit_bias": {2: 50.0}},
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_answers_are_those_of_an_engine_in_this_process(engine, here, name):
    params = SamplingParams(max_tokens=12, **PARAMETERS[name])
    prompts = [PROMPT[:n][::-1] for n in (5, 20, 37)]  # no hits: they would hang on who comes first
    salt = f"salt of {name}"
    for there, known in zip(
        engine.generate(prompts, params, "anna", salt), here.generate(prompts, params, "anna", salt), strict=True
    ):
        assert [plain(choice) for choice in there.choices] == [plain(choice) for choice in known.choices]
        assert there.usage == known.usage
        for mine, yours in zip(there.choices, known.choices, strict=True):
            assert [entry.token_id for entry in mine.logprobs or ()] == mine.token_ids[: len(mine.logprobs or ())]
            for one, other in zip(mine.logprobs or (), yours.logprobs or (), strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-3) and len(one.top) == len(other.top)
        times = there.timings
        assert times.queue_s + times.load_s + times.prefill_s == pytest.approx(there.ttft_s) and times.decode_s >= 0


@pytest.mark.parametrize(("first", "last"), [(2, 3), (1, 9), (7, 12)])
@pytest.mark.parametrize("n", [1, 3])
def test_stop_strings_end_an_answer_where_they_do_in_one_process(engine, here, first, last, n):
    """They are found here, while the engine goes on for a token or two, which nobody sees."""
    stop = text_of(here)[first:last]
    params = SamplingParams(temperature=0, n=n, max_tokens=60, ignore_eos=True, stop=[stop, "\0 never"])
    before = engine.stats()["requests"]
    handles = [one.submit(list(PROMPT), params, "", f"stop {first} {n}") for one in (engine, here)]
    pieces = [list(one.stream(handle)) for one, handle in zip((engine, here), handles, strict=True)]
    by_choice = [[piece for index in range(n) for piece in some if piece.index == index] for some in pieces]
    there, known = (handle.output for handle in handles)
    assert by_choice[0] == by_choice[1] and there.choices == known.choices and there.usage == known.usage
    assert there.choices[0].stop_reason == stop and stop not in there.text
    assert len(handles[0].chain) == len(handles[1].chain)
    now = engine.stats()["requests"]
    assert (now["aborted"], now["finished"]) == (before["aborted"], before["finished"] + 1)


def is_unread(front: AsyncEngine) -> bool:
    return not any(port.readers for port in front._ports.values())


def test_the_loop_takes_in_by_itself_what_the_process_says(saved_model, here, monkeypatch):
    """Without a thread: ids, long ones and texts, an answer that is left and one that is stopped, an error, the end."""
    prompts = [[i % 150 + 3] * (5 + i % 30) for i in range(32)]
    known = [out.token_ids for out in here.generate(prompts, TEN)]
    [text] = here.generate(["Hello there"], TEN)

    async def scenario():
        model = saved_model(tokenizer=True, max_position_embeddings=2048)
        engine = RemoteEngine(model, {"hbm": "2MiB"}, device="cpu")
        front = AsyncEngine(engine, engine.link)
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
        assert not [thread for thread in threading.enumerate() if thread is engine.link.reader and thread.name == READ]
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
        engine = RemoteEngine(
            model, {"hbm": "2MiB"}, device="cpu", session_store=redis.url, session_durability="unchecked"
        )
        front = AsyncEngine(engine, engine.link)
        await front.call(engine.chat("deleted").send, "Hello", TEN)
        os.kill(engine.pid, signal.SIGSTOP)
        with before_each(engine.core, "forget", asks.set):
            await front.call(engine.sessions.delete(SessionKey("", "deleted")).wait)  # as another server does it
            await front.call(wait_until, asks.is_set, "the next round")
            closing = asyncio.create_task(front.close())
            await front.call(wait_until, lambda: engine.closed, "it begins to close")
            os.kill(engine.pid, signal.SIGCONT)
            await asyncio.wait_for(closing, TIMEOUT_S)
        assert engine.state == "closed"

    asyncio.run(scenario())
    redis.kill()


def test_requests_wait_for_a_process_that_does_not_read(engine, here):
    """More than the kernel holds back for it: the rest goes out once there is room, and nothing is lost."""
    prompts = [[i % 150 + 3, i // 150 + 3, 9] for i in range(1500)]
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        handles = [engine.submit(prompt, one) for prompt in prompts]
        assert engine.link._life._channel.num_unsent > 0
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    for handle in handles:
        list(engine.stream(handle))
    assert engine.link._life._channel.num_unsent == 0
    sample = range(0, 1500, 97)
    known = here.generate([prompts[i] for i in sample], one)
    assert [handles[i].output.token_ids for i in sample] == [out.token_ids for out in known]


def test_a_truncated_session_keeps_its_kv_and_its_answers(engine, here):
    """The splice is made there, its chain comes back and goes with the next prompt."""
    for one in (engine, here):
        chat = one.chat("long", system="Be kind.")
        outs = [chat.send(f"This is message number {turn} of a long talk.", TEN) for turn in range(12)]
        assert chat.truncated_tokens > 0 and max(out.usage.cached_tokens_details.reencoded for out in outs) > 0
        if one is engine:
            known = [out.token_ids for out in outs]
    assert [out.token_ids for out in outs] == known


def test_errors_arrive_as_they_are(engine):
    with pytest.raises(ContextLengthError) as told:
        engine.generate([[1] * 300], TEN)
    assert (told.value.requested_tokens, told.value.limit_tokens) == (300, 256)
    with pytest.raises(SessionNotFoundError, match="no session 'nobody'") as unknown:
        engine.prefetch("nobody")
    assert unknown.value.param == "session_id"
    with pytest.raises(SessionNotFoundError):
        engine.admin.delete_session("nobody")
    with pytest.raises(RequestError, match="cursor"):
        engine.admin.list_sessions("", 10, "no cursor")
    with pytest.raises(RequestError, match="surrogate"):
        engine.root("half \ud83d")
    assert engine.generate([PROMPT], TEN, cache_salt="half \ud83d")[0].usage.completion_tokens == 10


def test_administration(engine):
    engine.generate([PROMPT], TEN, cache_salt="kept")
    engine.flush()
    assert engine.generate([PROMPT], TEN, cache_salt="kept")[0].usage.cached_tokens == 32
    assert engine.admin.verify()["sessions"]["problems"] in ((), [])
    assert engine.admin.handle("evict", {"all": True})["tiers"]["hbm"]["blocks"] > 0
    assert engine.generate([PROMPT], TEN, cache_salt="kept")[0].usage.cached_tokens == 0
    engine.answers.put([b"k" * 16], [1, 2, 3])
    assert [ids and list(ids) for ids in engine.answers.find_ids([[b"k" * 16], [b"x" * 16]])] == [[1, 2, 3], None]
    assert engine.stats()["process"]["state"] == "running"


def test_more_requests_than_are_taken_are_refused(engine):
    core = RemoteCore(engine.link, None, max_requests=2)
    core.root("")  # which the process says
    os.kill(engine.pid, signal.SIGSTOP)  # so that none of them ends
    try:
        handles = core.submit_all([(list(PROMPT), LONG)] * 2)
        with pytest.raises(EngineOverloadedError):
            core.submit_all([(list(PROMPT), TEN)])
        with engine.link.changed:
            for handle in handles:  # as `abort` says it, which then waits for the process
                engine.link.end_request(handle.request_id, None, "abort")
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    for handle in handles:
        core.abort(handle)
        assert handle.done and handle.output.finish_reason == "abort" and handle.lineage is not None
    assert len(engine.generate([PROMPT], TEN)[0].token_ids) == 10


def fill(link) -> None:
    """Until the process, which is stopped, takes nothing more."""
    with link.changed:
        life = link.check_open()
    with pytest.raises(EngineOverloadedError):
        while True:
            life.send(encode(End("nobody's", None, "abort")))


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
    for _ in stream(engine.core, turn.handle):
        pass
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        fill(engine.link)
        assert chat.end(hold).number == 2
        engine.chats.claims.release(hold)
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    wait_until(lambda: takes_more(engine), "it goes on")
    chat.send("And more", TEN)
    stored = engine.sessions.load(chat.key)
    assert (stored.turn, stored.token_ids, stored.messages) == (3, chat.token_ids, chat.messages)
    assert len(chat.messages) == 6


def test_nothing_of_the_configuration_is_in_the_list_of_processes(engine):
    shown = Path(f"/proc/{engine.pid}/cmdline").read_bytes()
    assert shown.endswith(b"\0-m\0kvstore.engine.core_process\0")


def test_what_cannot_be_opened_says_why_and_leaves_nothing(model, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(ConfigError, match="block_size"):
        RemoteEngine(model, block_size=0)
    with pytest.raises(ModelError, match="not a directory"):
        RemoteEngine(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="made for 256 tokens"):  # said by the process
        RemoteEngine(model, device="cpu", max_model_len=100_000)
    assert list(tmp_path.iterdir()) == []


def test_closing_ends_what_runs_and_refuses_what_comes(tmp_path):
    """With a model that has no tokenizer: it takes ids."""

    async def scenario():
        engine = RemoteEngine(save_model(tmp_path / "bare", max_position_embeddings=2048), device="cpu")
        front = AsyncEngine(engine)
        out = await front.generate(PROMPT, TEN)
        assert (out.text, len(out.token_ids)) == ("", 10)
        with pytest.raises(RequestError, match="no tokenizer"):
            engine.chat("a")
        task = asyncio.create_task(front.generate(PROMPT, LONGER))
        await wait_in_loop(lambda: engine.has_work)
        await front.close()
        assert (await task).finish_reason == "abort"
        with pytest.raises(EngineClosedError):
            await front.generate(PROMPT, TEN)
        with pytest.raises(EngineClosedError):
            engine.flush()
        engine.close()
        return engine

    engine = asyncio.run(asyncio.wait_for(scenario(), 300))
    assert engine.state == "closed" and engine.pid is None


def test_an_update_that_cannot_be_taken_in_ends_its_request_alone(engine, here, caplog):
    with engine.link.changed:  # no update is applied in here
        first, second = (engine.submit(PROMPT, TEN) for _ in range(2))
        first.output.prompt_token_ids = None  # as a defect could leave it
    with pytest.raises(TypeError):
        list(engine.stream(first))
    list(engine.stream(second))
    assert "could not be taken in" in caplog.text
    assert second.error is None and second.output.text == text_of(here)


def test_a_step_that_fails_there_is_told_to_every_request_and_the_engine_goes_on(here, capfd):
    front, there = map(Channel, socket.socketpair())
    core = CoreServer(here.core, here.loop, there, Heart(os.pipe()[1], 60.0))
    for number, params in enumerate([TEN, LONG]):
        front.send(encode(Submit(f"r{number}", list(PROMPT), params_to_wire(params), b"", b"", 0, None)))
    front.send(encode(Submit("wrong", [10**6], params_to_wire(TEN), b"", b"", 0, None)))
    front.send(encode(End("unknown", None, "abort")))
    with before_each_step(here, fail):
        with held(here):  # both are in the same step
            core.take_in()
        told = []
        while len(told) < 3 and front.poll(120_000):
            told += [update for message in front.receive() for update in decode_outbound(message).updates]
    failures = {update.request_id: error_of(update.ended.failure) for update in told}
    assert type(failures["wrong"]) is RequestError and not core._running and not core._ids
    assert [str(failures[f"r{number}"]) for number in (0, 1)] == ["the engine failed: RuntimeError: injected"] * 2
    assert capfd.readouterr().err.count("injected") == 1
    front.close()
    there.close()
    assert len(here.generate([PROMPT], TEN)[0].token_ids) == 10
