"""Reads traces from files, line by line if the format has lines. Every line is checked, and errors name it.

`traces` defines what a request is.
"""

from __future__ import annotations

import json
import math
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
MOONCAKE_BLOCK_SIZE, BAILIAN_BLOCK_SIZE = 512, 16
CHARACTERS_PER_TOKEN = 4  # of texts whose tokens are not counted: the usual rule of thumb for English
ANSWERING_ROLES = {"a", "gpt", "assistant", "chatgpt", "bard", "bing", "model"}  # all others ask


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
    if trace_format == "mooncake":
        trace = _read_named(path, block_size or MOONCAKE_BLOCK_SIZE, _mooncake_fields)
    elif trace_format == "bailian":
        trace = _read_named(path, block_size or BAILIAN_BLOCK_SIZE, _bailian_fields)
    elif trace_format == "sessions":
        trace = _read_sessions(path, block_size or DEFAULT_BLOCK_SIZE)
    else:
        trace = _read_turns(path, block_size or DEFAULT_BLOCK_SIZE, arrivals, max_context)
    if not trace.requests:
        raise ConfigError(f"{path} holds no request; is it a trace of the format {trace_format}?")
    return trace


# -- lines and fields ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class TraceRecord:
    """A JSON object and its place in a file."""

    fields: dict[str, Any]
    place: str  # "trace.jsonl, line 3"

    def wrong(self, text: str) -> ConfigError:
        return ConfigError(f"{self.place}: {text}")

    def get(self, name: str) -> Any:
        if name not in self.fields:
            raise self.wrong(f"the field {name!r} is missing; there are {_shown(list(self.fields))}")
        return self.fields[name]

    def tokens(self, name: str, least: int = 0) -> int:
        value = self.get(name)
        if not _is_int(value) or not least <= value <= MAX_TOKENS:
            raise self.wrong(f"{name!r} is {_shown(value)}; expected is a whole number of tokens from {least} on")
        return int(value)

    @property
    def calls_tool(self) -> bool:
        """Whether the answer ended in a call of a tool; a trace need not say."""
        value = self.fields.get("calls_tool", False)
        if not isinstance(value, bool):
            raise self.wrong(f"'calls_tool' is {_shown(value)}; expected is true or false")
        return value

    def seconds(self, name: str, unit_s: float = 1.0) -> float:
        value = self.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e18:
            raise self.wrong(f"{name!r} is {_shown(value)}; expected is a time as a number")
        return value * unit_s

    def names(self, name: str) -> array[int]:
        values = self.get(name)
        try:
            if not isinstance(values, list) or any(value is True or value is False for value in values):
                raise TypeError
            return array("q", values)
        except (TypeError, OverflowError):
            text = "expected is a list of whole numbers of 64 bits, the names of the prompt's blocks"
            raise self.wrong(f"{name!r} is {_shown(values)}; {text}") from None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: not JSON ({error.msg} at column {error.colno}): {_shown(text.strip())}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON that can be read: {error}") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that are not empty, with their numbers from 1."""
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield number, line
    except UnicodeDecodeError:
        raise ConfigError(f"{path.name}, after line {number}: not text in UTF-8; is this a trace file?") from None
    except OSError as error:
        raise ConfigError(f"the trace {path} cannot be read: {error.strerror or error}") from None


def _records(path: Path) -> Iterator[TraceRecord]:
    for number, line in _lines(path):
        place = f"{path.name}, line {number}"
        fields = _parsed(line, place)
        if not isinstance(fields, dict):
            raise ConfigError(f"{place}: expected is a JSON object a line, not {_shown(fields)}")
        yield TraceRecord(fields, place)


# -- traces that name their blocks -----------------------------------------------------------------------------------
def _mooncake_fields(record: TraceRecord) -> tuple[float, array[int]]:
    """timestamp (ms), input_length, output_length, hash_ids."""
    return record.seconds("timestamp", 0.001), _joined(record.names("hash_ids"))


