"""What a review of the service found: one request must neither stop the others nor be answered twice."""

import asyncio
import json
import threading
from contextlib import suppress

import pytest

from kvstore import Engine
from kvstore.engine.async_engine import AsyncEngine
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.sessions.window import Window
from kvstore.engine.text.chat_template import ChatTemplate
from kvstore.engine.text.prompts import check_length
from kvstore.errors import ContextLengthError
from kvstore.service.api.openai.schema import ChatCompletionBody, CompletionBody
from kvstore.service.api.schema import MAX_BRACKETS, MAX_QUOTES, parse
from kvstore.service.http.errors import ApiError
from kvstore.service.http.limits import Limits
from kvstore.service.settings.serve_options import ServeOptions
from tests.support.service.serving import raw_request, serving

LONG = SamplingParams(max_tokens=900, ignore_eos=True)


@pytest.fixture(scope="module")
def served():
    with serving() as found:
        yield found


@pytest.fixture
def engine():
    with Engine(device="cpu", cache_tiers={"hbm": "8MiB"}) as found:
        yield found


# -- one request, all the others -------------------------------------------------------------------------------------
@pytest.mark.parametrize("unit", ['[]', '{}', '"a"'])
def test_a_body_of_very_many_values_is_refused_before_they_are_made(unit):
    count = MAX_BRACKETS + 1 if unit[0] != '"' else MAX_QUOTES // 2 + 1
    for name, kind in (("tools", ChatCompletionBody), ("prompt", CompletionBody), ("unknown", CompletionBody)):
        body = f'{{"{name}":[{",".join([unit] * count)}]}}'.encode()
        with pytest.raises(ApiError) as refused:
            parse(body, kind)
        assert (refused.value.status, refused.value.code) == (400, "too_many_values")


def test_a_long_text_with_many_brackets_is_no_such_body():
    body = json.dumps({"prompt": "[a, b]" * 20_000}).encode()
    assert parse(body, CompletionBody).prompts() == ["[a, b]" * 20_000]


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(served, monkeypatch):
    def encoded(*_):
        raise AssertionError("a text that cannot fit was tokenized")

    monkeypatch.setattr("kvstore.engine.text.chat_template._ids", encoded)
    text = "hello " * 20_000
    history = [{"role": "user", "content": "hello " * 10_000}] * 2
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/chat/completions", {"messages": history}),
        ("/v1/responses", {"input": text}),
        ("/v1/responses", {"input": text, "store": False}),
        ("/chat", {"message": text}),
        ("/chat", {"message": "hi", "system": text}),
    ):
        reply = served.post(path, body)
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded"), (path, reply.body)
    served.wait_until_idle()


