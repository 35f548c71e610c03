"""How answers lie in their LMDB environment: records by number, numbers by key and by owner, and room for new ones.

Knows no thread and no policy but that the oldest go first. Errors are LMDB's own.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta

from kvstore.blocks.records import Record
from kvstore.disk.env import StoreEnvironment
from kvstore.disk.records import pack, seal, unseal

FULL_SHARE = 0.7  # of the map: the rest is for the pages that a transaction copies
RECORD_EXTRA_BYTES = 256  # of a record, at most, beside its ids: keys, owner and their places in the tables
KEY_BYTES = 16
NO_OWNER = bytes(16)
_NUMBER = struct.Struct(">Q")
_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class Answer(Record, frozen=True):
    """What one `put` brought. token_ids: little-endian u32."""

    keys: tuple[_Key, ...]
    token_ids: bytes
    owner: _Key = NO_OWNER


def owner_tag(tenant: str, session_id: str) -> bytes:
    """Names a session in its answers' records. It is no secret: the sessions' own table names them too."""
    parts = [text.encode("utf-8", "surrogatepass") for text in (tenant, session_id)]
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()[:16]


def encode(number: bytes, answer: Answer) -> bytes:
    return seal("answers", number, pack(answer))


def decode(number: bytes, value: bytes) -> Answer | None:
    """None: damaged."""
    try:
        return unseal(Answer, "answers", number, value)
    except ValueError:
        return None


class AnswerTables:
    """The answers of an open environment. Everything may raise lmdb.Error, OSError or MemoryError."""

    def __init__(self, env: StoreEnvironment) -> None:
        self.env = env
        self.num_damaged = 0
        with env.begin(write=True) as txn:
            self._answers = env.open_db(b"answers", txn=txn)  # by number, so that the oldest is the first
            self._numbers = env.open_db(b"numbers", txn=txn)  # by key
            self._owned = env.open_db(b"owned", txn=txn)  # nothing, by owner and number
        self._full_bytes = int(FULL_SHARE * env.info()["map_size"])

    def next_number(self) -> int:
        with self.env.begin() as txn, txn.cursor(self._answers) as cursor:
            known = cursor.key() if cursor.last() else b""
            return _NUMBER.unpack(known)[0] + 1 if len(known) == _NUMBER.size else 0

    def find(self, txn: Any, key: bytes) -> Answer | None:
        number = txn.get(key, db=self._numbers)
        value = None if number is None else txn.get(number, db=self._answers)
        if value is None:
            return None
        answer = decode(number, value)
        if answer is None or key not in answer.keys:
            self.num_damaged += 1
            return None
        return answer

    def write(self, answers: Sequence[tuple[int, Answer]], forgotten: Sequence[bytes]) -> int:
        """One transaction; returns how many old answers made room."""
        with self.env.begin(write=True) as txn:
            for owner in forgotten:
                self._forget(txn, owner)
            num_evicted = self._make_room(txn, sum(len(a.token_ids) + RECORD_EXTRA_BYTES for _, a in answers))
            for counted, answer in answers:
                number = _NUMBER.pack(counted)
                txn.put(number, encode(number, answer), db=self._answers)
                for key in answer.keys:
                    txn.put(key, number, db=self._numbers)
                if answer.owner != NO_OWNER:
                    txn.put(answer.owner + number, b"", db=self._owned)
            return num_evicted

    def _forget(self, txn: Any, owner: bytes) -> None:
        with txn.cursor(self._owned) as cursor:
            found = cursor.set_range(owner)
            places = []
            while found and cursor.key().startswith(owner):
                places.append(cursor.key())
                found = cursor.next()
        for place in places:
            self._remove(txn, place[len(owner) :])
            txn.delete(place, db=self._owned)

    def _make_room(self, txn: Any, num_bytes: int) -> int:
        num_evicted = 0
        while self._used_bytes(txn) + num_bytes > self._full_bytes:
            with txn.cursor(self._answers) as cursor:
                oldest = cursor.key() if cursor.first() else None
            if oldest is None:
                break
            self._remove(txn, oldest)
            num_evicted += 1
        return num_evicted

    def _used_bytes(self, txn: Any) -> int:
        used = 0
        for table in (self._answers, self._numbers, self._owned):
            stat = txn.stat(table)
            used += stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"])
        return used

    def _remove(self, txn: Any, number: bytes) -> None:
        """Of a damaged one the keys stay, and lead nowhere."""
        answer = decode(number, txn.get(number, db=self._answers, default=b""))
        txn.delete(number, db=self._answers)
        if answer is not None:
            for key in answer.keys:
                if txn.get(key, db=self._numbers) == number:  # else a newer answer has it
                    txn.delete(key, db=self._numbers)
            txn.delete(answer.owner + number, db=self._owned)

    def num_answers(self, txn: Any) -> int:
        return int(txn.stat(self._answers)["entries"])