def _bailian_fields(record: TraceRecord) -> tuple[float, array[int]]:
    """chat_id, parent_chat_id, timestamp (s), input_length, output_length, type, turn, hash_ids."""
    record.get("chat_id")
    return record.seconds("timestamp"), _joined(record.names("hash_ids"))


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


def _read_named(path: Path, block_size: int, fields: Callable[[TraceRecord], tuple[float, array[int]]]) -> Trace:
    requests: list[TraceRequest] = []
    num_surplus = 0
    for record in _records(path):
        arrival_s, names = fields(record)
        num_tokens = record.tokens("input_length", least=1)
        num_full, num_rest = divmod(num_tokens, block_size)
        num_blocks = num_full + (num_rest > 0)
        if len(names) > num_blocks + 1:
            text = f"{len(names)} hash_ids, but {num_tokens:,} tokens are {num_blocks} blocks of {block_size} tokens"
            raise record.wrong(f"{text}; is this the right format and block size?")
        num_surplus += len(names) > num_blocks
        partial = names[num_full] if num_rest and len(names) >= num_blocks else None
        num_output = record.tokens("output_length")
        requests.append(
            TraceRequest(names[:num_full], num_tokens, num_output, arrival_s, -1, partial, False, record.calls_tool)
        )
    notes = (f"{num_surplus:,} requests name one block more than their prompt holds; it is ignored",)
    return Trace(path.name, block_size, _in_order(requests), notes if num_surplus else ())


def _in_order(requests: list[TraceRequest]) -> list[TraceRequest]:
    return sorted(requests, key=lambda request: request.arrival_s)  # stable: equal times keep the file's order


# -- sessions by their lengths ---------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Session:
    chain_number: int
    num_tokens: int = 0  # prompt and answer of the last turn
    last_s: float = -math.inf


@dataclass(slots=True)
class _Sessions:
    known: dict[str, _Session] = field(default_factory=dict)
    num_chains: int = 0

    def new_chain(self) -> int:
        self.num_chains += 1
        return self.num_chains


def _read_sessions(path: Path, block_size: int) -> Trace:
    """A turn a line: session (text or number), timestamp (s), output_length, and one of input_length and new_tokens.

    input_length is the whole prompt with the history, new_tokens the new message only. A session's turns stand in
    order of time; sessions may be mixed. A prompt at least as long as the last prompt with its answer continues them;
    a shorter one was cut or rewritten, and nothing of it is taken to be known. calls_tool, here and in the formats that
    name blocks: whether the answer ended in a call of a tool; where it is missing, no.
    """
    return _sessions_trace(path.name, block_size, _records(path))


def read_session_lines(lines: Iterable[str], name: str, block_size: int = DEFAULT_BLOCK_SIZE) -> Trace:
    """A trace of the format `sessions` from its lines, as the store's own history gives them."""
    numbered = ((f"{name}, line {number}", line) for number, line in enumerate(lines, 1))
    return _sessions_trace(name, block_size, (TraceRecord(_parsed(line, place), place) for place, line in numbered))


def _sessions_trace(name: str, block_size: int, records: Iterable[TraceRecord]) -> Trace:
    sessions = _Sessions()
    return Trace(name, block_size, _in_order([_turn(r, sessions, block_size) for r in records]))


