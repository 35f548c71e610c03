"""The asyncio engine: many requests in one loop, streams, turns of sessions, cancellation, errors, close."""

import asyncio
import json
import threading
import traceback
from contextlib import aclosing
from unittest import mock

import pytest

from kvstore import AsyncChat, AsyncEngine, Engine, SamplingParams
from kvstore.engine.async_engine import MAX_CALLS
from kvstore.errors import EngineClosedError, KVStoreError, RequestError, SessionBusyError, SessionNotFoundError
from kvstore.sessions.record import SessionKey
from tests.support.by_hand import crawling
from tests.support.engines import greedy
from tests.support.faults import before_each, before_each_step, fail
from tests.support.waiting import wait_in_loop

pytestmark = pytest.mark.anyio
MODEL = {"tokenizer": True, "max_position_embeddings": 1024}
GREEDY = greedy(10)
LONG = greedy(900)
PROMPT = list(range(3, 40))


def opened(model) -> AsyncEngine:
    return AsyncEngine(Engine(model, {"hbm": "8MiB"}, device="cpu", max_num_seqs=8))


@pytest.fixture(scope="module")
async def served(model, anyio_backend):
    """For all tests that leave it as it was."""
    async with opened(model) as engine:
        yield engine


@pytest.fixture
async def engine(served):
    """Afterwards nothing may be held."""
    yield served
    await wait_in_loop(lambda: not served.engine.has_work)
    served.engine.check_integrity()
    assert not any(port.readers or port.tasks for port in served._ports.values())


async def test_many_requests_at_once_answer_as_alone(engine, plain):
    outs = await asyncio.gather(*(engine.generate(PROMPT[:n], GREEDY) for n in range(5, 30)))
    assert [out.token_ids for out in outs] == [plain(PROMPT[:n], 10) for n in range(5, 30)]


async def test_a_stream_brings_every_token_once(engine, plain):
    pieces = [piece async for piece in engine.stream(PROMPT, GREEDY)]
    assert [t for piece in pieces for t in piece.token_ids] == plain(PROMPT, 10)
    assert [piece.finish_reason for piece in pieces] == [None] * 9 + ["length"]


async def test_cancelling_aborts_the_request_and_leaves_the_others(engine, plain):
    with crawling(engine.engine):
        doomed = [asyncio.create_task(engine.generate([i + 1] * 20, LONG)) for i in range(3)]
        other = asyncio.create_task(engine.generate(PROMPT, GREEDY))
        num_steps = engine.engine.stats()["step"]["num_steps"]
        await wait_in_loop(lambda: engine.engine.stats()["step"]["num_steps"] > num_steps + 2)
        for task in doomed:
            task.cancel()
        ended = await asyncio.gather(*doomed, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in ended)
    assert (await other).token_ids == plain(PROMPT, 10)


async def test_leaving_a_stream_early_aborts_it(engine):
    stream = engine.stream(PROMPT, LONG)
    async for _ in stream:
        break
    await stream.aclose()
    assert engine.engine.stats()["requests"]["running"] == 0


async def test_cancelling_while_submitting_leaves_nothing(engine):
    submit, submitted, asked, may = engine.engine.submit, [], threading.Event(), threading.Event()

    def late(*args):
        asked.set()
        may.wait()
        submitted.append(submit(*args))
        return submitted[-1]

    engine.engine.submit = late
    task = asyncio.create_task(engine.generate(tuple(PROMPT), LONG))  # in a thread, as it is no list
    await wait_in_loop(asked.is_set)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    engine.engine.submit = submit
    with crawling(engine.engine):
        may.set()
        await wait_in_loop(lambda: submitted and submitted[0].done, "the request that nobody reads has ended")
    assert submitted[0].output.finish_reason == "abort"


