"""Repairs a damaged session: finds the turns that are whole, and makes them the session.

All other records are set aside under the session, unread, until the session is deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from msgspec.structs import replace

from kvstore.errors import SessionDamagedError, StoreError
from kvstore.sessions import tables
from kvstore.sessions.check import problems_of
from kvstore.sessions.record import Message, SessionHead, SessionKey, Tombstone, TurnRecord, damaged, unseal, with_turn
from kvstore.sessions.tables import ASIDE, HEADS, TURNS, View, be64


@dataclass(frozen=True, slots=True)
class Remains:
    """What can be read of a session. head: None if it is damaged. turns: the whole ones by their numbers."""

    number: int
    head: SessionHead | None
    turns: dict[int, TurnRecord]
    num_turns: int  # as far as that is known

    @property
    def first_turns(self) -> list[TurnRecord]:
        """The turns from the first up to the first damaged one: they are a valid state."""
        return [self.turns[n] for n in takewhile(self.turns.__contains__, range(1, self.num_turns + 1))]


@dataclass(frozen=True, slots=True)
class Repaired:
    """The outcome of a repair. head: of the repaired session. num_aside: turns that it set aside. tombstone: None if
    nothing was damaged.
    """

    head: SessionHead
    num_aside: int
    tombstone: Tombstone | None


@dataclass(frozen=True, slots=True)
class AsideTurn:
    """A turn that was set aside. messages: None where they cannot be read."""

    number: int
    messages: tuple[Message, ...] | None


def remains(view: View, key: SessionKey) -> Remains | None:
    """None: there is no such session."""
    number = _number(view, key)
    if number is None:
        return None
    turns: dict[int, TurnRecord] = {}
    last = 0
    for place, value in view.scan(TURNS, be64(number)):
        last = int.from_bytes(place[8:], "big")
        if (turn := _turn(place, value)) is not None:
            turns[last] = turn
    try:
        head = tables.head_of(view, number, key.session_id)
    except StoreError:
        head = None
    return Remains(number, head, turns, last if head is None else head.num_turns)


def _number(view: View, key: SessionKey) -> int | None:
    """The session's number; from its head if its entry among the names is damaged, missing, or another session's."""
    number, error = None, None
    try:
        number = tables.number_of(view, key)
    except StoreError as found:
        error = found
    if number is not None and _key_of(view, number) in (None, key):
        return number
    for place, _ in view.scan(HEADS):
        if _key_of(view, int.from_bytes(place, "big")) == key:
            return int.from_bytes(place, "big")
    if number is None and error is None:
        return None
    raise error or damaged(f"session {key.session_id}", "its id leads to another session")


def _key_of(view: View, number: int) -> SessionKey | None:
    """The key in the head; None if the head cannot be read."""
    try:
        return tables.head_of(view, number, "session").key
    except StoreError:
        return None


def _turn(place: bytes, value: bytes) -> TurnRecord | None:
    try:
        turn = unseal(TurnRecord, TURNS, place, value, "a turn")
    except StoreError:
        return None
    return turn if place[8:] == turn.number.to_bytes(4, "big") else None


# -- what is said ----------------------------------------------------------------------------------------------------
def explained(error: SessionDamagedError, key: SessionKey, found: Remains | None) -> SessionDamagedError:
    """The error, extended by which turns are whole and what can be done."""
    if found is None:
        return error
    first = len(found.first_turns)
    whole = _ranges(sorted(n for n in found.turns if n <= found.num_turns))
    said = f"of its {found.num_turns} turns, {whole} are whole" if found.turns else "none of its turns is whole"
    tenant = f" --tenant {key.tenant}" if key.tenant else ""
    command = f"`kvstore sessions repair {key.session_id}{tenant}`"
    if not first:
        return SessionDamagedError(f"{error}; {said}; {command} begins it anew and sets the rest aside")
    fork = "" if found.head is None else f"a fork at turn {first} goes on from there, and "
    kept = f"turns 1 to {first}" if first > 1 else "turn 1"
    return SessionDamagedError(f"{error}; {said}; {fork}{command} keeps {kept} and sets the rest aside")


def _ranges(numbers: Sequence[int]) -> str:
    """Such as "1 to 3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in runs)


# -- what is done ----------------------------------------------------------------------------------------------------
def repair(view: View, key: SessionKey, now_s: float) -> Repaired | None:
    """Make the whole turns from the beginning the session, under a new number, and set all else aside.

    Returns None if there is no such session. A session without damage stays as it is.
    """
    found = remains(view, key)
    if found is None:
        return None
    if (head := _sound_head(view, key, found)) is not None:
        return Repaired(head, 0, None)
    kept, left = found.first_turns, _left(view, found)
    draft = found.head or tables.draft_head(key, kept[0].created_s if kept else now_s)
    draft = replace(draft, num_turns=0, num_tokens=0, title="")
    for turn in kept:
        draft = with_turn(draft, turn, draft.updated_s)
    num_before = len(_aside(view, found.number))
    deletion = tables.next_number(view, "deletion", tables.TOMBSTONES)
    block_ids = tables.remove(view, key, found.number)
    head = tables.create(view, draft)
    for turn in kept:
        tables.put_turn(view, head.number, turn, tables.encode_turn(turn, key))
    for index, (place, value) in enumerate(left):
        view.put(ASIDE, be64(head.number) + index.to_bytes(4, "big"), bytes([len(place)]) + place + value)
    unshared = tables.unshared(view, block_ids, found.number)
    tombstone = Tombstone(deletion, key, tuple(sorted(unshared)))
    tables.put_tombstone(view, tombstone)
    return Repaired(head, len(_aside(view, head.number)) - num_before, tombstone)


def is_whole(view: View, number: int) -> bool:
    """Whether there is nothing to repair in the session of this number."""
    key = _key_of(view, number)
    if key is None or (found := remains(view, key)) is None:
        return False
    return found.number == number and _sound_head(view, key, found) is not None


def _sound_head(view: View, key: SessionKey, found: Remains) -> SessionHead | None:
    """The session's head if all its records can be read and all entries lead to it, else None."""
    try:
        state = None if problems_of(view, found.number) else tables.load(view, key)
        for turn in found.turns.values():
            if turn.idempotency_key is not None:
                tables.turn_of_request(view, key, turn.idempotency_key)
    except StoreError:
        return None
    return None if state is None else state.head


def _left(view: View, found: Remains) -> list[tuple[bytes, bytes]]:
    """Places and values of what is not kept: a head that is damaged, turns, and what was set aside before."""
    left = [_split(value) for _, value in view.scan(ASIDE, be64(found.number))]
    head = view.get(HEADS, be64(found.number))
    if found.head is None and head is not None:
        left.append((be64(found.number), head))
    first = len(found.first_turns)
    return left + [
        (place, value) for place, value in view.scan(TURNS, be64(found.number))
        if int.from_bytes(place[8:], "big") > first
    ]  # fmt: skip


def aside(view: View, key: SessionKey) -> list[AsideTurn]:
    """Turns of a session that were set aside."""
    head = tables.read_head(view, key)
    return [] if head is None else _aside(view, head.number)


def _aside(view: View, number: int) -> list[AsideTurn]:
    places = [_split(value) for _, value in view.scan(ASIDE, be64(number))]
    turns = [(int.from_bytes(place[8:], "big"), _turn(place, value)) for place, value in places if len(place) > 8]
    return [AsideTurn(number, None if turn is None else tuple(turn.messages)) for number, turn in turns]


def _split(value: bytes) -> tuple[bytes, bytes]:
    end = 1 + value[0]
    return value[1:end], value[end:]
