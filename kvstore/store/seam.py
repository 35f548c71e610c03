"""What crosses the seam between a scheduler and the store: questions about requests, and their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvstore.blocks.ids import BlockId, Lineage
from kvstore.blocks.records import Evict, Evicted, Transferred
from kvstore.policy.conversation import Conversation, QueueKey


class Lookup(Enum):
    """What a connector says about the blocks after those already in HBM."""

    MISS = "miss"  # nothing more; compute
    HIT = "hit"  # `num_tokens` more can be loaded at once
    PENDING = "pending"  # more are on their way from a slower tier: let the request wait, and take the next


@dataclass(frozen=True, slots=True)
class Match:
    """Answer of `get_num_new_matched_tokens`; every number of tokens is a multiple of the block size.

    num_tokens: how many can be loaded, 0 unless HIT. num_compute_tokens: how many to compute after those before asking
    again, as more are on their way from a slower tier; None if there is nothing more to ask. num_unsaved: how many of
    the tokens in HBM, counted from their end, must be computed again so that they can be saved. late_tiers: the tiers
    of blocks from `late_from` on that were found after the `Arrival`.
    """

    lookup: Lookup
    num_tokens: int = 0
    num_compute_tokens: int | None = None
    num_unsaved: int = 0
    late_from: int = 0
    late_tiers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that was queued, for the first time or after a preemption.

    chain, token_ids: all that is known now; `StepSpan` brings later ones. num_hbm_tokens: the first of them that HBM
    has. key: its place in the queue. conversation: from the `Arrival` of the same request before, or of another choice
    of its prompt. may_load False: a load for it failed, so it is computed. turn_starts: in tokens, as far as known; the
    first is where a system prompt ends. shared_ends: of turns, where other sessions may go on. name: its client's of
    the conversation, as a digest; sub-agents share it.
    """

    request_id: str
    chain: tuple[BlockId, ...]
    token_ids: tuple[int, ...]
    lineage: Lineage
    tenant: str
    num_hbm_tokens: int
    key: QueueKey
    conversation: Conversation | None = None
    may_load: bool = True
    turn_starts: Sequence[int] = ()
    shared_ends: Sequence[int] = ()
    name: bytes = b""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a connector says about a request that was queued.

    tiers: "cpu", "disk" or "remote" for each block after those in HBM, as far as they are stored. conversation: the one
    that it continues, to be handed back when the same request is queued again. num_known_blocks: that are stored,
    though it may not be able to begin behind all of them.
    """

    tiers: tuple[str, ...]
    conversation: Conversation
    num_known_blocks: int = 0


@dataclass(frozen=True, slots=True)
class StepSpan:
    """What one request computes in a step: tokens [first_token, first_token + num_tokens).

    new_ids: its blocks that have become full since the store was last told. new_tokens: its tokens from where the store
    knows them up to the end of these blocks.
    """

    request_id: str
    first_token: int
    num_tokens: int
    new_ids: tuple[BlockId, ...] = ()
    new_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A step that mostly computed prompts: how many of their tokens, and how long it took."""

    num_tokens: int
    seconds: float


class Upkeep(Protocol):
    """What an operator asks of a store, beside its requests. Without a store there is nothing to do."""

    def stats(self) -> dict[str, object]:
        """Counters and gauges."""
        ...

    def evict(self, what: Evict) -> tuple[dict[str, Evicted], frozenset[BlockId]]:
        """Evict what matches, or with dry_run only count it. Returns the amount per tier, and the ids."""
        return {}, frozenset()

    def forget(self, block_ids: Sequence[BlockId], timeout_s: float = 60.0) -> tuple[frozenset[BlockId], bool]:
        """Delete these blocks, in flight or not, from every tier below HBM, and what was computed after them.

        Returns all deleted blocks, and whether they are gone from disk, too: False if that took longer than the
        timeout, or if the disk cannot write.
        """
        return frozenset(block_ids), True

    def share(self, chain: Sequence[BlockId], timeout_s: float) -> int:
        """Wait until nothing of an ended request's chain is on its way to the tier that servers share any more; returns
        how many of its first blocks are there.
        """
        return 0

    def flush(self) -> None:
        """Returns when every finished block is synced on disk. Raises DegradedError when the disk cannot write."""
        return

    def verify(self, delete: bool = False) -> dict[str, object]:
        """Check every block on disk. delete: also delete what is damaged."""
        return {}

    def compact(self, codec: str | None = None) -> dict[str, object]:
        """Rewrite the disk's file without the space of deleted blocks, and its blocks in this codec."""
        return {}

    def check_integrity(self, idle: bool) -> None:
        """Assert that all counts agree. idle: there are no requests; first waits for what is in flight."""
        return


class Transfers(Protocol):
    """The part of the data plane that the store polls."""

    @property
    def can_save(self) -> bool: ...

    def completed(self) -> list[Transferred]: ...
