"""Token ids of answers by keyed digests: a history that comes back as text is recognised even after a restart.

A cache: the oldest answers are dropped first, a lost or damaged one is a miss, and nothing here raises into a request.
What `flush` has waited for is durable, unless `stats` says that the disk fails. On disk, records are stored by number,
and numbers by key and by owner. Knows no text, no template and no KV.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import lmdb
from msgspec import Meta

from kvstore.blocks.ids import token_bytes
from kvstore.blocks.records import Record
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.env import StoreEnvironment, open_environment
from kvstore.disk.live import Committer, LiveTables, Ticket
from kvstore.disk.records import pack, seal, stored, unseal
from kvstore.errors import StoreError

MAP_BYTES = 64 << 20
MAX_ANSWER_TOKENS = 1 << 18
MAX_WAITING_TOKENS = 1 << 20
MEMORY_TOKENS = 4 << 20  # of a store without files
GROUP_WAIT_S = 0.2  # between two commits, so that answers share one
MAX_CHANGES = 1 << 16  # that may wait
RECENT_EXTRA_TOKENS = 150  # what an answer in memory takes beside its ids, in tokens of 4 bytes
ERRORS = (lmdb.Error, OSError, MemoryError, StoreError)
FULL_SHARE = 0.7  # of the map: the rest is for the pages that a transaction copies
RECORD_EXTRA_BYTES = 320  # of a record, at most, beside its ids: keys, owner and their places in the tables
KEY_BYTES = 16
NO_OWNER = bytes(16)
_NUMBER = struct.Struct(">Q")
_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


@stored
class StoredAnswer(Record, frozen=True):
    """An answer as it is stored. keys: all digests that lead to it. token_ids: little-endian u32. owner: see
    `owner_tag`.
    """

    keys: tuple[_Key, ...]
    token_ids: bytes
    owner: _Key = NO_OWNER


def owner_tag(tenant: str, session_id: str) -> bytes:
    """Names a session in its answers' records. It is no secret: the sessions' own table names them too."""
    parts = [text.encode("utf-8", "surrogatepass") for text in (tenant, session_id)]
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()[:16]


def encode(number: bytes, answer: StoredAnswer) -> bytes:
    return seal("answers", number, pack(answer))


def decode(number: bytes, value: bytes) -> StoredAnswer | None:
    """None: damaged."""
    try:
        return unseal(StoredAnswer, "answers", number, value)
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

    def answer_of(self, txn: Any, key: bytes) -> StoredAnswer | None:
        number = txn.get(key, db=self._numbers)
        value = None if number is None else txn.get(number, db=self._answers)
        if value is None:
            return None
        answer = decode(number, value)
        if answer is None or key not in answer.keys:
            self.num_damaged += 1
            return None
        return answer

    def write(self, answers: Sequence[tuple[int, StoredAnswer]], forgotten: Sequence[bytes]) -> int:
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
        """The keys of a damaged answer stay; they lead nowhere."""
        answer = decode(number, txn.get(number, db=self._answers, default=b""))
        txn.delete(number, db=self._answers)
        if answer is not None:
            for key in answer.keys:
                if txn.get(key, db=self._numbers) == number:  # else a newer answer has it
                    txn.delete(key, db=self._numbers)
            txn.delete(answer.owner + number, db=self._owned)

    def num_answers(self, txn: Any) -> int:
        return int(txn.stat(self._answers)["entries"])


@dataclass(slots=True)
class _Recent:
    """Answers in memory by their numbers, oldest first."""

    answers: OrderedDict[int, StoredAnswer] = field(default_factory=OrderedDict)
    numbers: dict[bytes, int] = field(default_factory=dict)
    num_tokens: int = 0

    def add(self, number: int, answer: StoredAnswer) -> None:
        self.answers[number] = answer
        self.numbers.update(dict.fromkeys(answer.keys, number))
        self.num_tokens += len(answer.token_ids) // 4 + RECENT_EXTRA_TOKENS

    def ids_of(self, key: bytes) -> bytes | None:
        number = self.numbers.get(key)
        return None if number is None else self.answers[number].token_ids

    def shrink(self, max_tokens: int) -> int:
        """Remove the oldest until no more than this is left. Returns how many were removed."""
        num_before = len(self.answers)
        while self.num_tokens > max_tokens:
            self.remove(next(iter(self.answers)))
        return num_before - len(self.answers)

    def remove(self, number: int) -> bool:
        answer = self.answers.pop(number, None)
        if answer is None:
            return False
        self.num_tokens -= len(answer.token_ids) // 4 + RECENT_EXTRA_TOKENS
        for key in answer.keys:
            if self.numbers.get(key) == number:
                del self.numbers[key]
        return True


class AnswerStore:
    """Answers, the oldest dropped when it is full. Every method may be called from any thread.

    An answer is found at once after `put`, and is on disk within a second unless the process or the disk fails first.
    While the disk fails, answers wait in memory for the next try.
    open_environment: must allow 3 named databases; None, or one that fails: everything is kept in memory.
    """

    def __init__(self, open_environment: Callable[[], StoreEnvironment] | None) -> None:
        # dropped: not stored, as it is too large or too many waited. failed: uses of the disk.
        self._counts = dict.fromkeys(("committed", "dropped", "evicted", "failed"), 0)
        self._lock = threading.Lock()
        self._recent = _Recent()  # without files all of it, else what is not on disk
        self._forgotten: list[bytes] = []  # owners that are still to be removed from disk
        self._failing: str | None = None  # why the disk failed; until something is written again
        self._is_closed = False
        self._number = 0
        self._live: LiveTables[AnswerTables] | None = None
        self._committer: Committer | None = None
        if open_environment is not None:
            with self._counting():
                self._live = LiveTables(lambda: self._open(open_environment))
                self._committer = Committer("the store of answers", self._commit, MAX_CHANGES, GROUP_WAIT_S)

    def _open(self, open_environment: Callable[[], StoreEnvironment]) -> AnswerTables:
        env = open_environment()
        with ExitStack() as undo:
            undo.callback(env.close)
            tables = AnswerTables(env)
            self._number = tables.next_number()
            undo.pop_all()
        return tables

    @contextmanager
    def _counting(self, errors: tuple[type[Exception], ...] = ERRORS) -> Iterator[None]:
        """One of these errors is counted and ends only the work in this context."""
        try:
            yield
        except errors as error:
            with self._lock:
                self._counts["failed"] += 1
                self._failing = str(error) or repr(error)

    def put(self, keys: Sequence[bytes], token_ids: Sequence[int], owner: bytes = b"") -> None:
        """Remember an answer under each of its keys, which then no longer lead to older answers. owner: see
        `owner_tag`.

        Never waits for the disk.
        """
        assert 0 < len(keys) < 256 and all(len(key) == KEY_BYTES for key in keys), "keys of an answer"
        with self._lock:
            is_full = self._committer is not None and self._committer.num_queued >= MAX_CHANGES // 2
            if self._is_closed or is_full or len(token_ids) > MAX_ANSWER_TOKENS:
                self._counts["dropped"] += 1
                return
            self._recent.add(self._number, StoredAnswer(tuple(keys), token_bytes(token_ids), owner or NO_OWNER))
            if self._committer is None:
                self._counts["evicted"] += self._recent.shrink(MEMORY_TOKENS)
            else:
                self._counts["dropped"] += self._recent.shrink(MAX_WAITING_TOKENS)
                self._committer.submit(None)  # never waits: there is room
            self._number += 1

    def find_ids(self, groups: Sequence[Sequence[bytes]]) -> list[Sequence[int] | None]:
        """For each group, the ids of the first of its keys that is known."""
        with self._lock:  # first: what is not here any more is on disk by then
            recent = {key: ids for group in groups for key in group if (ids := self._recent.ids_of(key)) is not None}
            forgotten = set(self._forgotten)
        found: list[Sequence[int] | None] = [None] * len(groups)
        with self._counting(), self._reading() as (tables, txn):
            for index, group in enumerate(groups):
                for key in group:
                    ids = recent.get(key)
                    if ids is None and tables is not None:
                        answer = tables.answer_of(txn, key)
                        ids = None if answer is None or answer.owner in forgotten else answer.token_ids
                    if ids is not None:
                        found[index] = struct.unpack(f"<{len(ids) // 4}I", ids)
                        break
        return found

    @contextmanager
    def _reading(self) -> Iterator[tuple[AnswerTables | None, Any]]:
        with self._live or nullcontext() as tables:
            if tables is None:
                yield None, None
            else:
                with tables.env.begin() as txn:
                    yield tables, txn

    def forget_owner(self, owner: bytes) -> bool:
        """Forget all answers of this owner. Returns whether they are gone from disk, too; False if the disk failed."""
        with self._lock:
            of_owner = [number for number, answer in self._recent.answers.items() if answer.owner == owner]
            for number in of_owner:
                self._recent.remove(number)
            if self._committer is None:
                return True
            self._forgotten.append(owner)
        with suppress(StoreError):  # closed
            self._committer.submit(None)
        self._committer.flush()
        with self._lock:
            return owner not in self._forgotten

    def flush(self) -> None:
        """Wait until all answers are durable, or the disk has failed. Those who wait at once share a commit."""
        if self._committer is not None:
            self._committer.flush()

    def stats(self) -> dict[str, Any]:
        """answers: how many there are, on disk or in memory. failing: why the disk fails; None if it does not. The rest
        are counters.
        """
        with self._lock:
            num_waiting = len(self._recent.answers)
            shown = {"answers": num_waiting, **self._counts, "damaged": 0, "failing": self._failing}
        with self._counting(), self._reading() as (tables, txn):
            if tables is not None:
                shown |= {"answers": num_waiting + tables.num_answers(txn), "damaged": tables.num_damaged}
        return shown

    def close(self) -> None:
        """Write all waiting answers, and close. Calling it again does nothing."""
        with self._lock:
            self._is_closed = True
        if self._committer is not None:
            self._committer.close()
        if self._live is not None:
            with self._counting():
                self._live.close()

    def _commit(self, group: Sequence[Ticket[None]]) -> None:
        """Store all answers that wait, also since the disk failed, and remove those of owners to be forgotten."""
        assert self._live is not None
        with self._lock:
            answers, forgotten = list(self._recent.answers.items()), list(self._forgotten)
        with self._counting((Exception,)), self._live as tables:  # whatever it is: nothing here raises into a request
            assert tables is not None, "closed after this thread has ended"
            num_evicted = tables.write(answers, forgotten)
            with self._lock:
                self._failing = None
                self._counts["evicted"] += num_evicted
                for number, _ in answers:
                    self._counts["committed"] += self._recent.remove(number)
                for owner in forgotten:  # once: it may have been forgotten again meanwhile
                    self._forgotten.remove(owner)
        for ticket in group:
            ticket.finish(None)


def open_answers(directory: StoreDirectory | None) -> AnswerStore:
    """The answers of an owned store; without one, in memory."""
    if directory is None:
        return AnswerStore(None)
    path = directory.path / "answers"
    return AnswerStore(lambda: open_environment(path, MAP_BYTES, max_dbs=3, metasync=True))
