"""KVStore: what lies in the CPU tier and on disk, and everything that is in flight between them.

The control plane of the tiers: lookups, saves, splices, evictions. One thread at a time; worker threads are polled.
Knows slots and ids, no tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from kvstore.blocks.ids import BlockId, Lineage, child_block_id, splice_parent_id, token_bytes
from kvstore.blocks.records import BlockRecord, Evict, Evicted, Load, TransferPlan, Transferred
from kvstore.disk.io_queue import Done, IoQueue, ReadDone, TaskDone
from kvstore.disk.records import label
from kvstore.memory.tier import CpuTier, SlotState
from kvstore.policy.conversation import Answer, Conversation
from kvstore.policy.planner import Planner
from kvstore.policy.steering import Steering
from kvstore.rope.splice import plan_splice
from kvstore.stats import StoreStats
from kvstore.store.lookup import Identity, Lookups, Match, Tracked
from kvstore.store.prefetch import Prefetcher
from kvstore.store.saving import Saver, SaveStep, StepSpan
from kvstore.store.splicing import NewBlock, Piece, Run, Splicer
from kvstore.store.write_back import WriteBack

HINT_S = 30.0  # that what was read on a hint is kept before other things


class Transfers(Protocol):
    """The data plane, as far as the store polls it."""

    @property
    def can_save(self) -> bool: ...

    def completed(self) -> list[Transferred]: ...


@dataclass(slots=True)
class _Step:
    """Slots that a step's transfers hold. has_saved: whether its saves succeeded, None until they have ended."""

    loads: tuple[Load, ...]
    saves: SaveStep
    begun: bool = False  # the data plane has it, and will say how it ended
    has_saved: bool | None = None
    is_garbage: bool = False  # it was computed behind blocks that did not come


