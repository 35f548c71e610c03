"""Which states of a chain go when a turn has left new ones: not before these are on disk with the KV before them, so
that a server which is killed at any moment finds one.

Control plane, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.blocks.ids import BlockId
from kvstore.memory.tier import CpuTier
from kvstore.store.requests import Tracked
from kvstore.store.stored import StoredBlocks
from kvstore.store.write_back import WriteBack

SLACK_BLOCKS = 2  # a turn may end so much before the next one begins


class OldStates:
    """disk, delete_remote: None without such a tier. waiting: the last blocks of new states and, from the last on, the
    chain's blocks before these down to the first state that they replace; and the states that go.
    """

    def __init__(
        self, stored: StoredBlocks, cpu: CpuTier, disk: WriteBack | None,
        delete_remote: Callable[[Sequence[BlockId]], None] | None,
    ) -> None:  # fmt: skip
        self._stored, self._cpu, self._disk, self._delete_remote = stored, cpu, disk, delete_remote
        self.waiting: list[tuple[list[BlockId], list[list[BlockId]]]] = []

    def replace(self, request: Tracked, borders: set[int]) -> None:
        """Let the states of a chain go that those behind `borders` replace: at once without a disk, else when the last
        of these is on it. They are saved before `poll`.
        """
        old, last = self._replaced(request, borders), max(borders)
        if self._disk is None:
            for state in old.values():
                self.delete(state)
        elif old:
            new = [state[-1] for state in self._stored.with_states(request, last).states()]
            self.waiting.append(([*new, *request.chain[min(old) : last][::-1]], list(old.values())))

    def _replaced(self, request: Tracked, borders: set[int]) -> dict[int, list[BlockId]]:
        """All states of a chain, by the number of the block before them, but these, those that are needed where its
        system prompt, the turn before, and turns behind which other sessions may go on end, and in its first turn where
        other chains leave it. If nobody says where turns end, a few before these stay.
        """
        size, span, starts = self._stored.block_size, self._stored.state_span, request.turn_starts
        kept = {border - 1 for border in borders}
        for end in {start // size for start in (*starts[:1], *starts[-1:], *request.shared_ends)}:
            kept.update(range(end - span - SLACK_BLOCKS, end))
        shared = starts[1] // size if len(starts) > 1 else len(request.chain)
        num_more = 0 if starts else span
        first = max(0, starts[-3] // size - span - SLACK_BLOCKS) if len(starts) > 2 else 0  # older ones are gone
        found: dict[int, list[BlockId]] = {}
        for number in range(max(borders) - 1, first - 1, -1):
            if number in kept or not self._stored.has_state(request.chain[number]):
                continue
            if number < shared and self._stored.is_fork(request.chain[number]):
                kept.update(range(number + 1 - span, number + 1))
                continue
            num_more -= 1
            if num_more < 0:
                found[number] = [one.block_id for one in self._stored.state_records(request, number + 1)]
        return found

    def poll(self) -> None:
        """Delete what is replaced by now; what a lost one would have replaced stays."""
        if self._disk is None or not self.waiting:
            return
        contents, waiting, self.waiting = self._disk.contents, self.waiting, []
        for needed, old in waiting:
            missing = next((one for one in needed if not contents.contains(one)), None)
            if missing is None:
                for state in old:
                    self.delete(state)
            elif self._cpu.arena_block_of(missing) is not None:
                self.waiting.append((needed, old))

    def delete(self, block_ids: Sequence[BlockId]) -> None:
        """Delete the blocks of a state on every tier."""
        if self._disk is not None:
            self._disk.delete(block_ids)
        self._cpu.forget(block_ids[0])
        if self._delete_remote is not None:
            self._delete_remote(block_ids)
