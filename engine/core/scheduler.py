"""Which request computes how many tokens in the next step. One token budget, no prefill or decode phases. No torch.

Owns the requests; whose turn it is among tenants says `kvstore.engine.core.tenants`. Knows the connector only by its
scheduler-side verbs.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvstore.blocks.records import TransferPlan
from kvstore.connector import KVConnector
from kvstore.engine.config import SchedulerConfig
from kvstore.engine.core.kv_cache_manager import Allocation, KVCacheManager
from kvstore.engine.core.request import Request, Status
from kvstore.engine.core.tenants import Budget, Tenant, Tenants
from kvstore.engine.outputs import CachedTokensDetails
from kvstore.store.lookup import Lookup, Match
from kvstore.store.saving import StepSpan


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request joins the batch, for the first time or after a preemption."""

    request: Request
    token_ids: Sequence[int]
    block_numbers: Sequence[int]


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What one request does in this step. num_samples: 0 while its prompt is not complete, n when choices fan out."""

    request_id: str
    num_computed_tokens: int
    num_tokens: int
    num_samples: int
    allocation: Allocation


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. left: ids that leave the batch before it (finished, aborted, preempted)."""

    new_rows: tuple[NewRow, ...]
    scheduled: tuple[Scheduled, ...]
    left: tuple[str, ...]
    plan: TransferPlan | None

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)


@dataclass(frozen=True, slots=True)
class Progress:
    """A request's new token after a step; its finish_reason is set when it ended with it.

    scheduled: which of the step's scheduled requests sampled it (for a new choice, its owner); sample: which sample.
    """

    request: Request
    token_id: int
    scheduled: int
    sample: int = 0


