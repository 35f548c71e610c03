"""Which request computes how many tokens in the next step, and all requests from arrival to end: waiting, running, and
moves between the two.

`kvstore.engine.core.tenants` decides between tenants.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvstore.blocks.ids import BlockId, quantised_id, with_quantised
from kvstore.blocks.records import TransferPlan
from kvstore.connector import KVConnector
from kvstore.engine.config import SchedulerConfig
from kvstore.engine.core.beam_search import BeamSearch
from kvstore.engine.core.kv_cache_manager import Allocation, KVCacheManager, RequestBlocks
from kvstore.engine.core.request import Request, Status
from kvstore.engine.core.state_slots import StatePlan
from kvstore.engine.core.tenants import Budget, TenantQueue, TenantQueues
from kvstore.engine.outputs import TokenLogprob
from kvstore.store.seam import Lookup


class Roster:
    """Owns the requests; knows which of them wait and which run."""

    def __init__(self, blocks: RequestBlocks) -> None:
        self.blocks = blocks
        self.requests: dict[str, Request] = {}  # by id, with choices that wait for the first choice of their prompt
        self.searches: dict[str, BeamSearch] = {}  # by prompt
        self.tenants = TenantQueues(self._key)  # without those choices
        self.left: list[str] = []  # ids of requests that have stopped running since the last step
        self.num_preemptions = 0
        self.num_failed_loads = 0  # requests that went back because of a failed load
        self._next_sequence = 0

    def _key(self, request: Request) -> tuple[int, int]:
        return self.blocks.priority(request), request.sequence

    def add(self, request: Request) -> None:
        """Queue a request. Its children (n > 1) are known from now on, and queued once its prompt is computed. A search
        finds them itself, and its beams share its place among others.
        """
        if request.params.use_beam_search:
            request.children = []
        for choice in (request, *request.children):
            choice.sequence = self._next_sequence
            self._next_sequence += 1
            self.requests[choice.request_id] = choice
        if request.params.use_beam_search:
            search = self.searches[request.request_id] = BeamSearch(request)
            self._next_sequence = search.sequences.stop
        self.tenants.arrive((request, *request.children))
        if request.takes_copies:
            self._find_copies(request)
        self.queue(request)

    def _find_copies(self, request: Request) -> None:
        """Let it begin with quantised copies where these are more than is stored exactly."""
        pool = self.blocks.manager.pool
        found = self.blocks.connector.find_copies(
            request.chain, request.token_ids, request.lineage, lambda block_id: pool.lookup(block_id) is not None
        )
        if found is not None:
            request.build_on(found)

    def queue(self, request: Request) -> None:
        """Put a request into the waiting queue."""
        self.blocks.announce(request)
        self.tenants.queue(request)

    def bear(self, owner: Request, child: Request, token_id: int) -> None:
        """Queue a child whose next token came from its owner's logits. It shares the owner's blocks."""
        child.cached.inherit(owner.cached)
        child.conversation = owner.conversation
        self.blocks.manager.share(owner, child)
        child.append(token_id)
        if child.finish_reason is None:
            self.queue(child)
        else:
            child.status = Status.FINISHED
            del self.requests[child.request_id]
            self.blocks.manager.free(child)

    def advance(self, search: BeamSearch) -> list[Request]:
        """Let a search go on if all of its beams are computed. Returns its answers, the best first, if it is over.

        Else those that are computed do not wait with their blocks for the others: two searches might do so for ever.
        """
        if not search.is_complete:
            for beam in search.found:
                if beam.request_id in self.requests:
                    beam.num_preemptions += 1
                    self.remove(beam)
            return []
        going_on = search.advance()
        staying = [one for one in going_on if one.is_drawn and one.beam.request_id in self.requests]
        free = iter(set(search.sequences).difference(one.beam.sequence for one in staying))
        before, search.beams = search.beams, {}
        for one in going_on:
            beam = one.beam
            if one not in staying:
                beam = search.fork(one.beam)
                beam.sequence = next(free)
                self.requests[beam.request_id] = beam
                self.bear(one.beam, beam, one.token_id)
            search.beams[beam] = one.logprob
        for one in staying:  # now that others have what they share with it
            one.beam.append(one.token_id)
        for beam in reversed(before):  # the conversation ends with the best one
            if beam not in search.beams and beam.request_id in self.requests:
                beam.finish_reason = "abort"
                self.remove(beam)
        if going_on:
            return []
        answers = search.answers()
        del self.searches[answers[0].prompt_id]
        return answers

    def unused(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        """Those of these blocks that are in no request's chain, nor are their copies."""
        left = set(with_quantised(block_ids)).difference(*(request.chain for request in self.requests.values()))
        return [one for one in block_ids if one in left and quantised_id(one) in left]

    # -- from running to waiting -------------------------------------------------------------------------------------
    def preempt(self, request: Request) -> None:
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.go_back(request)

    def go_back(self, request: Request) -> None:
        """From running to waiting. The blocks that it has computed will be found again, in HBM or in the store."""
        self._take_out(request)
        self.blocks.free(request)
        self.queue(request)

    def drop_waiting_blocks(self, tenant: TenantQueue | None = None) -> bool:
        """Release the blocks of the last waiting choice that shares a prompt; it will find or compute them again.

        tenant: only this tenant's.
        """
        last = next(self.tenants.sharers(tenant), None)
        if last is None:
            return False
        self.blocks.free(last)
        self.blocks.announce(last)
        return True

    def roll_back(self, failed_blocks: Sequence[int]) -> None:
        """Forget blocks whose load failed. A request that refers to one goes back to the token before it, and
        computes.
        """
        failed = frozenset(failed_blocks)
        for block in failed:
            self.blocks.manager.pool.forget(block)
        for request in [r for r in self.tenants.running() if not failed.isdisjoint(r.block_numbers)]:
            self.num_failed_loads += 1
            request.may_load = False
            request.cached.undo()
            if request.loss is not None and request.loss[0] > request.cached.num_seen:
                request.loss = None  # it computes earlier ones, too
            self.go_back(request)

    # -- the end -----------------------------------------------------------------------------------------------------
    def finish(self, request_id: str, reason: str, stop_reason: str | int | None = None) -> None:
        """End a request now, whatever its state; unknown and ended ids are ignored. Children not yet born end too."""
        if (search := self.searches.pop(request_id, None)) is not None:
            for beam in search.beams:
                self.finish(beam.request_id, reason)
        request = self.requests.get(request_id)
        if request is None:
            return
        request.finish_reason, request.stop_reason = reason, stop_reason
        children, request.children = request.children, []
        self.remove(request)
        for child in children:
            self.finish(child.request_id, reason)

    def remove(self, request: Request) -> None:
        """Remove a request that has ended."""
        del self.requests[request.request_id]
        if not request.index or request.num_output_tokens:  # else it still waited for the first choice
            self._take_out(request)
            self.tenants.forget_idle(request.tenant)
            self.blocks.free(request)
        request.status = Status.FINISHED

    def _take_out(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self.left.append(request.request_id)
        self.tenants.take_out(request)

    def reset(self, reason: str) -> None:
        """End every request and forget every block: after an error in the middle of a step."""
        for request in self.requests.values():
            self.blocks.connector.request_finished(request.request_id)
            request.status, request.finish_reason = Status.FINISHED, reason
            request.block_numbers, request.children, request.state = [], [], None
        self.requests.clear()
        self.searches.clear()
        self.tenants.clear()
        self.left.clear()
        self.blocks.manager.pool.reset()
        for slots in (self.blocks.manager.states, self.blocks.manager.windows):
            if slots is not None:
                slots.reset()

    def check_integrity(self) -> None:
        """Assert what must hold between steps: counts, order, and no block held by a request that has ended."""
        self.tenants.check_integrity(self.requests)
        for name, search in self.searches.items():
            assert any(beam.request_id in self.requests for beam in search.beams), f"nothing is computed for {name}"
        for request in self.tenants.running():
            assert request.block_numbers, f"{request.request_id} runs without blocks"
        self.blocks.manager.pool.check_integrity(idle=not self.requests)
        if self.blocks.manager.states is not None:
            states = (request.state for request in self.requests.values() if request.state is not None)
            self.blocks.manager.states.check_integrity(states)
        if self.blocks.manager.windows is not None:
            held = (request.block_numbers[request.first_window :] for request in self.requests.values())
            self.blocks.manager.windows.check_integrity(held)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What one request computes in this step."""

    request_id: str
    num_computed_tokens: int
    num_tokens: int
    num_samples: int  # 0 while its prompt is not complete, n when choices fan out
    allocation: Allocation


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step."""

    joined: tuple[Request, ...]  # that join the batch, for the first time or after a preemption
    scheduled: tuple[Scheduled, ...]
    left: tuple[str, ...]  # ids of requests that leave the batch before the step: finished, aborted or preempted
    plan: TransferPlan | None
    states: StatePlan | None = None  # of a model that keeps some

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)


