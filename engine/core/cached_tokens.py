"""Counts the tokens of one request that were never computed. Knows no block and no store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.engine.outputs import CachedTokensDetails


@dataclass(slots=True)
class CachedCount:
    """A token is counted once, under the tier that held its block when the request arrived."""

    details: CachedTokensDetails | None = None  # None: the request was not scheduled yet
    arrival: list[str] | None = None  # the tier of each stored block of the prompt when the request arrived
    num_seen: int = 0  # tokens that were computed or counted already: they are not counted again
    before: tuple[CachedTokensDetails | None, int] | None = None  # `details` and `num_seen` before this step's loads

    def note_arrival(self, tiers: Iterable[str]) -> None:
        """Later arrivals, after a preemption, change nothing."""
        if self.arrival is None:
            self.arrival = list(tiers)

    def note_late(self, late_from: int, tiers: Iterable[str]) -> None:
        """Blocks from this one on were found after the request had arrived."""
        if self.arrival is not None and len(self.arrival) == late_from:
            self.arrival += tiers

    def count(self, num_cached: int, num_hit: int, block_size: int, splice_index: int | None) -> None:
        """Count the tokens before `num_cached`. num_hit: how many of them were found in HBM now.

        splice_index: blocks from this one on are spliced.
        """
        counts, arrival = Counter[str](), self.arrival or []
        for index in range(-(-self.num_seen // block_size), num_cached // block_size):
            if splice_index is not None and index >= splice_index:
                counts["reencoded"] += block_size
            elif index < len(arrival):
                counts[arrival[index]] += block_size
            else:  # the block was stored after the request had arrived
                counts["hbm" if index < num_hit // block_size else "cpu"] += block_size
        self.before = (self.details, self.num_seen)
        self.details = (self.details or CachedTokensDetails()) + CachedTokensDetails(**counts)
        self.num_seen = max(self.num_seen, num_cached)

    def pass_over(self, num_tokens: int) -> None:
        """The first `num_tokens` tokens will never be counted."""
        self.num_seen = max(self.num_seen, num_tokens)

    def confirm(self, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens exists: this step's loads, if any, have succeeded."""
        self.pass_over(num_tokens)
        self.before = None

    def undo(self) -> None:
        """This step's loads have failed."""
        if self.before is not None:
            self.details, self.num_seen = self.before

    def inherit(self, owner: CachedCount) -> None:
        """Another choice of the same prompt has the counts of the choice that computed it."""
        self.details, self.num_seen = owner.details, owner.num_seen
        self.arrival = None if owner.arrival is None else list(owner.arrival)
