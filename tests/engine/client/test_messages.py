"""What is said to a core, as it crosses between two processes, and what the client makes of what it says."""

from typing import get_args

import msgspec
import pytest

from kvstore import SamplingParams, errors
from kvstore.blocks.ids import Lineage, SpliceRun
from kvstore.blocks.records import Evict, Evicted
from kvstore.engine.client.messages import (
    Answered,
    Called,
    EvictBlocks,
    Flush,
    Pin,
    ReadStats,
    Splice,
    Submit,
    Unused,
    Updates,
    Verb,
    decode_inbound,
    decode_outbound,
    decode_result,
)
from kvstore.engine.client.requests import CoreClient
from kvstore.engine.core.request import Ended, Said, Update
from kvstore.engine.outputs import CachedTokensDetails, Facts, Timings, TokenLogprob
from kvstore.engine.process import Failed, encode
from kvstore.errors import (
    ConfigError,
    ContextLengthError,
    EngineDiedError,
    KVStoreError,
    ModelError,
    RequestError,
    SessionBusyError,
    StoreLockedError,
)

CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, KVStoreError)]
LINEAGE = Lineage(b"r" * 32, (SpliceRun(2, b"p" * 32, 5), SpliceRun(7, b"q" * 32, 9)))
RESULTS = [
    (Splice([b"b" * 32], [1, 2], LINEAGE, [(0, 1), (2, 9)], "tenant", ([b"h" * 32], LINEAGE)), ([b"c" * 32], LINEAGE)),
    (Splice([], [], LINEAGE, [], ""), None),
    (EvictBlocks(Evict(block_ids=frozenset([b"b" * 32]), to_bytes=7)), {"hbm": Evicted(1, 2)}),
    (Pin([b"b" * 32], None, float("inf")), None),
    (Unused([b"b" * 32, b"c" * 32]), [b"c" * 32]),
    (Flush([b"b" * 32], 9.5), 3),
    (ReadStats(), {"requests": {"running": 1}, "lost": None}),
]


def made(cls):
    if cls is ContextLengthError:
        return cls("too long", 300, 256)
    if cls is StoreLockedError:
        return cls("locked", 42)
    if issubclass(cls, ConfigError | ModelError):
        return cls("wrong", remedy={"cpu": 2})
    return cls("wrong", "field") if issubclass(cls, RequestError) else cls("wrong")


def crossed(error):
    return decode_outbound(encode(Failed(error))).error


@pytest.mark.parametrize("cls", CLASSES)
def test_every_exception_arrives_as_it_was(cls):
    error = made(cls)
    again = crossed(error)
    assert type(again) is cls and str(again) == str(error) and vars(again) == vars(error)


def test_what_is_no_exception_of_ours_becomes_one_without_its_trace():
    again = crossed(ZeroDivisionError("x" * 10_000))
    assert type(again) is KVStoreError and "ZeroDivisionError" in str(again) and len(str(again)) < 3000


def test_a_subclass_that_the_table_does_not_know_arrives_as_its_parent():
    class Odd(SessionBusyError):
        pass

    assert type(crossed(Odd("busy", "session_id"))) is SessionBusyError


def test_a_prompt_crosses_with_all_its_parameters():
    params = SamplingParams(
        n=2, max_tokens=9, min_tokens=2, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, repetition_penalty=1.5,
        presence_penalty=0.5, frequency_penalty=-0.5, seed=11, logit_bias={5: 1.5, 6: -100.0}, stop="never",
        stop_token_ids=[3, 4], ignore_eos=True, logprobs=3,
    )  # fmt: skip
    prompt = Submit("request-1", [1, 2], params, 9, "t", -1, [b"b" * 32], LINEAGE, [1, 5], [5])
    assert decode_inbound(encode(prompt)) == prompt


def test_numbers_of_other_types_that_are_allowed_cross():
    params = SamplingParams(temperature=1, top_p=1, logit_bias={3: 2}, ignore_eos=1, seed=-(2**63))
    there = decode_inbound(encode(Submit("request-1", [1], params, 1, "", 0, (), LINEAGE))).params
    assert (there.temperature, there.logit_bias, there.ignore_eos, there.seed) == (1.0, {3: 2.0}, True, -(2**63))


def test_news_cross():
    said = [Said(0, 5, None, None, TokenLogprob(5, -0.5, {5: -0.5})), Said(1, None, "stop", 7)]
    ended = Ended(CachedTokensDetails(16), [b"b" * 32], LINEAGE, Timings(0.5, 0.0, 0.25, 0.75))
    updates = Updates([Update("request-1", said), Update("request-2", [], ended)])
    assert decode_outbound(encode(updates)) == updates
    answered = decode_outbound(encode(Answered(3, encode_raw(None), RequestError("wrong", "field"))))
    assert (answered.number, type(answered.error), answered.error.param) == (3, RequestError, "field")


def encode_raw(value):
    return msgspec.Raw(encode(value))


@pytest.mark.parametrize(("verb", "result"), RESULTS)
def test_a_verb_and_its_result_cross_whole(verb, result):
    assert decode_inbound(encode(Called(7, verb))).verb == verb
    assert decode_result(verb, encode_raw(result)) == result


@pytest.mark.parametrize("value", [
    b"", b"\xc1", b"\x93\x01\x02\x03", encode({"type": "Run"}), encode(["Run", "x"]), encode(["Called", 1, ["close"]]),
    encode(["Called", 1, ["Forget", "not a list", 1]]), encode(["Called", 1, ["ReadStats.__call__"]]),
])  # fmt: skip
def test_other_bytes_are_no_message(value):
    """So nothing can be called but a verb, with arguments of its types."""
    assert len(get_args(Verb)) == 10
    with pytest.raises(msgspec.DecodeError):
        decode_inbound(value)


class SaysIt:
    """A `Core`."""

    facts = Facts("none", 256, 256, 16, 1, 160, b"", b"", {}, 64)
    life, state, is_reader = 0, "running", True

    def __init__(self) -> None:
        self.news = []

    def check_open(self):
        """It is open."""

    def submit(self, prompts):
        """It computes nothing."""

    def take_news(self):
        return self.news


def test_blocks_beyond_what_was_said_are_not_named():
    """The core may have gone on behind a stop string."""
    core = SaysIt()
    client = CoreClient(core, None)
    handle = client.submit([5] * 30, SamplingParams())
    chain = [bytes([number]) * 32 for number in range(4)]
    core.news = [Update("request-0", [Said(0, 7), Said(0, 8, "length")], Ended(chain=chain, lineage=Lineage(b"r")))]
    client.receive()
    assert handle.done and list(handle.chain) == chain[:2] and handle.lineage == Lineage(b"r")
    assert (handle.output.token_ids, handle.output.usage.completion_tokens, client.has_work) == ([7, 8], 2, False)


def test_choices_of_a_core_that_is_gone_are_aborted():
    core, error = SaysIt(), EngineDiedError("gone")
    client = CoreClient(core, None)
    handle = client.submit([5] * 30, SamplingParams(n=2))
    core.news = [Update("request-0", [Said(1, 7)])]
    client.receive()
    core.news = [Update("request-0", [], Ended(error=error))]
    client.receive()
    assert handle.done and handle.error is error and handle.chain == () and not client.has_work
    assert [(choice.token_ids, choice.finish_reason) for choice in handle.output.choices] == [
        ([], "abort"), ([7], "abort")
    ]  # fmt: skip
    assert handle.output.usage.completion_tokens == 1
