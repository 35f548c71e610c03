"""Reads traces from files, line by line if the format has lines. Every line is checked, and errors name it.

`traces` defines what a request is.
"""

from __future__ import annotations

import json
import math
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvstore.errors import ConfigError
from kvstore.planning.traces import (
    DEFAULT_ARRIVALS,
    DEFAULT_BLOCK_SIZE,
    MAX_TOKENS,
    Arrivals,
    Trace,
    TraceRequest,
    TraceTurn,
    TurnsToRequests,
    chain_names,
)

FORMATS = ("mooncake", "sessions", "turns", "bailian")
CHARACTERS_PER_TOKEN = 4  # of texts whose tokens are not counted: the usual rule of thumb for English
ANSWERING_ROLES = {"a", "gpt", "assistant", "chatgpt", "bard", "bing", "model"}  # all others ask
T = TypeVar("T")
_Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
_SomeTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
_Name = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


# -- what lines are --------------------------------------------------------------------------------------------------
class _TraceLine(msgspec.Struct, kw_only=True):
    """A request. calls_tool: whether its answer ended in a call of a tool; a trace need not say."""

    timestamp: Annotated[float, Meta(gt=-1e18, lt=1e18)]
    output_length: _Tokens
    calls_tool: bool = False


class _Mooncake(_TraceLine, kw_only=True):
    """timestamp: in ms. hash_ids: the names of the prompt's blocks."""

    input_length: _SomeTokens
    hash_ids: list[_Name]


class _Bailian(_Mooncake, kw_only=True):
    """timestamp: in seconds. It has parent_chat_id, type and turn, too."""

    chat_id: Any


class _SessionLine(_TraceLine, kw_only=True):
    """timestamp: in seconds. One of the lengths is given: of the whole prompt with the history, or of the new message
    alone.
    """

    session: str | int
    input_length: _SomeTokens | None = None
    new_tokens: _SomeTokens | None = None


class _CountedMessage(msgspec.Struct, array_like=True):
    role: str
    characters: Any
    words: Any
    tokens: _Tokens


class _TextMessage(msgspec.Struct, rename={"role": "from"}):
    role: str
    value: str

    @property
    def tokens(self) -> int:
        return -(-len(self.value) // CHARACTERS_PER_TOKEN)


class _Talk(msgspec.Struct):
    turns: list[_CountedMessage] | None = None
    conversations: list[_TextMessage] | None = None


_session_lines, _talks = msgspec.json.Decoder(_SessionLine), msgspec.json.Decoder(_Talk)
_arrays: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])
# Of traces that name their blocks: what reads a line, seconds of a unit of time, and the tokens of a block.
_NAMED: dict[str, tuple[msgspec.json.Decoder[Any], float, int]] = {
    "mooncake": (msgspec.json.Decoder(_Mooncake), 0.001, 512),
    "bailian": (msgspec.json.Decoder(_Bailian), 1.0, 16),
}


def read_trace(
    path: Path, trace_format: str, block_size: int | None = None, arrivals: Arrivals = DEFAULT_ARRIVALS,
    max_context: int | None = None,
) -> Trace:  # fmt: skip
    """The trace in a file. Raises ConfigError with the file, the line and what is expected there.

    block_size: tokens a block; None is the format's own (mooncake 512, bailian 16, else 128). arrivals, max_context: of
    the format `turns` only, which has neither times nor limits.
    """
    if trace_format not in FORMATS:
        raise ConfigError(f"unknown trace format {trace_format!r}; known are {', '.join(FORMATS)}")
    if block_size is not None and block_size < 1:
        raise ConfigError(f"a block of {block_size} tokens cannot be; give 1 or more")
    if trace_format in _NAMED:
        trace = _read_named(path, block_size, *_NAMED[trace_format])
    elif trace_format == "sessions":
        trace = _sessions_trace(path.name, block_size or DEFAULT_BLOCK_SIZE, _lines(path))
    else:
        trace = _read_turns(path, block_size or DEFAULT_BLOCK_SIZE, arrivals, max_context)
    if not trace.requests:
        raise ConfigError(f"{path} holds no request; is it a trace of the format {trace_format}?")
    return trace


