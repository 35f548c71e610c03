"""Blocks of requests in HBM: prefix hits, allocation, caching, release, erasure; and what comes from the tiers below.

Owns no request; knows the connector's verbs for the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvstore.blocks.holdings import Holdings, Place
from kvstore.blocks.ids import BlockId, token_bytes
from kvstore.blocks.pool import BlockPool
from kvstore.blocks.records import Evict, Loss
from kvstore.connector import KVConnector
from kvstore.engine.config import SchedulerConfig
from kvstore.engine.core.request import Request
from kvstore.engine.core.state_slots import StateSlots
from kvstore.engine.core.window_slots import WindowSlots
from kvstore.store.seam import Lookup, Match, NewRequest

_NOTHING = Match(Lookup.MISS)


@dataclass(frozen=True, slots=True)
class Allocation:
    """What changed in a request's block table: entries from `first_index` on are now `block_numbers`."""

    first_index: int
    block_numbers: tuple[int, ...]
    copy: tuple[int, int] | None = None  # source, destination: others still read the block that the request writes next
    window_copy: tuple[int, int] | None = None  # the same of the window slots


UNCHANGED = Allocation(0, ())


class KVCacheManager:
    """Gives requests their blocks. A block with several references is never written: its writer gets a copy.

    holdings: is told which blocks can be found. The pool tells it which blocks no longer can. states: of a model that
    keeps some; windows: of one whose layers with a window keep KV only where it is needed; None for others.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, holdings: Holdings | None = None, states: StateSlots | None = None,
        windows: WindowSlots | None = None,
    ) -> None:  # fmt: skip
        self.pool = pool
        self.block_size = block_size
        self.states, self.windows = states, windows
        self._holdings = holdings

    @property
    def num_free(self) -> int:
        """How many blocks could be computed next."""
        return self.pool.num_free if self.windows is None else min(self.pool.num_free, self.windows.num_free)

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, request: Request) -> list[int]:
        """Cached blocks of its longest prefix behind which the request can begin, head first."""
        return self.up_to_checkpoint(request, self.known_prefix(request))

    def known_prefix(self, request: Request) -> list[int]:
        """Cached blocks of the request's longest known prefix, head first.

        At least one token is left to compute, as sampling needs its logits.
        """
        hits: list[int] = []
        for block_id in request.chain[: (request.num_tokens - 1) // self.block_size]:
            block = self.pool.lookup(block_id)
            if block is None:
                break
            hits.append(block)
        return hits

    def up_to_checkpoint(self, request: Request, hits: list[int]) -> list[int]:
        """Of its first blocks those behind which it can begin: all of them, unless the model keeps states, or layers
        with a window lack the KV that they see there.
        """
        end = len(hits)
        while end and self.states is not None and not self.states.has(request.chain[end - 1]):
            end -= 1
        number = end
        while self.windows is not None and number > max(0, end - self.windows.window_blocks):
            number -= 1
            if not self.windows.of[hits[number]]:
                end = number
        return hits[:end]

    def _take_blocks(self, count: int, num_bare: int = 0) -> list[int]:
        """num_bare: so many of the first get no KV of layers with a window."""
        blocks = self.pool.allocate(count)
        if self.windows is not None:
            self.windows.drop(blocks)
            self.windows.give(blocks[num_bare:])
        return blocks

    def admit(self, request: Request, hits: Sequence[int], num_new_tokens: int, num_loaded: int = 0) -> bool:
        """Give a request that holds nothing its hit blocks and room for `num_new_tokens` more. All or nothing.

        num_loaded: so many of these are loaded, and the state behind them.
        """
        assert not request.block_numbers, f"{request.request_id} holds blocks already"
        needed, num_bare = self.num_blocks(len(hits) * self.block_size + num_new_tokens) - len(hits), 0
        if needed > self.pool.num_free - sum(self.pool.is_free(block) for block in hits):
            return False
        if self.windows is not None:
            first = self.windows.first_held(len(hits) * self.block_size + num_loaded, self.block_size)
            num_bare = max(0, num_loaded // self.block_size - self.windows.window_blocks)
            if needed - num_bare > self.windows.num_free - self.windows.num_unheld(hits[first:]):
                return False
            self.windows.acquire(hits[first:])
            request.first_window = first
        if self.states is not None:
            request.state = self.states.begin(request.chain[len(hits) - 1] if hits and not num_loaded else None)
            if request.state is None:
                return False
        self.pool.acquire(hits)
        request.block_numbers = [*hits, *self._take_blocks(needed, num_bare)]
        request.num_computed_tokens = len(hits) * self.block_size
        request.num_hashed_blocks = len(hits)
        return True

    def allocate(self, request: Request, num_new_tokens: int) -> Allocation | None:
        """Allocate room for the next `num_new_tokens` of a request that holds its blocks; None when the pool has too
        few.
        """
        self._release_windows(request)
        table = request.block_numbers
        index = request.num_computed_tokens // self.block_size
        shared = index < len(table) and self.pool.ref_count(table[index]) > 1
        needed = self.num_blocks(request.num_computed_tokens + num_new_tokens) - len(table)
        if needed <= 0 and not shared:
            return UNCHANGED
        if needed + shared > self.num_free:
            return None
        first_index, copy, window_copy = len(table), None, None
        if shared:
            (private,) = self._take_blocks(1)
            copy = (table[index], private)
            if self.windows is not None:
                window_copy = (int(self.windows.of[table[index]]), int(self.windows.of[private]))
                self.windows.release([table[index]], is_checkpoint=True)
            self.pool.release([table[index]])
            table[index] = private
            first_index = index
        table.extend(self._take_blocks(max(needed, 0)))
        return Allocation(first_index, tuple(table[first_index:]), copy, window_copy)

    def _release_windows(self, request: Request) -> None:
        """Release the window slots of blocks that its next token cannot see."""
        if self.windows is None:
            return
        first, ends = self.windows.first_held(request.num_computed_tokens, self.block_size), self._ends(request)
        for index in range(request.first_window, first):
            is_checkpoint = any(0 < end - index <= self.windows.window_blocks for end in ends)
            self.windows.release([request.block_numbers[index]], is_checkpoint)
        request.first_window = max(request.first_window, first)

    def _ends(self, request: Request) -> set[int]:
        """Behind which of its blocks others are likely to begin: where it left what others had computed, and where its
        system prompt ends.
        """
        return {request.fork, *(start // self.block_size for start in request.turn_starts[:1])}

    def share(self, owner: Request, child: Request) -> None:
        """Let `child` refer to all blocks that `owner` has computed, the partial tail included; or to none, if there is
        no slot for its state.
        """
        if self.states is not None and owner.state is not None:
            child.state = self.states.fork(owner.state)
            if child.state is None:
                return
        count = self.num_blocks(owner.num_computed_tokens)
        child.block_numbers = owner.block_numbers[:count]
        self.pool.acquire(child.block_numbers)
        if self.windows is not None:
            child.first_window = self.windows.first_held(owner.num_computed_tokens, self.block_size)
            self.windows.acquire(child.block_numbers[child.first_window :])
        child.num_computed_tokens = owner.num_computed_tokens
        child.num_hashed_blocks = owner.num_computed_tokens // self.block_size

    def next_checkpoint(self, request: Request, num_before: int) -> int | None:
        """The first border behind `num_before` tokens where a state is to be kept: where its first turn begins, where
        it leaves what others have computed, before its last token, and behind it. None if there is no more.
        """
        num_tokens = request.num_tokens
        ends = [*request.turn_starts[:1], request.fork * self.block_size, num_tokens - 1, num_tokens]
        borders = [end // self.block_size * self.block_size for end in ends]
        return min((border for border in borders if border > num_before), default=None)

    def checkpoints(self, request: Request) -> list[tuple[int, int]]:
        """Where a request that leaves has checkpoints that a later one can begin with, in tokens, and their slots: at
        the end of its system prompt, where it left what others had computed, and at its own end. Of layers with a
        window: all blocks that such a later one needs. What ended its answer may have been found some tokens late.
        """
        num_tokens = len(request.token_ids) - isinstance(request.stop_reason, str) * self.block_size
        num_sure = request.num_prompt_tokens if request.finish_reason == "abort" else num_tokens
        last = min(max(num_sure, request.num_prompt_tokens) // self.block_size, len(request.chain))
        ends = self._ends(request)
        if self.windows is not None:
            last = min(last, min(request.num_computed_tokens, request.num_tokens - 1) // self.block_size)
            span = self.windows.window_blocks + 1
            whole = sorted({one for end in (*ends, last) for one in range(max(0, end - span), min(end, last))})
            slots = ((one, int(self.windows.of[request.block_numbers[one]])) for one in whole)
            return [((one + 1) * self.block_size, slot) for one, slot in slots if slot]
        if self.states is None:
            return []
        borders = range(last, 0, -1)
        ends.add(next((border for border in borders if self.states.has(request.chain[border - 1])), 0))
        found = ((border, self.states.slot_of(request.chain[border - 1])) for border in ends - {0})
        return [(border * self.block_size, slot) for border, slot in sorted(found) if slot is not None]

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Put the full blocks of its first `num_tokens` tokens into the pool's map: they are computed or being loaded,
        and other requests of this step share them.
        """
        full = num_tokens // self.block_size
        for index in range(request.num_hashed_blocks, full):
            self._insert(request, index)
        request.num_hashed_blocks = max(request.num_hashed_blocks, full)

    def _insert(self, request: Request, index: int) -> None:
        """Insert a block, linked to its parent only if this request holds that: a block's holder must hold its
        parent.
        """
        block_id, parent_id = request.chain[index], request.chain[index - 1] if index else None
        if index and self.pool.block_id(request.block_numbers[index - 1]) != parent_id:
            parent_id = None
        inserted = self.pool.insert(request.block_numbers[index], block_id, parent_id, request.conversation)
        if inserted and self._holdings is not None:
            parent_id = request.lineage.parent(request.chain, index)
            tokens = token_bytes(request.token_ids[index * self.block_size : (index + 1) * self.block_size])
            self._holdings.stored(Place.HBM, block_id, parent_id, tokens, request.tenant)

    def free(self, request: Request) -> None:
        """Release the request's blocks; full ones stay cached until they are allocated again."""
        self.pool.release(request.block_numbers)
        if self.windows is not None:
            self.windows.release(request.block_numbers[request.first_window :], is_checkpoint=True)
            self._keep_windows(request, self.windows)
        if self.states is not None and request.state is not None:
            self.states.end(request.state)
            request.state = None
        request.block_numbers = []
        request.num_computed_tokens = request.num_hashed_blocks = request.first_window = 0

    def _keep_windows(self, request: Request, windows: WindowSlots) -> None:
        """Of the window slots that it leaves drop those of blocks that cannot be found. One of a block that it has
        loaded or computed again, as the one with this id had none, goes to that; not before the load has landed.
        """
        num_known = request.num_hashed_blocks if request.may_load and request.cached.before is None else 0
        for index, block in enumerate(request.block_numbers[request.first_window :], start=request.first_window):
            if not windows.of[block] or not self.pool.is_free(block) or self.pool.block_id(block) is not None:
                continue
            found = self.pool.lookup(request.chain[index]) if index < num_known else None
            if found is None or windows.of[found] or not self.pool.is_free(found):
                windows.drop([block])
            else:
                windows.move(block, found)


