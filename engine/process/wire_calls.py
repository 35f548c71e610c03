"""The table of blocking calls that a front may make to the engine's own process, with the types of what they take and
give. What is not in the table cannot be called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvstore.blocks.ids import BlockId, Lineage
from kvstore.blocks.records import Evict, Evicted
from kvstore.engine.process.wire import Failure
from kvstore.sessions.check import CheckReport
from kvstore.sessions.record import Message, SessionHead, SessionKey, SessionState, Tombstone, TurnRecord

MAX_CALLS = 32  # at once; each has a thread in the engine's process


class Call(msgspec.Struct, array_like=True):
    """number: of the answer that belongs to it."""

    number: int
    verb: str
    arguments: msgspec.Raw


class Answered(msgspec.Struct, array_like=True):
    number: int
    result: msgspec.Raw
    failure: Failure | None = None


class Signature:
    """Types of one verb: the tuple of its arguments, and its result."""

    def __init__(self, arguments: Any, result: Any) -> None:
        self.decode_arguments = msgspec.msgpack.Decoder(arguments).decode
        self.decode_result = msgspec.msgpack.Decoder(result).decode


_Ids = list[BlockId]
_Nothing = tuple[()]
_Key = tuple[SessionKey]
_Info = dict[str, Any]

# Names are verbs of the engine and of its parts. What returns a ticket is answered when it is durable.
SIGNATURES: dict[str, Signature] = {
    "root": Signature(tuple[str], bytes),
    "splice": Signature(
        tuple[_Ids, list[int], Lineage, list[tuple[int, int]], str], tuple[_Ids, Lineage] | None
    ),
    "expire_kv": Signature(tuple[_Ids, float | None], None),
    "pin_kv": Signature(tuple[_Ids, float], None),
    "flush": Signature(_Nothing, None),
    "stats": Signature(_Nothing, _Info),
    "sessions.create": Signature(tuple[SessionKey, list[Message], bytes, str, float | None], SessionHead),
    "sessions.commit_turn": Signature(tuple[SessionKey, TurnRecord, bytes, str, int | None], SessionHead),
    "sessions.fork": Signature(tuple[SessionKey, int | None, SessionKey], SessionHead),
    "sessions.set_ttl": Signature(tuple[SessionKey, float | None], SessionHead),
    "sessions.delete": Signature(_Key, Tombstone | None),
    "sessions.finish_deletion": Signature(tuple[int], None),
    "sessions.compact": Signature(_Nothing, None),
    "sessions.head": Signature(_Key, SessionHead | None),
    "sessions.load": Signature(tuple[SessionKey, int | None], SessionState | None),
    "sessions.turn": Signature(tuple[SessionKey, int], TurnRecord | None),
    "sessions.turn_of_request": Signature(tuple[SessionKey, str], TurnRecord | None),
    "sessions.list": Signature(tuple[str, int, str | None], list[SessionHead]),
    "sessions.expired": Signature(tuple[float, int], list[SessionKey]),
    "sessions.blocks_of": Signature(_Key, set[BlockId]),
    "sessions.unshared_blocks_of": Signature(_Key, set[BlockId]),
    "sessions.pending_deletions": Signature(_Nothing, list[Tombstone]),
    "sessions.check": Signature(_Nothing, CheckReport),
    "sessions.stats": Signature(_Nothing, dict[str, int]),
    "answers.put": Signature(tuple[list[bytes], list[int], bytes], None),
    "answers.find": Signature(tuple[list[list[bytes]]], list[list[int] | None]),
    "answers.forget_owner": Signature(tuple[bytes], bool),
    "answers.flush": Signature(_Nothing, None),
    "answers.stats": Signature(_Nothing, dict[str, int]),
    "admin.evict": Signature(tuple[Evict], dict[str, Evicted]),
    "admin.forget": Signature(tuple[_Ids, float], bool),
    "connector.prefetch": Signature(tuple[_Ids, list[int], Lineage, str], None),
    "connector.verify": Signature(tuple[bool], _Info),
    "connector.compact": Signature(_Nothing, _Info),
}

encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_answer = msgspec.msgpack.Decoder(Answered).decode
NOTHING = msgspec.Raw(encode(None))


def raw(value: Sequence[object] | object) -> msgspec.Raw:
    return msgspec.Raw(encode(value))