def test_only_what_cannot_fit_is_refused_unseen(engine):
    text = "how are you today? " * 20_000
    count = len(engine.tokenizer(text)["input_ids"])
    check_length([text], engine.tokenizer, count)
    check_length([text[:1000]] * (len(text) // 1000), engine.tokenizer, count)
    for texts, limit in (([text], count // 4), ([text], 10), ([text[:100_000]] * 10, count)):
        with pytest.raises(ContextLengthError) as refused:
            check_length(texts, engine.tokenizer, limit)
        assert limit < refused.value.requested_tokens <= 3 * count


def test_a_history_of_a_first_turn_has_a_bound(served):
    messages = [{"role": ("user", "assistant")[i % 2], "content": "a b c " * 1000} for i in range(401)]
    reply = served.post("/chat", {"messages": messages})
    assert (reply.status, reply.error["param"]) == (400, "messages")


def test_other_threads_run_while_a_template_is_tokenized(engine):
    template = ChatTemplate.of(engine.tokenizer)
    assert template is not None
    ticks, over = [], threading.Event()

    def tick():
        while not over.wait(0.001):
            ticks.append(None)

    thread = threading.Thread(target=tick)
    thread.start()
    template.prompt_ids([{"role": "user", "content": "how are you? " * 50_000}])
    over.set()
    thread.join()
    assert len(ticks) > 10


def test_a_text_to_be_tokenized_has_a_bound(served):
    reply = served.post("/tokenize", {"prompt": "a" * (2**20 + 1)})
    assert (reply.status, reply.error["param"]) == (400, "prompt")
    assert served.post("/tokenize", {"prompt": "a b", "return_token_strs": True}).json()["count"] > 0


def test_a_history_that_is_much_too_long_is_cut_in_few_steps(served, monkeypatch):
    rendered = []
    known = Window._without

    def counted(self, *arguments):
        rendered.append(None)
        return known(self, *arguments)

    monkeypatch.setattr(Window, "_without", counted)
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": f"the message number {i}"} for i in range(1001)]
    reply = served.post("/chat", {"messages": messages, "max_tokens": 2})
    assert reply.status == 200, reply.body
    assert 0 < len(rendered) <= 15
    assert reply.json()["truncated_tokens"] > 0


# -- errors ----------------------------------------------------------------------------------------------------------
def test_whoever_runs_hears_when_queueing_another_request_tore_the_engine(engine):
    async def check():
        serving = AsyncEngine(engine)
        answer = await serving.start("hello", LONG)
        await anext(answer)
        known = engine.loop.scheduler.add

        def fail(request):
            raise MemoryError("injected")

        engine.loop.scheduler.add = fail
        with pytest.raises(MemoryError):
            await serving.generate("other")
        engine.loop.scheduler.add = known
        async with asyncio.timeout(30):
            with pytest.raises(MemoryError):
                async for _ in answer:
                    pass
        assert (await serving.generate("again", SamplingParams(max_tokens=2))).finish_reason is not None
        await serving.close()

    asyncio.run(check())


def test_the_trace_of_an_error_does_not_grow_with_those_who_get_it(engine):
    async def check():
        serving = AsyncEngine(engine)
        answers = [await serving.start("hello", LONG) for _ in range(8)]
        for answer in answers:
            await anext(answer)

        def fail(output):
            raise RuntimeError("injected")

        engine.loop.runner.launch = fail
        lengths = []
        for answer in answers:
            try:
                async for _ in answer:
                    pass
            except RuntimeError as error:
                trace, length = error.__traceback__, 0
                while trace is not None:
                    trace, length = trace.tb_next, length + 1
                lengths.append(length)
        assert len(lengths) == 8 and len(set(lengths)) == 1
        with pytest.raises(StopAsyncIteration):
            await anext(answers[0])
        await serving.close()

    asyncio.run(check())


def test_a_stream_of_completions_that_fails_shows_no_finish_reason(served):
    engine = served.engine
    known = engine.loop.runner.launch
    steps = []

    def fail(output):
        steps.append(None)
        if len(steps) > 3:
            engine.loop.runner.launch = known
            raise RuntimeError("injected")
        return known(output)

    engine.loop.runner.launch = fail
    body = {"prompt": ["a", "b"], "stream": True, "max_tokens": 50, "ignore_eos": True}
    events = served.post("/v1/completions", body).events()
    assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == "internal_error"
    assert all(choice["finish_reason"] is None for event in events[:-2] for choice in event["choices"])
    served.wait_until_idle()


# -- limits ----------------------------------------------------------------------------------------------------------
def test_a_place_is_not_lost_to_one_who_gave_up_waiting():
    async def check():
        limits = Limits(ServeOptions(max_concurrent_per_key=1, max_queue_per_key=4))

        async def run(inside: asyncio.Event, ended: asyncio.Event):
            async with limits.admit("a"):
                inside.set()
                await ended.wait()

        events = [asyncio.Event() for _ in range(6)]
        first = asyncio.create_task(run(events[0], events[1]))
        await events[0].wait()
        second = asyncio.create_task(run(events[2], events[3]))
        while not limits.num_waiting:
            await asyncio.sleep(0)
        events[1].set()  # the first one leaves, then the third one comes, and only then the second one hears of its end
        third = asyncio.create_task(run(events[4], events[5]))
        second.cancel()
        async with asyncio.timeout(5):
            await events[4].wait()
        events[5].set()
        await asyncio.gather(first, third)
        with suppress(asyncio.CancelledError):
            await second
        assert (limits.counts(), limits.num_admitted) == ({}, 0)

    asyncio.run(check())


# -- retries ---------------------------------------------------------------------------------------------------------
def test_a_retried_response_that_went_to_a_fork_is_found_there(served):
    first = served.post("/v1/responses", {"input": "hello", "max_output_tokens": 3}).json()
    busy = {"previous_response_id": first["id"], "input": "a long one", "stream": True, "max_output_tokens": 900}
    raw = served.connect()
    raw.sendall(raw_request("POST", "/v1/responses", json.dumps({**busy, "ignore_eos": True}).encode()))
    raw.recv(64)
    asked = {"previous_response_id": first["id"], "input": "and this", "max_output_tokens": 3}
    answer = served.request("POST", "/v1/responses", asked, {"Idempotency-Key": "again"})
    raw.close()
    served.wait_until_idle()
    retried = served.request("POST", "/v1/responses", asked, {"Idempotency-Key": "again"})
    assert answer.status == retried.status == 200
    assert answer.json()["id"] == retried.json()["id"] != first["id"].removesuffix("1") + "2"


def test_nobody_waits_for_ever_for_answers_that_cannot_be_written(tmp_path):
    tiers = {"hbm": "8MiB", "cpu": "8MiB", "disk": "64MiB", "path": tmp_path}
    with Engine(device="cpu", cache_tiers=tiers) as engine:

        def fail(*_):
            raise ValueError("injected")

        engine.answers._tables.write = fail
        engine.answers.put([bytes(16)], [1, 2, 3])
        waiting = threading.Thread(target=engine.answers.flush, daemon=True)
        waiting.start()
        waiting.join(30)
        assert not waiting.is_alive()
        assert list(engine.answers.find([[bytes(16)]])[0]) == [1, 2, 3]
