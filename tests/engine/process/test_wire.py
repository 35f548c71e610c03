"""What crosses the border between the front and the engine's process: exceptions, parameters, calls."""

from dataclasses import fields

import msgspec
import pytest

from kvstore import SamplingParams, errors
from kvstore.blocks.ids import Lineage
from kvstore.blocks.records import Evict
from kvstore.engine.process.core import carry_out
from kvstore.engine.process.wire import (
    SIGNATURES,
    Call,
    Params,
    Submit,
    decode_inbound,
    encode,
    error_of,
    failure_of,
    owner_of,
    owner_to_wire,
    params_of,
    params_to_wire,
)
from kvstore.errors import ContextLengthError, KVStoreError, RequestError, SessionBusyError, StoreLockedError

CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, KVStoreError)]


def raw(value):
    return msgspec.Raw(encode(value))


def made(cls):
    if cls is ContextLengthError:
        return cls("too long", 300, 256)
    if cls is StoreLockedError:
        return cls("locked", 42)
    return cls("wrong", "field") if issubclass(cls, RequestError) else cls("wrong")


@pytest.mark.parametrize("cls", CLASSES)
def test_every_exception_arrives_as_it_was(cls):
    error = made(cls)
    again = error_of(msgspec.msgpack.decode(encode(failure_of(error)), type=type(failure_of(error))))
    assert type(again) is cls and str(again) == str(error) and vars(again) == vars(error)


def test_what_is_no_exception_of_ours_becomes_one_without_its_trace():
    again = error_of(failure_of(ZeroDivisionError("x" * 10_000)))
    assert type(again) is KVStoreError and "ZeroDivisionError" in str(again) and len(str(again)) < 3000


def test_a_subclass_that_the_table_does_not_know_arrives_as_its_parent():
    class Odd(SessionBusyError):
        pass

    assert type(error_of(failure_of(Odd("busy", "session_id")))) is SessionBusyError


def test_all_parameters_cross_but_those_of_text():
    assert set(Params.__struct_fields__) == {field.name for field in fields(SamplingParams)} - {"stop", "detokenize"}
    params = SamplingParams(
        n=2, max_tokens=9, min_tokens=2, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, repetition_penalty=1.5,
        presence_penalty=0.5, frequency_penalty=-0.5, seed=11, logit_bias={5: 1.5, 6: -100.0}, stop="never",
        stop_token_ids=[3, 4], ignore_eos=True, logprobs=3,
    )  # fmt: skip
    spliced = [b"b" * 32], Lineage(b"r" * 32, 0)
    submit = Submit("request-1", [1, 2], params_to_wire(params), b"t", b"s", -1, spliced, [1])
    again = decode_inbound(encode(submit))
    assert encode(again) == encode(submit)
    there = params_of(again.params)
    assert (there.stop, there.detokenize) == ((), False)
    assert all(getattr(there, name) == getattr(params, name) for name in set(Params.__struct_fields__))


def test_numbers_of_other_types_that_are_allowed_cross():
    params = SamplingParams(temperature=1, top_p=1, logit_bias={3: 2}, ignore_eos=1, seed=-(2**63))
    submit = Submit("request-1", [1], params_to_wire(params), b"", b"", 0, None)
    there = params_of(decode_inbound(encode(submit)).params)
    assert (there.temperature, there.logit_bias, there.ignore_eos, there.seed) == (1.0, {3: 2.0}, True, -(2**63))


def test_parameters_are_checked_on_the_other_side_too():
    wrong = msgspec.structs.replace(params_to_wire(SamplingParams()), n=10**6)
    with pytest.raises(RequestError, match="n is 1000000"):
        params_of(wrong)


@pytest.mark.parametrize("text", ["", "tenant", "\u00e9\u4e2d", "half \ud83d"])
def test_a_salt_may_be_any_text(text):
    assert owner_of(owner_to_wire(text)) == text


def test_what_a_call_takes_and_gives_crosses_whole():
    signature, lineage = SIGNATURES["splice"], Lineage(b"r" * 32, 2, b"p" * 32, 5)
    arguments = ([b"b" * 32], [1, 2], lineage, [(0, 1), (2, 9)], "tenant")
    assert signature.decode_arguments(raw(arguments)) == arguments
    assert signature.decode_result(raw(([b"c" * 32], lineage))) == ([b"c" * 32], lineage)
    assert signature.decode_result(raw(None)) is None
    what = Evict(block_ids=frozenset([b"b" * 32]), to_bytes=7)
    assert SIGNATURES["evict"].decode_arguments(raw((what,))) == (what,)


class OneRoot:
    def check_open(self):
        pass

    def root(self, tenant):
        return tenant.encode()


def test_a_call_is_carried_out():
    assert carry_out(OneRoot(), Call(1, "root", raw(("t",)))) == b"t"


@pytest.mark.parametrize("verb", ["", "close", "check_open", "__class__", "root.__call__"])
def test_what_is_not_in_the_table_is_not_called(verb):
    with pytest.raises(KVStoreError, match="unknown call"):
        carry_out(OneRoot(), Call(1, verb, raw(())))


@pytest.mark.parametrize("arguments", [(), (1,), ("a", "b"), {"tenant": "a"}, None])
def test_arguments_of_other_types_are_refused(arguments):
    with pytest.raises(msgspec.ValidationError):
        carry_out(OneRoot(), Call(1, "root", raw(arguments)))


@pytest.mark.parametrize("value", [b"", b"\xc1", b"\x93\x01\x02\x03", encode({"type": "Run"}), encode(["Run", "x"])])
def test_other_bytes_are_no_message(value):
    with pytest.raises(msgspec.DecodeError):
        decode_inbound(value)