def _turn(record: TraceRecord, sessions: _Sessions, block_size: int) -> TraceRequest:
    name, arrival_s = record.get("session"), record.seconds("timestamp")
    if not isinstance(name, str) and not _is_int(name):
        raise record.wrong(f"'session' is {_shown(name)}; expected is a text or a whole number")
    session = sessions.known.get(_shown(name))
    if session is None:
        session = sessions.known[_shown(name)] = _Session(sessions.new_chain())
    if arrival_s < session.last_s:
        raise record.wrong(f"the session {_shown(name)} goes back in time, from {session.last_s} to {arrival_s} s")
    if ("input_length" in record.fields) == ("new_tokens" in record.fields):
        raise record.wrong("expected is either 'input_length' (the whole prompt) or 'new_tokens' (the new message)")
    if "new_tokens" in record.fields:
        num_tokens = session.num_tokens + record.tokens("new_tokens", least=1)
    else:
        num_tokens = record.tokens("input_length", least=1)
    if num_tokens < session.num_tokens:
        session.chain_number = sessions.new_chain()
    num_output = record.tokens("output_length")
    session.num_tokens, session.last_s = num_tokens + num_output, arrival_s
    chain = chain_names(session.chain_number, session.num_tokens // block_size)
    return TraceRequest(chain, num_tokens, num_output, arrival_s, -1, None, True, record.calls_tool)


# -- conversations without times -------------------------------------------------------------------------------------
def _read_turns(path: Path, block_size: int, arrivals: Arrivals, max_context: int | None) -> Trace:
    """A JSON array, or lines, of {id, turns: [[role, characters, words, tokens]]} or ShareGPT's own form
    {id, conversations: [{from, value}]}, whose tokens are taken to be a quarter of the characters.

    Messages up to an answer are its prompt; answers before the first message are history that stands in the first
    prompt; an answer after an answer joins it; a last message without an answer asks for nothing and is left out.
    """
    conversations = [pair for record in _conversations(path) if (pair := _turns_of(record))[1]]
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


def _conversations(path: Path) -> Iterator[TraceRecord]:
    first = next(iter(_lines(path)), (1, ""))[1]
    if not first.lstrip().startswith("["):
        yield from _records(path)
        return
    whole = _whole(path)
    for number, fields in enumerate(whole, 1):
        place = f"{path.name}, conversation {number}"
        if not isinstance(fields, dict):
            raise ConfigError(f"{place}: expected is a JSON object, not {_shown(fields)}")
        yield TraceRecord(fields, place)


def _whole(path: Path) -> list[Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path.name}, line {error.lineno}: not JSON ({error.msg})") from None
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"{path.name}: not JSON that can be read: {error}") from None
    assert isinstance(found, list)  # it begins with a bracket
    return found


def _turns_of(record: TraceRecord) -> tuple[int, list[tuple[int, int]]]:
    """The tokens before the first message, and those of each message with its answer."""
    history, waiting = 0, 0
    pairs: list[tuple[int, int]] = []
    for answers, num_tokens in _messages(record):
        if not answers:
            waiting += num_tokens
        elif waiting:
            pairs.append((waiting, num_tokens))
            waiting = 0
        elif pairs:
            pairs[-1] = (pairs[-1][0], pairs[-1][1] + num_tokens)
        else:
            history += num_tokens
    return history, pairs


def _messages(record: TraceRecord) -> Iterator[tuple[bool, int]]:
    """Whether a message is an answer, and its tokens."""
    if "turns" not in record.fields and "conversations" not in record.fields:
        raise record.wrong(f"expected is 'turns' or 'conversations'; there are {_shown(list(record.fields))}")
    name = "turns" if "turns" in record.fields else "conversations"
    messages = record.get(name)
    if not isinstance(messages, list):
        raise record.wrong(f"{name!r} is {_shown(messages)}; expected is a list of messages")
    for message in messages:
        match message:
            case [str(role), _, _, int(tokens)] if name == "turns" and 0 <= tokens <= MAX_TOKENS:
                yield role in ANSWERING_ROLES, max(tokens, 1)
            case {"from": str(role), "value": str(text)} if name == "conversations":
                yield role in ANSWERING_ROLES, max(-(-len(text) // CHARACTERS_PER_TOKEN), 1)
            case _:
                form = "[role, characters, words, tokens]" if name == "turns" else '{"from": role, "value": text}'
                raise record.wrong(f"a message is {_shown(message)}; expected is {form}")
