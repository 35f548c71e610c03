"""What a session is: its records, their bytes, and how its turns add up to a state.

Knows no file, no transaction and no thread. Every stored value is sealed for its place, so one that turns up under
another key is damaged, not another session's text.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, field, structs

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import U32, Count, Id, Record, Seconds
from kvstore.config import SESSION_ID
from kvstore.disk import records as disk_records
from kvstore.errors import RequestError, SessionDamagedError, StoreError

T = TypeVar("T")
Message = dict[str, Any]
StoredMessage = dict[str, str | list[dict[str, Any]]]  # texts, and an answer's tool_calls

TITLE_CHARS = 80
_MAX_U64 = 2**64 - 1
_Usage = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class SessionKey(Record, frozen=True, order=True):
    """A session's owner and id. Raises RequestError unless the id has 1 to 128 letters, digits, "_" or "-"."""

    tenant: str
    session_id: str

    def __post_init__(self) -> None:
        if not isinstance(self.session_id, str) or not SESSION_ID.fullmatch(self.session_id):
            raise RequestError("a session id has 1 to 128 letters, digits, '_' or '-'", param="session_id")


class Parent(Record, frozen=True):
    """The session that a fork was made of, and the last turn that they share. The parent may have been deleted.

    is_version: the fork says again what followed that turn, and people see both as one conversation.
    """

    session_id: str
    turn: U32
    is_version: bool = False


@disk_records.stored
class SessionHead(Record, frozen=True):
    """A session without its turns.

    number: the store's own; a session created again under the id of a deleted one has another. title: the first user
    text, cut, or what a client has called it. system: the system prompt. fingerprint: 32 bytes of the model and layout,
    or empty. num_tokens: after the last turn. ttl_s: how long it lives after its last turn; None is for ever.
    is_personal: a person's conversation, as a client has said; programs have sessions, too.
    """

    key: SessionKey
    number: Count
    created_s: Seconds
    updated_s: Seconds
    num_turns: U32 = 0
    title: str = ""
    system: tuple[Message, ...] = ()
    fingerprint: bytes = b""
    model: str = ""
    parent: Parent | None = None
    ttl_s: Seconds | None = None
    num_tokens: Count = 0
    is_personal: bool = False

    @property
    def expires_s(self) -> float | None:
        return None if self.ttl_s is None else self.updated_s + self.ttl_s

    def is_over(self, now_s: float) -> bool:
        """Whether it has expired: then nobody finds it any more, and it is deleted soon."""
        return self.expires_s is not None and self.expires_s <= now_s

    @property
    def cursor(self) -> str:
        """The session's place in its tenant's list, for `list(after=...)`."""
        return f"{micros(self.updated_s):016x}{self.number:016x}"


class MessageEdit(Record, frozen=True):
    """A change of message `index` of those that turn `turn` has added. message: what stands there instead; None:
    nothing.
    """

    turn: U32
    index: U32
    message: StoredMessage | None = None

    @property
    def place(self) -> tuple[int, int]:
        return self.turn, self.index


@disk_records.stored
class TurnRecord(Record, frozen=True):
    """One turn, as it is stored. Sequences are copied into tuples.

    number: from 1. messages: what the turn adds to the transcript. base "append": `token_ids` follow the session's
    earlier ones, and `chain` has the blocks that have become full since; "rebase" (after a truncation, or when a
    template rewrote history): both are complete, as of the end of this turn. first_reencoded: index of the first
    re-encoded block in the complete chain; splice_parent, splice_end: see `kvstore.blocks.ids.SpliceRun`; splices: the
    runs after that first one. turn_starts: where in the complete token ids each turn that is left in the window begins,
    as far as it is known. spans: blocks of the chains of spans whose KV this turn has reused.
    num_dropped_messages: of all messages after the system prompt, how many are no longer in the window.
    truncated_tokens: dropped by this turn. miss: why it computed what an earlier turn had, if it did. idempotency_key:
    the request's; no two turns of a session have the same. options: a digest of the tools and variables that the ids in
    the window were rendered with; empty for none. edits: changes of what earlier turns added, which is still there.
    """

    number: U32
    messages: Sequence[StoredMessage]
    token_ids: Sequence[U32]
    chain: Sequence[Id]
    base: Literal["append", "rebase"] = "append"
    first_reencoded: U32 | None = None
    splice_parent: bytes = b""
    splice_end: U32 = 0
    turn_starts: Sequence[U32] = ()
    num_dropped_messages: U32 = 0
    truncated_tokens: U32 = 0
    finish_reason: str = ""
    usage: dict[str, _Usage] = field(default_factory=dict)
    miss: dict[str, Any] | None = None
    created_s: Seconds = 0.0
    idempotency_key: str | None = None
    options: bytes = b""
    edits: Sequence[MessageEdit] = ()
    splices: Sequence[tuple[U32, Id, U32]] = ()
    spans: Sequence[Id] = ()

    def __post_init__(self) -> None:
        structs.force_setattr(self, "messages", tuple(dict(message) for message in self.messages))
        structs.force_setattr(self, "usage", dict(self.usage))
        for name in ("token_ids", "chain", "turn_starts", "edits", "splices", "spans"):
            structs.force_setattr(self, name, tuple(getattr(self, name)))

    @property
    def block_ids(self) -> Sequence[BlockId]:
        """The blocks that it refers to."""
        return *self.chain, *self.spans

    @property
    def system(self) -> tuple[Message, ...]:
        """The system messages at its beginning; a first turn may bring the system prompt."""
        end = next((i for i, m in enumerate(self.messages) if m.get("role") != "system"), len(self.messages))
        return tuple(self.messages[:end])


