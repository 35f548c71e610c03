"""A core here, in a process of its own, and several: the same answers, sessions and errors from each."""

import asyncio
from pathlib import Path

import pytest

from kvstore import AsyncEngine, CacheTiers, Engine, SamplingParams
from kvstore.errors import ContextLengthError, EngineClosedError, RequestError, SessionNotFoundError
from tests.support.engines import save_model
from tests.support.waiting import wait_in_loop

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


def opened(model: str, path: Path, kind: str) -> Engine:
    return Engine(model, CacheTiers(**TIERS, path=path), seed=1, device="cpu", load="always", **KINDS[kind])


@pytest.fixture(scope="module", params=KINDS)
def engine(request, model, tmp_path_factory):
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


@pytest.mark.parametrize(("first", "last"), [(2, 3), (1, 9), (7, 12)])
@pytest.mark.parametrize("n", [1, 3])
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


@pytest.mark.parametrize("kind", ["here", "own"])
def test_closing_ends_what_runs_and_refuses_what_comes(tmp_path, kind):
    """With a model that has no tokenizer: it takes ids."""

    async def scenario():
        model = save_model(tmp_path / "bare", max_position_embeddings=2048)
        engine = Engine(model, {"hbm": "8MiB"}, device="cpu", **KINDS[kind])
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
    assert engine.core.state == "closed" and engine.core.pid is None


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