class KVStore:
    """write_back None: there is no disk. erase and copy act on the arena's bytes."""

    def __init__(
        self,
        cpu: CpuTier,
        io: IoQueue,
        write_back: WriteBack | None,
        transfers: Transfers,
        identity: Identity,
        secret: bytes,
        planner: Planner,
        copy: Callable[[Sequence[Piece]], None],
        stats: StoreStats,
        clock: Callable[[], float],
        steering: Steering,
    ) -> None:
        self.cpu = cpu
        self._steering = steering
        self.disk = write_back
        self.stats = stats
        self._io = io
        self._transfers = transfers
        self._identity = identity
        self._secret = secret
        self._planner = planner
        self._clock = clock
        self.lookups = Lookups(cpu, write_back, identity, stats, clock)
        num_on_disk = 0 if write_back is None else write_back.capacity_bytes // planner.block_bytes
        self._prefetcher = Prefetcher(
            cpu, write_back, self.lookups, planner, stats, clock, identity.block_size, num_on_disk, steering.refresh
        )
        self._saver = Saver(cpu, self.lookups, identity.block_size, stats, clock)
        self._splicer = Splicer(cpu, io, write_back, copy, stats, clock)
        self._loads: list[Load] = []
        self._steps: dict[int, _Step] = {}
        self._next_ticket = 0
        self._ended: deque[Done | Transferred] = deque()  # what worker threads have finished and was not looked at yet
        self._to_forget: list[tuple[tuple[BlockId, ...], set[BlockId]]] = []  # what is below them is not known yet
        self._failed_blocks: list[int] = []
        self._to_erase: set[int] = set()  # slots with something forgotten in them that were held at that time

    # -- requests ----------------------------------------------------------------------------------------------------
    def arrive(self, request: Tracked, num_hbm_tokens: int) -> list[str]:
        """A request was queued: returns the tier of each block after those in HBM, as far as they are stored."""
        size = self._identity.block_size
        most = min((len(request.token_ids) - 1) // size, len(request.chain))  # one token is always left to compute
        self.lookups.arrive(request, num_hbm_tokens // size, most)
        self._prefetcher.arrive(request)
        return request.arrival

    def num_usable(self, request_id: str, num_hit: int) -> int:
        """Of `num_hit` blocks in HBM, those before a hole that is to be computed and saved now."""
        request = self.lookups.requests[request_id]
        return self._saver.num_usable(request.chain, num_hit, request.lineage.root)

    def match(self, request_id: str, num_computed_tokens: int, max_tokens: int) -> Match:
        """What can be loaded behind `num_computed_tokens`, and what is to be computed meanwhile."""
        size = self._identity.block_size
        first = num_computed_tokens // size
        return self._prefetcher.match(self.lookups.requests[request_id], first, first + max_tokens // size)

    def take(self, request_id: str, block_numbers: Sequence[int], first_token: int, num_tokens: int) -> None:
        """HBM blocks for a hit were allocated: their loads go into the next plan."""
        size = self._identity.block_size
        request = self.lookups.requests[request_id]
        self._loads += self.lookups.take(request, block_numbers, first_token // size, num_tokens // size)

    def leave(self, request_id: str, answer: Answer | None = None) -> Tracked | None:
        """The request ended or was preempted. Returns it as it was known."""
        self._prefetcher.leave(request_id)
        request = self.lookups.leave(request_id)
        if request is not None:
            self._saver.drop_partial(request)
            if self.disk is not None:
                self.disk.touch(request.chain, request.conversation)
            if request.conversation is not None:
                self._steering.leave(request.conversation, request.chain, answer)
        return request

    # -- steps -------------------------------------------------------------------------------------------------------
    def plan(self, spans: Sequence[StepSpan]) -> TransferPlan | None:
        """The transfers of a step: the loads that were taken since the last one, and where its tokens are saved."""
        # Registered before it holds anything: what is cut off in here can be dropped.
        ticket = self._next_ticket = self._next_ticket + 1
        step = self._steps[ticket] = _Step((), SaveStep([], [], []))
        for span in spans:
            if (request := self.lookups.requests.get(span.request_id)) is not None:
                self._prefetcher.scheduled(request)
        self._saver.plan(spans, self._transfers.can_save, step.saves)
        step.loads, self._loads = tuple(self._loads), []
        if not step.loads and not step.saves.saves:
            del self._steps[ticket]
            return None
        return TransferPlan(step.loads, tuple(step.saves.saves), ticket)

    def begun(self, ticket: int) -> None:
        """The data plane has the plan of this step. May be called without the lock."""
        self._steps[ticket].begun = True

    def drop_unbegun(self) -> None:
        """Steps that were planned and never began."""
        for ticket in [ticket for ticket, step in self._steps.items() if not step.begun]:
            step = self._steps.pop(ticket)
            self._release_loads(step)
            self._end_saves(step, False)
        self._saver.drop_unnamed()

    def drop_taken(self) -> None:
        """Loads that were taken for a step that was never planned."""
        loads, self._loads = self._loads, []
        for load in reversed(loads):
            self.cpu.release(load.slot)

    def take_failed_blocks(self) -> tuple[int, ...]:
        """HBM blocks whose load failed since the last call."""
        failed, self._failed_blocks = tuple(self._failed_blocks), []
        return failed

    # -- what has ended ----------------------------------------------------------------------------------------------
    def poll(self, reads_ahead: bool = True) -> bool:
        """Collect what worker threads have finished. True when there was something.

        reads_ahead: for those who wait, too, which takes a look at all of them.
        """
        self._saver.name()
        self._ended += [*self._transfers.completed(), *self._io.completed()]
        moved = bool(self._ended)
        while self._ended:  # one at a time: an error loses no other
            self._collect(self._ended.popleft())
        self._end_steps()
        self._splicer.poll()
        self._steering.poll()
        if reads_ahead:
            self._prefetcher.poll()
        if self.disk is not None:
            self.disk.pump()
            if self._to_forget and self.disk.index_loaded:
                self._forget_below()
        if self._to_erase:
            self._erase()
        return moved

    def _collect(self, ended: Done | Transferred) -> None:
        if isinstance(ended, Transferred):
            self._transferred(ended)
        elif isinstance(ended, TaskDone):
            for slot in self._splicer.task_done(ended.key, ended.succeeded):
                self._landed(slot)
        elif self.disk is not None:
            if isinstance(ended, ReadDone):
                self._planner.read(ended.read.view.nbytes, ended.seconds, ended.num_active)
                self.disk.read_done(ended)
                self._prefetcher.landed()
            else:
                self.disk.write_done(ended)

    def _transferred(self, done: Transferred) -> None:
        if (step := self._steps.get(done.ticket)) is None:  # dropped: cut off between its beginning and the note of it
            return
        if done.is_load:
            step.is_garbage = not done.succeeded
            self._end_loads(step, done.succeeded)
            if done.succeeded:
                self._planner.loaded(done.num_bytes, done.seconds)
        else:
            step.has_saved = done.succeeded

    def _end_steps(self) -> None:
        """Those whose transfers have ended and whose blocks have names."""
        for ticket, step in list(self._steps.items()):
            if step.has_saved is not None and not step.loads and not step.saves.num_unnamed:
                self._end_saves(step, step.has_saved and not step.is_garbage)
            if not step.loads and not step.saves.written:
                del self._steps[ticket]

    def _end_loads(self, step: _Step, succeeded: bool) -> None:
        if succeeded:
            self.stats.loaded += len(step.loads)
        else:
            self.stats.load_failures += len(step.loads)
            self._failed_blocks += [load.block_number for load in step.loads]
        self._release_loads(step)

    def _release_loads(self, step: _Step) -> None:
        for load in reversed(step.loads):
            self.cpu.release(load.slot)
        step.loads = ()

    def _end_saves(self, step: _Step, succeeded: bool) -> None:
        for _, slot in step.saves.complete:
            if self.cpu.state(slot) is not SlotState.PENDING:  # deleted meanwhile
                self.cpu.release(slot)
            elif succeeded:
                self.cpu.publish(slot)
                self.stats.saved += 1
                self._landed(slot)
            else:
                self._lose(slot)
                self.cpu.release(slot)
        for slot in step.saves.written:
            if not succeeded and self.cpu.state(slot) is SlotState.EMPTY:
                self.cpu.spoil(slot)
            elif not succeeded and self.cpu.state(slot) is SlotState.PENDING:
                self._lose(slot)  # a later step has filled it
            self.cpu.release(slot)
        step.saves.written, step.saves.complete = [], []

    def _lose(self, slot: int) -> None:
        """A block that was announced will not come, nor what later steps are saving behind it."""
        lost = {self.cpu.record(slot).block_id}  # type: ignore[union-attr]
        self._saver.lost(slot)
        self.cpu.fail(slot)
        self.stats.dropped_saves += 1
        for step in self._steps.values():
            for _, other in step.saves.complete:
                record = self.cpu.record(other)
                if record is not None and record.parent_id in lost and self.cpu.state(other) is SlotState.PENDING:
                    self.cpu.fail(other)
                    lost.add(record.block_id)

    def _landed(self, slot: int) -> None:
        """A READY slot, whose reference goes to the disk's queue."""
        if self.disk is not None:
            self.disk.add_dirty(slot)
        else:
            self.cpu.release(slot)

    # -- splices -----------------------------------------------------------------------------------------------------
    def splice(
        self,
        old_chain: Sequence[BlockId],
        old_tokens: Sequence[int],
        old_lineage: Lineage,
        spans: Sequence[tuple[int, int]],
        tenant: str,
    ) -> tuple[list[BlockId], Lineage] | None:
        """Begin a chain of the kept `spans` of old tokens; returns it and its lineage, or None when it cannot be made.

        The chain covers the full blocks that can be made; its first ones, before any token that moved, are the old
        ones. What is kept beyond it is to be computed. None: sources or slots are missing, or nothing can be reused.
        """
        size = self._identity.block_size
        planned = plan_splice(spans, size, len(old_chain))
        if not planned.blocks or not self.cpu.keep:
            return None
        kept = [token for start, end in spans for token in old_tokens[start:end]]
        conversation = self.find_conversation(old_chain)
        old = Tracked("", old_chain, old_tokens, old_lineage, tenant, conversation=conversation)
        records = {p.source_block: self.lookups.record(old, p.source_block) for b in planned.blocks for p in b.pieces}
        chain = list(old_chain[: planned.num_exact_blocks])
        sources = [
            (records[p.source_block].block_id, p.source_offset, p.length) for b in planned.blocks for p in b.pieces
        ]
        parent = splice_parent_id(self._secret, chain[-1] if chain else old_lineage.root, sources)
        first, blocks = len(chain), []
        splice_parent = parent
        for block in planned.blocks:
            tokens = token_bytes(kept[block.index * size : (block.index + 1) * size])
            block_id = child_block_id(parent, tokens)
            record = BlockRecord(
                block_id, parent, tokens, self._identity.fingerprint, label(tenant), self._identity.model, self._clock()
            )
            runs = tuple(Run(records[p.source_block], p.source_offset, p.offset, p.length) for p in block.pieces)
            blocks.append(NewBlock(record, runs, conversation))
            chain.append(block_id)
            parent = block_id
        if not self._splicer.start(blocks):
            return None
        if conversation is not None:
            self._steering.move(conversation, chain)
        return chain, Lineage(old_lineage.root, first, splice_parent, len(chain))

    # -- giving up, looking after ------------------------------------------------------------------------------------
    def prefetch(self, chain: Sequence[BlockId], tokens: Sequence[int], lineage: Lineage, tenant: str) -> int:
        """Read what of this chain is on disk only, when nobody waits; returns how many reads were begun.

        Its conversation is kept for a while, so that what was read is still there when the person presses enter.
        """
        if self.disk is None or not self.cpu.keep:
            return 0
        conversation = self.find_conversation(chain)
        until_s = self._clock() + HINT_S
        if conversation is not None and conversation.pinned_until_s < until_s:
            self._steering.pin(conversation, until_s)
        return self._prefetcher.hint(Tracked("", chain, tokens, lineage, tenant, conversation=conversation))

    def find_conversation(self, chain: Sequence[BlockId]) -> Conversation | None:
        """The conversation of this chain; one is made when nobody is known to have it but its end is stored."""
        found = self._steering.find(chain)
        if found is None and chain and self.lookups.holds(chain[-1]):
            found = self._steering.make(chain[-1])
            self._steering.adopt([(chain[-1], found)])
            self.cpu.touch(chain, self._clock(), found)
            if self.disk is not None:
                self.disk.touch(chain, found)
        return found

    def forget(self, block_ids: Sequence[BlockId]) -> set[BlockId]:
        """These blocks go from the CPU tier, the write queue and the disk, and their bytes from the arena.

        What was computed after them goes too: of turns that were never stored, of answers cut by a stop string. On disk
        they are gone when `is_forgotten`; what somebody still uses in the CPU tier is not found any more, and is erased
        when it has been released. Returns all of them; as long as the index of the disk is not loaded the set grows.
        """
        doomed = self._with_descendants(block_ids)
        self._forget(doomed)
        found = set(doomed)
        if self.disk is not None and not self.disk.index_loaded:
            self._to_forget.append((tuple(block_ids), found))
        return found

    def _forget_below(self) -> None:
        """The index is loaded: what hangs on disk below blocks that were forgotten before."""
        waiting, self._to_forget = self._to_forget, []
        for block_ids, found in waiting:
            below = [block_id for block_id in self._with_descendants(block_ids) if block_id not in found]
            found.update(below)
            if below:
                self._forget(below)

    def _forget(self, doomed: Sequence[BlockId]) -> None:
        self.stats.forgotten += len(doomed)
        held = {slot for slot in map(self.cpu.find, doomed) if slot is not None}
        held |= {request.partial[1] for request in self.lookups.requests.values() if request.partial is not None}
        held |= {slot for step in self._steps.values() for slot in step.saves.written}
        if self.disk is not None:
            self.disk.delete(doomed)
        for block_id in reversed(doomed):
            self.cpu.forget(block_id)
        self._steering.forget(doomed)
        self._to_erase |= held
        self._erase()

    def _with_descendants(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        """Parents before children, as far as they are known."""
        return self._with_cpu_descendants(block_ids if self.disk is None else self.disk.with_descendants(block_ids))

    def _with_cpu_descendants(self, block_ids: Iterable[BlockId]) -> list[BlockId]:
        """Those linked in the pool, and those whose parent was on disk only when they came."""
        children: dict[BlockId, list[BlockId]] = {}
        for record in map(self.cpu.record, self.cpu.blocks()):
            if record is not None:
                children.setdefault(record.parent_id, []).append(record.block_id)
        found = list(block_ids)
        known = set(found)
        for block_id in found:
            fresh = [child for child in children.get(block_id, ()) if child not in known]
            known.update(fresh)
            found += fresh
        return found

    def _erase(self) -> None:
        """Overwrite what was forgotten and is not held any more."""
        self.cpu.erase_stale()
        self._to_erase = {slot for slot in self._to_erase if not self.cpu.pool.is_free(slot)}

    def forget_tree(self, block_id: BlockId) -> None:
        """A block on disk is damaged: it goes, and with it what was computed after it."""
        if self.disk is not None:
            self.disk.delete_tree(block_id)

    def is_forgotten(self, block_ids: set[BlockId]) -> bool:
        """Whether what `forget` returned is gone from disk."""
        if self.disk is None:
            return True
        is_whole = all(found is not block_ids for _, found in self._to_forget)
        return is_whole and not self.disk.is_deleting(block_ids)

    def cannot_forget(self, block_ids: set[BlockId]) -> bool:
        """Whether the disk does not let these go at the moment; it is tried again later."""
        return self.disk is not None and self.disk.cannot_delete(block_ids)

    def evict(self, what: Evict) -> tuple[dict[str, Evicted], frozenset[BlockId]]:
        """Give up what matches, on CPU and disk, or with dry_run count it; also returns the ids."""
        slots = self._select_cpu(what)
        if not self.cpu.keep:  # nothing is linked there, and what waits to be written must not lose its parent
            ids = [record.block_id for record in map(self.cpu.record, slots) if record is not None]
            slots = [slot for slot in map(self.cpu.find, self._with_cpu_descendants(ids)) if slot is not None]
        records = [record for record in map(self.cpu.record, slots) if record is not None]
        found = {"cpu": Evicted(len(slots), len(slots) * self._planner.block_bytes)}
        chosen = {record.block_id for record in records}
        if not what.dry_run:
            for slot in slots:
                self.cpu.fail(slot)
        if self.disk is not None:
            on_disk, found["disk"] = self.disk.select(what)
            chosen.update(on_disk)
            if not what.dry_run:
                self.disk.delete(on_disk)
        if not what.dry_run:
            self.cpu.erase_stale()
        return found, frozenset(chosen)

    def _select_cpu(self, what: Evict) -> list[int]:
        """Slots that match, the least recently used first, and tails before heads."""
        conditions = (what.unused_for_s, what.model, what.block_ids, what.to_bytes)
        if not what.everything and all(condition is None for condition in conditions):
            return []
        now, pool = self._clock(), self.cpu.pool
        most = pool.num_cached
        if what.to_bytes is not None:
            most = max(0, most - what.to_bytes // self._planner.block_bytes)

        def matches(slot: int) -> bool:
            record = self.cpu.record(slot)
            assert record is not None
            if what.unused_for_s is not None and now - self.cpu.last_used_s(slot) < what.unused_for_s:
                return False
            if record.model != (what.model or record.model):
                return False
            return what.block_ids is None or record.block_id in what.block_ids

        return list(islice(pool.from_tails(self.cpu.last_used_s, matches), most))

    def finish(self) -> None:
        """The store is about to be closed."""
        self._prefetcher.drop_hints()
        if self.disk is not None:
            self.disk.finish()

    @property
    def is_idle(self) -> bool:
        """Nothing is in flight and nothing is to be written."""
        if self._steps or self._ended or not self._splicer.is_idle:
            return False
        return self.disk.is_drained if self.disk else self._io.is_idle

    def as_dict(self) -> dict[str, object]:
        """Gauges and counters."""
        found: dict[str, object] = {
            "cpu": self.cpu.as_dict(self._planner.block_bytes),
            "store": {
                **self.stats.as_dict(), "unsaved": self._saver.num_unsaved,
                **self._planner.as_dict(), **self._prefetcher.as_dict(),
            },
            "policy": self._steering.as_dict(),
        }
        if self.disk is not None:
            found["disk"] = self.disk.stats()
        return found

    def check_integrity(self, idle: bool) -> None:
        """Assert that counts agree; with `idle`, that nothing is held."""
        self.cpu.check_integrity(idle)
        self._prefetcher.check_integrity(idle)
        assert not idle or not self._steps, f"steps in flight while idle: {list(self._steps)}"