class Erasure:
    """Erases deleted blocks of HBM, and checkpoints behind them, between two steps. overwrite: clears HBM blocks, and
    slots of states or windows.
    """

    def __init__(
        self, manager: KVCacheManager, overwrite: Callable[[Sequence[int], Sequence[int]], None]
    ) -> None:  # fmt: skip
        self._pool, self._states, self._windows = manager.pool, manager.states, manager.windows
        self._overwrite = overwrite
        self.pending: set[int] = set()  # deleted blocks that a request still held

    def forget(self, block_ids: Iterable[BlockId]) -> None:
        """Forget these blocks and overwrite them. A block that a request holds is overwritten once it is released."""
        block_ids = tuple(block_ids)
        if self._states is not None:
            self._states.forget(block_ids)
        self._forget(self._known(block_ids))

    def evict(self, what: Evict, block_ids: frozenset[BlockId]) -> int:
        """Evict these blocks and all that match, except blocks in use. Returns their number."""
        conditions = (what.unused_for_s, what.model, what.block_ids, what.to_bytes)
        if what.everything and all(condition is None for condition in conditions):
            blocks = list(self._pool.cached_blocks())
        else:
            blocks = self._known(block_ids if what.block_ids is None else block_ids | what.block_ids)
        free = [block for block in blocks if self._pool.is_free(block)]
        if not what.dry_run:
            if self._states is not None:
                self._states.forget(filter(None, map(self._pool.block_id, free)))
            self._forget(free)
        return len(free)

    def _known(self, block_ids: Iterable[BlockId]) -> list[int]:
        return [block for block in map(self._pool.lookup, block_ids) if block is not None]

    def _forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._pool.forget(block)
            self.pending.add(block)
        self.go_on(always=True)

    def go_on(self, always: bool = False) -> None:
        """Overwrite blocks that have become free. always: also blocks without an id, which may be a deleted
        session's.
        """
        free = {block for block in self.pending if self._pool.is_free(block)}
        if not free and not always:
            return
        self.pending -= free
        stale, slots = self._pool.take_stale(), [] if self._states is None else self._states.take_stale()
        if self._windows is not None:
            self._windows.drop(stale)
            slots = self._windows.take_stale()
        if stale or slots:
            self._overwrite(stale, slots)


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
        self._long = max(config.checkpoint_tokens, config.max_num_batched_tokens) // manager.block_size

    def priority(self, request: Request) -> int:
        return request.priority if self._has_priorities else 0

    def announce(self, request: Request) -> None:
        """Let the store know what this request may load; at its arrival also note which tier holds what."""
        known = self.manager.known_prefix(request)
        hits = self.manager.up_to_checkpoint(request, known)
        new = NewRequest(
            request.request_id, tuple(request.chain), tuple(request.token_ids), request.lineage, request.tenant,
            len(hits) * self.manager.block_size, (self.priority(request), request.place), request.conversation,
            request.may_load, request.turn_starts, request.shared_ends, request.name,
        )  # fmt: skip
        found = self.connector.on_new_request(new)
        request.num_told_blocks, request.num_told_tokens = len(request.chain), len(request.token_ids)
        request.conversation = found.conversation
        self.manager.pool.touch(hits, found.conversation)
        if not request.num_preemptions:
            num_known, num_begun = max(len(known), found.num_known_blocks), len(hits) + len(found.tiers)
            halfway = 0 if self.manager.states is None else request.halfway(num_begun, self._long)
            request.fork = max(num_known, halfway) if num_begun >= num_known else num_known
        request.cached.note_arrival(["hbm"] * len(hits) + list(found.tiers))

    def free(self, request: Request) -> None:
        """Release the request's blocks, and cancel what it would have loaded."""
        has_kv = request.finish_reason is not None or request.may_load  # else some of it was not loaded
        states = self.manager.checkpoints(request) if has_kv and request.block_numbers else ()
        self.connector.request_finished(request.request_id, request.answer, *request.take_news(is_end=True), states)
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
        if external.num_unsaved and not external.num_tokens:
            hits = self.manager.up_to_checkpoint(request, hits)
            num_hit = len(hits) * size
        if num_hit + external.num_tokens < request.lineage.splice_end * size:
            self._note_loss(request, num_hit + external.num_tokens)
            self.connector.request_finished(request.request_id)
            request.give_up_splice()
            request.cached.arrival = None  # it was noted for the blocks of the previous chain
            self.announce(request)
            return self.admit(request, most)
        self._note_answer(request, num_hit, external)
        num_tokens = self.num_to_compute(request, num_hit + external.num_tokens, most)
        if not self.manager.admit(request, hits, external.num_tokens + num_tokens, external.num_tokens):
            return Lookup.MISS
        self.load(request, external.num_tokens, num_hit)
        self._note_loss(request, num_hit + external.num_tokens)
        return Admitted(num_tokens, UNCHANGED)

    def _note_loss(self, request: Request, num_cached: int) -> None:
        """Find out why it computes what an earlier request had. A second start, after a preemption, changes nothing."""
        manager, size = self.manager, self.manager.block_size
        num_had = min(request.num_had, request.num_prompt_tokens - 1) // size * size
        if num_cached >= num_had or request.loss is not None or request.num_preemptions:
            return
        block_id = request.chain[num_cached // size]
        begins_anywhere = manager.states is None and manager.windows is None
        if manager.pool.lookup(block_id) is not None and not begins_anywhere:
            loss = Loss("no_checkpoint", "hbm")
        elif request.moved_from is not None and num_cached >= request.moved_from * size:
            loss = Loss("not_loaded", why="only re-encoded KV is there")
        elif request.may_load:
            loss = self.connector.why_missing(request.request_id, block_id, request.had_s)
        else:
            loss = Loss("load_failed", "cpu", time.time())
        request.loss = (num_cached, loss)

    def ask_again(self, request: Request) -> Match:
        """Ask what more can be loaded, once the request has computed what came before."""
        done = request.num_computed_tokens
        if request.ask_at is None or done < request.ask_at:
            return _NOTHING
        found = self.connector.get_num_new_matched_tokens(request.request_id, done, request.num_tokens - 1 - done)
        self._note_answer(request, done, found)
        return found

    def num_to_compute(self, request: Request, num_before: int, most: int) -> int:
        """Tokens to compute up to its last one, to where it asks again, or to where a checkpoint is wanted."""
        end = request.num_tokens if request.ask_at is None else request.ask_at
        if self.manager.states is not None:
            end = min(end, self.manager.next_checkpoint(request, num_before) or end)
        return min(end - num_before, most)

    def scheduled(self, request: Request, num_tokens: int) -> None:
        """A step computes its next `num_tokens` tokens. Keep a copy of its state if that is wanted where they end.

        For a model with states.
        """
        states, end = self.manager.states, request.num_computed_tokens + num_tokens
        if states is None or request.state is None or end % self.manager.block_size:
            return
        if end == self.manager.next_checkpoint(request, request.num_computed_tokens):
            states.keep(request.state, end)

    @staticmethod
    def _note_answer(request: Request, num_before: int, found: Match) -> None:
        """Note when to ask again, and which blocks the store has found since the request arrived."""
        if found.lookup is Lookup.PENDING:
            return
        request.cached.note_late(found.late_from, found.late_tiers)
        request.ask_at = None
        if found.num_compute_tokens is not None:
            request.ask_at = num_before + found.num_tokens + found.num_compute_tokens

    def load(self, request: Request, num_tokens: int, num_hit: int = 0) -> None:
        """Load the blocks of its next `num_tokens` tokens in this step, if any, and share them from now on. num_hit:
        how many of the tokens before these were found in HBM now.
        """
        size, first_token = self.manager.block_size, request.num_computed_tokens
        if num_tokens:
            blocks = request.block_numbers[first_token // size : (first_token + num_tokens) // size]
            rows = [] if request.state is None else [request.state.slot]
            if self.manager.windows is not None:
                rows = self.manager.windows.of[blocks].tolist()
            self.connector.update_state_after_alloc(request.request_id, blocks, first_token, num_tokens, rows)
            request.num_computed_tokens += num_tokens
            self.manager.cache_full_blocks(request, request.num_computed_tokens)
        request.cached.count(request.num_computed_tokens, num_hit, size, request.lineage)

    # -- after a step ------------------------------------------------------------------------------------------------
    def computed(self, request: Request, num_tokens: int) -> None:
        """Note that the KV of the request's first `num_tokens` tokens exists: computed, or loaded."""
        request.cached.confirm(num_tokens)
        if not request.num_output_tokens:
            request.num_saved_tokens += self.connector.take_num_saved(request.request_id)
        self.manager.cache_full_blocks(request, num_tokens)
        if self.manager.states is not None and request.state is not None:
            is_answer = num_tokens >= request.num_prompt_tokens
            self.manager.states.computed(request.state, num_tokens, request.chain, self.manager.block_size, is_answer)