def _decoded(decoder: msgspec.json.Decoder[T], text: str | bytes | msgspec.Raw, place: str) -> T:
    try:
        try:
            return decoder.decode(text)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:  # NaN, or half of a surrogate pair; else the standard library says where it ends
            return decoder.decode(_cleaned(bytes(text) if isinstance(text, msgspec.Raw) else text))
    except json.JSONDecodeError as error:
        at = f"{place}, line {error.lineno}" if error.lineno > 1 else place
        raise ConfigError(f"{at}: not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: {error}") from None


def _cleaned(text: str | bytes) -> bytes:
    """The same in strict JSON."""
    value = json.loads(text.rstrip(), parse_constant=lambda _: None)
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a file that are not empty, each after its place, such as "trace.jsonl, line 3"."""
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield f"{path.name}, line {number}", line
    except UnicodeDecodeError:
        raise ConfigError(f"{path.name}, after line {number}: not text in UTF-8; is this a trace file?") from None
    except OSError as error:
        raise ConfigError(f"the trace {path} cannot be read: {error.strerror or error}") from None


# -- traces that name their blocks -----------------------------------------------------------------------------------
def _joined(names: Sequence[int]) -> array[int]:
    """Names that stand for all before a block, too. Whether those of a file do already need not be asked: joined with
    the ones before them they are as many and as equal. By Python's hash of numbers, which is the same in every process
    and 64 bits wide.
    """
    joined, before = array("q"), 0
    for name in names:
        before = hash((before, name))
        joined.append(before)
    return joined


def _read_named(
    path: Path, block_size: int | None, decoder: msgspec.json.Decoder[_Mooncake], unit_s: float, usual_size: int
) -> Trace:
    requests: list[TraceRequest] = []
    num_surplus, size = 0, block_size or usual_size
    for place, text in _lines(path):
        line = _decoded(decoder, text, place)
        names, num_tokens = _joined(line.hash_ids), line.input_length
        num_full, num_rest = divmod(num_tokens, size)
        num_blocks = num_full + (num_rest > 0)
        if len(names) > num_blocks + 1:
            found = f"{len(names)} hash_ids, but {num_tokens:,} tokens are {num_blocks} blocks of {size} tokens"
            raise ConfigError(f"{place}: {found}; is this the right format and block size?")
        num_surplus += len(names) > num_blocks
        partial = names[num_full] if num_rest and len(names) >= num_blocks else None
        arrival_s = line.timestamp * unit_s
        requests.append(
            TraceRequest(
                names[:num_full], num_tokens, line.output_length, arrival_s, -1, partial, False, line.calls_tool
            )
        )
    notes = (f"requests that name one block more than their prompt holds, which is ignored: {num_surplus:,}",)
    return Trace(path.name, size, _in_order(requests), notes if num_surplus else ())


def _in_order(requests: list[TraceRequest]) -> list[TraceRequest]:
    return sorted(requests, key=lambda request: request.arrival_s)  # stable: equal times keep the file's order


# -- sessions by their lengths ---------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Session:
    chain_number: int = 0  # none yet
    num_tokens: int = 0  # prompt and answer of the last turn
    last_s: float = -math.inf


def read_session_lines(lines: Iterable[str], name: str, block_size: int = DEFAULT_BLOCK_SIZE) -> Trace:
    """A trace of the format `sessions` from its lines, as the store's own history gives them."""
    return _sessions_trace(name, block_size, ((f"{name}, line {number}", line) for number, line in enumerate(lines, 1)))


