"""What crosses the seam between a scheduler and the store: what is asked of a request, and what is answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import Evict, Evicted
from kvstore.policy.conversation import Conversation


class Lookup(Enum):
    """What a connector says of the blocks behind those already in HBM."""

    MISS = "miss"  # nothing more; compute
    HIT = "hit"  # `num_tokens` more can be loaded at once
    PENDING = "pending"  # on their way from a slower tier: leave the request waiting, take the next


@dataclass(frozen=True, slots=True)
class Match:
    """Answer of `get_num_new_matched_tokens`; every number of tokens is a multiple of the block size.

    num_tokens: that can be loaded, 0 unless HIT. num_compute_tokens: so many are to be computed behind those before
    asking again, as more are on their way from a slower tier; None when there is nothing more to be asked. num_unsaved:
    of the tokens in HBM that were asked from, so many at the end are to be computed again, so that they can be saved.
    """

    lookup: Lookup
    num_tokens: int = 0
    num_compute_tokens: int | None = None
    num_unsaved: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a connector says of a request that was queued.

    tiers: "cpu" or "disk" for each block after those in HBM, as far as they are stored. conversation: which one it goes
    on with, to be handed back when the same request is queued again.
    """

    tiers: list[str]
    conversation: Conversation


@dataclass(frozen=True, slots=True)
class StepSpan:
    """What one request computes in a step: tokens [first_token, first_token + num_tokens).

    new_ids: of its blocks that have become full since the store was last told of it. new_tokens: its tokens from where
    the store knows them to the end of these blocks.
    """

    request_id: str
    first_token: int
    num_tokens: int
    new_ids: tuple[BlockId, ...] = ()
    new_tokens: tuple[int, ...] = ()


class Upkeep(Protocol):
    """What whoever looks after a store asks of it, beside the requests. Without a store there is nothing to do."""

    def evict(self, what: Evict) -> tuple[dict[str, Evicted], frozenset[BlockId]]:
        """Give up what matches, or with dry_run only count it: per tier, and the ids."""
        return {}, frozenset()

    def forget(self, block_ids: Sequence[BlockId], timeout_s: float = 60.0) -> tuple[frozenset[BlockId], bool]:
        """Delete these blocks, in flight or not, from every tier below HBM, and what was computed after them.

        Returns all that were forgotten, and whether they are gone from disk too: False when that took longer than given
        or when the disk cannot write.
        """
        return frozenset(block_ids), True

    def flush(self) -> None:
        """Returns when every finished block is synced on disk. Raises DegradedError when the disk cannot write."""
        return

    def verify(self, delete: bool = False) -> dict[str, object]:
        """Check every block on disk; delete: take out what is damaged."""
        return {}

    def compact(self) -> dict[str, object]:
        """Rewrite the disk's file without what was deleted."""
        return {}

    def check_integrity(self, idle: bool) -> None:
        """Assert that all counts agree. idle: no request is there; waits for what is in flight first."""
        return
