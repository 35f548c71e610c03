"""The asyncio engine: many requests in one loop, streams, cancellation, errors, close."""

import asyncio
import threading
import traceback

import pytest

from kvstore import AsyncEngine, Engine, SamplingParams
from kvstore.errors import EngineClosedError, KVStoreError
from tests.support.by_hand import crawling
from tests.support.engines import Greedy
from tests.support.waiting import wait_in_loop

GREEDY = SamplingParams(temperature=0, max_tokens=10)
PROMPT = list(range(3, 40))
LONG = SamplingParams(max_tokens=900, ignore_eos=True)
BUILTIN = {"device": "cpu", "cache_tiers": {"hbm": "8MiB"}}  # whose window is long enough


@pytest.fixture(scope="module")
def greedy():
    return Greedy()


def run(model, scenario, **options):
    """Run `scenario(async_engine)` to its end; afterwards nothing may be held."""

    async def whole():
        engine = AsyncEngine(Engine(model, **options))
        try:
            result = await scenario(engine)
            await wait_in_loop(lambda: not engine.engine.has_work)
            engine.engine.check_integrity()
            assert not any(port.readers or port.tasks for port in engine._ports.values())
            return result
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(whole(), 300))


def test_many_requests_at_once_answer_as_alone(model, greedy):
    async def scenario(engine):
        return await asyncio.gather(*(engine.generate(PROMPT[:n], GREEDY) for n in range(5, 30)))

    outs = run(model, scenario, max_num_seqs=8)
    assert [out.token_ids for out in outs] == [greedy(PROMPT[:n], 10) for n in range(5, 30)]


def test_a_stream_brings_every_token_once(model, greedy):
    async def scenario(engine):
        return [piece async for piece in engine.stream(PROMPT, GREEDY)]

    pieces = run(model, scenario)
    assert [t for piece in pieces for t in piece.token_ids] == greedy(PROMPT, 10)
    assert [piece.finish_reason for piece in pieces] == [None] * 9 + ["length"]


def test_cancelling_aborts_the_request_and_leaves_the_others(model, greedy):
    async def scenario(engine):
        long = SamplingParams(temperature=0, max_tokens=200)
        with crawling(engine.engine):
            doomed = [asyncio.create_task(engine.generate([i + 1] * 20, long)) for i in range(3)]
            other = asyncio.create_task(engine.generate(PROMPT, GREEDY))
            await wait_in_loop(lambda: engine.engine.stats()["step"]["num_steps"] > 2)
            for task in doomed:
                task.cancel()
            ended = await asyncio.gather(*doomed, return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in ended)
        return await other

    assert run(model, scenario).token_ids == greedy(PROMPT, 10)


def test_leaving_a_stream_early_aborts_it(model):
    async def scenario(engine):
        stream = engine.stream(PROMPT, SamplingParams(temperature=0, max_tokens=200))
        async for _ in stream:
            break
        await stream.aclose()
        return engine.engine.stats()["requests"]["running"]

    assert run(model, scenario) == 0


def test_cancelling_while_submitting_leaves_nothing(model):
    async def scenario(engine):
        submit, submitted, asked, may = engine.engine.submit, [], threading.Event(), threading.Event()

        def late(*args):
            asked.set()
            may.wait()
            submitted.append(submit(*args))
            return submitted[-1]

        engine.engine.submit = late
        long = SamplingParams(temperature=0, max_tokens=200)
        task = asyncio.create_task(engine.generate(tuple(PROMPT), long))  # in a thread, as it is no list
        await wait_in_loop(asked.is_set)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with crawling(engine.engine):
            may.set()
            await wait_in_loop(lambda: submitted and submitted[0].done, "the request that nobody reads has ended")
        return submitted[0].output.finish_reason

    assert run(model, scenario) == "abort"


def test_whoever_runs_hears_when_queueing_another_request_tore_the_engine():
    async def scenario(engine):
        answer = await engine.start("hello", LONG)
        await anext(answer)
        roster = engine.engine.loop.scheduler.roster
        known = roster.add

        def fail(request):
            raise MemoryError("injected")

        roster.add = fail
        with pytest.raises(MemoryError):
            await engine.generate("other")
        roster.add = known
        with pytest.raises(MemoryError):
            async for _ in answer:
                pass
        assert (await engine.generate("again", SamplingParams(max_tokens=2))).finish_reason is not None

    run(None, scenario, **BUILTIN)


def test_the_trace_of_an_error_does_not_grow_with_those_who_get_it():
    async def scenario(engine):
        answers = [await engine.start("hello", LONG) for _ in range(8)]
        for answer in answers:
            await anext(answer)

        def fail(output):
            raise RuntimeError("injected")

        engine.engine.loop.runner.launch = fail
        lengths = set()
        for answer in answers:
            with pytest.raises(RuntimeError) as caught:
                async for _ in answer:
                    pass
            lengths.add(sum(1 for _ in traceback.walk_tb(caught.value.__traceback__)))
        assert len(lengths) == 1
        with pytest.raises(StopAsyncIteration):
            await anext(answers[0])

    run(None, scenario, **BUILTIN)


def test_close_ends_what_runs_and_refuses_what_comes(model):
    async def scenario():
        engine = AsyncEngine(Engine(model))
        task = asyncio.create_task(engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=200)))
        with crawling(engine.engine):
            await wait_in_loop(lambda: engine.engine.has_work)
            await engine.close()
        out = await task
        assert out.finish_reason == "abort"
        with pytest.raises(EngineClosedError):
            await engine.generate(PROMPT, GREEDY)

    asyncio.run(asyncio.wait_for(scenario(), 300))


def test_when_the_thread_dies_nobody_waits_for_ever(model):
    class Panic(BaseException):
        pass

    async def scenario():
        engine = AsyncEngine(Engine(model))

        def broken(*_):
            raise Panic

        engine.engine.loop.runner.launch = broken
        thread_errors = []
        previous, threading.excepthook = threading.excepthook, thread_errors.append
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

    asyncio.run(asyncio.wait_for(scenario(), 300))


def test_closing_the_engine_itself_ends_its_callers(model):
    async def scenario():
        engine = AsyncEngine(Engine(model))
        task = asyncio.create_task(engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=200)))
        with crawling(engine.engine):
            await wait_in_loop(lambda: engine.engine.has_work)
            await asyncio.to_thread(engine.engine.close)
        assert (await task).finish_reason == "abort"
        await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 300))
