"""Blocks of requests in HBM and below it: hits, loads, and the tier that a prompt's tokens came from.

Owns no request; knows the connector's verbs for the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvstore.connector import KVConnector
from kvstore.engine.config import SchedulerConfig
from kvstore.engine.core.kv_cache_manager import UNCHANGED, Allocation, KVCacheManager
from kvstore.engine.core.request import Request
from kvstore.store.seam import Lookup, Match, NewRequest

_NOTHING = Match(Lookup.MISS)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A waiting request has got its blocks."""

    num_tokens: int  # to compute in this step
    allocation: Allocation  # the change of its block table, if it already had one


class RequestBlocks:
    """Asks HBM first, then the connector, which is told what becomes of each request."""

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager, connector: KVConnector) -> None:
        self.manager = manager
        self.connector = connector
        self._has_priorities = config.policy == "priority"

    def priority(self, request: Request) -> int:
        return request.priority if self._has_priorities else 0

    def announce(self, request: Request) -> None:
        """Let the store know what this request may load; at its arrival also note which tier holds what."""
        hits = self.manager.match_prefix(request)
        new = NewRequest(
            request.request_id, tuple(request.chain), tuple(request.token_ids), request.lineage, request.tenant,
            len(hits) * self.manager.block_size, (self.priority(request), request.place), request.conversation,
            request.may_load, request.turn_starts,
        )  # fmt: skip
        found = self.connector.on_new_request(new)
        request.num_told_blocks, request.num_told_tokens = len(request.chain), len(request.token_ids)
        request.conversation = found.conversation
        self.manager.pool.touch(hits, found.conversation)
        request.cached.note_arrival(["hbm"] * len(hits) + list(found.tiers))

    def free(self, request: Request) -> None:
        """Release the request's blocks, and cancel what it would have loaded."""
        self.connector.request_finished(request.request_id, request.answer, *request.take_news(is_end=True))
        self.manager.free(request)
        request.ask_at, request.num_unread = None, 0

    # -- before a step -----------------------------------------------------------------------------------------------
    def admit(self, request: Request, most: int) -> Admitted | Literal[Lookup.MISS, Lookup.PENDING]:
        """Blocks for a waiting request; MISS when there are too few, PENDING when its own are on their way."""
        size = self.manager.block_size
        if request.block_numbers:  # a choice that shares its computed prompt
            allocation = self.manager.allocate(request, 1)
            return Lookup.MISS if allocation is None else Admitted(1, allocation)
        hits = self.manager.match_prefix(request)
        num_hit = len(hits) * size
        external = self.connector.get_num_new_matched_tokens(
            request.request_id, num_hit, request.num_tokens - 1 - num_hit
        )
        if external.lookup is Lookup.PENDING:
            return Lookup.PENDING
        num_hit -= external.num_unsaved
        hits = hits[: num_hit // size]
        if num_hit + external.num_tokens < request.lineage.splice_end * size:
            self.connector.request_finished(request.request_id)
            request.give_up_splice()
            request.cached.arrival = None  # it was noted for the blocks of the previous chain
            self.announce(request)
            return self.admit(request, most)
        self._note_answer(request, num_hit, external)
        num_tokens = self.num_to_compute(request, num_hit + external.num_tokens, most)
        if not self.manager.admit(request, hits, external.num_tokens + num_tokens):
            return Lookup.MISS
        if external.num_tokens:
            self._load(request, num_hit, external.num_tokens)
        self._count_cached(request, num_hit, num_hit + external.num_tokens)
        return Admitted(num_tokens, UNCHANGED)

    def ask_again(self, request: Request) -> Match:
        """Ask what more can be loaded, once the request has computed what came before."""
        done = request.num_computed_tokens
        if request.ask_at is None or done < request.ask_at:
            return _NOTHING
        found = self.connector.get_num_new_matched_tokens(request.request_id, done, request.num_tokens - 1 - done)
        self._note_answer(request, done, found)
        return found

    def load_more(self, request: Request, num_tokens: int) -> None:
        """Load in this step what `ask_again` has found, once there is room for it."""
        self._load(request, request.num_computed_tokens, num_tokens)
        self._count_cached(request, 0, request.num_computed_tokens)

    @staticmethod
    def num_to_compute(request: Request, num_before: int, most: int) -> int:
        """Tokens to compute up to its last one, or to where it asks again."""
        end = request.num_tokens if request.ask_at is None else request.ask_at
        return min(end - num_before, most)

    @staticmethod
    def _note_answer(request: Request, num_before: int, found: Match) -> None:
        """Note when to ask again, and which blocks the store has found since the request arrived."""
        if found.lookup is Lookup.PENDING:
            return
        request.cached.note_late(found.late_from, found.late_tiers)
        request.ask_at = None
        if found.num_compute_tokens is not None:
            request.ask_at = num_before + found.num_tokens + found.num_compute_tokens

    def _load(self, request: Request, first_token: int, num_tokens: int) -> None:
        """Load the blocks from `first_token` on in this step, and share them from now on."""
        size = self.manager.block_size
        blocks = request.block_numbers[first_token // size : (first_token + num_tokens) // size]
        self.connector.update_state_after_alloc(request.request_id, blocks, first_token, num_tokens)
        request.num_computed_tokens += num_tokens
        self.manager.cache_full_blocks(request, request.num_computed_tokens)

    def _count_cached(self, request: Request, num_hit: int, num_cached: int) -> None:
        request.cached.count(num_cached, num_hit, self.manager.block_size, request.lineage.splice_index)

    # -- after a step ------------------------------------------------------------------------------------------------
    def computed(self, request: Request, num_tokens: int) -> None:
        """Note that the KV of the request's first `num_tokens` tokens exists: computed, or loaded."""
        request.cached.confirm(num_tokens)
        self.manager.cache_full_blocks(request, num_tokens)

    def compute_instead(self, request: Request) -> None:
        """A load has failed: compute what should have been loaded."""
        request.may_load = False
        request.cached.undo()
