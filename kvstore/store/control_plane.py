"""KVStore: what is in the CPU tier and on disk, and everything in flight between them.

The control plane of the tiers: requests, steps, splices, evictions. One thread at a time; worker threads are polled.
Knows arena blocks and ids, but no tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvstore.blocks.ids import BlockId, Lineage, quantised_id, state_chain
from kvstore.blocks.records import BlockRecord, Loss, SplicedState, TransferPlan, Transferred
from kvstore.policy.conversation import Answer, Conversation
from kvstore.policy.planner import Planner
from kvstore.remote.spread import Believed, BelievedContents
from kvstore.store.context import Identity, Stage, StoreContext
from kvstore.store.deletion import Deletion
from kvstore.store.old_states import OldStates
from kvstore.store.prefetch import Prefetcher
from kvstore.store.quantised import IsHeld, find_copies
from kvstore.store.remote import RemoteBlocks, RemoteSource
from kvstore.store.requests import Requests, Tracked
from kvstore.store.saving import StepsInFlight
from kvstore.store.seam import Lookup, Match, StepSpan, Transfers
from kvstore.store.splicing import Piece, Splicer, plan_chain
from kvstore.store.stored import ChainContent, StoredBlocks, TierReads
from kvstore.store.write_back import WriteBack
from kvstore.tiers.port import Done, ReadDone, TaskDone, WriteDone
from kvstore.tiers.worker import TierWorker

HINT_S = 30.0  # how long blocks that were read on a hint are preferred to others


class KVStore:
    """io: works for the disk, and copies. disk, remote: None without such a tier. copy: copies bytes within the arena.

    reads: None without a tier below the CPU tier.
    """

    def __init__(
        self, context: StoreContext, planner: Planner, identity: Identity, io: TierWorker,
        transfers: Transfers, copy: Callable[[Sequence[Piece], Sequence[SplicedState]], None],
        disk: WriteBack | None,
        remote: RemoteSource | None = None,
    ) -> None:  # fmt: skip
        self.cpu, self.stats = cpu, stats = context.cpu, context.stats
        self.steering = context.steering
        self.remote: RemoteBlocks | None = None
        self.disk, self.planner = disk, planner
        self._io, self._transfers, self._clock = io, transfers, context.clock
        below: list[Believed] = [] if disk is None else [io]
        if remote is not None:
            below.append(remote.tier)
        self.reads = reads = TierReads(context, below) if below else None
        contents = None if disk is None else disk.contents
        believed = None if remote is None else BelievedContents(remote.tier, context.clock)
        self.stored = StoredBlocks(context, contents, reads, identity, believed)
        self.requests = Requests(cpu, self.stored, reads, stats)
        num_disk_blocks = 0 if disk is None else disk.file.capacity_bytes // planner.block_bytes
        self.prefetcher = Prefetcher(context, self.requests, planner, reads, num_disk_blocks)
        if remote is not None and believed is not None and reads is not None:
            self.remote = RemoteBlocks(
                context, planner, remote, believed, disk, self.stored, reads, self.prefetcher.answered
            )
        self.splicer = Splicer(cpu, io, self.stored, reads, copy, stats)
        self._landed = cpu.release if disk is None else disk.add_dirty  # takes over a READY arena block's reference
        self.steps = StepsInFlight(cpu, self.requests, self.stored, stats, disk is not None, self._landed)
        self.deletion = Deletion(context, disk, planner.block_bytes, self.stored, self.steps.being_filled, self.remote)
        self.old_states = OldStates(self.stored, cpu, disk, None if self.remote is None else self.remote.delete)
        self.ended: deque[Done | Transferred] = deque()  # finished by worker threads, not processed yet

    def find_copies(self, content: ChainContent, is_in_hbm: IsHeld) -> Lineage | None:
        """See `KVConnector.find_copies`."""
        return find_copies(content, is_in_hbm, self.stored, self.cpu, self.planner)

    def arrive(self, request: Tracked, num_hbm_tokens: int) -> tuple[str, ...]:
        """Note a queued request. Returns the tier of each block after those in HBM, as far as they are stored."""
        self.requests.arrive(request, num_hbm_tokens // self.stored.block_size)
        if self.remote is not None:
            self.remote.arrive(request)
        self.prefetcher.arrive(request)
        return tuple(request.tiers)

    def match(self, request_id: str, num_computed_tokens: int, max_tokens: int) -> Match:
        """What can be loaded after `num_computed_tokens`, and what to compute meanwhile."""
        size, request = self.stored.block_size, self.requests.by_id[request_id]
        first = num_computed_tokens // size
        is_new = not request.wanted.is_open
        usable = begin = self.steps.num_usable(request, first) if is_new else first
        if usable < first and self.requests.keeps_states:
            begin = 0  # it begins where a state is stored, which may be before
        found = self.prefetcher.match(request, begin, first + max_tokens // size)
        self.planner.num_prompts += is_new and found.lookup is not Lookup.PENDING  # until the step is planned
        found = request.with_late_tiers(found)
        num_unsaved = first - (begin if found.num_tokens else usable)
        return found if not num_unsaved else replace(found, num_unsaved=num_unsaved * size)

    def load(
        self, request_id: str, block_numbers: Sequence[int], first_token: int, num_tokens: int,
        rows: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Add the loads of a hit, whose HBM blocks were allocated, to the next plan. rows: where its states go, see
        `KVConnector.update_state_after_alloc`.
        """
        size, request = self.stored.block_size, self.requests.by_id[request_id]
        if request.restored is not None:
            states = self.requests.hand_out_states(request, first_token // size, rows)
            self.steps.add_loads(states)
        self.steps.add_loads(self.requests.hand_out(request, block_numbers, first_token // size, num_tokens // size))

    def save_states(self, request: Tracked, states: Sequence[tuple[int, int]]) -> TransferPlan | None:
        """Plan to save states of a request that leaves, each behind so many of its tokens, as it is in its row; None if
        all are stored, or cannot be. If there is too little room, those at its end come first.
        """
        size, new = self.stored.block_size, list[tuple[int, list[BlockRecord]]]()
        for num_tokens, row in reversed(states):
            records = self.stored.state_records(request, num_tokens // size)
            if self.stored.holds(records[-1].block_id):
                continue
            if self.stored.holds(records[0].block_id):  # the rest of one of which a part was lost
                self.old_states.delete([record.block_id for record in records])
            new.append((row, records))
        borders = {num_tokens // size for num_tokens, _ in states}
        self.old_states.replace(request, borders)
        plan = self.steps.plan_states(new, request.conversation) if new else None
        for border in sorted(border for border in borders if border + 1 not in borders):
            content = self.stored.with_states(request, border)
            if request.conversation is not None:
                self.stored.claim_states(content, request.conversation)
        return plan

    def remove(self, request_id: str, answer: Answer | None = None) -> Tracked | None:
        """Remove a request that has ended or was preempted, and return it."""
        self.steps.name_full_blocks(ending=self.requests.by_id.get(request_id))
        self.prefetcher.remove(request_id)
        request = self.requests.remove(request_id)
        if request is not None:
            self.steps.remove(request)
            if self.disk is not None:
                self.disk.contents.touch(request.chain, request.conversation)
            if request.conversation is not None:
                self.steering.end_request(request.conversation, request.chain, answer)
        return request

    def extend(self, request_id: str, new_ids: Sequence[BlockId], new_tokens: Sequence[int]) -> None:
        """Add blocks that have become full; see `StepSpan`."""
        if new_tokens and (request := self.requests.by_id.get(request_id)) is not None:
            request.extend(new_ids, new_tokens)

    def plan(self, spans: Sequence[StepSpan]) -> TransferPlan | None:
        """The transfers of a step: the loads added since the last one, and where its tokens are saved."""
        self.planner.num_prompts = sum(span.num_tokens > 1 for span in spans)
        for span in spans:
            if (request := self.requests.by_id.get(span.request_id)) is not None:
                self.prefetcher.start(request)
        return self.steps.plan(spans, self._transfers.can_save)

    def poll(self, reads_ahead: bool = True) -> bool:
        """Collect what worker threads have finished. Returns whether there was anything.

        reads_ahead: also start reads for waiting requests, which examines all of them.
        """
        self.steps.name_full_blocks()
        self.ended += [*self._transfers.completed(), *self._io.completed()]
        moved = bool(self.ended)
        while self.ended:  # one at a time, so that an error loses none of the others
            self._collect(self.ended.popleft())
        if self.remote is not None and self.remote.poll():
            self.prefetcher.landed()
            moved = True
        self.steps.end_steps()
        if self.splicer.jobs:
            self.splicer.poll()
        self.steering.poll()
        if reads_ahead:
            self.prefetcher.poll()
        if self.disk is not None:
            self.disk.pump()
        if self.old_states.waiting:
            self.old_states.poll()
        if self.deletion.to_erase:
            self.deletion.erase()
        return moved

    def _collect(self, ended: Done | Transferred) -> None:
        if isinstance(ended, Transferred):
            if ended.is_load and ended.succeeded:
                self.planner.loaded(ended.num_bytes, ended.seconds)
            self.steps.transferred(ended)
        elif isinstance(ended, TaskDone):
            for arena_block in self.splicer.task_done(ended.key, ended.succeeded):
                self._landed(arena_block)
        elif self.disk is not None:
            if isinstance(ended, ReadDone) and self.reads is not None:
                self.planner.read(ended.job.view.nbytes, ended.seconds, ended.num_active)
                self.disk.read_done(ended, self.reads)
                self.prefetcher.landed()
            elif isinstance(ended, WriteDone):
                self.disk.write_done(ended)

    def why_missing(self, request_id: str, block_id: BlockId, since_s: float) -> Loss:
        """Why a request is to compute a block that was there at `since_s`."""
        losses, disk, believed = self.stats.losses, self.disk, None if self.remote is None else self.remote.contents
        known = losses.get(block_id)
        is_unreadable = known is not None and known.cause == "unreadable"
        if not is_unreadable and (tiers := self.stored.tiers((block_id,), 0, 1)):
            if self.stored.is_being_saved(block_id):
                return Loss("being_written", tiers[0])
            request = self.requests.by_id[request_id]
            lacks_room, is_behind = request.lacks_room, block_id not in request.loads.chain[: request.border]
            if self.requests.keeps_states and is_behind and not (request.is_computed or lacks_room):
                last = state_chain(request.chain[request.num_known - 1], 1, self.stored.block_size)[0]
                return Loss("no_checkpoint", tiers[0], why=(losses.get(last) or Loss("unknown")).why)
            return Loss("not_loaded", tiers[0], why="no room to read it" if lacks_room else "computing is quicker")
        if not is_unreadable and (tiers := self.stored.tiers((quantised_id(block_id),), 0, 1)):
            return Loss("not_loaded", tiers[0], why="only a quantised copy is there")
        if believed is not None and believed.is_away(block_id) and (known is None or believed.has_had(block_id)):
            return Loss("remote_away", believed.name)
        begun_s = None if disk is None else disk.file.created_s
        if known is None and begun_s is not None and since_s < begun_s:
            return Loss("store_replaced", "disk", begun_s)
        return losses.why(block_id, since_s, disk is not None or believed is not None)

    def splice(
        self, old: ChainContent, spans: Sequence[tuple[int, int]], secret: bytes,
        head: tuple[Sequence[BlockId], Lineage] | None = None,
    ) -> tuple[list[BlockId], Lineage] | None:  # fmt: skip
        """See `KVConnector.splice`. The chain covers the full blocks that can be made; the rest must be computed."""
        can_splice = self.cpu.keep and (head is None or not head[0] or self.stored.holds(head[0][-1]))
        planned = plan_chain(old, spans, self.stored, secret, head) if can_splice else None
        if planned is None:
            return None
        conversation = self._conversation_of(old.chain)
        run = planned.lineage.splices[-1]
        is_new = not self.stored.keeps(planned.chain[run.first])
        if not self.splicer.start(planned.blocks, conversation):
            return None
        if self.disk is not None and is_new and run.first:
            self.disk.note_splice(*planned.chain[run.first - 1 : run.first + 1])
        if conversation is not None and planned.lineage.root == old.lineage.root:
            self.steering.move(conversation, planned.chain)
        elif conversation is not None:  # a span stays where it is, and has come back
            self.steering.end_request(self.steering.arrive(old.chain, None, is_stored=True), old.chain)
            self._touch(old.chain, conversation)
        return planned.chain, planned.lineage

    def prefetch(self, content: ChainContent) -> None:
        """Read blocks of this chain that are only on disk, while nobody waits for reads, and keep its conversation for
        a while, so that they are still in memory when the user presses enter.
        """
        if (self.disk is None and self.remote is None) or not self.cpu.keep:
            return
        conversation = self._conversation_of(content.chain)
        if conversation is not None and conversation.pinned_until_s < self._clock() + HINT_S:
            self.steering.pin(conversation, HINT_S)
        hint = Tracked(content.chain, content.tokens, content.lineage, content.tenant, conversation=conversation)
        if self.remote is None or not self.remote.questions.ask(hint):
            self.prefetcher.hint(hint)

    def pin(self, chain: Sequence[BlockId], seconds: float | None, expires_s: float | None, tenant: str | None) -> None:
        if (conversation := self._conversation_of(chain)) is not None:
            self.steering.pin(conversation, seconds, expires_s, tenant, len(chain))
            if self.requests.keeps_states:
                self._claim_states(chain, conversation)

    def _claim_states(self, chain: Sequence[BlockId], conversation: Conversation) -> None:
        """Give the states that a request begins with behind this chain to its conversation."""
        content = ChainContent(list(chain), b"", Lineage(chain[0]), "")
        if (found := self.stored.restorable(content, 0, len(self.stored.tiers(chain, 0, len(chain))))) is not None:
            self.stored.claim_states(found, conversation)

    def _conversation_of(self, chain: Sequence[BlockId]) -> Conversation | None:
        """The conversation of this chain, or of its copies; makes one if it has none and its end is stored."""
        found = self.steering.conversation_of(chain)
        if found is None and chain and not self.stored.holds(chain[-1]) and self.stored.holds(quantised_id(chain[-1])):
            chain = [quantised_id(one) for one in chain]
            found = self.steering.conversation_of(chain)
        if found is None and chain and self.stored.holds(chain[-1]):
            found = self.steering.make(chain[-1])
            self.steering.adopt([(chain[-1], found)])
            self._touch(chain, found)
        return found

    def _touch(self, chain: Sequence[BlockId], conversation: Conversation) -> None:
        self.cpu.touch(chain, conversation)
        if self.disk is not None:
            self.disk.contents.touch(chain, conversation)

    def finish(self) -> None:
        """Prepare for closing."""
        self.prefetcher.drop_hints()
        if self.reads is not None:
            self.reads.finish()
        if self.disk is not None:
            self.disk.finish()

    def stages(self) -> list[Stage]:
        """Steps and splices; writes and deletions; what the remote tier gets of it."""
        disk = [] if self.disk is None else [self.disk.in_flight, self.disk.contents.removing.in_flight]
        remote = [] if self.remote is None else self.remote.stages()
        return [self.steps.by_ticket.keys, self.splicer.jobs.keys, *disk, *remote]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight or waiting to be written."""
        if self.steps.by_ticket or self.ended or self.splicer.jobs or self.old_states.waiting:
            return False
        is_drained = not self.reads and (self.disk.is_drained if self.disk else self._io.is_idle)
        return is_drained and (self.remote is None or self.remote.is_idle)

    def as_dict(self) -> dict[str, object]:
        """Gauges and counters."""
        counts = self.stats.as_dict() | self.planner.as_dict() | self.prefetcher.as_dict()
        return {
            "cpu": self.cpu.as_dict(self.planner.block_bytes),
            "store": counts
            | {
                "unsaved": self.steps.num_unsaved,
                "state_blocks": self.stored.num_state_blocks,
                "window_blocks": self.stored.state_span if self.stored.has_windows else 0,
            },
            "policy": self.steering.as_dict(),
            **({} if self.disk is None else {"disk": {**self.disk.stats(), "reads_in_flight": len(self.reads or ())}}),
            **({} if self.remote is None else {"remote": self.remote.as_dict()}),
        }

    def check_integrity(self, idle: bool) -> None:
        """Assert that counts agree; with `idle`, that nothing is held."""
        self.cpu.check_integrity(idle)
        self.prefetcher.check_integrity(idle)
        assert not idle or not self.steps.by_ticket, f"steps in flight while idle: {list(self.steps.by_ticket)}"
