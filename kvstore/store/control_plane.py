"""KVStore: what lies in the CPU tier and on disk, and everything that is in flight between them.

The control plane of the tiers: requests, steps, splices, evictions. One thread at a time; worker threads are polled.
Knows slots and ids, no tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from kvstore.blocks.ids import BlockId, Lineage, token_bytes
from kvstore.blocks.records import TransferPlan, Transferred
from kvstore.disk.io_queue import Done, IoQueue, ReadDone, TaskDone
from kvstore.memory.tier import CpuTier
from kvstore.policy.conversation import Answer, Conversation
from kvstore.policy.planner import Planner
from kvstore.policy.steering import Steering
from kvstore.stats import StoreStats
from kvstore.store.deletion import Deletion
from kvstore.store.matching import Matcher, choose
from kvstore.store.prefetch import Prefetcher
from kvstore.store.requests import Requests, Tracked
from kvstore.store.saving import Saver
from kvstore.store.seam import Match, StepSpan
from kvstore.store.splicing import Piece, Splicer, plan_chain
from kvstore.store.steps import StepsInFlight
from kvstore.store.stored import ChainContent, Identity, StoredBlocks
from kvstore.store.write_back import WriteBack

HINT_S = 30.0  # that what was read on a hint is kept before other things


class Transfers(Protocol):
    """The data plane, as far as the store polls it."""

    @property
    def can_save(self) -> bool: ...

    def completed(self) -> list[Transferred]: ...


class KVStore:
    """disk None: there is none. copy: acts on the arena's bytes."""

    def __init__(
        self,
        cpu: CpuTier,
        io: IoQueue,
        disk: WriteBack | None,
        transfers: Transfers,
        identity: Identity,
        planner: Planner,
        copy: Callable[[Sequence[Piece]], None],
        stats: StoreStats,
        clock: Callable[[], float],
        steering: Steering,
    ) -> None:
        self.cpu, self.disk, self.stats, self.steering, self.planner = cpu, disk, stats, steering, planner
        self._io, self._transfers, self._clock = io, transfers, clock
        reads = None if disk is None else disk.reads
        self.stored = StoredBlocks(cpu, None if disk is None else disk.contents, reads, identity, stats, clock)
        self.requests = Requests(cpu, self.stored, reads, stats)
        self.prefetcher = Prefetcher(
            cpu, self.requests, lambda request: choose(request, planner, reads),
            0 if disk is None else disk.capacity_bytes // planner.block_bytes, steering.refresh,
        )  # fmt: skip
        self._matcher = Matcher(self.requests, self.prefetcher, planner, reads, stats, clock, cpu.keep)
        self.saver = Saver(cpu, self.requests, self.stored, stats, disk is not None)
        self.splicer = Splicer(cpu, io, self.stored, reads, copy, stats)
        self.steps = StepsInFlight(cpu, self.saver, stats, self._landed)
        self.deletion = Deletion(cpu, disk, steering, stats, planner.block_bytes, self._unnamed_slots)
        self.ended: deque[Done | Transferred] = deque()  # what worker threads have finished and was not looked at yet

    def arrive(self, request: Tracked, num_hbm_tokens: int) -> list[str]:
        """A request was queued: returns the tier of each block after those in HBM, as far as they are stored."""
        self.requests.arrive(request, num_hbm_tokens // self.stored.block_size)
        self.prefetcher.arrive(request)
        return request.arrival

    def match(self, request_id: str, num_computed_tokens: int, max_tokens: int) -> Match:
        """What can be loaded behind `num_computed_tokens`, and what is to be computed meanwhile."""
        size, request = self.stored.block_size, self.requests.by_id[request_id]
        first = num_computed_tokens // size
        usable = first if request.wanted.is_open else self.saver.num_usable(request, first)
        found = self._matcher.match(request, usable, first + max_tokens // size)
        return found if usable == first else replace(found, num_unsaved=(first - usable) * size)

    def load(self, request_id: str, block_numbers: Sequence[int], first_token: int, num_tokens: int) -> None:
        """HBM blocks for a hit were allocated: their loads go into the next plan."""
        size, request = self.stored.block_size, self.requests.by_id[request_id]
        self.steps.add_loads(self.requests.hand_out(request, block_numbers, first_token // size, num_tokens // size))

    def remove(self, request_id: str, answer: Answer | None = None) -> Tracked | None:
        """The request ended or was preempted. Returns it as it was known."""
        self.saver.name_full_blocks(ending=self.requests.by_id.get(request_id))
        self.prefetcher.remove(request_id)
        request = self.requests.remove(request_id)
        if request is not None:
            self.saver.drop_partial(request)
            if self.disk is not None:
                self.disk.contents.touch(request.chain, request.conversation)
            if request.conversation is not None:
                self.steering.leave(request.conversation, request.chain, answer)
        return request

    def extend(self, request_id: str, new_ids: Sequence[BlockId], new_tokens: Sequence[int]) -> None:
        """Blocks of it have become full; see `StepSpan`."""
        if new_tokens and (request := self.requests.by_id.get(request_id)) is not None:
            request.chain += new_ids
            request.tokens += token_bytes(new_tokens)

    def plan(self, spans: Sequence[StepSpan]) -> TransferPlan | None:
        """The transfers of a step: the loads that were added since the last one, and where its tokens are saved."""
        for span in spans:
            if (request := self.requests.by_id.get(span.request_id)) is not None:
                self.prefetcher.start(request)
        return self.steps.plan(spans, self._transfers.can_save)

    def _unnamed_slots(self) -> Iterator[int]:
        for request in self.requests.by_id.values():
            if request.saving.partial is not None:
                yield request.saving.partial[1]
        for step in self.steps.by_ticket.values():
            yield from step.saves.written

    def poll(self, reads_ahead: bool = True) -> bool:
        """Collect what worker threads have finished. True when there was something.

        reads_ahead: for those who wait, too, which takes a look at all of them.
        """
        self.saver.name_full_blocks()
        self.ended += [*self._transfers.completed(), *self._io.completed()]
        moved = bool(self.ended)
        while self.ended:  # one at a time: an error loses no other
            self._collect(self.ended.popleft())
        self.steps.end_steps()
        self.splicer.poll()
        self.steering.poll()
        if reads_ahead:
            self.prefetcher.poll()
        if self.disk is not None:
            self.disk.pump()
        self.deletion.poll()
        return moved

    def _collect(self, ended: Done | Transferred) -> None:
        if isinstance(ended, Transferred):
            if ended.is_load and ended.succeeded:
                self.planner.loaded(ended.num_bytes, ended.seconds)
            self.steps.transferred(ended)
        elif isinstance(ended, TaskDone):
            for slot in self.splicer.task_done(ended.key, ended.succeeded):
                self._landed(slot)
        elif self.disk is not None:
            if isinstance(ended, ReadDone):
                self.planner.read(ended.read.view.nbytes, ended.seconds, ended.num_active)
                self.disk.read_done(ended)
                self.prefetcher.landed()
            else:
                self.disk.write_done(ended)

    def _landed(self, slot: int) -> None:
        """A READY slot, whose reference goes to the disk's queue."""
        if self.disk is not None:
            self.disk.add_dirty(slot)
        else:
            self.cpu.release(slot)

    def splice(
        self, old: ChainContent, spans: Sequence[tuple[int, int]], secret: bytes
    ) -> tuple[list[BlockId], Lineage] | None:
        """See `KVConnector.splice`. The chain covers the full blocks that can be made; the rest is to be computed."""
        planned = plan_chain(old, spans, self.stored, secret) if self.cpu.keep else None
        if planned is None:
            return None
        conversation = self._conversation_of(old.chain)
        if not self.splicer.start(planned.blocks, conversation):
            return None
        if conversation is not None:
            self.steering.move(conversation, planned.chain)
        return planned.chain, planned.lineage

    def prefetch(self, hint: Tracked) -> None:
        """Read what of this chain is on disk only, when nobody waits.

        Its conversation is kept for a while, so that what was read is still there when the person presses enter.
        """
        if self.disk is None or not self.cpu.keep:
            return
        conversation = hint.conversation = self._conversation_of(hint.chain)
        if conversation is not None and conversation.pinned_until_s < self._clock() + HINT_S:
            self.steering.pin(conversation, HINT_S)
        self.prefetcher.hint(hint)

    def pin(self, chain: Sequence[BlockId], seconds: float | None, expires_s: float | None) -> None:
        if (conversation := self._conversation_of(chain)) is not None:
            self.steering.pin(conversation, seconds, expires_s)

    def _conversation_of(self, chain: Sequence[BlockId]) -> Conversation | None:
        """The conversation of this chain; one is made when nobody is known to have it but its end is stored."""
        found = self.steering.find(chain)
        if found is None and chain and self.stored.holds(chain[-1]):
            found = self.steering.make(chain[-1])
            self.steering.adopt([(chain[-1], found)])
            self.cpu.touch(chain, found)
            if self.disk is not None:
                self.disk.contents.touch(chain, found)
        return found

    def finish(self) -> None:
        """The store is about to be closed."""
        self.prefetcher.drop_hints()
        if self.disk is not None:
            self.disk.finish()

    @property
    def is_idle(self) -> bool:
        """Nothing is in flight and nothing is to be written."""
        if self.steps.by_ticket or self.ended or not self.splicer.is_idle:
            return False
        return self.disk.is_drained if self.disk else self._io.is_idle

    def as_dict(self) -> dict[str, object]:
        """Gauges and counters."""
        found: dict[str, object] = {
            "cpu": self.cpu.as_dict(self.planner.block_bytes),
            "store": {
                **self.stats.as_dict(), "unsaved": self.saver.num_unsaved,
                **self.planner.as_dict(), **self.prefetcher.as_dict(),
            },
            "policy": self.steering.as_dict(),
        }
        if self.disk is not None:
            found["disk"] = self.disk.stats()
        return found

    def check_integrity(self, idle: bool) -> None:
        """Assert that counts agree; with `idle`, that nothing is held."""
        self.cpu.check_integrity(idle)
        self.prefetcher.check_integrity(idle)
        assert not idle or not self.steps.by_ticket, f"steps in flight while idle: {list(self.steps.by_ticket)}"