async def test_turns_whose_spans_are_computed_hold_up_nothing_else_and_end_with_their_readers(model):
    may_step, text = threading.Event(), "The lighthouse has a keeper and seven cats. " * 20
    parts = [{"type": "text", "text": "Read: " * 40}, {"type": "text", "text": text, "reuse": "reencode"}]
    engine = AsyncEngine(Engine(model, {"hbm": "8MiB", "cpu": "8MiB"}, device="cpu", max_num_seqs=8))
    async with engine:
        keys = [SessionKey("", f"span-{number}") for number in range(MAX_CALLS)]
        with before_each_step(engine.engine, may_step.wait):
            chats = [engine.engine.chat(key.session_id) for key in keys]
            message = [{"role": "user", "content": parts}]
            turns = [asyncio.create_task(AsyncChat(engine, chat).start(message, GREEDY)) for chat in chats]
            holds = lambda: list(map(engine.engine.chats.claims.on, keys))  # noqa: E731
            await wait_in_loop(lambda: all(hold is not None and hold.computed for hold in holds()))
            waiting, call = holds(), asyncio.create_task(engine.call(int))
            await wait_in_loop(call.done)
            for turn in turns:
                turn.cancel()
            await asyncio.gather(*turns, return_exceptions=True)
            may_step.set()
            await wait_in_loop(lambda: not any(holds()))
        ends = [hold.computed[0].output.finish_reason for hold in waiting]
        assert ends.count("abort") >= MAX_CALLS - 8, "those that were not in the first step"


async def test_who_iterates_hears_of_what_prevented_the_request(engine):
    async def script(_):
        raise RequestError("injected")

    with pytest.raises(RequestError, match="injected"):
        async for _ in engine.turn(script):
            pass


async def test_whoever_runs_hears_when_queueing_another_request_tore_the_engine(engine):
    with crawling(engine.engine):
        answer = await engine.start("hello", LONG)
        await anext(answer)
        with before_each(engine.engine.loop.scheduler.roster, "add", fail), pytest.raises(RuntimeError):
            await engine.generate("other")
    with pytest.raises(RuntimeError):
        async for _ in answer:
            pass
    assert (await engine.generate("again", greedy(2))).finish_reason is not None


async def test_the_trace_of_an_error_does_not_grow_with_those_who_get_it(engine):
    answers = [await engine.start("hello", LONG) for _ in range(8)]
    for answer in answers:
        await anext(answer)
    lengths = set()
    with before_each_step(engine.engine, fail):
        for answer in answers:
            with pytest.raises(RuntimeError) as caught:
                async for _ in answer:
                    pass
            lengths.add(sum(1 for _ in traceback.walk_tb(caught.value.__traceback__)))
    assert len(lengths) == 1
    with pytest.raises(StopAsyncIteration):
        await anext(answers[0])


# -- turns -------------------------------------------------------------------------------------------------------------
async def text_of(answer):
    async with answer:
        return "".join([piece.text async for piece in answer])


async def test_a_turn_is_stored_before_its_last_piece(engine):
    chat = engine.engine.chat("stored")
    async with await AsyncChat(engine, chat).start("My name is Ada.", GREEDY) as answer:
        async for piece in answer:
            stored = engine.engine.sessions.turn(SessionKey("", "stored"), 1)
            assert (stored is None) == (piece.finish_reason is None)
    assert await answer.result() == stored and chat.num_turns == 1
    assert stored.messages[-1] == {"role": "assistant", "content": answer.output.text}


@pytest.mark.parametrize("num_pieces", [0, 3])
async def test_an_abandoned_turn_is_not_stored_and_a_stopped_one_is(engine, num_pieces):
    chat = engine.engine.chat(f"left-{num_pieces}")
    with crawling(engine.engine):
        async with await AsyncChat(engine, chat).start("Hello", LONG) as answer:
            for _ in range(num_pieces):
                await anext(answer)
        assert chat.num_turns == 0 and chat.chats.claims.on(chat.key) is None and await answer.result() is None

        async with await AsyncChat(engine, chat).start("Hello", LONG) as answer:
            await anext(answer)
            await answer.stop()
            pieces = [piece async for piece in answer]
        assert pieces[-1].finish_reason == "abort" and (await answer.result()).finish_reason == "abort"
    assert chat.num_turns == 1 and 1 <= len(answer.output.token_ids) < 900


async def test_a_first_turn_may_bring_the_history(engine):
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada."},
        {"role": "user", "content": "What is my name?"},
    ]

    chat = engine.engine.chat("history")
    await text_of(await AsyncChat(engine, chat).start(history, GREEDY))
    assert chat.messages[:4] == history and chat.num_turns == 1
    again = engine.engine.sessions.load(SessionKey("", "history"))
    assert again.messages == chat.messages and again.token_ids == chat.token_ids
    answer = await AsyncChat(engine, chat).start("And again?", GREEDY)
    await text_of(answer)
    assert answer.output.usage.cached_tokens >= len(again.token_ids) // 16 * 16 - 16
    with pytest.raises(RequestError, match="one user message"):
        await AsyncChat(engine, chat).start(history, GREEDY)


