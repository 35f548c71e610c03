"""Messages between the front and the engine's own process, with exceptions as plain data.

Knows no socket and no engine. The bytes are msgpack and never name code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_type_hints

import msgspec

import kvstore.errors as errors
from kvstore.blocks.ids import BlockId, Lineage
from kvstore.engine.outputs import CachedTokensDetails, Timings, TokenLogprob
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.sessions.core import Core, Facts
from kvstore.errors import ConfigError, ContextLengthError, KVStoreError, ModelError, RequestError, StoreLockedError

MAX_MESSAGE_CHARS = 2000


# -- exceptions ------------------------------------------------------------------------------------------------------
class Failure(msgspec.Struct, array_like=True):
    """An exception."""

    kind: str  # name of its class
    message: str
    more: tuple[str | int | dict[str, str | int] | None, ...] = ()  # its arguments after the message


def failure_of(error: BaseException) -> Failure:
    """An exception as data, without its trace. An error that is no KVStoreError becomes one that names its class."""
    message = str(error)[:MAX_MESSAGE_CHARS]
    if not isinstance(error, KVStoreError):
        return Failure("KVStoreError", f"the engine failed: {type(error).__name__}: {message}")
    kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    if isinstance(error, ConfigError | ModelError):
        first, *more = (part[:MAX_MESSAGE_CHARS] if isinstance(part, str) else part for part in error.args)
        return Failure(kind, first, tuple(more))
    if isinstance(error, ContextLengthError):
        return Failure(kind, message, (error.requested_tokens, error.limit_tokens))
    if isinstance(error, StoreLockedError):
        return Failure(kind, message, (error.pid,))
    return Failure(kind, message, (error.param,) if isinstance(error, RequestError) else ())


def error_of(failure: Failure) -> KVStoreError:
    """The exception again, of the same class."""
    error: KVStoreError = getattr(errors, failure.kind)(failure.message, *failure.more)
    return error


# -- the start -------------------------------------------------------------------------------------------------------
class Start(msgspec.Struct):
    """The first line that the process reads, as JSON."""

    parent: int  # process id of the front
    channel: int  # descriptors of the process' ends
    pulse: int
    silence_s: float  # the process is killed after so long without a sign of life
    store: tuple[str, int, int] | None  # path of the directory that the front owns, descriptors that carry its locks
    arguments: dict[str, Any]  # of `Engine`


class Starting(msgspec.Struct, tag=True):
    """The engine begins a stage of its start."""

    stage: str


class Hello(msgspec.Struct, tag=True):
    """The engine is ready."""

    facts: Facts


class NotStarted(msgspec.Struct, tag=True):
    """The engine could not be opened; the process ends."""

    failure: Failure


# -- requests --------------------------------------------------------------------------------------------------------
class Params(msgspec.Struct, array_like=True):
    """SamplingParams without what concerns text."""

    n: int
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    logit_bias: dict[int, float]
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int | None


def params_to_wire(params: SamplingParams) -> Params:
    values = {name: getattr(params, name) for name in Params.__struct_fields__}
    return Params(**{**values, "ignore_eos": bool(params.ignore_eos)})  # may be any true value


def params_of(wire: Params) -> SamplingParams:
    """For the engine's process, which makes no text. Raises RequestError as SamplingParams does."""
    return SamplingParams(**msgspec.structs.asdict(wire), detokenize=False)


class Submit(msgspec.Struct, tag=True, array_like=True):
    """A prompt. Tenant and salt are bytes, as a salt may hold half a surrogate pair."""

    request_id: str
    token_ids: list[int]
    params: Params
    tenant: bytes
    cache_salt: bytes
    priority: int
    spliced: tuple[list[BlockId], Lineage] | None
    turn_starts: Sequence[int] = ()


class End(msgspec.Struct, tag=True, array_like=True):
    """End a request, or one choice of it."""

    request_id: str
    index: int | None  # of the choice; None: all of them
    reason: str  # "abort", or "stop" when the front has found a stop string


class Close(msgspec.Struct, tag=True, array_like=True):
    """Close the engine in order and end the process."""


class Call(msgspec.Struct, tag=True, array_like=True):
    """A call of a verb of the core."""

    number: int  # the answer carries the same
    verb: str
    arguments: msgspec.Raw


Inbound = Submit | End | Call | Close


def owner_to_wire(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def owner_of(wire: bytes) -> str:
    return wire.decode("utf-8", "surrogatepass")


# -- answers ---------------------------------------------------------------------------------------------------------
class Said(msgspec.Struct, array_like=True):
    """A new token of one choice, or its end without one."""

    index: int
    token_id: int | None
    finish_reason: str | None
    stop_reason: int | None  # the token id that ended the choice
    logprob: TokenLogprob | None


class Ended(msgspec.Struct, array_like=True):
    """A request's figures once every choice has ended."""

    cached: CachedTokensDetails
    chain: Sequence[BlockId]
    lineage: Lineage | None
    timings: Timings
    failure: Failure | None


class Update(msgspec.Struct, array_like=True):
    """What a step has brought for one request."""

    request_id: str
    said: list[Said]
    ended: Ended | None


class Updates(msgspec.Struct, tag=True, array_like=True):
    """What a step has brought for all requests."""

    updates: list[Update]


class Answered(msgspec.Struct, tag=True, array_like=True):
    """The result of a call, or why it failed."""

    number: int
    result: msgspec.Raw
    failure: Failure | None = None


class Signature:
    """The types of one verb of `Core`: its arguments, as a tuple, and its result."""

    def __init__(self, verb: str) -> None:
        types = get_type_hints(getattr(Core, verb))
        self.decode_result = msgspec.msgpack.Decoder(types.pop("return")).decode
        self.decode_arguments = msgspec.msgpack.Decoder(tuple[tuple(types.values())]).decode  # type: ignore[misc]


# The verbs that a front may call in the engine's process. Nothing else can be called.
CALLS = "root splice prefetch pin expire forget evict verify compact flush stats".split()
SIGNATURES = {verb: Signature(verb) for verb in CALLS}

Outbound = Updates | Answered
Announcement = Starting | Hello | NotStarted

encode = msgspec.msgpack.Encoder().encode
decode_inbound = msgspec.msgpack.Decoder(Inbound).decode
decode_outbound = msgspec.msgpack.Decoder(Outbound).decode
decode_announcement = msgspec.msgpack.Decoder(Announcement).decode
encode_start = msgspec.json.Encoder().encode
decode_start = msgspec.json.Decoder(Start).decode
