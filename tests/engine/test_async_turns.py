"""Turns of sessions through the asyncio engine: durable before the last piece, stopped, abandoned, refused."""

import asyncio
import json
from contextlib import aclosing

import pytest

from kvstore import AsyncEngine, Engine, SamplingParams
from kvstore.errors import RequestError, SessionBusyError, SessionNotFoundError
from kvstore.sessions.record import SessionKey
from tests.support.by_hand import crawling, held
from tests.support.waiting import wait_in_loop

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)


def said(text):
    return [{"role": "user", "content": text}]


def run(scenario):
    async def whole():
        engine = AsyncEngine(Engine())
        try:
            await scenario(engine)
            await wait_in_loop(lambda: not engine.engine.has_work)
            engine.engine.check_integrity()
            assert not any(port.readers or port.tasks for port in engine._ports.values())
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(whole(), 300))


async def text_of(answer):
    async with answer:
        return "".join([piece.text async for piece in answer])


def test_a_turn_is_stored_before_its_last_piece():
    async def scenario(engine):
        chat = engine.engine.chat("a")
        async with await engine.start_turn(chat, said("My name is Ada."), GREEDY, "key-1") as answer:
            async for piece in answer:
                stored = engine.engine.sessions.turn_of_request(SessionKey("", "a"), "key-1")
                assert (stored is None) == (piece.finish_reason is None)
        assert await answer.result() == stored and chat.num_turns == 1
        assert stored.messages[-1] == {"role": "assistant", "content": answer.output.text}

    run(scenario)


@pytest.mark.parametrize("num_pieces", [0, 3])
def test_an_abandoned_turn_is_not_stored_and_a_stopped_one_is(num_pieces):
    async def scenario(engine):
        chat = engine.engine.chat("a")
        with crawling(engine.engine):
            async with await engine.start_turn(chat, said("Hello"), LONG) as answer:
                for _ in range(num_pieces):
                    await anext(answer)
            assert chat.num_turns == 0 and not chat.is_busy and await answer.result() is None

            async with await engine.start_turn(chat, said("Hello"), LONG) as answer:
                await anext(answer)
                await answer.stop()
                pieces = [piece async for piece in answer]
            assert pieces[-1].finish_reason == "abort" and (await answer.result()).finish_reason == "abort"
        assert chat.num_turns == 1 and 1 <= len(answer.output.token_ids) < 900

    run(scenario)


def test_a_cancelled_reader_leaves_nothing_running():
    async def scenario(engine):
        chat = engine.engine.chat("a")
        for seconds in (0.001, 0.02, 0.05):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(text_of(await engine.start_turn(chat, said("Hello"), LONG)), seconds)
            await wait_in_loop(lambda: not chat.is_busy)
        task = asyncio.ensure_future(engine.start_turn(chat, said("Hello"), LONG))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_in_loop(lambda: not chat.is_busy)
        assert chat.num_turns == 0

    run(scenario)


def test_a_first_turn_may_bring_the_history():
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada."},
        {"role": "user", "content": "What is my name?"},
    ]

    async def scenario(engine):
        chat = engine.engine.chat("a")
        await text_of(await engine.start_turn(chat, history, GREEDY))
        assert chat.messages[:4] == history and chat.num_turns == 1
        again = engine.engine.sessions.load(SessionKey("", "a"))
        assert again.messages == chat.messages and again.token_ids == chat.token_ids
        answer = await engine.start_turn(chat, said("And again?"), GREEDY)
        await text_of(answer)
        assert answer.output.usage.cached_tokens >= len(again.token_ids) // 16 * 16 - 16
        with pytest.raises(RequestError, match="one user message"):
            await engine.start_turn(chat, history, GREEDY)

    run(scenario)


@pytest.mark.parametrize(
    "roles", [["assistant"], ["user", "user"], ["system"], ["user", "system", "user"], ["user", "assistant"], []]
)
def test_other_orders_of_roles_are_refused(roles):
    async def scenario(engine):
        messages = [{"role": role, "content": "x"} for role in roles]
        with pytest.raises(RequestError, match="take turns"):
            await engine.start_turn(engine.engine.chat("a"), messages, GREEDY)

    run(scenario)


def test_times_of_a_request_add_up_and_are_stored_with_its_turn():
    async def scenario(engine):
        answer = await engine.start_turn(engine.engine.chat("a"), said("Hello"), GREEDY)
        await text_of(answer)
        times = answer.output.timings
        assert times.ttft_s == answer.output.ttft_s > 0 and times.decode_s > 0
        assert times.queue_s + times.load_s + times.prefill_s == pytest.approx(times.ttft_s)
        usage = (await answer.result()).usage
        assert usage["ttft_us"] == round(times.ttft_s * 1e6)
        json.dumps(usage)

    run(scenario)


def test_a_turn_that_is_cancelled_twice_leaves_its_session_free():
    """A client that is gone is noticed by a failing write and by its connection, one after the other."""

    async def scenario(engine):
        chat = engine.engine.chat("a")
        await text_of(await engine.start_turn(chat, said("Hello"), GREEDY))
        with crawling(engine.engine):
            answer = await engine.start_turn(chat, said("Hello"), LONG)
            await anext(answer)
            with held(engine.engine):  # the abort has to wait
                task = asyncio.create_task(answer.aclose())
                for _ in range(3):
                    await asyncio.sleep(0.01)
                    task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_in_loop(lambda: not chat.is_busy)
        assert chat.num_turns == 1

    run(scenario)


def test_a_turn_has_one_answer_and_that_is_kept_as_text():
    async def scenario(engine):
        for params in (SamplingParams(n=2), SamplingParams(detokenize=False)):
            with pytest.raises(RequestError):
                await engine.start_turn(engine.engine.chat("a"), said("Hello"), params)

    run(scenario)


def test_a_session_talks_forks_and_is_resumed(tmp_path):
    tiers = {"hbm": "8MiB", "cpu": "8MiB", "disk": "64MiB", "path": tmp_path}
    with Engine() as plain:
        session = plain.chat("a", system="Be brief.")
        expected = [session.send(text, GREEDY).text for text in ("My name is Ada.", "What is my name?")]

    async def scenario():
        async with AsyncEngine(Engine(cache_tiers=tiers)) as engine:
            chat = await engine.chat("a", system="Be brief.")
            first = await chat.send("My name is Ada.", GREEDY)
            second = "".join([piece.text async for piece in chat.stream("What is my name?", GREEDY)])
            assert [first.text, second] == expected and chat.last.text == second
            fork = await chat.fork("b", turn=1)
            assert fork.num_turns == 1 and (await fork.send("What is my name?", GREEDY)).text == second
            await engine.flush()
            assert (await engine.stats())["sessions"]["sessions"] == 2
        async with AsyncEngine(Engine(cache_tiers=tiers)) as engine:
            again = await engine.chat("a")
            await again.prefetch()
            await again.set_ttl(1000.0)
            assert again.messages == chat.messages and again.session_id == "a"
            with pytest.raises(SessionNotFoundError):
                await engine.prefetch("c")
            assert (await again.keep_last(1)).messages == ()

    asyncio.run(asyncio.wait_for(scenario(), 300))


def test_a_stream_of_a_session_that_is_left_keeps_what_was_said_and_a_cancelled_turn_is_not_stored():
    async def scenario(engine):
        chat = await engine.chat("a")
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
        assert chat.num_turns == 1 and not chat.session.is_busy
        assert (await chat.send("Go on", GREEDY)).text and chat.num_turns == 2

    run(scenario)
