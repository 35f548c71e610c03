"""All requests of an engine from arrival to end: waiting, running, and moves between the two.

Knows no step; `kvstore.engine.core.tenants` decides between tenants.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.engine.core.request import Request, Status
from kvstore.engine.core.request_blocks import RequestBlocks
from kvstore.engine.core.tenants import TenantQueue, TenantQueues


class Roster:
    """Owns the requests; knows which of them wait and which run."""

    def __init__(self, blocks: RequestBlocks) -> None:
        self.blocks = blocks
        self.requests: dict[str, Request] = {}  # by id, with choices that wait for the first choice of their prompt
        self.tenants = TenantQueues(self._key)  # without those choices
        self.left: list[str] = []  # ids of requests that have stopped running since the last step
        self.num_preemptions = 0
        self.num_failed_loads = 0  # requests that went back because of a failed load
        self._next_sequence = 0

    def _key(self, request: Request) -> tuple[int, int]:
        return self.blocks.priority(request), request.sequence

    def add(self, request: Request) -> None:
        """Queue a request. Its children (n > 1) are known from now on, and queued once its prompt is computed."""
        for choice in (request, *request.children):
            choice.sequence = self._next_sequence
            self._next_sequence += 1
            self.requests[choice.request_id] = choice
        self.tenants.arrive((request, *request.children))
        self.queue(request)

    def queue(self, request: Request) -> None:
        """Put a request into the waiting queue."""
        self.blocks.announce(request)
        self.tenants.queue(request)

    def bear(self, owner: Request, child: Request, token_id: int) -> None:
        """Queue a child that has drawn its first token from its owner's logits. It shares the blocks of the prompt."""
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

    # -- from running to waiting -------------------------------------------------------------------------------------
    def preempt(self, request: Request) -> None:
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._go_back(request)

    def _go_back(self, request: Request) -> None:
        """Preempt a request. The blocks that it has computed will be found again, in HBM or in the store."""
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
            self.blocks.compute_instead(request)
            self._go_back(request)

    # -- the end -----------------------------------------------------------------------------------------------------
    def finish(self, request_id: str, reason: str, stop_reason: str | int | None = None) -> None:
        """End a request now, whatever its state; unknown and ended ids are ignored. Children not yet born end too."""
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
            request.block_numbers, request.children = [], []
        self.requests.clear()
        self.tenants.clear()
        self.left.clear()
        self.blocks.manager.pool.reset()

    def check_integrity(self) -> None:
        """Assert what must hold between steps: counts, order, and no block held by a request that has ended."""
        self.tenants.check_integrity(self.requests)
        for request in self.tenants.running():
            assert request.block_numbers, f"{request.request_id} runs without blocks"
        self.blocks.manager.pool.check_integrity(idle=not self.requests)
