"""A core here, in a process of its own, and several: the same answers, sessions and errors from each.

Of the process: what goes out and comes in, more than it takes, and its end.
"""

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
from kvstore.engine.client.messages import End, Opened, Submit, Updates, decode_outbound
from kvstore.engine.client.remote import MAX_REQUESTS, READ, CoreServer, RemoteCore
from kvstore.engine.client.requests import CoreClient
from kvstore.engine.core.request import Said, Update
from kvstore.engine.outputs import Facts
from kvstore.engine.process import Channel, Child, Heart, Start, encode
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
from tests.support.waiting import TIMEOUT_S, wait_in_loop, wait_until

MODEL = {"tokenizer": True}
TIERS = {"hbm": "2MiB", "cpu": "4MiB", "disk": "32MiB"}
TEN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONGER = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)  # a second, and more
PROMPT = list(range(3, 40))
KINDS = {
    "here": {},
    "own": {"process": "own"},
    "several": {"process": "own", "data_parallel_size": 2},
}
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def opened(model: str, path: Path, kind: str) -> Engine:
    return Engine(model, CacheTiers(**TIERS, path=path), seed=1, device="cpu", load="always", **KINDS[kind])


@pytest.fixture(scope="module")
def own(model, tmp_path_factory):
    with opened(model, tmp_path_factory.mktemp("own") / "store", "own") as engine:
        yield engine
        assert not engine.has_work and engine.stats()["requests"]["running"] == 0
    assert engine.core.state == "closed"


@pytest.fixture(scope="module", params=KINDS)
def engine(request, model, tmp_path_factory):
    if request.param == "own":
        yield request.getfixturevalue("own")
        return
    with opened(model, tmp_path_factory.mktemp("core") / "store", request.param) as engine:
        yield engine
        assert not engine.has_work and engine.stats()["requests"]["running"] == 0
    assert engine.core.state == "closed"


@pytest.fixture(scope="module")
def here(model, tmp_path_factory):
    """What the others are compared with."""
    with opened(model, tmp_path_factory.mktemp("here") / "store", "here") as engine:
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
def test_answers_are_the_same(engine, here, name):
    params = SamplingParams(max_tokens=12, **PARAMETERS[name])
    prompts = [PROMPT[:n][::-1] for n in (5, 20, 37)]  # no hits: they would hang on who comes first
    salt = f"{name} {id(engine)}"  # nothing is cached of it, whichever core came before
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