class Scheduler:
    """FCFS or priority order (lower value first), running requests before waiting ones, preemption of the latest.

    That is inside a tenant. Each tenant gets the same share of the running set and of every step, as far as it has
    work: when one waits that runs less than others, one of theirs is preempted.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        manager: KVCacheManager,
        connector: KVConnector,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.manager = manager
        self.connector = connector
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self.num_failed_loads = 0
        self._tenants = Tenants(self._key)  # unborn choices are not in it
        self._short: Request | None = None  # it could not start for want of blocks, of which other tenants have more
        self._left: list[str] = []
        self._next_sequence = 0
        self._clock = clock

    @property
    def num_running(self) -> int:
        return self._tenants.num_running

    @property
    def num_waiting(self) -> int:
        return self._tenants.num_waiting

    @property
    def has_work(self) -> bool:
        return bool(self.num_running or self.num_waiting)

    @property
    def running(self) -> list[Request]:
        return self._tenants.running()

    def _key(self, request: Request) -> tuple[int, int]:
        return self._priority(request), request.sequence

    def _priority(self, request: Request) -> int:
        return request.priority if self.config.policy == "priority" else 0

    # -- arrival and departure ---------------------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Queue a request. Its children (n > 1) are known from now on and queued when its prompt is computed."""
        for choice in (request, *request.children):
            choice.sequence = self._next_sequence
            self._next_sequence += 1
            self.requests[choice.request_id] = choice
        self._tenants.arrive((request, *request.children))
        self._announce(request)
        self._tenants.queue(request)

    def _announce(self, request: Request) -> None:
        """Let the store know what this request may load; at its arrival also note which tier holds what."""
        hits = self.manager.match_prefix(request)
        found = self.connector.on_new_request(
            request.request_id,
            request.chain,
            request.token_ids,
            request.lineage,
            request.tenant,
            len(hits) * self.config.block_size,
            (self._priority(request), request.place),
            request.conversation,
            request.may_load,
        )
        request.conversation = found.conversation
        self.manager.pool.touch(hits, found.conversation)
        if request.arrival is None:
            request.arrival = ["hbm"] * len(hits) + found.tiers

    def finish(self, request_id: str, reason: str, stop_reason: str | int | None = None) -> None:
        """End a request now, whatever its state; unknown and ended ids are ignored. Children not yet born end too."""
        request = self.requests.get(request_id)
        if request is None:
            return
        request.finish_reason, request.stop_reason = reason, stop_reason
        children, request.children = request.children, []
        self._remove(request)
        for child in children:
            self.finish(child.request_id, reason)

    def _remove(self, request: Request) -> None:
        del self.requests[request.request_id]
        if not self._is_unborn(request):
            self._take_out(request)
            self._tenants.forget_idle(request.tenant)
            self._free(request)
        request.status = Status.FINISHED

    @staticmethod
    def _is_unborn(request: Request) -> bool:
        """A choice that still waits for its prompt to be computed by the first one."""
        return request.index > 0 and not request.num_output_tokens

    def _take_out(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self._left.append(request.request_id)
        self._tenants.take_out(request)

    def _free(self, request: Request) -> None:
        self.connector.request_finished(request.request_id, request.block_numbers, request.answer)
        self.manager.free(request)
        request.ask_at, request.num_unread = None, 0

    # -- one step ----------------------------------------------------------------------------------------------------
    def schedule(self) -> SchedulerOutput:
        """Fill the token budget: every running request in order, then waiting ones while there is room."""
        scheduled: list[Scheduled] = []
        new_rows: list[NewRow] = []
        self._make_way()
        limits = self.config
        budget = self._tenants.budget(limits.max_num_batched_tokens, limits.max_num_seqs - self.num_running)
        if not self._schedule_running(budget, scheduled):
            self._schedule_waiting(budget, scheduled, new_rows)
        spans = [StepSpan(s.request_id, s.num_computed_tokens, s.num_tokens) for s in scheduled]
        plan = self.connector.build_connector_meta(spans)
        left, self._left = tuple(self._left), []
        return SchedulerOutput(tuple(new_rows), tuple(scheduled), left, plan)

    def _make_way(self) -> None:
        """Tenants that wait and run less than others get a place of those, and blocks: one request each in a step.

        Preempting costs what it costs to load, or to compute, the victim's last block and what HBM loses meanwhile.
        """
        tenants, num_free = self._tenants, self.config.max_num_seqs - self.num_running
        if len(tenants) < 2:
            return
        short, self._short = self._short, None
        for tenant in sorted(tenants.waiting(), key=lambda tenant: tenant.rank):
            if (ahead := tenants.ahead_of(tenant)) is None:
                break
            if num_free:
                num_free -= 1
            else:
                self._preempt(ahead.running[-1])
            if tenant.waiting[0].pending_s is None:  # else it may be waiting for its own: see `_short`
                self._make_blocks_free(tenant.waiting[0])
        if short is not None and short.status is Status.WAITING:
            self._make_blocks_free(short)

    def _make_blocks_free(self, request: Request) -> None:
        """For its first chunk, of tenants that run more."""
        tenants, most = self._tenants, self.config.max_num_batched_tokens
        needed = 1 if request.block_numbers else self.manager.num_blocks(min(request.num_tokens, most))
        while self.manager.pool.num_free < needed and (ahead := tenants.ahead_of(tenants.of(request))) is not None:
            if not self._drop_waiting_blocks(ahead):
                self._preempt(ahead.running[-1])

    def _schedule_running(self, budget: Budget, scheduled: list[Scheduled]) -> bool:
        """Returns whether some had to be preempted. The order is such that these are the last."""
        num_before, index, order = self.num_preemptions, 0, self._tenants.running()
        while index < len(order) and budget.left > 0:
            request = order[index]
            index += 1
            most = budget.most(request)
            if most <= 0 or request.is_answered:
                continue  # its tenant has had its share, or it ends when its last token is read
            found = self._ask_again(request)
            if found.lookup is Lookup.PENDING:
                continue  # what it waits for will be there before it could be computed
            num_tokens = self._num_to_compute(request, request.num_computed_tokens + found.num_tokens, most)
            allocation = self._allocate(request, found.num_tokens + num_tokens, order)
            if allocation is None:
                break  # the request itself was the last, and is waiting again
            if found.num_tokens:
                self._load(request, request.num_computed_tokens, found.num_tokens)
                self._count_cached(request, 0, request.num_computed_tokens)
            scheduled.append(self._scheduled(request, num_tokens, allocation))
            budget.take(request, num_tokens)
        return self.num_preemptions > num_before

    def _ask_again(self, request: Request) -> Match:
        """For a request that has computed what was to be computed before its next load."""
        done = request.num_computed_tokens
        if request.ask_at is None or done < request.ask_at:
            return _NOTHING
        found = self.connector.get_num_new_matched_tokens(request.request_id, done, request.num_tokens - 1 - done)
        self._note_answer(request, done, found)
        return found

    @staticmethod
    def _note_answer(request: Request, num_before: int, found: Match) -> None:
        """When to ask again."""
        if found.lookup is Lookup.PENDING:
            return
        request.ask_at = None
        if found.num_compute_tokens is not None:
            request.ask_at = num_before + found.num_tokens + found.num_compute_tokens

    @staticmethod
    def _num_to_compute(request: Request, num_before: int, most: int) -> int:
        end = request.num_tokens if request.ask_at is None else request.ask_at
        return min(end - num_before, most)

    def _allocate(self, request: Request, num_tokens: int, order: list[Request]) -> Allocation | None:
        while (allocation := self.manager.allocate(request, num_tokens)) is None:
            if self._drop_waiting_blocks():
                continue
            victim = order.pop()
            self._preempt(victim)
            if victim is request:
                return None
        return allocation

    def _drop_waiting_blocks(self, tenant: Tenant | None = None) -> bool:
        """Take back the blocks of the last waiting choice that shares a prompt; it will find or compute them again.

        tenant: only of this one.
        """
        last = next(self._tenants.sharers(tenant), None)
        if last is None:
            return False
        self._free(last)
        self._announce(last)
        return True

    def _preempt(self, request: Request) -> None:
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._go_back(request)

    def _go_back(self, request: Request) -> None:
        """From running to waiting; what it has computed is found again, in HBM or in the store."""
        self._take_out(request)
        self._free(request)
        self._announce(request)
        self._tenants.queue(request)

    def _schedule_waiting(self, budget: Budget, scheduled: list[Scheduled], new_rows: list[NewRow]) -> None:
        skipped: dict[Tenant, int] = {}  # how many of a tenant's first are left waiting for their own blocks
        while (tenant := self._next_tenant(budget, skipped)) is not None:
            request = tenant.waiting[skipped.get(tenant, 0)]
            admitted = self._admit(request, budget.most(request))
            if admitted is Lookup.PENDING:
                if request.pending_s is None:
                    request.pending_s = self._clock()
                skipped[tenant] = skipped.get(tenant, 0) + 1
                continue
            if admitted is Lookup.MISS:
                ahead = self._tenants.ahead_of(tenant)
                if (ahead is not None or not self.num_running) and self._drop_waiting_blocks(ahead):
                    continue  # nobody runs who could give back blocks, or it is others' turn to do without
                self._short = None if ahead is None else request
                break
            if request.scheduled_s is None:
                request.scheduled_s = self._clock()
            self._tenants.run(request)
            new_rows.append(NewRow(request, tuple(request.token_ids), tuple(request.block_numbers)))
            scheduled.append(self._scheduled(request, admitted.num_tokens, admitted.allocation))
            budget.take(request, admitted.num_tokens)

    def _next_tenant(self, budget: Budget, skipped: dict[Tenant, int]) -> Tenant | None:
        """Whose request is next; None when there is no room. skipped: how many of its first do not count."""
        if budget.left <= 0 or self.num_running >= self.config.max_num_seqs:
            return None
        found = [
            tenant
            for tenant in self._tenants.waiting()
            if (index := skipped.get(tenant, 0)) < len(tenant.waiting) and budget.most(tenant.waiting[index]) > 0
        ]
        tenant = min(found, key=lambda tenant: tenant.rank, default=None)
        if tenant is None:
            return None
        # A place that was made, or would be made, for a tenant whose blocks are on their way is not taken by others.
        num_kept = sum(len(other.running) + 1 < len(tenant.running) for other in skipped)
        return tenant if self.num_running + num_kept < self.config.max_num_seqs else None

    def _admit(self, request: Request, most: int) -> "_Admitted | Literal[Lookup.MISS, Lookup.PENDING]":
        """Blocks for a waiting request; MISS when there are too few, PENDING when its own are on their way."""
        if request.block_numbers:  # a choice that shares its computed prompt
            allocation = self.manager.allocate(request, 1)
            return Lookup.MISS if allocation is None else _Admitted(1, allocation)
        hits = self.manager.match_prefix(request)
        hits = hits[: self.connector.get_num_usable_blocks(request.request_id, len(hits))]
        num_hit = len(hits) * self.config.block_size
        external = self.connector.get_num_new_matched_tokens(
            request.request_id, num_hit, request.num_tokens - 1 - num_hit
        )
        if external.lookup is Lookup.PENDING:
            return Lookup.PENDING
        if num_hit + external.num_tokens < request.lineage.splice_end * self.config.block_size:
            self.connector.request_finished(request.request_id, ())
            request.give_up_splice()
            request.arrival = None  # that was of the blocks of its chain before
            self._announce(request)
            return self._admit(request, most)
        self._note_answer(request, num_hit, external)
        num_tokens = self._num_to_compute(request, num_hit + external.num_tokens, most)
        if not self.manager.admit(request, hits, external.num_tokens + num_tokens):
            return Lookup.MISS
        if external.num_tokens:
            self._load(request, num_hit, external.num_tokens)
        self._count_cached(request, num_hit, num_hit + external.num_tokens)
        return _Admitted(num_tokens, Allocation(0, ()))

    def _load(self, request: Request, first_token: int, num_tokens: int) -> None:
        """The blocks from `first_token` on are loaded in this step, and shared from now on."""
        size = self.config.block_size
        blocks = request.block_numbers[first_token // size : (first_token + num_tokens) // size]
        self.connector.update_state_after_alloc(request.request_id, blocks, first_token, num_tokens)
        self.manager.cache_loading_blocks(request, len(blocks))
        request.num_computed_tokens += num_tokens

    def _count_cached(self, request: Request, num_hit: int, num_cached: int) -> None:
        """Tokens before `num_cached` that it has never computed, by the tier that held their block when it arrived.

        num_hit: those of them that HBM had.
        """
        size, counts, arrival = self.config.block_size, Counter[str](), request.arrival or []
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

    def _scheduled(self, request: Request, num_tokens: int, allocation: Allocation) -> Scheduled:
        first, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        num_samples = 1 + len(request.children) if end == request.num_tokens else 0
        request.num_computed_tokens = end
        request.num_unread += num_samples > 0
        return Scheduled(request.request_id, first, num_tokens, num_samples, allocation)

    # -- after the step ----------------------------------------------------------------------------------------------
    def update(
        self, output: SchedulerOutput, sampled: Iterable[Sequence[int]], failed_blocks: Sequence[int] = ()
    ) -> list[Progress]:
        """Take in the step's samples (one sequence per scheduled request): append, cache full blocks, fan out, end.

        failed_blocks: HBM blocks whose load failed; requests that refer to one of them lose this step and compute it.
        """
        if failed_blocks:
            self._roll_back(frozenset(failed_blocks))
        progress: list[Progress] = []
        for index, (step, token_ids) in enumerate(zip(output.scheduled, sampled, strict=True)):
            request = self.requests.get(step.request_id)
            if request is None or request.status is not Status.RUNNING:
                continue  # ended while the step ran, or went back
            num_computed = step.num_computed_tokens + step.num_tokens
            request.num_seen_tokens = max(request.num_seen_tokens, num_computed)
            request.seen_before = None
            self.manager.cache_full_blocks(request, num_computed)
            if not step.num_samples:
                continue
            request.num_unread -= 1
            children, request.children = request.children, []
            for sample, (child, token_id) in enumerate(zip(children, token_ids[1:], strict=True), start=1):
                if child.status is not Status.FINISHED:
                    self._bear(request, child, token_id)
                    progress.append(Progress(child, token_id, index, sample))
            request.append(token_ids[0])
            progress.append(Progress(request, token_ids[0], index))
            if request.finish_reason is not None:
                self._remove(request)
        return progress

    def compute_again(self, request_id: str) -> None:
        """A token of it could not be drawn in time, and the step behind it has begun: both are computed again."""
        request = self.requests.get(request_id)
        if request is not None and request.status is Status.RUNNING:
            request.reads_at_once = True
            request.num_seen_tokens = max(request.num_seen_tokens, request.num_computed_tokens)  # none is a hit
            self._preempt(request)

    def _roll_back(self, failed: frozenset[int]) -> None:
        """Forget blocks that hold nothing; whoever refers to one goes back to the token before it, and computes."""
        for block in failed:
            self.manager.pool.forget(block)
        for request in [r for r in self.running if not failed.isdisjoint(r.block_numbers)]:
            self.num_failed_loads += 1
            request.may_load = False
            if request.seen_before is not None:  # what was to be loaded is computed after all
                request.cached, request.num_seen_tokens = request.seen_before
            self._go_back(request)

    def _bear(self, owner: Request, child: Request, token_id: int) -> None:
        """A child got its first token from its owner's logits: it shares the prompt's blocks and is queued."""
        child.cached, child.arrival, child.num_seen_tokens = owner.cached, owner.arrival, owner.num_seen_tokens
        child.conversation = owner.conversation
        self.manager.share(owner, child)
        child.append(token_id)
        if child.finish_reason is None:
            self._announce(child)
            self._tenants.queue(child)
        else:
            child.status = Status.FINISHED
            del self.requests[child.request_id]
            self.manager.free(child)

    def reset(self, reason: str) -> None:
        """End every request and forget every block: after an error in the middle of a step."""
        for request in self.requests.values():
            self.connector.request_finished(request.request_id, request.block_numbers)
            request.status, request.finish_reason = Status.FINISHED, reason
            request.block_numbers, request.children = [], []
        self.requests.clear()
        self._tenants.clear()
        self._short = None
        self._left.clear()
        self.manager.pool.reset()

    def check_integrity(self) -> None:
        """Assert what must hold between steps: counts, order, and no block held by a request that has ended."""
        self._tenants.check_integrity(self.requests)
        for request in self._tenants.running():
            assert request.block_numbers, f"{request.request_id} runs without blocks"
        self.manager.pool.check_integrity(idle=not self.requests)


@dataclass(frozen=True, slots=True)
class _Admitted:
    num_tokens: int
    allocation: Allocation


_NOTHING = Match(Lookup.MISS)
