"""Requests that are computed step by step, and what is saved of them, on tiers without bytes."""

from kvstore.blocks.records import Transferred
from kvstore.store.saving import StepsInFlight
from kvstore.store.seam import StepSpan
from tests.support.store.prefetch_bench import Bench


class SaveBench(Bench):
    """Requests that are computed: each step is planned, and ends when the test says so."""

    def __init__(self, num_arena_blocks: int, has_disk: bool = True, keep: bool = True) -> None:
        super().__init__(num_arena_blocks)
        self.cpu.keep = keep
        self.landed: list[bytes] = []  # what would be written to disk
        self.steps = StepsInFlight(self.cpu, self.requests, self.stored, self.stats, has_disk, self._landed)

    def _landed(self, arena_block: int) -> None:
        self.landed.append(self.cpu.record(arena_block).block_id)
        self.cpu.release(arena_block)

    def computed(self, num_blocks: int, num_named: int | None = None):
        """A request that was admitted, of which nothing is stored. num_named: blocks whose ids are known."""
        request = self.arrive(self.request(num_blocks, stored=False))
        del request.chain[num_blocks if num_named is None else num_named :]
        return request

    def plan(self, *spans, may_save: bool = True):
        """Each a request, its first token and how many."""
        return self.steps.plan([StepSpan(one.request_id, first, num) for one, first, num in spans], may_save)

    def end(self, plan, succeeded: bool = True) -> None:
        if plan is not None:
            self.steps.begun(plan.ticket)
            self.steps.transferred(Transferred(plan.ticket, False, succeeded))
        self.steps.end_steps()

    def save(self, *spans, may_save: bool = True, succeeded: bool = True):
        plan = self.plan(*spans, may_save=may_save)
        self.end(plan, succeeded)
        return [] if plan is None else list(plan.saves)

    def ended(self, request) -> None:
        self.remove(request)
        self.steps.remove(request)

    def is_saved(self, request) -> list[bool]:
        return [self.cpu.arena_block_of(block_id) is not None for block_id in request.chain]

    def check_idle(self) -> None:
        super().check_idle()
        assert not self.steps.by_ticket
