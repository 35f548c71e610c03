"""Constrained answers of whole engines: alone and in a batch, preempted, ahead of their tokens, refused and aborted."""

import json
import re
import threading
from collections import Counter
from contextlib import contextmanager

import pytest

from kvstore import Engine, RequestError, SamplingParams, StructuralTag, StructuredOutputsParams
from tests.support.engines import open_engine, tokens
from tests.support.first_stage import pipelined
from tests.support.grammars import request_of
from tests.support.waiting import TIMEOUT_S, wait_until

MODEL = {"tokenizer": True, "max_position_embeddings": 512}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}  # fmt: skip
CALL = StructuralTag("[", "]", grammar="start: /[0-9]{1,3}/")
EOS = 5  # of the built-in tokenizer
NUM_SEEDS = 36  # all pairs of ways
WANTED = [
    StructuredOutputsParams(json=PERSON), StructuredOutputsParams(regex="[a-c]{2,9}-[0-9]+"),
    StructuredOutputsParams(choice=["yes", "no", "maybe"]), StructuredOutputsParams(tags=[CALL]),
    StructuredOutputsParams(grammar='start: "(" start ")" | /[a-z]{1,3}/'),
]  # fmt: skip
TOO_COMPLEX = StructuredOutputsParams(json={"type": "string", "pattern": "^(a{1000}){1000}$"})
WRONG = StructuredOutputsParams(json={"properties": {"a": {"type": "foo"}}})


@pytest.fixture(scope="module")
def engine(model):
    with open_engine(model, max_num_seqs=24) as engine:
        yield engine
        engine.check_integrity()