@dataclass(frozen=True, slots=True)
class SessionState:
    """A session at the end of `turn` (0: before its first). The lists are the caller's own; `head` is as of now.

    miss: what the next turn has to compute anew, and why, if the last one was an edit.
    """

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
    options: bytes = b""
    miss: dict[str, Any] | None = None
    splices: Sequence[tuple[int, BlockId, int]] = ()


@disk_records.stored
class Tombstone(Record, frozen=True):
    """A deletion of a session, or of some of its messages, that is not finished yet: the blocks that no session
    referred to any more when it happened.

    A later session with the same content may refer to the same ids. Deleting them is still harmless: KV is a cache, and
    missing blocks are computed again.
    """

    number: Count
    key: SessionKey
    block_ids: tuple[Id, ...]


def damaged(what: str, why: str) -> SessionDamagedError:
    return SessionDamagedError(f"{what} is damaged ({why})")


def with_turn(head: SessionHead, turn: TurnRecord, now_s: float) -> SessionHead:
    """The head after one more turn."""
    num_tokens = len(turn.token_ids) + (head.num_tokens if turn.base == "append" else 0)
    text = next((str(message.get("content", "")) for message in turn.messages if message.get("role") == "user"), "")
    return structs.replace(
        head, updated_s=now_s, num_turns=turn.number, num_tokens=num_tokens,
        title=head.title or " ".join(text[: 4 * TITLE_CHARS].split())[:TITLE_CHARS], system=turn.system or head.system,
    )  # fmt: skip


def transcript(turns: Sequence[TurnRecord]) -> dict[tuple[int, int], Message]:
    """The messages at the end of the last of `turns`, which are the session's first ones; by their turns, and their
    indices among what these have added.
    """
    said: dict[tuple[int, int], Message] = {}
    for turn in turns:
        said |= {(turn.number, index): dict(message) for index, message in enumerate(turn.messages)}
        for edit in turn.edits:
            if edit.message is None:
                said.pop(edit.place, None)
            else:
                said[edit.place] = dict(edit.message)
    return said


def replay(head: SessionHead, turns: Sequence[TurnRecord]) -> SessionState:
    """The state at the end of the last of `turns`, which are the session's first ones in order."""
    messages: list[Message] = [] if turns and turns[0].system else [dict(message) for message in head.system]
    messages += transcript(turns).values()
    start = max((i for i, turn in enumerate(turns) if turn.base == "rebase"), default=0)
    state = SessionState(head, len(turns), messages, [], [])
    for turn in turns[start:]:
        state.token_ids.extend(turn.token_ids)
        state.chain.extend(turn.chain)
    if not turns:
        return state
    return replace(
        state, first_reencoded=turns[-1].first_reencoded, splice_parent=turns[-1].splice_parent,
        splice_end=turns[-1].splice_end, splices=turns[-1].splices, turn_starts=turns[-1].turn_starts,
        num_dropped_messages=turns[-1].num_dropped_messages, options=turns[-1].options,
        miss=None if turns[-1].messages else turns[-1].miss,
        truncated_tokens=sum(turn.truncated_tokens for turn in turns),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fork:
    """A session that begins with the first turns of another, before it is stored. draft: its head without these turns.

    It shares their blocks, but none of their idempotency keys.
    """

    draft: SessionHead
    turns: Sequence[TurnRecord]

    @property
    def state(self) -> SessionState:
        return replay(self.draft, self.turns)


def micros(time_s: float) -> int:
    """A time as it stands in sorted keys."""
    return min(max(0, int(time_s * 1e6)), _MAX_U64) if math.isfinite(time_s) else 0 if time_s < 0 else _MAX_U64


def digest(text: str) -> bytes:
    """32 bytes for a text of any length; half a surrogate pair in a client's JSON is a text like any other."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def encode(record: Record, what: str) -> bytes:
    """Raises StoreError for a record that could not be read back."""
    try:
        packed = disk_records.pack(record)
        disk_records.unpack(type(record), packed)
    except (ValueError, TypeError, OverflowError) as error:
        raise StoreError(f"{what} cannot be stored: {error}") from error
    return packed


def unseal(kind: type[T], table: str, key: bytes, value: bytes, what: str) -> T:
    """Read a record of this kind from its place. Raises SessionDamagedError unless it was sealed for that place."""
    try:
        return disk_records.unseal(kind, table, key, value)
    except ValueError as error:
        raise damaged(what, str(error)) from error
