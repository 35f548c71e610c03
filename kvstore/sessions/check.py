"""A walk over all sessions: whether every record is whole, and all that belongs to it is there."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvstore.errors import StoreError
from kvstore.sessions import tables
from kvstore.sessions.record import damaged, replay
from kvstore.sessions.tables import View, be64


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

    def session(self, number: int) -> None:
        try:
            head = tables.head_of(self.view, number, f"session number {number}")
            name, key = f"session {head.key.session_id}", head.key
            turns = tables.read_turns(self.view, head, head.num_turns)
            if len(replay(head, turns).token_ids) != head.num_tokens:
                raise damaged(name, "its number of tokens does not match its turns")
            if tables.find(self.view, key) != number:
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
        missing = Counter(table for table, place in needed if self.view.get(table, place) is None)
        self.problems += [f"{name} lacks {count} of its entries in {table!r}" for table, count in missing.items()]

    def rest(self) -> None:
        """Counts suffice: all that the heads need is there, so what is more belongs to none."""
        for table in (tables.NAMES, tables.ORDER, tables.EXPIRY, tables.TURNS, tables.REQUESTS, tables.REFS):
            extra = self.view.count(table) - self.places[table]
            if extra > 0:
                self.problems.append(f"{extra} entries in {table!r} belong to no readable session")
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


def check(view: View) -> CheckReport:
    walk = _Check(view)
    numbers = [int.from_bytes(place, "big") for place, _ in view.scan(tables.HEADS)]
    for number in numbers:
        walk.session(number)
    walk.rest()
    num_refs, num_tombstones = view.count(tables.REFS), view.count(tables.TOMBSTONES)
    return CheckReport(len(numbers), walk.num_turns, num_refs, num_tombstones, tuple(walk.problems))