def params_of(seed: int, **changes: object) -> SamplingParams:
    """Every way to sample, each with every way to constrain, and some without one."""
    ways = [
        {"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 20, "top_p": 0.8}, {"repetition_penalty": 1.3},
        {"min_tokens": 6}, {"logit_bias": {7: 3.0}, "min_p": 0.02}, {"n": 3}, {"logprobs": 2}, {"ignore_eos": True},
    ]  # fmt: skip
    wanted = WANTED[seed % 6] if seed % 6 < len(WANTED) else None
    return SamplingParams(max_tokens=40, seed=seed, structured_outputs=wanted, **ways[seed % len(ways)] | changes)


def prompt_of(seed: int) -> list[int]:
    return tokens(seed, 9 + seed % 5, 1200)


def said(output) -> list[tuple]:
    return [
        (choice.token_ids, choice.text, choice.finish_reason, [one.token_id for one in choice.logprobs or ()])
        for choice in output.choices
    ]


def alone(engine, seed: int) -> list[tuple]:
    return said(engine.generate([prompt_of(seed)], params_of(seed))[0])


def together(engine, seeds) -> list[list[tuple]]:
    return [said(output) for output in engine.generate([*map(prompt_of, seeds)], [*map(params_of, seeds)])]


def matches(wanted: StructuredOutputsParams, text: str) -> bool:
    if wanted.choice is not None:
        return text in wanted.choice
    if wanted.json is not None:
        return set(json.loads(text)) == set(PERSON["properties"])
    if wanted.tags:
        return re.fullmatch(r"([^\[]|\[[0-9]{1,3}\])*(\[[0-9]{0,3})?", text) is not None  # it may be cut off
    return re.fullmatch(wanted.regex or r"\(*[a-z]{1,3}\)*", text) is not None


@pytest.fixture(scope="module")
def expected(engine):
    return [alone(engine, seed) for seed in range(NUM_SEEDS)]


def test_every_answer_that_was_not_cut_off_matches(engine, expected):
    ended = Counter()
    for seed, choices in enumerate(expected):
        wanted = params_of(seed).structured_outputs
        for token_ids, text, reason, _ in choices:
            if wanted is not None and (reason == "stop" or wanted.tags):
                assert matches(wanted, text), (wanted, text)
                assert reason == "length" or token_ids[-1] == EOS
                ended[WANTED.index(wanted)] += 1
    assert len(ended) == len(WANTED), ended


def test_an_answer_does_not_depend_on_the_batch(engine, expected):
    assert together(engine, range(NUM_SEEDS)) == expected


def test_choices_differ_and_each_matches(engine):
    params = SamplingParams(n=5, seed=1, temperature=3.0, max_tokens=30, structured_outputs=WANTED[1])
    choices = engine.generate([prompt_of(1)], params)[0].choices
    assert len({choice.text for choice in choices}) == 5
    alone = [SamplingParams(seed=1 + i, temperature=3.0, max_tokens=30, structured_outputs=WANTED[1]) for i in range(5)]
    outputs = engine.generate([prompt_of(1)] * 5, alone)
    assert [choice.token_ids for choice in choices] == [output.token_ids for output in outputs]


def test_a_preempted_answer_goes_on_as_it_began(model, expected):
    with open_engine(model, hbm=18 * 16 * 768, max_num_seqs=24, max_model_len=128) as engine:
        assert together(engine, range(24)) == expected[:24]
        assert engine.stats()["requests"]["preemptions"] > 0


def test_a_step_that_is_launched_ahead_draws_when_the_last_token_is_known(model, expected):
    """A CPU stands in for a device: launched steps are read after the launch of the next one."""
    held = Counter()
    with open_engine(model, max_num_seqs=24) as engine:
        sampler, is_constrained = engine.loop.runner.sampler, engine.loop.runner.sampler.is_constrained

        def counted(rows):
            """Only steps that are launched ahead ask."""
            held[is_constrained(rows)] += 1
            return is_constrained(rows)

        sampler.is_constrained, engine.loop.steps.depth = counted, 2
        assert together(engine, range(NUM_SEEDS)) == expected
        assert [alone(engine, seed) for seed in range(8)] == expected[:8]
    assert held[True] > 30 and held[False] > 0


@pytest.mark.parametrize("num_steps", [2, 3])
def test_steps_of_a_pipeline_draw_when_their_logits_come_back(model, expected, num_steps):
    with open_engine(model, hbm=40 * 16 * 768, max_num_seqs=24, max_num_batched_tokens=64, max_model_len=128) as engine:
        stage = pipelined(engine, num_steps)
        assert together(engine, range(NUM_SEEDS)) == expected
        assert engine.stats()["requests"]["preemptions"] > 0
    assert stage.most_in_flight == num_steps


# -- in another process ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("process", ["here", "own"])
def test_the_library(process):
    wanted = SamplingParams(max_tokens=80, seed=3, structured_outputs=StructuredOutputsParams(json=PERSON))
    with Engine(device="cpu", process=process) as engine:
        outputs = engine.generate(["Who is Ada?", "And Bob?"], wanted)
        assert all(matches(wanted.structured_outputs, output.text) for output in outputs)
        reply = engine.chat("ada").send("Who are you?", wanted)
        assert matches(wanted.structured_outputs, reply.text)
        again = engine.chat("ada").send("And your dog?", wanted)
        assert again.usage.cached_tokens > 0 and matches(wanted.structured_outputs, again.text)
        for given, message in ((WRONG, "Invalid type: foo, at /properties/a"), (TOO_COMPLEX, "became too complex")):
            with pytest.raises(RequestError, match=message) as raised:
                engine.generate(["Hello"], SamplingParams(max_tokens=9, structured_outputs=given))
            assert raised.value.param == "structured_outputs"
        assert engine.generate(["Who is Ada?"], wanted)[0].text == outputs[0].text


# -- what ends early ---------------------------------------------------------------------------------------------------
def test_what_cannot_be_compiled_or_goes_too_far_ends_no_other_request(engine):
    plain = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
    expected = engine.generate([prompt_of(3)], plain)[0].token_ids
    num_aborted = engine.stats()["requests"]["aborted"]
    other = engine.submit(prompt_of(3), plain)
    pieces = engine.stream(other)
    next(pieces)
    failing = [
        engine.submit(prompt_of(4), SamplingParams(structured_outputs=wanted)) for wanted in (WRONG, TOO_COMPLEX)
    ]
    assert [token for piece in pieces for token in piece.token_ids] == expected[1:]
    for handle in failing:
        wait_until(lambda handle=handle: handle.done)
        with pytest.raises(RequestError, match="structured_outputs"):
            handle.raise_error()
    assert engine.stats()["requests"]["running"] == engine.stats()["requests"]["waiting"] == 0
    assert engine.stats()["requests"]["aborted"] == num_aborted


def test_one_prompt_of_several_fails_as_a_whole(engine):
    params = SamplingParams(max_tokens=9, n=3, structured_outputs=TOO_COMPLEX)
    with pytest.raises(RequestError, match="became too complex"):
        engine.generate([prompt_of(4)], params)
    engine.check_integrity()


@contextmanager
def compiling(engine):
    """In here the thread that compiles is busy with another grammar, until the event is set."""
    begun, let_go = threading.Event(), threading.Event()
    engine.core.compiler.prepare(request_of(WANTED[2]), lambda *_: (begun.set(), let_go.wait(TIMEOUT_S)))
    assert begun.wait(TIMEOUT_S)
    try:
        yield let_go
    finally:
        let_go.set()


def test_a_prompt_that_waits_for_its_grammar_can_be_aborted_and_holds_up_nobody(engine):
    threes = [SamplingParams(structured_outputs=StructuredOutputsParams(regex=letter + "{3}")) for letter in "xy"]
    with compiling(engine) as let_go:
        waiting, after = (engine.submit(prompt_of(1), params) for params in threes)
        plain = SamplingParams(max_tokens=5, ignore_eos=True)
        assert engine.generate([prompt_of(2)], plain)[0].usage.completion_tokens == 5
        engine.abort(waiting)
        assert waiting.done and waiting.output.choices[0].finish_reason == "abort" and not after.done
        let_go.set()
        assert "".join(piece.text for piece in engine.stream(after)) == "yyy"
    engine.check_integrity()


def test_an_engine_is_closed_while_a_prompt_waits_for_its_grammar(model):
    engine = open_engine(model)
    with compiling(engine) as let_go:
        waiting = engine.submit(prompt_of(1), SamplingParams(structured_outputs=WANTED[2]))
        closing = threading.Thread(target=engine.close)
        closing.start()
        wait_until(lambda: waiting.done)
        let_go.set()
    closing.join()
    assert waiting.output.choices[0].finish_reason == "abort"


def test_a_model_without_a_tokenizer_says_so(saved_model):
    with (
        open_engine(saved_model()) as engine,
        pytest.raises(RequestError, match="structured_outputs needs a tokenizer, and this model has none"),
    ):
        engine.generate([tokens(1, 9)], SamplingParams(structured_outputs=WANTED[2]))