def _sessions_trace(name: str, block_size: int, lines: Iterable[tuple[str, str]]) -> Trace:
    """A session's turns stand in order of time; sessions may be mixed. A prompt at least as long as the last prompt
    with its answer continues them; a shorter one was cut or rewritten, and nothing of it is taken to be known.
    """
    sessions, numbers = dict[str | int, _Session](), count(1)
    requests: list[TraceRequest] = []
    for place, text in lines:
        line = _decoded(_session_lines, text, place)
        session = sessions.setdefault(line.session, _Session())
        if line.timestamp < session.last_s:
            gone = f"goes back in time, from {session.last_s} to {line.timestamp} s"
            raise ConfigError(f"{place}: the session {line.session!r} {gone}")
        if (line.input_length is None) == (line.new_tokens is None):
            raise ConfigError(f"{place}: expected is either 'input_length' (the whole prompt) or 'new_tokens'")
        num_tokens = line.input_length or session.num_tokens + (line.new_tokens or 0)
        if num_tokens < session.num_tokens or not session.chain_number:
            session.chain_number = next(numbers)
        session.num_tokens, session.last_s = num_tokens + line.output_length, line.timestamp
        chain = chain_names(session.chain_number, session.num_tokens // block_size)
        requests.append(
            TraceRequest(chain, num_tokens, line.output_length, line.timestamp, -1, None, True, line.calls_tool)
        )
    return Trace(name, block_size, _in_order(requests))


# -- conversations without times -------------------------------------------------------------------------------------
def _read_turns(path: Path, block_size: int, arrivals: Arrivals, max_context: int | None) -> Trace:
    """A JSON array, or lines, of {id, turns: [[role, characters, words, tokens]]} or ShareGPT's own form
    {id, conversations: [{from, value}]}, whose tokens are taken to be a quarter of the characters.

    Messages up to an answer are its prompt; answers before the first message are history that stands in the first
    prompt; an answer after an answer joins it; a last message without an answer asks for nothing and is left out.
    """
    conversations = [pair for place, text in _talk_texts(path) if (pair := _turns_of(place, text))[1]]
    if not conversations:
        raise ConfigError(f"{path} holds no conversation with a message and an answer")
    rng = random.Random(arrivals.seed)
    if arrivals.num_conversations is None or arrivals.num_conversations <= len(conversations):
        drawn = rng.sample(conversations, arrivals.num_conversations or len(conversations))
    else:
        drawn = rng.choices(conversations, k=arrivals.num_conversations)
    collected = TurnsToRequests(block_size, max_context=max_context)
    start_s = 0.0
    for history_tokens, pairs in drawn:
        turns = [TraceTurn(new, answer, arrivals.think_s(rng) if i else 0.0) for i, (new, answer) in enumerate(pairs)]
        collected.add(start_s, turns, history_tokens)
        start_s += rng.expovariate(arrivals.rate_per_s)
    return Trace(path.name, block_size, collected.requests())


def _talk_texts(path: Path) -> Iterator[tuple[str, str | msgspec.Raw]]:
    """Each conversation after its place."""
    first = next(iter(_lines(path)), ("", ""))[1]
    if not first.lstrip().startswith("["):
        yield from _lines(path)
        return
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path.name}: not text that can be read: {error}") from None
    conversations = _decoded(_arrays, text, path.name)
    for number, one in enumerate(conversations, 1):
        yield f"{path.name}, conversation {number}", one


def _turns_of(place: str, text: str | msgspec.Raw) -> tuple[int, list[tuple[int, int]]]:
    """The tokens before the first message, and those of each message with its answer."""
    talk = _decoded(_talks, text, place)
    messages: Sequence[_CountedMessage | _TextMessage] | None = talk.conversations if talk.turns is None else talk.turns
    if messages is None:
        raise ConfigError(f"{place}: expected is 'turns' or 'conversations'")
    history, waiting = 0, 0
    pairs: list[tuple[int, int]] = []
    for message in messages:
        num_tokens = max(message.tokens, 1)
        if message.role not in ANSWERING_ROLES:
            waiting += num_tokens
        elif waiting:
            pairs.append((waiting, num_tokens))
            waiting = 0
        elif pairs:
            pairs[-1] = (pairs[-1][0], pairs[-1][1] + num_tokens)
        else:
            history += num_tokens
    return history, pairs
