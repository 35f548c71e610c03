"""A walk over all sessions: whether every record is whole, and all that belongs to it is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.blocks.ids import BlockId
from kvstore.errors import StoreError
from kvstore.sessions.record import SessionHead, TurnRecord, damaged, replay
from kvstore.sessions.tables import (
    EXPIRY,
    HEADS,
    NAMES,
    ORDER,
    REFS,
    REQUESTS,
    TOMBSTONES,
    TURNS,
    View,
    be64,
    expiry_key,
    find,
    head_of,
    name_key,
    order_key,
    read_turns,
    request_key,
    tombstone,
    turn_key,
)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a walk over everything found. problems: a sentence each; empty when all is well."""

    num_sessions: int
    num_turns: int
    num_refs: int
    num_tombstones: int
    problems: tuple[str, ...]


class _Check:
    """One walk: every head and all it must have, then whatever belongs to no head."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.problems: list[str] = []
        self.num_turns = 0
        self.places: Counter[str] = Counter()  # entries that the heads account for, by table
        self.refs: Counter[int] = Counter()  # by session number

    def session(self, number: int) -> None:
        try:
            head = head_of(self.view, number, f"session number {number}")
            state_turns = read_turns(self.view, head, head.num_turns)
            if len(replay(head, state_turns).token_ids) != head.num_tokens:
                raise damaged(f"session {head.key.session_id}", "its number of tokens does not match its turns")
            if find(self.view, head.key) != number:
                raise damaged(f"session {head.key.session_id}", "its id does not lead to it")
        except StoreError as error:
            self.problems.append(str(error))
            return
        self.num_turns += len(state_turns)
        self._places(head, state_turns)
        self._refs(head, {block_id for turn in state_turns for block_id in turn.chain})

    def _places(self, head: SessionHead, turns: Sequence[TurnRecord]) -> None:
        number = head.number
        needed = [(NAMES, name_key(head.key)), (ORDER, order_key(head)), (EXPIRY, expiry_key(head))]
        needed += [(TURNS, turn_key(number, turn.number)) for turn in turns]
        needed += [(REQUESTS, request_key(number, t.idempotency_key)) for t in turns if t.idempotency_key is not None]
        for table, place in needed:
            if place is None:
                continue
            self.places[table] += 1
            if self.view.get(table, place) is None:
                self.problems.append(f"session {head.key.session_id} has no entry in {table!r}")

    def _refs(self, head: SessionHead, block_ids: set[BlockId]) -> None:
        self.refs[head.number] = len(block_ids)
        missing = sum(self.view.get(REFS, block_id + be64(head.number)) is None for block_id in block_ids)
        if missing:
            self.problems.append(f"session {head.key.session_id} lacks {missing} references to its blocks")

    def rest(self) -> None:
        """Counts suffice: all that the heads need is there, so what is more belongs to none."""
        for table in (NAMES, ORDER, EXPIRY, TURNS, REQUESTS):
            extra = self.view.count(table) - self.places[table]
            if extra > 0:
                self.problems.append(f"{extra} entries in {table!r} belong to no readable session")
        extra = self.view.count(REFS) - sum(self.refs.values())
        if extra > 0:
            self.problems.append(f"{extra} references belong to no readable session")
        for place, value in self.view.scan(TOMBSTONES):
            try:
                tombstone(place, value)
            except StoreError as error:
                self.problems.append(str(error))


def problems_of(view: View, number: int) -> list[str]:
    """What is wrong with one session, by its number."""
    walk = _Check(view)
    walk.session(number)
    return walk.problems


def check(view: View, progress: Callable[[int, int], None] | None = None) -> CheckReport:
    """progress(done, total) is called after each session."""
    walk = _Check(view)
    numbers = [int.from_bytes(place, "big") for place, _ in view.scan(HEADS)]
    for done, number in enumerate(numbers, start=1):
        walk.session(number)
        if progress is not None:
            progress(done, len(numbers))
    walk.rest()
    problems = tuple(walk.problems)
    return CheckReport(len(numbers), walk.num_turns, view.count(REFS), view.count(TOMBSTONES), problems)
