"""Recent conversations by digests: the exact ids that the model has seen and said.

Bounded; the least recently used are dropped. Holds no text. Knows no template and no engine.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LINE_COST, TURN_COST = 190, 100  # costs beside the ids, in tokens of 4 bytes


@dataclass(frozen=True, slots=True)
class KnownConversation:
    """A conversation at the end of an answer. owner: its session, if any."""

    num_messages: int
    token_ids: Sequence[int]
    owner: bytes = b""


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a turn within a line. history: the digest of all messages up to there."""

    history: bytes
    num_messages: int
    num_tokens: int


@dataclass(slots=True)
class _Line:
    """A growing conversation; all its turns share its ids."""

    number: int
    token_ids: array[int]
    owner: bytes
    ends: list[_End]

    @property
    def cost(self) -> int:
        return LINE_COST + len(self.token_ids) + TURN_COST * len(self.ends)

    def at(self, end: _End) -> KnownConversation:
        return KnownConversation(end.num_messages, self.token_ids[: end.num_tokens], self.owner)

    def is_continued_by(self, before: bytes, new: KnownConversation) -> bool:
        known = array("I", new.token_ids[: len(self.token_ids)])
        return (self.ends[-1].history, self.owner, self.token_ids) == (before, new.owner, known)


class Lines:
    """The most recently used conversations. Any thread may call it."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._lines: OrderedDict[int, _Line] = OrderedDict()  # the least recently used first
        self._by_history: dict[bytes, tuple[_Line, _End]] = {}
        self._next_number = 0
        self.num_tokens = 0  # with the costs beside them

    def add(self, history: bytes, before: bytes, new: KnownConversation) -> None:
        """Remember a conversation; if the one up to the previous answer is known, extend that. history, before: digests
        of the messages of each.
        """
        with self._lock:
            line, _ = self._by_history.get(before, (None, None))
            if line is None or not line.is_continued_by(before, new):
                line = _Line(self._next_number, array("I"), new.owner, [])
                self._next_number += 1
                self._lines[line.number] = line
            else:
                self.num_tokens -= line.cost
            line.token_ids.extend(new.token_ids[len(line.token_ids) :])
            line.ends.append(_End(history, new.num_messages, len(line.token_ids)))
            self._by_history[history] = (line, line.ends[-1])
            self._lines.move_to_end(line.number)
            self.num_tokens += line.cost
            while self.num_tokens > self._max_tokens:
                self._remove(next(iter(self._lines.values())))

    def find_first(self, histories: Iterable[bytes]) -> KnownConversation | None:
        """The first known conversation among those with these digests."""
        with self._lock:
            for history in histories:
                line, end = self._by_history.get(history, (None, None))
                if line is not None and end is not None:
                    self._lines.move_to_end(line.number)
                    return line.at(end)
        return None

    def forget_owner(self, owner: bytes) -> None:
        with self._lock:
            for line in [line for line in self._lines.values() if line.owner == owner]:
                self._remove(line)

    def _remove(self, line: _Line) -> None:
        del self._lines[line.number]
        self.num_tokens -= line.cost
        for end in line.ends:
            if self._by_history.get(end.history, (None, None))[0] is line:
                del self._by_history[end.history]
