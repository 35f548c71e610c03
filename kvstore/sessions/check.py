"""Checks all sessions: every record is whole, and all of its entries in other tables exist. Makes lost ones again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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


def _looked_at(view: View, number: int) -> WholeSession | str | None:
    """A session, or what is wrong with it; None: it was deleted meanwhile."""
    if not tables.is_there(view, number):
        return None
    try:
        return whole_session(view, number)
    except StoreError as error:
        return str(error)


def _extra(view: View, places: Counter[str]) -> Iterator[str]:
    """Compare counts, which is enough: all entries that the heads need exist, so any others belong to no head.

    places: entries that the heads account for, by table.
    """
    for table in (tables.NAMES, tables.ORDER, tables.EXPIRY, tables.TURNS, tables.REQUESTS, tables.REFS):
        extra = view.count(table) - places[table]
        if extra > 0:
            yield f"{extra} entries in {table!r} belong to no readable session"


def _bad_tombstones(view: View) -> Iterator[str]:
    for place, value in view.scan(tables.TOMBSTONES):
        try:
            tables.tombstone(place, value)
        except StoreError as error:
            yield str(error)


Checked = tuple[CheckReport, Sequence[int]]  # and the numbers of sessions to be mended: whole ones that lack entries


def check_apart(read: Callable[[Callable[[View], Any]], Any], version: Callable[[], int]) -> Checked:
    """Check each session in a view of its own; `read` runs a function in one. version: changes with every commit. Other
    servers may write meanwhile, so entries without a session are reported only if nobody did.
    """

    def rest(view: View) -> list[str]:
        return [*(_extra(view, places) if version() == begun else ()), *_bad_tombstones(view)]

    begun = version()
    numbers = read(lambda view: [int.from_bytes(place, "big") for place, _ in view.scan(tables.HEADS)])
    problems, lacking, num_turns, places = list[str](), list[int](), 0, Counter[str]()
    for number in numbers:
        found = read(partial(_looked_at, number=number))
        if isinstance(found, str):
            problems.append(found)
        elif found is not None:
            num_turns += len(found.turns)
            places.update(table for table, _ in found.entries)
            places[tables.TURNS] += len(found.turns)
            lacking += [number] if found.lost else []
            lost = Counter(table for table, _ in found.lost)
            problems += [f"{found.name} lacks {num} of its entries in {table!r}" for table, num in lost.items()]
    problems += read(rest)
    num_refs, num_tombstones = read(lambda view: (view.count(tables.REFS), view.count(tables.TOMBSTONES)))
    return CheckReport(len(numbers), num_turns, num_refs, num_tombstones, tuple(problems)), lacking


def check(view: View) -> Checked:
    """The same in one view."""
    return check_apart(lambda work: work(view), lambda: 0)
