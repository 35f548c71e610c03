"""Slots for the states of a model that keeps some beside its KV: one for each request, the others keep checkpoints.

A checkpoint is a copy of a state at a block's border, under the id of the block that ends there. A request can only
begin behind a block that has one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvstore.blocks.ids import BlockId

Copy = tuple[int, int]  # of one slot to another


@dataclass(frozen=True, slots=True)
class StatePlan:
    """slots: of the step's requests, by their ids. before, after: copies, in this order, around the forward."""

    slots: Mapping[str, int]
    before: tuple[Copy, ...]
    after: tuple[Copy, ...]


@dataclass(slots=True)
class RequestState:
    """What a request has in the slots.

    kept: (number of tokens, slot) of copies whose step has not ended. last: its latest checkpoints in its answer.
    needed: its latest checkpoint: the next turn begins there if it ends now.
    """

    slot: int
    kept: list[tuple[int, int]] = field(default_factory=list)
    last: list[BlockId] = field(default_factory=list)
    needed: BlockId | None = None


class StateSlots:
    """Who has which slot. A slot that nobody needs is taken from the checkpoint that was not used for longest, of those
    that no running request needs.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.reset()
        self._stale.clear()

    def reset(self) -> None:
        """Forget everything: after an error, or once the pool's blocks are forgotten."""
        self._free = list(range(self.num_slots))
        self._checkpoints: OrderedDict[BlockId, int] = OrderedDict()  # the one that was not used for longest first
        self._running: dict[int, RequestState] = {}  # by slot
        self._stale = set(self._free)  # not overwritten since somebody had them
        self._before: list[Copy] = []
        self._after: list[Copy] = []

    def has(self, block_id: BlockId) -> bool:
        return block_id in self._checkpoints

    def slot_of(self, block_id: BlockId) -> int | None:
        """Where the checkpoint behind this block is."""
        return self._checkpoints.get(block_id)

    def begin(self, block_id: BlockId | None) -> RequestState | None:
        """A slot for a request that begins behind this block, or with nothing. None if all are in use."""
        source = None if block_id is None else self._checkpoints[block_id]
        if block_id is not None:
            self._checkpoints.move_to_end(block_id)
        slot = self._get()
        if slot is not None and source is not None and slot != source:
            self._before.append((source, slot))
        return None if slot is None else self._begun(slot)

    def fork(self, state: RequestState) -> RequestState | None:
        """A slot for a request that goes on where another one is. None if all are in use."""
        slot = self._get()
        if slot is None:
            return None
        self._before.append((state.slot, slot))
        return self._begun(slot)

    def _begun(self, slot: int) -> RequestState:
        state = self._running[slot] = RequestState(slot)
        return state

    def keep(self, state: RequestState, num_tokens: int) -> None:
        """Copy the state as it is after the next step, in which so many tokens are computed, if a slot is free, or has
        only this request's checkpoint before.
        """
        slot = self._get(state)
        if slot is not None:
            self._after.append((state.slot, slot))
            state.kept.append((num_tokens, slot))

    def computed(self, state: RequestState, num_tokens: int, chain: list[BlockId], size: int, is_answer: bool) -> None:
        """The first `num_tokens` tokens are computed: copies up to there are checkpoints from now on.

        is_answer: of those that a request makes while it answers only two are left, as no later turn begins before.
        """
        for end, slot in [kept for kept in state.kept if kept[0] <= num_tokens and kept[0] <= len(chain) * size]:
            state.kept.remove((end, slot))
            block_id = chain[end // size - 1]
            if self.has(block_id):
                self._free.append(slot)
            else:
                self._checkpoints[block_id] = slot
            state.needed = block_id
            if is_answer:
                state.last.append(block_id)
        while len(state.last) > 2:
            self.forget([state.last.pop(0)])

    def end(self, state: RequestState) -> None:
        """A request leaves its slot, and copies of it that are no checkpoints yet."""
        del self._running[state.slot]
        self._free += (state.slot, *(slot for _, slot in state.kept))

    def forget(self, block_ids: Iterable[BlockId]) -> None:
        """Forget the checkpoints behind these blocks."""
        for block_id in block_ids:
            if (slot := self._checkpoints.pop(block_id, None)) is not None:
                self._free.append(slot)

    def take_stale(self) -> list[int]:
        """The free slots that somebody had since the last call."""
        copied = {slot for copy in self._before for slot in copy}  # by the next step, though who had them has left
        found = sorted(self._stale.intersection(self._free) - copied)
        self._stale.difference_update(found)
        return found

    def take_plan(self, states: Mapping[str, RequestState]) -> StatePlan:
        """The next step of these requests."""
        before, after = tuple(self._before), tuple(self._after)
        self._before.clear()
        self._after.clear()
        return StatePlan({request_id: state.slot for request_id, state in states.items()}, before, after)

    def check_integrity(self, live: Iterable[RequestState]) -> None:
        """Assert that every slot has one owner."""
        held = [slot for state in live for slot in (state.slot, *(slot for _, slot in state.kept))]
        assert sorted([*held, *self._free, *self._checkpoints.values()]) == list(range(self.num_slots)), "lost slots"

    def _get(self, state: RequestState | None = None) -> int | None:
        """state: whose own checkpoint may be taken, if there is no other."""
        if self._free:
            slot = self._free.pop()
        else:
            needed = [one.needed for one in self._running.values()]
            taken = next((one for one in self._checkpoints if one not in needed), None)
            if taken is None and state is not None and needed.count(state.needed) == 1:
                taken = state.needed
            if taken is None or taken not in self._checkpoints:
                return None
            slot = self._checkpoints.pop(taken)
        self._stale.add(slot)
        return slot
