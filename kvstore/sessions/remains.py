"""What is left of a damaged session, and forks, which go on from there.

Writes nothing into a damaged session: its other records stay as they are until it is deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile

from msgspec.structs import replace

from kvstore.errors import RequestError, SessionBusyError, SessionDamagedError, SessionNotFoundError, StoreError
from kvstore.sessions import tables
from kvstore.sessions.check import whole_session
from kvstore.sessions.record import Fork, Parent, SessionHead, SessionKey, TurnRecord, unseal, with_turn
from kvstore.sessions.tables import HEADS, TURNS, View, be64

MAX_LOOKED_AT = 10  # of damaged sessions, each time they are counted: whether one is whole by now takes reading it


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


def remains(view: View, key: SessionKey) -> Remains | None:
    """None: there is no such session."""
    number = _number(view, key)
    if number is None:
        return None
    turns: dict[int, TurnRecord] = {}
    last = 0
    for place, value in view.scan(TURNS, be64(number)):
        last = int.from_bytes(place[8:], "big")
        with suppress(StoreError):
            turn = unseal(TurnRecord, TURNS, place, value, "a turn")
            if turn.number == last:
                turns[last] = turn
    head = _head(view, number)
    return Remains(number, head, turns, last if head is None else head.num_turns)


def _number(view: View, key: SessionKey) -> int | None:
    """The session's number; from its head if its id leads nowhere, or to another session."""
    with suppress(StoreError):
        number = tables.number_of(view, key)
        head = None if number is None else _head(view, number)
        if head is None or head.key == key:
            return number
    numbers = (int.from_bytes(place, "big") for place, _ in view.scan(HEADS))
    return next((n for n in numbers if (head := _head(view, n)) is not None and head.key == key), None)


def _head(view: View, number: int) -> SessionHead | None:
    """None if it cannot be read."""
    with suppress(StoreError):
        return tables.head_of(view, number, "session")
    return None


def fork(
    view: View, source: SessionKey, turn: int | None, new_key: SessionKey, now_s: float, is_version: bool = False
) -> Fork:
    """turn: the last one that it begins with; None: all. The other session may be damaged, but not these turns. Raises
    RequestError where they do not end with an answer, as it was forgotten.
    """
    assert source.tenant == new_key.tenant, "a fork of another tenant's session"
    head, turns = _source(view, source, turn, now_s)
    draft = replace(
        head, key=new_key, number=0, created_s=now_s, updated_s=now_s, num_turns=0, num_tokens=0,
        title=head.title if turns else "", parent=Parent(source.session_id, len(turns), is_version),
    )  # fmt: skip
    made = Fork(draft, [replace(one, idempotency_key=None) for one in turns])
    messages = made.state.messages
    if turns and messages and messages[-1]["role"] not in ("assistant", "system"):
        raise RequestError(f"the answer of turn {len(turns)} was forgotten: a fork cannot end there", param="turn")
    return made


def check_fork(view: View, made: Fork) -> None:
    """Raises SessionBusyError if the turns that it begins with were changed meanwhile, and as `fork`."""
    draft, parent = made.draft, made.draft.parent
    assert parent is not None
    source = SessionKey(draft.key.tenant, parent.session_id)
    if fork(view, source, parent.turn, draft.key, draft.created_s).turns != made.turns:
        raise SessionBusyError(f"session {source.session_id} has just been changed; ask again", retry_after_s=0)


def store_fork(view: View, made: Fork) -> SessionHead:
    key, head = made.draft.key, tables.read_head(view, made.draft.key)
    if head is not None and not head.is_over(made.draft.created_s):
        raise StoreError(f"session {key.session_id} exists already: take another id, or delete it first")
    return tables.append(view, made.draft, made.turns, [tables.encode_turn(one, key) for one in made.turns])


def _source(view: View, key: SessionKey, turn: int | None, now_s: float) -> tuple[SessionHead, Sequence[TurnRecord]]:
    """The head and the first turns of a session; of a damaged head what these turns tell."""
    try:
        head = tables.read_head(view, key)
        if head is None or head.is_over(now_s):
            raise SessionNotFoundError(f"there is no session {key.session_id!r}", param="session_id")
        last = head.num_turns if turn is None else turn
        if not 0 <= last <= head.num_turns:
            raise RequestError(f"turn is {turn}; session {key.session_id} has {head.num_turns} turns", param="turn")
        return head, tables.read_turns(view, head, last)
    except SessionDamagedError:
        found = remains(view, key)
        if found is None or turn is None or not 1 <= turn <= len(found.first_turns):
            raise
        turns = found.first_turns[:turn]
        head = found.head or tables.draft_head(key, turns[0].created_s)
        for one in turns if found.head is None else ():
            head = with_turn(head, one, head.updated_s)
        return head, turns


class Damage:
    """The sessions of a store in which damage was found. numbers: theirs."""

    def __init__(self) -> None:
        self.numbers: frozenset[int] = frozenset()

    def explained(self, view: View, key: SessionKey, error: SessionDamagedError) -> SessionDamagedError:
        """Note the damage. The error, extended by what is whole and what can be done."""
        found = None
        with suppress(StoreError):
            found = remains(view, key)
        if found is None:
            return error
        self.numbers |= {found.number}
        return SessionDamagedError(f"{error}; {_said(view, found)}")

    def count(self, view: View) -> int:
        """How many there are, without those that are gone or whole by now."""
        some = sorted(self.numbers)[:MAX_LOOKED_AT]
        self.numbers -= {n for n in some if not tables.is_there(view, n) or _is_whole(view, n)}
        return len(self.numbers)


def _is_whole(view: View, number: int) -> bool:
    with suppress(StoreError):
        return not whole_session(view, number).lost
    return False


def _said(view: View, found: Remains) -> str:
    """Which turns are whole, and what can be done."""
    with suppress(StoreError):
        if whole_session(view, found.number).lost:
            return "all its turns are whole; `kvstore verify` makes again what leads to them"
    first = len(found.first_turns)
    whole = _ranges(sorted(n for n in found.turns if n <= found.num_turns))
    said = f"of its {found.num_turns} turns, {whole} are whole" if found.turns else "none of its turns is whole"
    return f"{said}; a fork at turn {first} goes on from there" if first else f"{said}; no fork goes on without turn 1"


def _ranges(numbers: Sequence[int]) -> str:
    """Such as "1 to 3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in runs)
