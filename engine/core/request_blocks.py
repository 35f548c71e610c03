"""Blocks of requests in HBM and below it: what is cached, what is loaded, and which tier a prompt's tokens came from.

Owns no request; knows the connector by its scheduler-side verbs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from kvstore.connector import KVConnector
from kvstore.engine.config import SchedulerConfig
from kvstore.engine.core.kv_cache_manager import UNCHANGED, Allocation, KVCacheManager
from kvstore.engine.core.request import Request
from kvstore.engine.outputs import CachedTokensDetails
from kvstore.store.seam import Lookup, Match

_NOTHING = Match(Lookup.MISS)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A waiting request has room to compute so many tokens. allocation: what changed in a table that it had before."""

    num_tokens: int
    allocation: Allocation


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
        found = self.connector.on_new_request(
            request.request_id, request.chain, request.token_ids, request.lineage, request.tenant,
            len(hits) * self.manager.block_size, (self.priority(request), request.place), request.conversation,
            request.may_load,
        )  # fmt: skip
        request.num_told_blocks, request.num_told_tokens = len(request.chain), len(request.token_ids)
        request.conversation = found.conversation
        self.manager.pool.touch(hits, found.conversation)
        if request.arrival is None:
            request.arrival = ["hbm"] * len(hits) + found.tiers

    def free(self, request: Request) -> None:
        """The request gives its blocks back; what it would have loaded is not wanted any more."""
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
            request.arrival = None  # that was of the blocks of its chain before
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
        """What more can be loaded, for a request that has computed what was to be computed before."""
        done = request.num_computed_tokens
        if request.ask_at is None or done < request.ask_at:
            return _NOTHING
        found = self.connector.get_num_new_matched_tokens(request.request_id, done, request.num_tokens - 1 - done)
        self._note_answer(request, done, found)
        return found

    def load_more(self, request: Request, num_tokens: int) -> None:
        """In this step, what `ask_again` has found, once there is room for it."""
        self._load(request, request.num_computed_tokens, num_tokens)
        self._count_cached(request, 0, request.num_computed_tokens)

    @staticmethod
    def num_to_compute(request: Request, num_before: int, most: int) -> int:
        """Up to its last token, or to where it asks again."""
        end = request.num_tokens if request.ask_at is None else request.ask_at
        return min(end - num_before, most)

    @staticmethod
    def _note_answer(request: Request, num_before: int, found: Match) -> None:
        """When to ask again."""
        if found.lookup is Lookup.PENDING:
            return
        request.ask_at = None
        if found.num_compute_tokens is not None:
            request.ask_at = num_before + found.num_tokens + found.num_compute_tokens

    def _load(self, request: Request, first_token: int, num_tokens: int) -> None:
        """The blocks from `first_token` on are loaded in this step, and shared from now on."""
        size = self.manager.block_size
        blocks = request.block_numbers[first_token // size : (first_token + num_tokens) // size]
        self.connector.update_state_after_alloc(request.request_id, blocks, first_token, num_tokens)
        request.num_computed_tokens += num_tokens
        self.manager.cache_full_blocks(request, request.num_computed_tokens)

    def _count_cached(self, request: Request, num_hit: int, num_cached: int) -> None:
        """Tokens before `num_cached` that it has never computed, by the tier that held their block when it arrived.

        num_hit: those of them that HBM had.
        """
        size, counts, arrival = self.manager.block_size, Counter[str](), request.arrival or []
        splice = request.lineage.splice_index
        for index in range(-(-request.num_seen_tokens // size), num_cached // size):
            if splice is not None and index >= splice:
                counts["reencoded"] += size
            elif index < len(arrival):
                counts[arrival[index]] += size
            else:  # it came in between
                counts["hbm" if index < num_hit // size else "cpu"] += size
        request.seen_before = (request.cached, request.num_seen_tokens)
        request.cached = (request.cached or CachedTokensDetails()) + CachedTokensDetails(**counts)
        request.num_seen_tokens = max(request.num_seen_tokens, num_cached)

    # -- after a step ------------------------------------------------------------------------------------------------
    def computed(self, request: Request, num_tokens: int) -> None:
        """The KV of its first `num_tokens` tokens is there, and what was loaded has landed."""
        request.num_seen_tokens = max(request.num_seen_tokens, num_tokens)
        request.seen_before = None
        self.manager.cache_full_blocks(request, num_tokens)

    def compute_instead(self, request: Request) -> None:
        """A load of it has failed: what was to be loaded is computed after all."""
        request.may_load = False
        if request.seen_before is not None:
            request.cached, request.num_seen_tokens = request.seen_before
