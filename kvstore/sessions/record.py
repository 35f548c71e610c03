"""What a session is: its records, their bytes, and how its turns add up to a state.

Knows no file, no transaction and no thread. Every stored value is `seal`ed: a version, the payload, and a checksum that
covers the place it is stored at too, so a value that turns up under another key is damaged, not another session's text.
"""

import hashlib
import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import xxhash

from kvstore.blocks.ids import BLOCK_ID_BYTES, BlockId, token_bytes
from kvstore.errors import RequestError, SessionDamagedError, StoreError

T = TypeVar("T")
Message = dict[str, str]

SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
VERSION = 1
FINGERPRINT_BYTES = 32
TITLE_CHARS = 80
_CHECKSUM_BYTES = 16
_MAX_U64 = 2**64 - 1


@dataclass(frozen=True, slots=True, order=True)
class SessionKey:
    """Whose session, and its id. Raises RequestError for an id of other than 1 to 128 letters, digits, "_" or "-"."""

    tenant: str
    session_id: str

    def __post_init__(self) -> None:
        if not isinstance(self.session_id, str) or not SESSION_ID.fullmatch(self.session_id):
            raise RequestError("a session id has 1 to 128 letters, digits, '_' or '-'", param="session_id")


@dataclass(frozen=True, slots=True)
class Parent:
    """The session a fork was made of, and its last turn that the fork shares. The parent may be gone by now."""

    session_id: str
    turn: int


