"""Token ids of answers by keyed digests: a history that comes back as text is recognised even after a restart.

A cache: the oldest answers are dropped first, a lost or damaged one is a miss, and nothing here raises into a request.
Knows no text, no template and no KV.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any

from msgspec import Meta

from kvstore.blocks.ids import token_bytes
from kvstore.blocks.records import Record
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.env import StoreEnvironment, open_environment
from kvstore.disk.records import pack, seal, stored, unseal
from kvstore.errors import StoreError
from kvstore.sessions.memory import MemoryTables
from kvstore.sessions.storage import IO_ERRORS, MAX_QUEUE, DiskTables, Storage, Ticket, Transactions
from kvstore.sessions.tables import View, be64

ANSWERS = "answers"  # number -> StoredAnswer; the oldest is the first
NUMBERS = "numbers"  # key -> number
OWNED = "owned"  # * owner, number
TABLES = (ANSWERS, NUMBERS, OWNED)
MAP_BYTES = 64 << 20
FULL_SHARE = 0.7  # of the map: the rest is for the pages that a transaction copies
MEMORY_BYTES = 16 << 20  # of a store without files
MAX_WAITING = MAX_QUEUE // 2  # answers; the rest of the queue is for those who wait
FIND_WAIT_S = 1.0  # for answers that are on their way to the disk
MAX_ANSWER_TOKENS = 1 << 18
RECORD_EXTRA_BYTES = 320  # of a record on disk, at most, beside its ids: keys, owner and their places in the tables
KEY_BYTES = 16
NO_OWNER = bytes(16)
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


# -- in a transaction ------------------------------------------------------------------------------------------------
def _add(view: View, answer: StoredAnswer, max_bytes: int) -> int:
    """Returns how many old answers made room."""
    num_evicted = 0
    while view.num_bytes() + len(answer.token_ids) + RECORD_EXTRA_BYTES > max_bytes:
        oldest = next(view.scan(ANSWERS), None)
        if oldest is None:
            break
        _remove(view, oldest[0])
        num_evicted += 1
    last, _ = next(view.scan(ANSWERS, reverse=True), (b"", b""))
    number = be64(int.from_bytes(last, "big") + 1)
    view.put(ANSWERS, number, seal(ANSWERS, number, pack(answer)))
    for key in answer.keys:
        view.put(NUMBERS, key, number)
    if answer.owner != NO_OWNER:
        view.put(OWNED, answer.owner + number, b"")
    return num_evicted


def _answer(view: View, number: bytes) -> StoredAnswer | None:
    """None: damaged, or not there."""
    with suppress(ValueError):
        return unseal(StoredAnswer, ANSWERS, number, view.get(ANSWERS, number) or b"")
    return None


def _remove(view: View, number: bytes) -> None:
    """The keys of a damaged answer stay; they lead nowhere."""
    answer = _answer(view, number)
    view.delete(ANSWERS, number)
    if answer is not None:
        for key in answer.keys:
            if view.get(NUMBERS, key) == number:  # else a newer answer has it
                view.delete(NUMBERS, key)
        view.delete(OWNED, answer.owner + number)


def _forget(view: View, owner: bytes) -> None:
    for place in [place for place, _ in view.scan(OWNED, owner)]:
        _remove(view, place[KEY_BYTES:])
        view.delete(OWNED, place)


class AnswerStore:
    """Answers, the oldest dropped when it is full. Every method may be called from any thread.

    An answer is found at once after `put`, and is on disk within a second, unless the process or the disk fails first.
    open_environment: must allow 3 named databases; None, or one that fails: everything is kept in memory. max_bytes: of
    its file. transactions: on its tables.
    """

    def __init__(
        self, open_environment: Callable[[], StoreEnvironment] | None, max_bytes: int = int(FULL_SHARE * MAP_BYTES)
    ) -> None:
        # dropped: not stored, as it is too large or too many waited. failed: uses of the disk.
        self._counts = dict.fromkeys(("committed", "dropped", "evicted", "failed", "damaged"), 0)
        self._lock = threading.Lock()
        self._refused: str | None = None  # why the file could not be opened
        self._failing: str | None = None  # why the disk failed; until something is written again
        self._last: Ticket[int] | None = None  # of the last answer
        storage: Storage = MemoryTables(TABLES)
        self._max_bytes = MEMORY_BYTES
        if open_environment is not None:
            try:
                storage, self._max_bytes = DiskTables(open_environment, TABLES), max_bytes
            except (*IO_ERRORS, StoreError) as error:
                self._note([error])
                self._refused = self._failing
        self.transactions = Transactions("the store of answers", storage, self._note)

    def _note(self, outcomes: Sequence[object]) -> None:
        """Of changes: how many answers each has evicted, None for one that stores no answer, or an error."""
        with self._lock:
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    self._counts["failed"] += 1
                    self._failing = str(outcome) or repr(outcome)
                elif isinstance(outcome, int):
                    self._counts["committed"] += 1
                    self._counts["evicted"] += outcome
                    self._failing = self._refused

    def put(self, keys: Sequence[bytes], token_ids: Sequence[int], owner: bytes = b"") -> None:
        """Remember an answer under each of its keys, which then no longer lead to older answers. owner: see
        `owner_tag`.

        Never waits for the disk.
        """
        assert 0 < len(keys) < 256 and all(len(key) == KEY_BYTES for key in keys), "keys of an answer"
        answer = StoredAnswer(tuple(keys), token_bytes(token_ids), owner or NO_OWNER)
        if len(token_ids) <= MAX_ANSWER_TOKENS and self.transactions.num_queued < MAX_WAITING:
            with suppress(StoreError):  # closed
                self._last = self.transactions.submit(lambda view: _add(view, answer, self._max_bytes), is_urgent=False)
                return
        with self._lock:
            self._counts["dropped"] += 1

    def find_ids(self, groups: Sequence[Sequence[bytes]]) -> list[Sequence[int] | None]:
        """For each group, the ids of the first of its keys that is known."""

        def ids_in(view: View) -> list[Sequence[int] | None]:
            known = ((self._ids_of(view, key) for key in group) for group in groups)
            return [next((ids for ids in group if ids is not None), None) for group in known]

        if self._last is not None and not self._last.done:
            self.flush(FIND_WAIT_S)
        try:
            return self.transactions.read(ids_in)
        except StoreError as error:
            self._note([error])
        return [None] * len(groups)

    def _ids_of(self, view: View, key: bytes) -> Sequence[int] | None:
        number = view.get(NUMBERS, key)
        if number is None or view.get(ANSWERS, number) is None:
            return None
        answer = _answer(view, number)
        if answer is None or key not in answer.keys:
            with self._lock:
                self._counts["damaged"] += 1
            return None
        return struct.unpack(f"<{len(answer.token_ids) // 4}I", answer.token_ids)

    def forget_owner(self, owner: bytes) -> bool:
        """Forget all answers of this owner; b"": of all. False: the disk failed and has them still; ask again later."""
        with suppress(StoreError):
            self.transactions.submit(lambda view: _forget(view, owner)).wait()
            return self._refused is None
        return False

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all answers are durable, or the disk has failed. Those who wait at once share a commit. timeout:
        in seconds.
        """
        with suppress(StoreError):
            self.transactions.submit(lambda _: None).wait(timeout)

    def stats(self) -> dict[str, Any]:
        """answers: how many there are. failing: why the disk fails; None if it does not. The rest are counters."""
        num_answers = 0
        try:
            num_answers = self.transactions.read(lambda view: view.count(ANSWERS))
        except StoreError as error:
            self._note([error])
        with self._lock:
            return {"answers": num_answers, **self._counts, "failing": self._failing}

    def close(self) -> None:
        """Write all waiting answers, and close. Calling it again does nothing."""
        with suppress(StoreError):
            self.transactions.close()


def open_answers(directory: StoreDirectory | None) -> AnswerStore:
    """The answers of an owned store; without one, in memory."""
    if directory is None:
        return AnswerStore(None)
    path = directory.path / "answers"
    return AnswerStore(lambda: open_environment(path, MAP_BYTES, max_dbs=3, metasync=True))
