"""From the CPU tier to the disk: which dirty arena block is written next, what leaves the disk to make room for it, and
what becomes of failed writes and reads.

A dirty arena block holds one reference until its write is durable. What leaves the disk is evicted, deleted or lost;
what CPU and disk hold together stays closed under parents. A disk that failed is tried again after a longer while each
time.

Control plane, one thread; the worker of the disk does the work and is polled. Eviction from the CPU tier is metadata
only because every block that is free there has been written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from functools import partial

from msgspec.structs import replace

from kvstore.blocks.forest import InFlight
from kvstore.blocks.holdings import Holdings
from kvstore.blocks.ids import BlockId, is_quantised, quantised_id, with_quantised
from kvstore.blocks.records import BlockRecord, Evict, Evicted, ReadResult
from kvstore.disk.blocks_file import WATERMARK
from kvstore.disk.format import WriteError
from kvstore.disk.index import TenantBytes
from kvstore.disk.opening import OpenDisk
from kvstore.errors import StoreError
from kvstore.store.context import StoreContext
from kvstore.store.stored import Deletions, DiskContents, TierReads
from kvstore.tiers.port import ReadDone, WriteDone, WriteJob
from kvstore.tiers.worker import BATCH_BYTES, TierWorker

PAGE_BYTES = 4096
MAX_QUEUED_BYTES = 2 * BATCH_BYTES  # other dirty blocks wait in the arena, where a deletion still finds them
MAX_FULL = 5  # how often in a row the map may be full before the disk counts as degraded
GIVE_UP_S = 1.0  # how long a block waits for room while nothing may be evicted


class WriteBack:
    """io: the disk's. tenant_bytes: how much one tenant's blocks may take. health: of writes; a damaged file is put
    aside before it is written to again. queued: what the writer has, in bytes of the file. before_splice: by the first
    block of a splice, which names another parent, the block in front of it.

    Parents of what waits and of what the writer has are kept until that is written.
    """

    def __init__(
        self, context: StoreContext, on_disk: OpenDisk, io: TierWorker, tenant_bytes: int | None = None,
        holdings: Holdings | None = None,
    ) -> None:  # fmt: skip
        self.tier = disk = on_disk.tier
        self.file = disk.file
        self._cpu, self._stats, self._clock = context.cpu, context.stats, context.clock
        self._io, self._view, self._tenant_bytes = io, context.view, tenant_bytes
        self.contents = DiskContents(disk, on_disk.index, Deletions(io), context.steering, context.clock, holdings)
        self.health = io.health
        self.dirty: deque[int] = deque()
        self.submitted: dict[int, BlockId] = {}  # by arena block: what the writer has
        self._num_submitted = InFlight[BlockId]()
        self._unsure: set[int] = set()  # of these, those that may have gone to an environment that was set aside
        self.queued = TenantBytes()
        self.before_splice: dict[BlockId, BlockId] = {}
        self._num_full = 0
        self._stuck_since_s: float | None = None

    # -- reads -------------------------------------------------------------------------------------------------------
    def read_done(self, done: ReadDone, reads: TierReads) -> None:
        """A read from disk has ended."""
        if done.result is ReadResult.OK:
            self._stats.read += 1
            reads.publish(done.job.handle)
        else:
            block_id, gone = done.job.record.block_id, reads.fail(done, self._stats.read_failures)
            is_lost = done.result in (ReadResult.MISSING, ReadResult.CORRUPT) or not self.contents.contains(block_id)
            if is_lost and gone is not None:  # a quarantine may have come in between
                self.delete_tree(block_id, gone, done.result)
            elif not is_lost:
                why = done.result.value
                self._stats.losses.note(done.result.lost_by, "disk", block_id, why=why)
        self._cpu.release(done.job.handle)

    # -- writes ------------------------------------------------------------------------------------------------------
    def add_dirty(self, arena_block: int) -> None:
        """Write this READY arena block, and take over its reference."""
        self.dirty.append(arena_block)
        for parent_id in self._parents_of(self._record(arena_block)):
            self._cpu.parents_in_flight[parent_id] += 1

    def _record(self, arena_block: int) -> BlockRecord:
        record = self._cpu.record(arena_block)
        assert record is not None
        return record

    def _parents_of(self, record: BlockRecord) -> Sequence[BlockId]:
        """The block before this one, and its copy: the disk may have either."""
        return with_quantised([record.parent_id]) if self.contents.quantises else (record.parent_id,)

    def _let_parents_go(self, record: BlockRecord) -> None:
        """A block was written, or never will be."""
        for parent_id in self._parents_of(record):
            self._cpu.parents_in_flight.end(parent_id)

    def _file_bytes(self, arena_block: int) -> int:
        """What an incompressible block takes in the file: whole pages, with the value's header."""
        return (self._view(arena_block).nbytes // PAGE_BYTES + 1) * PAGE_BYTES

    def note_splice(self, before: BlockId, first: BlockId) -> None:
        """See `before_splice`. Those that were given up before they were written are forgotten: they have no place in
        memory any more.
        """
        known = self.before_splice.items()
        kept = {one: other for one, other in known if self._cpu.arena_block_of(one) is not None}
        self.before_splice = kept | {first: before}

    def in_flight(self) -> set[int]:
        """Arena blocks that are dirty or that the writer has."""
        return {*self.submitted, *self.dirty}

    def pump(self) -> None:
        """Hand dirty arena blocks to the writer, within its bounds, and make room for them. Called once per poll."""
        if self.health.is_paused or (self.tier.file.broken and not self._quarantine()):
            return
        if self.contents.removing.pump():
            return  # they go alone, as they make room
        while self.dirty and self.queued.total < MAX_QUEUED_BYTES and self._submit_first():
            pass

    def _submit_first(self) -> bool:
        """Submit the first dirty arena block. Returns False if it has to wait."""
        arena_block = self.dirty[0]
        own, size = self._record(arena_block), self._file_bytes(arena_block)
        record = self._as_written(own)
        if not self._cpu.is_current(arena_block) or self.contents.contains(record.block_id):
            self._drop_first(own)  # deleted, or there already
            return True
        if record is not own and not self._will_have(record.parent_id) and self._is_ahead(own):
            self.dirty.rotate(-1)
            return True
        if record is not own and self._lacks_parent(record):
            self._refuse_first(own, "the disk has evicted what it is built on")
            return True
        if self._is_over_limit(record.tenant, size):
            self._stats.refused_writes += 1
            self._refuse_first(own, "its tenant has on disk what it may have")
            return True
        if not self.make_room(self.queued.total + size, self.queued.total):
            if self.queued.total or self.contents.removing.sizes:
                return False
            if len(self.contents.index):
                return self._give_up_first(own)
            # The file system had no room: the disk will find out whether that is still so.
        self._stuck_since_s = None
        self.contents.removing.drop(record.block_id)
        self.queued.add(record.tenant, size)
        self.submitted[self.dirty.popleft()] = record.block_id
        self._num_submitted[record.block_id] += 1
        view = self._view(arena_block)
        self._io.submit_writes([WriteJob(arena_block, record, view.nbytes, lambda: view)])
        return True

    def _as_written(self, own: BlockRecord) -> BlockRecord:
        """What the disk gets of a block: with int8 its quantised copy, unless the block before it is there exactly: a
        chain is quantised from its beginning on. A copy that comes from there is not quantised again.
        """
        if not self.contents.quantises or is_quantised(own.block_id):
            return own
        before = self._before(own)
        if not is_quantised(before) and self._will_have(before):
            return own
        return replace(own, block_id=quantised_id(own.block_id), parent_id=quantised_id(own.parent_id))

    def _before(self, own: BlockRecord) -> BlockId:
        return self.before_splice.get(own.block_id, own.parent_id)

    def _is_ahead(self, own: BlockRecord) -> bool:
        """Whether the block before this one waits, too: what failed comes back in any order, and that block decides."""
        before = self._cpu.arena_block_of(self._before(own))
        return before is not None and before in self.dirty

    def _lacks_parent(self, record: BlockRecord) -> bool:
        """Whether the disk has evicted what a quantised copy is built on: the CPU tier keeps the exact block then."""
        return not self._will_have(record.parent_id) and self._stats.losses.get(record.parent_id) is not None

    def _will_have(self, block_id: BlockId) -> bool:
        return self.contents.contains(block_id) or block_id in self._num_submitted

    def _is_over_limit(self, tenant: str, num_bytes: int) -> bool:
        if self._tenant_bytes is None:
            return False
        stored = self.contents.index.bytes.of(tenant)
        return stored + self.queued.of(tenant) + num_bytes > self._tenant_bytes

    def _give_up_first(self, record: BlockRecord) -> bool:
        """All that is stored is in use, or is what this block is built on: a conversation larger than the tier.

        Returns False to wait some more: somebody may let go. After that, its end is stored neither here nor in the CPU
        tier.
        """
        now_s = self._clock()
        if self._stuck_since_s is None:
            self._stuck_since_s = now_s
        if 0 <= now_s - self._stuck_since_s < GIVE_UP_S:  # less than 0: the clock was set back
            return False
        self._stats.dropped_writes += 1
        self._refuse_first(record, "the disk is full of what is in use")
        return True

    def _refuse_first(self, record: BlockRecord, why: str) -> None:
        """Do not write the first dirty arena block, nor what is built on it."""
        is_linked = self._cpu.keep or not self._cpu.is_current(self.dirty[0])  # nothing is in a staging area
        for block_id in [record.block_id] if is_linked else self._cpu.with_descendants([record.block_id]):
            self._cpu.forget(block_id)
        self._stats.losses.note("not_written", "disk", record.block_id, why=why)
        self._drop_first(record)

    def _drop_first(self, record: BlockRecord) -> None:
        self._let_parents_go(record)
        self._cpu.release(self.dirty.popleft())

    def write_done(self, done: WriteDone) -> None:
        jobs, deletes = done.batch.jobs, done.batch.deletes
        for job in jobs:
            self.queued.add(job.record.tenant, -self._file_bytes(job.handle))
            self._num_submitted.end(self.submitted.pop(job.handle))
        self.contents.removing.ended(deletes, done.error)
        if done.error is not None:
            self._writes_failed(jobs, done.error)
            return
        self.health.succeeded()
        self._num_full = 0
        for job, stored in zip(jobs, done.stored, strict=True):
            record, arena_block = job.record, job.handle
            is_doubtful = arena_block in self._unsure
            self._unsure.discard(arena_block)
            if is_doubtful and not self.tier.contains(record.block_id):
                self.dirty.append(arena_block)
                continue
            self._stats.written += 1
            self.contents.written(record, stored.num_bytes, self._cpu.conversation(arena_block))
            own = self._record(arena_block)
            if record.block_id == own.block_id and self._as_written(own) is not own:
                self._delete([record.block_id])  # the write of the block before it failed, which is quantised now
                self.dirty.append(arena_block)
                continue
            if not self._cpu.is_current(arena_block) and record.block_id not in self._num_submitted:
                self._delete([record.block_id])  # deleted while it was being written, and no newer copy is
            self.before_splice.pop(own.block_id, None)
            self._let_parents_go(own)
            self._cpu.release(arena_block)

    def refuse_waiting(self) -> None:
        """Do not write what waits: it is in memory that is wanted back."""
        while self.dirty:
            self._refuse_first(self._record(self.dirty[0]), "its memory was wanted back")

    # -- what leaves the disk ----------------------------------------------------------------------------------------
    def delete(self, block_ids: Sequence[BlockId]) -> None:
        """Delete blocks from the disk and the CPU tier. Holders of arena blocks keep them."""
        for block_id in reversed(block_ids):
            self._cpu.forget(block_id)
        self._delete(block_ids)

    def _delete(self, block_ids: Sequence[BlockId]) -> None:
        sizes = [self.contents.remove(block_id) for block_id in block_ids]
        self._stats.disk_removals += len(sizes) - sizes.count(None)
        self._submit([(block_id, size or 0) for block_id, size in zip(block_ids, sizes, strict=True)])

    def _submit(self, blocks: Sequence[tuple[BlockId, int]]) -> None:
        """Submit deletions of these blocks, given with their sizes. They are no longer in the index."""
        for block_id, size in reversed(blocks):
            self.contents.leaves(block_id, size)
        self.contents.removing.pump()

    def with_descendants(self, block_ids: Iterable[BlockId]) -> list[BlockId]:
        """These and all that builds on them, on disk or in the CPU tier, parents before children. In the CPU tier an
        exact block may build on one of which only the disk's copy is left.
        """
        found = self._cpu.with_descendants(self.contents.with_descendants(block_ids))
        copies = {one for one in found if is_quantised(one)}
        if copies:
            before = (one for one in self._cpu.absent_parents() if one not in self.contents.index)
            found = self._cpu.with_descendants([*found, *(one for one in before if quantised_id(one) in copies)])
        return found

    def delete_tree(
        self, block_id: BlockId, gone: Sequence[BlockId] = (), result: ReadResult = ReadResult.CORRUPT
    ) -> list[BlockId]:
        """Delete a lost block and all that was computed after it, as nobody could use that. Returns all of them.

        gone: what the CPU tier had below it until now. result: of the read that found out.
        """
        lost = self.with_descendants([block_id, *gone])
        self._stats.losses.note(result.lost_by, "disk", *lost, why=result.value)
        self.delete(lost)
        return lost

    def make_room(self, incoming_bytes: int, num_queued_bytes: int) -> bool:
        """Evict, in order, until this much more may be written. Returns False if that must wait.

        num_queued_bytes: how much of it the writer already has.
        """
        excess = self.tier.file.excess_bytes(incoming_bytes) - self.contents.removing.num_bytes
        if excess <= 0:
            return True
        has_evicted = self.evict(excess)
        # Their pages become usable after the next transactions. Half of the space above the watermark bridges that.
        slack = (1 - WATERMARK) * self.tier.file.capacity_bytes / 2
        return has_evicted and (excess <= slack or not num_queued_bytes)

    def evict(self, num_bytes: int) -> bool:
        """Evict at least this much, in order. Returns False if nothing can be evicted."""
        victims = self.contents.index.take_victims(num_bytes, self._cpu.is_needed)
        self._stats.disk_evictions += len(victims)
        self._stats.losses.note("evicted", "disk", *(entry.block_id for entry in victims))
        for entry in reversed(victims):
            self._cpu.forget(entry.block_id)
        self._submit([(entry.block_id, entry.stored_bytes) for entry in victims])
        return bool(victims)

    def select(self, what: Evict, without: Container[BlockId] = frozenset()) -> tuple[list[BlockId], Evicted]:
        """Matching blocks on disk, tails first, and their size. Blocks in use stay, unless they are named. without: the
        CPU tier's that go before.
        """
        index = self.contents.index
        named = what.everything or what.block_ids is not None
        chosen = index.select(what) if named else index.select(what, partial(self._cpu.is_needed, without=without))
        entries = [index.get(block_id) for block_id in chosen]
        return chosen, Evicted(len(chosen), sum(entry.stored_bytes for entry in entries if entry is not None))

    # -- failures ----------------------------------------------------------------------------------------------------
    def _writes_failed(self, jobs: Sequence[WriteJob], error: str) -> None:
        """Keep the blocks dirty, and try again later, deletions too, after a longer while each time."""
        self._stats.dropped_writes += len(jobs)
        self.dirty.extendleft(job.handle for job in reversed(jobs))
        self._unsure.difference_update(job.handle for job in jobs)
        if error == WriteError.MAP_FULL and self._num_full < MAX_FULL:
            # There is room, but in pieces that are too small, or only free after another transaction or two.
            self._num_full += 1
            self.evict(sum(self._file_bytes(job.handle) for job in jobs))
            self.contents.removing.pump()
        elif error != WriteError.BROKEN:  # such a file is put aside at once
            self.health.failed(error)

    def _quarantine(self) -> bool:
        """Set the damaged environment aside, start with an empty one, and write the CPU tier to it again.

        Returns False if the file system does not allow it. It is tried again later; until then, nothing is on disk.
        """
        try:
            self.tier.file.quarantine()
        except (StoreError, OSError) as error:
            self.health.failed(str(error))
            return False
        self.health.succeeded()
        self._forget_tails()
        self.contents.begin_anew()
        self._unsure |= self.submitted.keys()  # a write that succeeds may have gone there
        others = self._cpu.hold_all_but(self.in_flight())
        for one in others:  # parents first: if this stops half-way, none lacks its parent
            self.add_dirty(one)
        return True

    def _forget_tails(self) -> None:
        """Drop the CPU tier's blocks whose parents were only on disk, as nobody can use them."""
        index = self.contents.index
        lost = [one for one in self._cpu.absent_parents() if one in index or quantised_id(one) in index]
        for block_id in self._cpu.with_descendants(lost):
            self._cpu.forget(block_id)

    # -- looking after -----------------------------------------------------------------------------------------------
    def cannot_delete(self, block_ids: set[BlockId]) -> bool:
        """Whether the deletion of some of these has failed, and will not be tried again soon."""
        has_failed = self.tier.file.broken or self.contents.removing.have_failed(block_ids)
        return self.health.error is not None and has_failed

    @property
    def is_drained(self) -> bool:
        """Whether nothing is dirty, or on its way to or from the disk."""
        return not self.contents.removing.sizes and not self.dirty and self._io.is_idle

    def persist_touched(self) -> None:
        """Send times of last use along with the next transaction."""
        if touched := self.contents.take_touched():
            self._io.submit_touched(touched)

    def finish(self) -> None:
        """Prepare for closing: hand over what was waiting for a better moment."""
        self.persist_touched()
        self.contents.removing.pump()

    def stats(self) -> dict[str, object]:
        return {
            **self.tier.stats(),
            "blocks": len(self.contents.index),
            "dirty_blocks": len(self.dirty),
            "queued_write_bytes": self.queued.total,
            "degraded": self.health.error,
        }