@dataclass(frozen=True, slots=True)
class SessionHead:
    """A session without its turns.

    number: the store's own; a session created again under the id of a deleted one has another. title: the first user
    text, cut. system: the system prompt. fingerprint: 32 bytes of the model and layout, or empty. num_tokens: after the
    last turn. ttl_s: how long it lives after its last turn; None is for ever.
    """

    key: SessionKey
    number: int
    created_s: float
    updated_s: float
    num_turns: int = 0
    title: str = ""
    system: tuple[Message, ...] = ()
    fingerprint: bytes = b""
    model: str = ""
    parent: Parent | None = None
    ttl_s: float | None = None
    num_tokens: int = 0

    @property
    def expires_s(self) -> float | None:
        return None if self.ttl_s is None else self.updated_s + self.ttl_s

    @property
    def cursor(self) -> str:
        """Where the session stands in the list of its tenant: what `list(after=...)` goes on from."""
        return f"{micros(self.updated_s):016x}{self.number:016x}"


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn, as it is stored. Sequences are copied into tuples.

    number: from 1. messages: what the turn adds to the transcript. base "append": `token_ids` come after those there
    were, `chain` holds the blocks that became full since; "rebase" (after a truncation, or when a template rewrote
    history): both are complete, as of the end of this turn. first_reencoded: index of the first re-encoded block in the
    complete chain; splice_parent, splice_end: see `kvstore.blocks.ids.Lineage`. turn_starts: where in the complete
    token ids each turn that is left in the window begins, as far as it is known. num_dropped_messages: of all messages
    after the system prompt, how many are no longer in the window. truncated_tokens: dropped by this turn.
    idempotency_key: the request's; one turn of a session has it.
    """

    number: int
    messages: Sequence[Message]
    token_ids: Sequence[int]
    chain: Sequence[BlockId]
    base: Literal["append", "rebase"] = "append"
    first_reencoded: int | None = None
    splice_parent: bytes = b""
    splice_end: int = 0
    turn_starts: Sequence[int] = ()
    num_dropped_messages: int = 0
    truncated_tokens: int = 0
    finish_reason: str = ""
    usage: dict[str, int] = field(default_factory=dict)
    created_s: float = 0.0
    idempotency_key: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", tuple(dict(message) for message in self.messages))
        object.__setattr__(self, "token_ids", tuple(self.token_ids))
        object.__setattr__(self, "chain", tuple(self.chain))
        object.__setattr__(self, "turn_starts", tuple(self.turn_starts))
        object.__setattr__(self, "usage", dict(self.usage))

    @property
    def system(self) -> tuple[Message, ...]:
        """The system messages it opens with; a first turn may bring the system prompt."""
        end = next((i for i, m in enumerate(self.messages) if m.get("role") != "system"), len(self.messages))
        return tuple(self.messages[:end])


@dataclass(frozen=True, slots=True)
class SessionState:
    """A session at the end of `turn` (0: before its first). The lists are the caller's own; `head` is as of now."""

    head: SessionHead
    turn: int
    messages: list[Message]
    token_ids: list[int]
    chain: list[BlockId]
    first_reencoded: int | None = None
    splice_parent: bytes = b""
    splice_end: int = 0
    turn_starts: Sequence[int] = ()
    num_dropped_messages: int = 0
    truncated_tokens: int = 0  # by all turns up to this one


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A deletion that is to be carried through: the blocks that no session referred to any more when it happened.

    A session that came later may refer to the same ids, having the same content. Deleting them is harmless all the
    same: KV is a cache, and what is missing is computed again.
    """

    number: int
    key: SessionKey
    block_ids: tuple[BlockId, ...]


def damaged(what: str, why: str) -> SessionDamagedError:
    return SessionDamagedError(f"{what} is damaged ({why})")


def with_turn(head: SessionHead, turn: TurnRecord, now_s: float) -> SessionHead:
    """The head after one more turn."""
    num_tokens = len(turn.token_ids) + (head.num_tokens if turn.base == "append" else 0)
    text = next((message.get("content", "") for message in turn.messages if message.get("role") == "user"), "")
    return replace(
        head, updated_s=now_s, num_turns=turn.number, num_tokens=num_tokens,
        title=head.title or " ".join(text[: 4 * TITLE_CHARS].split())[:TITLE_CHARS], system=turn.system or head.system,
    )  # fmt: skip


def replay(head: SessionHead, turns: Sequence[TurnRecord]) -> SessionState:
    """The state at the end of the last of `turns`, which are the session's first ones in order."""
    messages: list[Message] = [] if turns and turns[0].system else [dict(message) for message in head.system]
    messages += [dict(message) for turn in turns for message in turn.messages]
    start = max((i for i, turn in enumerate(turns) if turn.base == "rebase"), default=0)
    state = SessionState(head, len(turns), messages, [], [])
    for turn in turns[start:]:
        state.token_ids.extend(turn.token_ids)
        state.chain.extend(turn.chain)
    if not turns:
        return state
    return replace(
        state, first_reencoded=turns[-1].first_reencoded, splice_parent=turns[-1].splice_parent,
        splice_end=turns[-1].splice_end, turn_starts=turns[-1].turn_starts,
        num_dropped_messages=turns[-1].num_dropped_messages,
        truncated_tokens=sum(turn.truncated_tokens for turn in turns),
    )  # fmt: skip


def micros(time_s: float) -> int:
    """A time as it stands in sorted keys."""
    return min(max(0, int(time_s * 1e6)), _MAX_U64) if math.isfinite(time_s) else 0 if time_s < 0 else _MAX_U64