@pytest.mark.parametrize(("first", "last", "n"), [(2, 3, 1), (1, 9, 3), (7, 12, 1)])
def test_stop_strings_end_an_answer_at_the_same_token(engine, here, first, last, n):
    """They are found in front, while the core may go on for a token or two, which nobody sees."""
    stop = text_of(here)[first:last]
    params = SamplingParams(temperature=0, n=n, max_tokens=200, ignore_eos=True, stop=[stop, "\0 never"])
    before = engine.stats()
    handles = [one.submit(list(PROMPT), params, "", f"stop {first} {n} {id(engine)}") for one in (engine, here)]
    pieces = [list(one.stream(handle)) for one, handle in zip((engine, here), handles, strict=True)]
    by_choice = [[piece for index in range(n) for piece in some if piece.index == index] for some in pieces]
    there, known = (handle.output for handle in handles)
    assert by_choice[0] == by_choice[1] and there.choices == known.choices and there.usage == known.usage
    assert there.choices[0].stop_reason == stop and stop not in there.text
    assert [len(handle.chain) for handle in handles] == [(len(PROMPT) + len(known.token_ids)) // 16] * 2
    now = engine.stats()
    counts = [(stats["requests"]["aborted"], stats["requests"]["finished"]) for stats in (before, now)]
    assert counts[1] == (counts[0][0], counts[0][1] + 1)
    num_said = now["tokens"]["completion_tokens"] - before["tokens"]["completion_tokens"]
    assert known.usage.completion_tokens <= num_said < 200 * n, "the core was told"


def test_an_answer_that_asks_for_more_than_the_window_has_left_is_capped(engine):
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    [out] = engine.generate([[5] * 250], params)
    assert (out.usage.capped_max_tokens, out.usage.completion_tokens) == (6, 6)


def test_a_truncated_session_keeps_its_kv_and_its_answers(engine, here):
    """The splice is made there, its chain comes back and goes with the next prompt."""
    for one in (engine, here):
        chat = one.chat(f"long-{id(engine)}", system="Be kind.")
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
    assert engine.stats().get("process", {"state": "running"})["state"] == engine.core.state == "running"


@pytest.mark.anyio
async def test_closing_ends_what_runs_and_refuses_what_comes(tmp_path):
    """With a model that has no tokenizer: it takes ids."""
    model = save_model(tmp_path / "bare", max_position_embeddings=2048)
    engine = Engine(model, {"hbm": "8MiB"}, device="cpu")
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
    assert engine.core.state == "closed" and engine.core.pid is None


def test_a_request_has_ended_when_it_was_aborted_while_the_engine_closes(model, tmp_path):
    may_step, is_done = threading.Event(), []
    engine = opened(model, tmp_path / "store", "here")
    with before_each_step(engine, may_step.wait):
        handle = engine.submit(list(PROMPT), LONG)
        closing = threading.Thread(target=engine.close)
        closing.start()
        wait_until(lambda: engine.core.state == "closed")
        aborting = threading.Thread(target=lambda: is_done.append((engine.abort(handle), handle.done)[1]))
        aborting.start()
        wait_until(lambda: not aborting.is_alive() or engine.client._ended._waiters)
        may_step.set()
        for thread in (aborting, closing):
            thread.join()
    assert is_done == [True] and handle.output.finish_reason == "abort"


def test_an_update_that_cannot_be_taken_in_ends_its_request_alone(engine, here, caplog):
    with engine.client._taking:  # no update is applied in here
        first, second = (engine.submit(PROMPT, TEN) for _ in range(2))
        first.output.prompt_token_ids = None  # as a defect could leave it
    with pytest.raises(TypeError):
        list(engine.stream(first))
    list(engine.stream(second))
    assert "could not be taken in" in caplog.text
    assert second.error is None and second.output.text == text_of(here)


def test_a_stream_that_is_left_ends_its_request(engine):
    handle = engine.submit(list(PROMPT), SamplingParams(max_tokens=200, ignore_eos=True, n=2))
    pieces = engine.stream(handle)
    next(pieces)
    pieces.close()
    assert handle.done and {choice.finish_reason for choice in handle.output.choices} == {"abort"}
    said = [len(choice.token_ids) for choice in handle.output.choices]
    assert handle.output.usage.completion_tokens == sum(said) and not engine.has_work


def is_unread(front: AsyncEngine) -> bool:
    return not any(port.readers for port in front._ports.values())


@pytest.mark.anyio
async def test_the_loop_takes_in_by_itself_what_the_process_says(saved_model, here, redis, monkeypatch):
    """Without a thread: ids, long ones and texts, an answer that is left and one that is stopped, an error, the end."""
    prompts = [[i % 150 + 3] * (5 + i % 30) for i in range(32)]
    known = [out.token_ids for out in here.generate(prompts, TEN)]
    [text] = here.generate(["Hello there"], TEN)

    model = saved_model(tokenizer=True, max_position_embeddings=2048)
    shared = {"session_store": redis.url, "session_durability": "unchecked"}
    engine = Engine(model, {"hbm": "2MiB"}, device="cpu", process="own", **shared)
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
    await closed_while_a_round_waits(engine, front)
    with pytest.raises(EngineClosedError):
        await front.start(PROMPT, TEN)
    with pytest.raises(EngineClosedError):
        engine.flush()
    assert engine.core.state == "closed" and engine.core.pid is None
    assert [out.token_ids for out in outs] == [out.token_ids for out in again] == known
    assert (said.text, said.token_ids) == (text.text, text.token_ids)


async def closed_while_a_round_waits(engine: Engine, front: AsyncEngine) -> None:
    """It carries out a deletion, and the loop that is being closed is the one that reads the answer."""
    asks = threading.Event()
    await front.call(engine.chat("deleted").send, "Hello", TEN)
    os.kill(engine.core.pid, signal.SIGSTOP)
    with before_each(engine.client, "call", asks.set):
        await front.call(engine.sessions.delete(SessionKey("", "deleted")).wait)  # as another server does it
        await front.call(wait_until, asks.is_set, "the next round")
        closing = asyncio.create_task(front.close())
        await front.call(wait_until, lambda: engine.closed, "it begins to close")
        os.kill(engine.core.pid, signal.SIGCONT)
        await asyncio.wait_for(closing, TIMEOUT_S)


def test_requests_wait_for_a_process_that_does_not_read(own, here):
    """More than the kernel holds back for it: the rest goes out once there is room, and nothing is lost."""
    prompts = [[i % 150 + 3, i // 150 + 3, 9] for i in range(1500)]
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    os.kill(own.core.pid, signal.SIGSTOP)
    try:
        handles = [own.submit(prompt, one) for prompt in prompts]
        assert own.core._child.channel.num_unsent > 0
    finally:
        os.kill(own.core.pid, signal.SIGCONT)
    for handle in handles:
        list(own.stream(handle))
    assert own.core._child.channel.num_unsent == 0
    sample = range(0, 1500, 97)
    known = here.generate([prompts[i] for i in sample], one)
    assert [handles[i].output.token_ids for i in sample] == [out.token_ids for out in known]


def test_more_requests_than_are_taken_are_refused(own):
    own.core.max_requests = 2
    os.kill(own.core.pid, signal.SIGSTOP)  # so that none of them ends
    try:
        handles = own.client.submit_all([(list(PROMPT), LONG)] * 2)
        with pytest.raises(EngineOverloadedError):
            own.client.submit_all([(list(PROMPT), TEN)])
        for handle in handles:  # as `abort` says it, which then waits for the process
            own.core.end(handle.request_id)
    finally:
        os.kill(own.core.pid, signal.SIGCONT)
        own.core.max_requests = MAX_REQUESTS
    for handle in handles:
        own.client.abort(handle)
        assert handle.done and handle.output.finish_reason == "abort" and handle.lineage is not None
    assert len(own.generate([PROMPT], TEN)[0].token_ids) == 10


def test_half_a_character_does_not_cross(own):
    with pytest.raises(RequestError, match="surrogate"):
        own.generate([PROMPT], TEN, tenant="half \ud83d")
    assert not own.has_work


def fill(core) -> None:
    """Until the process, which is stopped, takes nothing more."""
    with pytest.raises(EngineOverloadedError):
        while True:
            with core.changed:
                core._send(core._child, encode(End("nobody's", None, None)))


def takes_more(own) -> bool:
    try:
        own.stats()
    except EngineOverloadedError:
        return False
    return True


def test_a_turn_is_stored_whole_while_the_process_takes_nothing_more(own):
    chat = own.chat("expiring")
    chat.send("Hello", TEN)
    chat.set_ttl(3600)
    hold = own.chats.claims.hold(chat.key)
    turn = chat.begin(hold, chat.check([{"role": "user", "content": "More"}], TEN), TEN)
    for _ in own.stream(turn.handle):
        pass
    os.kill(own.core.pid, signal.SIGSTOP)
    try:
        fill(own.core)
        assert chat.end(hold).number == 2
        own.chats.claims.release(hold)
    finally:
        os.kill(own.core.pid, signal.SIGCONT)
    wait_until(lambda: takes_more(own), "it goes on")
    chat.send("And more", TEN)
    stored = own.sessions.load(chat.key)
    assert (stored.turn, stored.token_ids, stored.messages) == (3, chat.token_ids, chat.messages)
    assert len(chat.messages) == 6


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
    heart = Heart(None, 60.0)
    server = CoreServer(here.core, there, heart)
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
    heart.close()
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
        self.told.send_all(encode(Opened(Facts("none", 256, 256, 16, 1, 160, b"", b"", {}, 64))))


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
