"""Checks all sessions: every record is whole, and all of its entries in other tables exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvstore.errors import StoreError
from kvstore.sessions import tables
from kvstore.sessions.record import damaged, replay
from kvstore.sessions.tables import View, be64


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What the check found. problems: a sentence each; empty when all is well."""

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

    def session(self, number: int) -> None:
        try:
            head = tables.head_of(self.view, number, f"session number {number}")
            name, key = f"session {head.key.session_id}", head.key
            turns = tables.read_turns(self.view, head, head.num_turns)
            if len(replay(head, turns).token_ids) != head.num_tokens:
                raise damaged(name, "its number of tokens does not match its turns")
            if tables.number_of(self.view, key) != number:
                raise damaged(name, "its id does not lead to it")
        except StoreError as error:
            self.problems.append(str(error))
            return
        self.num_turns += len(turns)
        requests = [turn.idempotency_key for turn in turns if turn.idempotency_key is not None]
        needed = [(tables.NAMES, tables.name_key(key)), (tables.ORDER, tables.order_key(head))]
        needed += [(tables.EXPIRY, place) for place in (tables.expiry_key(head),) if place is not None]
        needed += [(tables.TURNS, tables.turn_key(number, turn.number)) for turn in turns]
        needed += [(tables.REQUESTS, tables.request_key(number, request)) for request in requests]
        needed += [(tables.REFS, block_id + be64(number)) for block_id in {b for t in turns for b in t.chain}]
        self.places.update(table for table, _ in needed)
        self.view.expect(needed)
        missing = Counter(table for table, place in needed if self.view.get(table, place) is None)
        self.problems += [f"{name} lacks {count} of its entries in {table!r}" for table, count in missing.items()]

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


def problems_of(view: View, number: int) -> list[str]:
    """What is wrong with one session, by its number."""
    walk = _Check(view)
    walk.session(number)
    return walk.problems


def check_apart(read: Callable[[Callable[[View], Any]], Any], version: Callable[[], int]) -> CheckReport:
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
        walk.tombstones()
        if version() == begun:
            walk.extra()
        return walk

    begun = version()
    numbers = read(lambda view: [int.from_bytes(place, "big") for place, _ in view.scan(tables.HEADS)])
    walks = [read(one(number)) for number in numbers]
    walks.append(read(rest))
    num_refs, num_tombstones = read(lambda view: (view.count(tables.REFS), view.count(tables.TOMBSTONES)))
    problems = tuple(problem for walk in walks for problem in walk.problems)
    return CheckReport(len(numbers), sum(walk.num_turns for walk in walks), num_refs, num_tombstones, problems)


def check(view: View) -> CheckReport:
    walk = _Check(view)
    numbers = [int.from_bytes(place, "big") for place, _ in view.scan(tables.HEADS)]
    for number in numbers:
        walk.session(number)
    walk.extra()
    walk.tombstones()
    num_refs, num_tombstones = view.count(tables.REFS), view.count(tables.TOMBSTONES)
    return CheckReport(len(numbers), walk.num_turns, num_refs, num_tombstones, tuple(walk.problems))