def digest(text: str) -> bytes:
    """32 bytes for a text of any length; half a surrogate pair in a client's JSON is a text like any other."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def seal(table: str, key: bytes, payload: bytes) -> bytes:
    body = bytes([VERSION]) + payload
    return body + _checksum(table, key, body)


def unseal(table: str, key: bytes, value: bytes, what: str) -> bytes:
    """The payload. Raises StoreError when the value is not what was sealed for this place."""
    body = value[:-_CHECKSUM_BYTES]
    if not body or value[-_CHECKSUM_BYTES:] != _checksum(table, key, body):
        raise damaged(what, f"a record in {table!r} fails its checksum")
    if body[0] != VERSION:
        raise StoreError(f"{what} has records of version {body[0]}, not {VERSION}: use the program that wrote them")
    return body[1:]


def _checksum(table: str, key: bytes, body: bytes) -> bytes:
    place = table.encode() + b":" + len(key).to_bytes(2, "little") + key
    checksum = xxhash.xxh3_128(place)
    checksum.update(body)
    return checksum.digest()


class _Writer:
    """Fields one after the other: little-endian numbers, counted bytes."""

    def __init__(self) -> None:
        self.data = bytearray()

    def u32(self, value: int) -> None:
        self.data += struct.pack("<I", value)

    def u64(self, value: int) -> None:
        self.data += struct.pack("<Q", value)

    def f64(self, value: float) -> None:
        if not math.isfinite(value):
            raise ValueError(f"a time is {value}")
        self.data += struct.pack("<d", value)

    def blob(self, value: bytes) -> None:
        self.u32(len(value))
        self.data += value

    def text(self, value: str) -> None:
        if not isinstance(value, str):
            raise ValueError(f"{value!r:.40} is not a text")
        self.blob(value.encode("utf-8", "surrogatepass"))

    def messages(self, messages: Sequence[Message]) -> None:
        self.u32(len(messages))
        for message in messages:
            self.u32(len(message))
            for name, value in message.items():
                self.text(name)
                self.text(value)

    def block_ids(self, block_ids: Sequence[BlockId]) -> None:
        if any(len(block_id) != BLOCK_ID_BYTES for block_id in block_ids):
            raise ValueError(f"a block id has not {BLOCK_ID_BYTES} bytes")
        self.u32(len(block_ids))
        self.data += b"".join(block_ids)

    def parent(self, value: Parent) -> None:
        self.text(value.session_id)
        self.u32(value.turn)

    def optional(self, value: T | None, write: Callable[[T], None]) -> None:
        self.data.append(value is not None)
        if value is not None:
            write(value)


class _Reader:
    """What `_Writer` wrote. Raises ValueError for anything else, before making room for it: the file may be hostile."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, num_bytes: int) -> bytes:
        start, self._at = self._at, self._at + num_bytes
        if self._at > len(self._data):
            raise ValueError("a record ends early")
        return self._data[start : self._at]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def f64(self) -> float:
        value: float = struct.unpack("<d", self.take(8))[0]
        if not math.isfinite(value):
            raise ValueError("a time is not finite")
        return value

    def text(self) -> str:
        return self.take(self.u32()).decode("utf-8", "surrogatepass")

    def messages(self) -> tuple[Message, ...]:
        return tuple({self.text(): self.text() for _ in range(self._count(8))} for _ in range(self._count(4)))

    def block_ids(self) -> tuple[BlockId, ...]:
        joined = self.take(BLOCK_ID_BYTES * self.u32())
        return tuple(joined[i : i + BLOCK_ID_BYTES] for i in range(0, len(joined), BLOCK_ID_BYTES))

    def token_ids(self) -> tuple[int, ...]:
        count = self.u32()
        return struct.unpack(f"<{count}I", self.take(4 * count))

    def usage(self) -> dict[str, int]:
        return {self.text(): struct.unpack("<q", self.take(8))[0] for _ in range(self._count(12))}

    def optional(self, read: Callable[[], T]) -> T | None:
        flag = self.take(1)[0]
        if flag > 1:
            raise ValueError("a flag is neither 0 nor 1")
        return read() if flag else None

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError("a record goes on after its end")

    def _count(self, min_bytes: int) -> int:
        count = self.u32()
        if count * min_bytes > len(self._data) - self._at:
            raise ValueError("a record ends early")
        return count