@pytest.mark.parametrize(
    "roles", [["assistant"], ["system"], ["user", "system", "user"], ["user", "assistant"], ["user", "tool"], []]
)
async def test_other_orders_of_roles_are_refused(engine, roles):
    messages = [{"role": role, "content": "x"} for role in roles]
    with pytest.raises(RequestError, match=r"messages must end with|give a text, or a list of messages"):
        await AsyncChat(engine, engine.engine.chat("roles")).start(messages, GREEDY)


async def test_times_of_a_request_add_up_and_are_stored_with_its_turn(engine):
    answer = await AsyncChat(engine, engine.engine.chat("times")).start("Hello", GREEDY)
    await text_of(answer)
    times = answer.output.timings
    assert times.ttft_s == answer.output.ttft_s > 0 and times.decode_s > 0
    assert times.queue_s + times.load_s + times.prefill_s == pytest.approx(times.ttft_s)
    usage = (await answer.result()).usage
    assert usage["ttft_us"] == round(times.ttft_s * 1e6)
    json.dumps(usage)


async def test_a_turn_has_one_answer_and_that_is_kept_as_text(engine):
    for params in (SamplingParams(n=2), SamplingParams(detokenize=False)):
        with pytest.raises(RequestError):
            await AsyncChat(engine, engine.engine.chat("kept")).start("Hello", params)


async def test_a_stream_of_a_session_that_is_left_keeps_what_was_said_and_a_cancelled_turn_is_not_stored(engine):
    chat = await engine.chat("streamed")
    with crawling(engine.engine):
        async with aclosing(chat.stream("Hello", LONG)) as pieces:
            first = await anext(pieces)
            with pytest.raises(SessionBusyError):
                await chat.send("Me too", GREEDY)
    assert chat.num_turns == 1 and chat.messages[-1]["content"].startswith(first.text)
    task = asyncio.create_task(chat.send("Go on", LONG))
    await wait_in_loop(lambda: engine.port.readers)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert chat.num_turns == 1 and engine.engine.chats.claims.on(chat.session.key) is None
    assert (await chat.send("Go on", GREEDY)).text and chat.num_turns == 2


async def test_a_session_talks_forks_and_is_resumed(model, engine, tmp_path):
    alone = await engine.chat("alone", system="Be brief.")
    expected = [(await alone.send(text, GREEDY)).text for text in ("My name is Ada.", "What is my name?")]
    tiers = {"hbm": "8MiB", "cpu": "8MiB", "disk": "64MiB", "path": tmp_path}
    async with AsyncEngine(Engine(model, tiers, device="cpu")) as stored:
        chat = await stored.chat("a", system="Be brief.")
        first = await chat.send("My name is Ada.", GREEDY)
        second = "".join([piece.text async for piece in chat.stream("What is my name?", GREEDY)])
        assert [first.text, second] == expected and chat.last.text == second
        fork = await chat.fork("b", turn=1)
        assert fork.num_turns == 1 and (await fork.send("What is my name?", GREEDY)).text == second
        await stored.flush()
        assert (await stored.stats())["sessions"]["sessions"] == 2
    async with AsyncEngine(Engine(model, tiers, device="cpu")) as stored:
        again = await stored.chat("a")
        await again.prefetch()
        await again.set_ttl(1000.0)
        assert again.messages == chat.messages and again.session_id == "a"
        with pytest.raises(SessionNotFoundError):
            await stored.prefetch("c")
        assert (await again.keep_last(1)).messages == ()
        edits = [{"type": "remove", "index": 1}, {"type": "remove", "index": 2}]
        assert (await again.edit(edits, "forget", expected_turn=3)).turn == 4
        assert again.messages == [chat.messages[0], *chat.messages[3:]]


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_when_the_thread_dies_nobody_waits_for_ever(model):
    class Panic(BaseException):
        pass

    engine = opened(model)
    thread_errors = []
    previous, threading.excepthook = threading.excepthook, thread_errors.append
    engine.engine.loop.runner.launch = mock.Mock(side_effect=Panic)
    try:
        ended = await asyncio.gather(*(engine.generate(PROMPT[:n], GREEDY) for n in (5, 9)), return_exceptions=True)
        assert all(isinstance(error, KVStoreError) for error in ended)
        with pytest.raises(EngineClosedError):
            await engine.generate(PROMPT, GREEDY)
        engine.engine.loop._thread.join()
    finally:
        threading.excepthook = previous
    assert [entry.exc_type for entry in thread_errors] == [Panic]
    await engine.close()
