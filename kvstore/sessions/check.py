"""Checks all sessions: every record is whole, and all of its entries in other tables exist. Makes lost ones again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.errors import StoreError
from kvstore.sessions import tables
from kvstore.sessions.record import SessionHead, TurnRecord, damaged, replay
from kvstore.sessions.tables import Place, View


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What the check found. problems: a sentence each; empty when all is well."""

    num_sessions: int
    num_turns: int
    num_refs: int
    num_tombstones: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WholeSession:
    """A session whose head and turns can be read. entries: what should lead to it; lost: those of them that do not."""

    name: str
    turns: Sequence[TurnRecord]
    entries: dict[Place, bytes]
    lost: Sequence[Place]


def whole_session(view: View, number: int) -> WholeSession:
    """Raises SessionDamagedError if its head or a turn is damaged, or if another session has its id."""
    head = tables.head_of(view, number, f"session number {number}")
    name = f"session {head.key.session_id}"
    turns = tables.read_turns(view, head, head.num_turns)
    if len(replay(head, turns).token_ids) != head.num_tokens:
        raise damaged(name, "its number of tokens does not match its turns")
    if _is_anothers(view, head):
        raise damaged(name, "its id leads to another session")
    entries = tables.entries_of(head, turns)
    view.expect(list(entries))
    return WholeSession(name, turns, entries, [place for place, value in entries.items() if view.get(*place) != value])


def _is_anothers(view: View, head: SessionHead) -> bool:
    """Whether the id of this session rightly belongs to another one, as far as can be read."""
    try:
        number = tables.number_of(view, head.key)
    except StoreError:
        return False
    if number in (None, head.number):
        return False
    try:
        return tables.head_of(view, number, "session").key == head.key
    except StoreError:
        return tables.is_there(view, number)


def mend(view: View, number: int) -> None:
    """Make the entries again that should lead to a session. Raises SessionDamagedError."""
    found = whole_session(view, number)
    for table, place in found.lost:
        view.put(table, place, found.entries[table, place])


class _Check:
    """One walk: every head and all it must have, then whatever belongs to no head.

    lacking: numbers of whole sessions to which not everything leads that should.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.problems: list[str] = []
        self.lacking: list[int] = []
        self.num_turns = 0
        self.places: Counter[str] = Counter()  # entries that the heads account for, by table

    def session(self, number: int) -> None:
        try:
            found = whole_session(self.view, number)
        except StoreError as error:
            self.problems.append(str(error))
            return
        self.num_turns += len(found.turns)
        self.places.update(table for table, _ in found.entries)
        self.places[tables.TURNS] += len(found.turns)
        if found.lost:
            self.lacking.append(number)
        for table, count in Counter(table for table, _ in found.lost).items():
            self.problems.append(f"{found.name} lacks {count} of its entries in {table!r}")

    def extra(self) -> None:
        """Compare counts, which is enough: all entries that the heads need exist, so any others belong to no head."""
        for table in (tables.NAMES, tables.ORDER, tables.EXPIRY, tables.TURNS, tables.REQUESTS, tables.REFS):
            extra = self.view.count(table) - self.places[table]
            if extra > 0:
                self.problems.append(f"{extra} entries in {table!r} belong to no readable session")

    def tombstones(self) -> None:
        for place, value in self.view.scan(tables.TOMBSTONES):
            try:
                tables.tombstone(place, value)
            except StoreError as error:
                self.problems.append(str(error))


Checked = tuple[CheckReport, Sequence[int]]  # and the numbers of sessions to be mended


def check_apart(read: Callable[[Callable[[View], Any]], Any], version: Callable[[], int]) -> Checked:
    """Check each session in a view of its own; `read` runs a function in one. version: changes with every commit. Other
    servers may write meanwhile, so entries without a session are reported only if nobody did.
    """

    def one(number: int) -> Callable[[View], _Check]:
        def look(view: View) -> _Check:
            walk = _Check(view)
            if tables.is_there(view, number):
                walk.session(number)
            return walk

        return look

    def rest(view: View) -> _Check:
        walk = _Check(view)
        for each in walks:
            walk.places.update(each.places)
        if version() == begun:
            walk.extra()
        walk.tombstones()
        return walk

    begun = version()
    numbers = read(lambda view: [int.from_bytes(place, "big") for place, _ in view.scan(tables.HEADS)])
    walks = [read(one(number)) for number in numbers]
    walks.append(read(rest))
    num_refs, num_tombstones = read(lambda view: (view.count(tables.REFS), view.count(tables.TOMBSTONES)))
    problems = tuple(problem for walk in walks for problem in walk.problems)
    report = CheckReport(len(numbers), sum(walk.num_turns for walk in walks), num_refs, num_tombstones, problems)
    return report, [number for walk in walks for number in walk.lacking]


def check(view: View) -> Checked:
    """The same in one view."""
    return check_apart(lambda work: work(view), lambda: 0)
