"""Recent conversations by digests: the exact ids that the model has seen and said.

Bounded; the least recently used are dropped. Holds no text. Knows no template and no engine.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.blocks.ids import BlockId, Lineage

LINE_COST, MESSAGE_COST, TURN_COST, BLOCK_COST = 190, 16, 100, 20  # costs beside the ids, in tokens of 4 bytes


@dataclass(frozen=True, slots=True)
class KnownConversation:
    """A conversation at the end of an answer. messages: a digest each.

    chain: ids of the blocks up to the end of its splice, none without one. turns: for each turn the index of its first
    message and where in the ids it begins; empty when unknown. owner: its session, if any.
    """

    messages: Sequence[bytes]
    token_ids: Sequence[int]
    chain: Sequence[BlockId]
    lineage: Lineage
    turns: Sequence[tuple[int, int]] = ()
    owner: bytes = b""


@dataclass(frozen=True, slots=True)
class Names:
    """Digests that a conversation is looked up by. history: of all its messages. before: of those before the last
    answer. end: of its system prompt and last messages.
    """

    history: bytes
    before: bytes
    end: bytes


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a turn within a line."""

    names: Names
    num_messages: int
    num_tokens: int
    num_turns: int


@dataclass(slots=True)
class _Line:
    """A growing conversation; all its turns share its ids."""

    number: int
    token_ids: array[int]
    messages: list[bytes]
    chain: Sequence[BlockId]
    lineage: Lineage
    turns: list[tuple[int, int]]
    owner: bytes
    ends: list[_End]

    @property
    def cost(self) -> int:
        beside = MESSAGE_COST * len(self.messages) + TURN_COST * len(self.ends) + BLOCK_COST * len(self.chain)
        return LINE_COST + len(self.token_ids) + beside

    def at(self, end: _End) -> KnownConversation:
        return KnownConversation(
            self.messages[: end.num_messages], self.token_ids[: end.num_tokens], self.chain, self.lineage,
            self.turns[: end.num_turns], self.owner,
        )  # fmt: skip

    def is_continued_by(self, names: Names, new: KnownConversation) -> bool:
        known = array("I", new.token_ids[: len(self.token_ids)])
        return (
            self.ends[-1].names.history == names.before
            and (self.lineage, self.owner, self.token_ids) == (new.lineage, new.owner, known)
            and list(new.turns[: len(self.turns)]) == self.turns
        )


class Lines:
    """The most recently used conversations. Any thread may call it."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._lines: OrderedDict[int, _Line] = OrderedDict()  # the least recently used first
        self._by_history: dict[bytes, tuple[_Line, _End]] = {}
        self._by_end: dict[bytes, tuple[_Line, _End]] = {}
        self._next_number = 0
        self.num_tokens = 0  # with the costs beside them

    def add(self, names: Names, new: KnownConversation) -> None:
        """Remember a conversation; if the one up to the previous answer is known, extend that."""
        with self._lock:
            line, _ = self._by_history.get(names.before, (None, None))
            if line is None or not line.is_continued_by(names, new):
                line = _Line(
                    self._next_number, array("I"), [], new.chain, new.lineage, list(new.turns), new.owner, []
                )  # fmt: skip
                self._next_number += 1
                self._lines[line.number] = line
            else:
                self.num_tokens -= line.cost
            line.token_ids.extend(new.token_ids[len(line.token_ids) :])
            line.messages.extend(new.messages[len(line.messages) :])
            line.turns = list(new.turns)
            end = _End(names, len(line.messages), len(line.token_ids), len(line.turns))
            line.ends.append(end)
            self._by_history[names.history] = self._by_end[names.end] = (line, end)
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

    def find_longer(self, name: bytes, system: Sequence[bytes], rest: Sequence[bytes]) -> KnownConversation | None:
        """A known conversation with this end: the same system prompt, then more messages, then the `rest`.

        Never one of a session, whose ids must go when it is deleted.
        """
        with self._lock:
            line, end = self._by_end.get(name, (None, None))
            if line is None or end is None or line.owner:
                return None
            first = end.num_messages - len(rest)
            if first <= len(system) or line.messages[: len(system)] != list(system):
                return None
            if line.messages[first : end.num_messages] != list(rest):
                return None
            self._lines.move_to_end(line.number)
            return line.at(end)

    def forget_owner(self, owner: bytes) -> None:
        with self._lock:
            for line in [line for line in self._lines.values() if line.owner == owner]:
                self._remove(line)

    def _remove(self, line: _Line) -> None:
        del self._lines[line.number]
        self.num_tokens -= line.cost
        for end in line.ends:
            for index, name in ((self._by_history, end.names.history), (self._by_end, end.names.end)):
                if index.get(name, (None, None))[0] is line:
                    del index[name]