def _encoded(what: str, write: Callable[[_Writer], None]) -> bytes:
    writer = _Writer()
    try:
        write(writer)
    except (ValueError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise StoreError(f"{what} cannot be stored: {error}") from error
    return bytes(writer.data)


def _decoded(what: str, payload: bytes, read: Callable[[_Reader], T]) -> T:
    reader = _Reader(payload)
    try:
        value = read(reader)
        reader.end()
    except ValueError as error:
        raise damaged(what, str(error)) from error
    return value


def encode_number(number: int) -> bytes:
    return number.to_bytes(8, "little")


def decode_number(payload: bytes, what: str) -> int:
    return _decoded(what, payload, _Reader.u64)


def encode_head(head: SessionHead) -> bytes:
    def write(w: _Writer) -> None:
        if len(head.fingerprint) not in (0, FINGERPRINT_BYTES):
            raise ValueError(f"its fingerprint has {len(head.fingerprint)} bytes, not {FINGERPRINT_BYTES}")
        w.text(head.key.tenant)
        w.text(head.key.session_id)
        w.u64(head.number)
        w.f64(head.created_s)
        w.f64(head.updated_s)
        w.u32(head.num_turns)
        w.text(head.title)
        w.messages(head.system)
        w.blob(head.fingerprint)
        w.text(head.model)
        w.optional(head.parent, w.parent)
        w.optional(head.ttl_s, w.f64)
        w.u64(head.num_tokens)

    return _encoded(f"session {head.key.session_id}", write)


def decode_head(payload: bytes, what: str) -> SessionHead:
    def read(r: _Reader) -> SessionHead:
        return SessionHead(
            key=SessionKey(r.text(), r.text()), number=r.u64(), created_s=r.f64(), updated_s=r.f64(),
            num_turns=r.u32(), title=r.text(), system=r.messages(), fingerprint=r.take(r.u32()), model=r.text(),
            parent=r.optional(lambda: Parent(r.text(), r.u32())), ttl_s=r.optional(r.f64), num_tokens=r.u64(),
        )  # fmt: skip

    return _decoded(what, payload, read)


def encode_turn(turn: TurnRecord, what: str) -> bytes:
    def write(w: _Writer) -> None:
        if turn.base not in ("append", "rebase"):
            raise ValueError(f'its base is {turn.base!r}, not "append" or "rebase"')
        w.u32(turn.number)
        w.data.append(turn.base == "rebase")
        w.messages(turn.messages)
        w.u32(len(turn.token_ids))
        w.data += token_bytes(turn.token_ids)
        w.block_ids(turn.chain)
        w.optional(turn.first_reencoded, w.u32)
        w.blob(turn.splice_parent)
        w.u32(turn.splice_end)
        w.u32(len(turn.turn_starts))
        w.data += token_bytes(turn.turn_starts)
        w.u32(turn.num_dropped_messages)
        w.u32(turn.truncated_tokens)
        w.text(turn.finish_reason)
        w.u32(len(turn.usage))
        for name, count in turn.usage.items():
            w.text(name)
            w.data += struct.pack("<q", count)
        w.f64(turn.created_s)
        w.optional(turn.idempotency_key, w.text)

    return _encoded(f"turn {turn.number} of {what}", write)


def decode_turn(payload: bytes, what: str) -> TurnRecord:
    def read(r: _Reader) -> TurnRecord:
        number, rebase = r.u32(), r.optional(lambda: True)
        return TurnRecord(
            number=number, base="rebase" if rebase else "append", messages=r.messages(), token_ids=r.token_ids(),
            chain=r.block_ids(), first_reencoded=r.optional(r.u32), splice_parent=r.take(r.u32()),
            splice_end=r.u32(), turn_starts=r.token_ids(), num_dropped_messages=r.u32(),
            truncated_tokens=r.u32(), finish_reason=r.text(), usage=r.usage(), created_s=r.f64(),
            idempotency_key=r.optional(r.text),
        )  # fmt: skip

    return _decoded(what, payload, read)


def encode_tombstone(tombstone: Tombstone) -> bytes:
    def write(w: _Writer) -> None:
        w.u64(tombstone.number)
        w.text(tombstone.key.tenant)
        w.text(tombstone.key.session_id)
        w.block_ids(tombstone.block_ids)

    return _encoded(f"the deletion of session {tombstone.key.session_id}", write)


def decode_tombstone(payload: bytes, what: str) -> Tombstone:
    return _decoded(what, payload, lambda r: Tombstone(r.u64(), SessionKey(r.text(), r.text()), r.block_ids()))