@dataclass(frozen=True, slots=True)
class Progress:
    """A request's new token after a step; of a search, an answer. If it ended with it, its finish_reason is set."""

    request: Request
    token_id: int
    scheduled: int  # index of the scheduled request that sampled it; for a new choice, its owner's; -1 for a search's
    sample: int = 0  # index among the samples of that scheduled request


class Scheduler:
    """FCFS or priority order (lower value first); running requests before waiting ones; the latest is preempted first.

    This order holds within a tenant. Each tenant with work gets the same share of the running set and of every step:
    when a waiting tenant runs less than another, one of the other's requests is preempted.
    """

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager, connector: KVConnector) -> None:
        self.config = config
        self.manager = manager
        self.connector = connector
        self.blocks = RequestBlocks(config, manager, connector)
        self.roster = Roster(self.blocks)
        self._tenants = self.roster.tenants
        self._short: Request | None = None  # lacked blocks to start, while other tenants hold more

    @property
    def num_running(self) -> int:
        return self._tenants.num_running

    @property
    def num_waiting(self) -> int:
        return self._tenants.num_waiting

    @property
    def has_work(self) -> bool:
        return bool(self.num_running or self.num_waiting)

    # -- one step ----------------------------------------------------------------------------------------------------
    def schedule(self) -> SchedulerOutput:
        """Fill the token budget: running requests in order, then waiting ones while there is room."""
        scheduled: list[Scheduled] = []
        joined: list[Request] = []
        self._make_way()
        limits = self.config
        budget = self._tenants.budget(limits.max_num_batched_tokens, limits.max_num_seqs - self.num_running)
        if not self._schedule_running(budget, scheduled):
            self._schedule_waiting(budget, scheduled, joined)
        spans = [self.roster.requests[s.request_id].span(s.num_computed_tokens, s.num_tokens) for s in scheduled]
        plan = self.connector.build_connector_meta(spans)
        left = tuple(self.roster.left)
        self.roster.left.clear()
        return SchedulerOutput(tuple(joined), tuple(scheduled), left, plan, self._states(scheduled))

    def _states(self, scheduled: Sequence[Scheduled]) -> StatePlan | None:
        if self.manager.states is None:
            return None
        of = {s.request_id: self.roster.requests[s.request_id].state for s in scheduled}
        return self.manager.states.take_plan({name: state for name, state in of.items() if state is not None})

    def _make_way(self) -> None:
        """Give waiting tenants that run less than others a place and blocks of those: one request each in a step.

        Preemption costs loading, or computing, the victim's last block and what HBM evicts meanwhile.
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
                self.roster.preempt(ahead.running[-1])
            if tenant.waiting[0].pending_s is None:  # else it may be waiting for its own blocks, see `_short`
                self._make_blocks_free(tenant.waiting[0])
        if short is not None and short.status is Status.WAITING:
            self._make_blocks_free(short)

    def _make_blocks_free(self, request: Request) -> None:
        """Take blocks for the tenant's first chunk from tenants that run more."""
        tenants, most = self._tenants, self.config.max_num_batched_tokens
        needed = 1 if request.block_numbers else self.manager.num_blocks(min(request.num_tokens, most))
        while self.manager.num_free < needed and (ahead := tenants.ahead_of(tenants.of(request))) is not None:
            if not self.roster.drop_waiting_blocks(ahead):
                self.roster.preempt(ahead.running[-1])

    def _schedule_running(self, budget: Budget, scheduled: list[Scheduled]) -> bool:
        """Schedule running requests. Returns whether some were preempted; those are the last in order."""
        num_before, index, order = self.roster.num_preemptions, 0, self._tenants.running()
        blocks, share = self.blocks, -(-len(order) // self.config.steps_in_flight)
        while index < len(order) and budget.left > 0 and len(scheduled) < share:
            request = order[index]
            index += 1
            most = budget.most(request)
            if most <= 0 or request.is_answered or (request.num_unread and self.config.steps_in_flight > 1):
                continue  # its tenant's share is used up, or its last token must be read: it ends, or is in flight
            found = blocks.ask_again(request)
            if found.lookup is Lookup.PENDING:
                continue  # loading its blocks will take less time than computing them
            num_tokens = blocks.num_to_compute(request, request.num_computed_tokens + found.num_tokens, most)
            allocation = self._allocate(request, found.num_tokens + num_tokens, order)
            if allocation is None:
                break  # the request itself was the last, and is waiting again
            if found.num_tokens:
                blocks.load(request, found.num_tokens)
            scheduled.append(self._scheduled(request, num_tokens, allocation))
            budget.spend(request, num_tokens)
        return self.roster.num_preemptions > num_before

    def _allocate(self, request: Request, num_tokens: int, order: list[Request]) -> Allocation | None:
        while (allocation := self.manager.allocate(request, num_tokens)) is None:
            if self.roster.drop_waiting_blocks():
                continue
            victim = order.pop()
            self.roster.preempt(victim)
            if victim is request:
                return None
        return allocation

    def _schedule_waiting(self, budget: Budget, scheduled: list[Scheduled], joined: list[Request]) -> None:
        skipped: dict[TenantQueue, int] = {}  # how many of a tenant's first requests wait for their own blocks
        while (tenant := self._next_tenant(budget, skipped)) is not None:
            request = tenant.waiting[skipped.get(tenant, 0)]
            admitted = self.blocks.admit(request, budget.most(request))
            if admitted is Lookup.PENDING:
                if request.pending_s is None:
                    request.pending_s = time.monotonic()
                skipped[tenant] = skipped.get(tenant, 0) + 1
                continue
            if admitted is Lookup.MISS:
                ahead = self._tenants.ahead_of(tenant)
                if (ahead is not None or not self.num_running) and self.roster.drop_waiting_blocks(ahead):
                    continue  # no running request could release blocks, or others must preempt first
                self._short = None if ahead is None else request
                break
            if request.scheduled_s is None:
                request.scheduled_s = time.monotonic()
            self._tenants.run(request)
            joined.append(request)
            scheduled.append(self._scheduled(request, admitted.num_tokens, admitted.allocation))
            budget.spend(request, admitted.num_tokens)

    def _next_tenant(self, budget: Budget, skipped: dict[TenantQueue, int]) -> TenantQueue | None:
        """The tenant whose request is next; None without room. skipped: how many of its first requests to pass over."""
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
        # A place that is freed, or could be, for a tenant whose blocks are on their way is not given to others.
        num_kept = sum(len(other.running) + 1 < len(tenant.running) for other in skipped)
        return tenant if self.num_running + num_kept < self.config.max_num_seqs else None

    def _scheduled(self, request: Request, num_tokens: int, allocation: Allocation) -> Scheduled:
        if self.manager.states is not None:
            self.blocks.scheduled(request, num_tokens)
        first, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        num_samples = 1 + len(request.children) if end == request.num_tokens else 0
        request.num_computed_tokens = end
        request.num_unread += num_samples > 0
        return Scheduled(request.request_id, first, num_tokens, num_samples, allocation)

    # -- after the step ----------------------------------------------------------------------------------------------
    def update(
        self, output: SchedulerOutput, sampled: Iterable[Sequence[int]], failed_blocks: Sequence[int] = (),
        logprobs: Mapping[int, Sequence[TokenLogprob | None]] = MappingProxyType({}),
    ) -> list[Progress]:  # fmt: skip
        """Apply the step's samples (one sequence per scheduled request): append tokens, cache full blocks, fan out,
        finish.

        failed_blocks: HBM blocks whose load failed; requests that refer to one of them lose this step and compute it.
        logprobs: see `StepResult`.
        """
        if failed_blocks:
            self.roster.roll_back(failed_blocks)
        progress: list[Progress] = []
        requests, computed, searches = self.roster.requests, self.blocks.computed, dict[str, BeamSearch]()
        for index, (step, token_ids) in enumerate(zip(output.scheduled, sampled, strict=True)):
            request = requests.get(step.request_id)
            if request is None or request.status is not Status.RUNNING:
                continue  # it ended, or was preempted, while the step ran
            computed(request, step.num_computed_tokens + step.num_tokens)
            if not step.num_samples:
                continue
            request.num_unread -= 1
            if request.params.use_beam_search:
                search = searches[request.prompt_id] = self.roster.searches[request.prompt_id]
                (found,) = logprobs[index]
                assert found is not None, "the sampler was not asked for what may follow"
                search.add(request, found)
                continue
            children, request.children = request.children, []
            for sample, (child, token_id) in enumerate(zip(children, token_ids[1:], strict=True), start=1):
                if child.status is not Status.FINISHED:
                    self.roster.bear(request, child, token_id)
                    progress.append(Progress(child, token_id, index, sample))
            request.append(token_ids[0])
            progress.append(Progress(request, token_ids[0], index))
            if request.finish_reason is not None:
                self.roster.remove(request)
        for search in searches.values():
            progress += [Progress(answer, answer.token_ids[-1], -1) for answer in self.roster.advance(search)]
        return progress

    def compute_again(self, request_id: str) -> None:
        """One of its tokens could not be drawn before the next step began: compute both again."""
        request = self.roster.requests.get(request_id)
        if request is not None and request.status is Status.RUNNING:
            request.reads_at_once = True
            request.cached.pass_over(request.num_computed_tokens)  # what it hits after this is its own
            request.num_preemptions += 1  # for itself it is one
            self.roster.go_back(request)
