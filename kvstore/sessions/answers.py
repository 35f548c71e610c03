"""Token ids of answers by keyed digests, so that a history that comes back as text is known again after a restart.

A cache: what is lost or damaged is a miss, and nothing here raises into a request. One thread commits in groups. Knows
no text, no template and no KV.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import lmdb

from kvstore.blocks.ids import token_bytes
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.env import Gate, StoreEnvironment, open_environment
from kvstore.errors import StoreError
from kvstore.sessions.answer_tables import KEY_BYTES, NO_OWNER, Answer, AnswerTables

MAP_BYTES = 64 << 20
MAX_ANSWER_TOKENS = 1 << 18
MAX_WAITING_TOKENS = 1 << 20
MEMORY_TOKENS = 4 << 20  # of a store without files
GROUP_WAIT_S = 0.2  # between two commits, so that answers share one
RECENT_EXTRA_TOKENS = 150  # what an answer in memory takes beside its ids, in tokens of 4 bytes
ERRORS = (lmdb.Error, OSError, MemoryError, StoreError)


@dataclass(slots=True)
class _Recent:
    """Answers in memory by their numbers, oldest first."""

    answers: OrderedDict[int, Answer] = field(default_factory=OrderedDict)
    numbers: dict[bytes, int] = field(default_factory=dict)
    num_tokens: int = 0

    def add(self, number: int, answer: Answer) -> None:
        self.answers[number] = answer
        self.numbers.update(dict.fromkeys(answer.keys, number))
        self.num_tokens += len(answer.token_ids) // 4 + RECENT_EXTRA_TOKENS

    def find(self, key: bytes) -> bytes | None:
        number = self.numbers.get(key)
        return None if number is None else self.answers[number].token_ids

    def remove(self, number: int) -> bool:
        answer = self.answers.pop(number, None)
        if answer is None:
            return False
        self.num_tokens -= len(answer.token_ids) // 4 + RECENT_EXTRA_TOKENS
        for key in answer.keys:
            if self.numbers.get(key) == number:
                del self.numbers[key]
        return True


@dataclass(slots=True)
class _Counts:
    committed: int = 0
    dropped: int = 0  # not stored: too large, too many waited, or the disk failed
    evicted: int = 0
    failed: int = 0  # uses of the disk


class AnswerStore:
    """Answers, the oldest dropped when it is full. Every method may be called from any thread.

    What `put` brings is found at once, and is on disk within a second unless the process or the disk fails before.
    open_environment: must allow 3 named databases; None, or one that fails: everything is kept in memory.
    """

    def __init__(self, open_environment: Callable[[], StoreEnvironment] | None) -> None:
        self._counts = _Counts()
        self._changed = threading.Condition()
        self._recent = _Recent()  # without files all of it, else what is not on disk
        self._waiting: deque[int] = deque()  # numbers in `_recent`, to be written
        self._forgotten: list[bytes] = []  # owners, to be removed from disk
        self._failed: list[bytes] = []  # owners that could not be; tried again with the next change
        self._num_asked = self._num_done = 0  # changes
        self._is_awaited = False  # somebody is in `flush`
        self._closing = False
        self._gate = Gate()  # nobody reads while the file is closed
        self._tables: AnswerTables | None = None
        self._number = 0
        if open_environment is not None:
            with self._counting():
                self._tables = self._open(open_environment)
        self._thread: threading.Thread | None = None
        if self._tables is not None:
            self._thread = threading.Thread(target=self._run, args=(self._tables,), name="kvstore-answers", daemon=True)
            self._thread.start()

    def _open(self, open_environment: Callable[[], StoreEnvironment]) -> AnswerTables:
        env = open_environment()
        try:
            tables = AnswerTables(env)
            self._number = tables.next_number()
            return tables
        except BaseException:
            env.close()
            raise

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """An error of the disk ends what is done in here, no more."""
        try:
            yield
        except ERRORS:
            with self._changed:
                self._counts.failed += 1

    def put(self, keys: Sequence[bytes], token_ids: Sequence[int], owner: bytes = b"") -> None:
        """Remember the ids of an answer under each of its keys, instead of what these led to. owner: see `owner_tag`.

        Never waits for the disk.
        """
        assert 0 < len(keys) < 256 and all(len(key) == KEY_BYTES for key in keys), "keys of an answer"
        with self._changed:
            if self._closing or len(token_ids) > MAX_ANSWER_TOKENS:
                self._counts.dropped += 1
                return
            self._recent.add(self._number, Answer(tuple(keys), token_bytes(token_ids), owner or NO_OWNER))
            self._number += 1
            while self._recent.num_tokens > (MEMORY_TOKENS if self._thread is None else MAX_WAITING_TOKENS):
                self._recent.remove(next(iter(self._recent.answers)))
                self._counts.evicted += self._thread is None
                self._counts.dropped += self._thread is not None
            if self._thread is not None:
                self._waiting.append(self._number - 1)
                self._note_change()

    def _note_change(self) -> None:
        self._num_asked += 1
        self._changed.notify_all()

    def find(self, groups: Sequence[Sequence[bytes]]) -> list[Sequence[int] | None]:
        """For each group, the ids of the first of its keys that is known."""
        with self._changed:  # first: what is not here any more is on disk by then
            recent = {key: ids for group in groups for key in group if (ids := self._recent.find(key)) is not None}
            forgotten = {*self._forgotten, *self._failed}
        found: list[Sequence[int] | None] = [None] * len(groups)
        with self._counting(), self._reading() as (tables, txn):
            for index, group in enumerate(groups):
                for key in group:
                    ids = recent.get(key)
                    if ids is None and tables is not None:
                        answer = tables.find(txn, key)
                        ids = None if answer is None or answer.owner in forgotten else answer.token_ids
                    if ids is not None:
                        found[index] = struct.unpack(f"<{len(ids) // 4}I", ids)
                        break
        return found

    @contextmanager
    def _reading(self) -> Iterator[tuple[AnswerTables | None, Any]]:
        with self._gate:
            tables = self._tables
            if tables is None:
                yield None, None
            else:
                with tables.env.begin() as txn:
                    yield tables, txn

    def forget_owner(self, owner: bytes) -> bool:
        """Nothing of this owner is found any more. Returns whether it is gone from disk too: False when that failed."""
        with self._changed:
            of_owner = [number for number, answer in self._recent.answers.items() if answer.owner == owner]
            for number in of_owner:
                self._recent.remove(number)
            if self._thread is None:
                return True
            self._forgotten.append(owner)
            self._note_change()
        self.flush()
        with self._changed:
            return owner not in self._failed and owner not in self._forgotten

    def flush(self) -> None:
        """Returns when what was put is on disk, or when the disk failed."""
        with self._changed:
            asked, thread = self._num_asked, self._thread
            if thread is not None and self._num_done < asked:
                self._is_awaited = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._num_done >= asked or not thread.is_alive())

    def stats(self) -> dict[str, int]:
        """answers: how many there are, on disk or in memory; the rest are counters."""
        with self._changed:
            shown = {"answers": len(self._recent.answers), **asdict(self._counts), "damaged": 0}
        with self._counting(), self._reading() as (tables, txn):
            if tables is not None:
                shown |= {"answers": shown["answers"] + tables.num_answers(txn), "damaged": tables.num_damaged}
        return shown

    def close(self) -> None:
        """Write what waits, and close. Calling it again does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        with self._gate.alone(), self._counting():
            tables, self._tables = self._tables, None
            if tables is not None:
                tables.env.close()

    # -- the thread --------------------------------------------------------------------------------------------------
    def _run(self, tables: AnswerTables) -> None:
        while group := self._next_group():
            answers, forgotten, asked = group
            num_evicted = self._write(tables, answers, forgotten)
            with self._changed:
                if num_evicted is None:
                    self._counts.dropped += len(answers)  # they stay in memory until there are too many
                    self._failed = forgotten
                else:
                    self._counts.evicted += num_evicted
                    for number, _ in answers:
                        self._counts.committed += self._recent.remove(number)
                    self._failed = []
                self._num_done = asked
                self._changed.notify_all()

    def _write(
        self, tables: AnswerTables, answers: Sequence[tuple[int, Answer]], forgotten: Sequence[bytes]
    ) -> int | None:
        try:
            return tables.write(answers, forgotten)
        except Exception:  # whatever it is: without this thread, those in `flush` would wait for ever
            with self._changed:
                self._counts.failed += 1
            return None

    def _next_group(self) -> tuple[list[tuple[int, Answer]], list[bytes], int] | None:
        """All that waits, after a pause in which more may come. None: closing, and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_done < self._num_asked or self._closing)
            if self._num_done == self._num_asked:
                return None
            self._changed.wait_for(lambda: self._closing or self._is_awaited, GROUP_WAIT_S)
            self._is_awaited = False
            known = self._recent.answers
            answers = [(number, known[number]) for number in self._waiting if number in known]
            forgotten = [*self._failed, *self._forgotten]
            self._waiting.clear()
            self._failed, self._forgotten = forgotten, []  # not to be found meanwhile
            return answers, forgotten, self._num_asked


def open_answers(directory: StoreDirectory | None) -> AnswerStore:
    """The answers of an owned store; without one, in memory."""
    if directory is None:
        return AnswerStore(None)
    path = directory.path / "answers"
    return AnswerStore(lambda: open_environment(path, MAP_BYTES, max_dbs=3))
