"""The remote tier as the store sees it: what it has, what is read from it, and what is stored there.

Control plane, one thread. The ordinary write-back also writes to disk what was read from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, ReadResult
from kvstore.disk.io_queue import ReadDone
from kvstore.memory.tier import CpuTier
from kvstore.policy.planner import Planner
from kvstore.remote.prefill import PrefillServer
from kvstore.remote.tier import Asked, PutsDone, RemoteDone, RemoteTier
from kvstore.stats import StoreStats
from kvstore.store.elsewhere import Elsewhere
from kvstore.store.fence import Stage
from kvstore.store.prefetch import Prefetcher
from kvstore.store.reads import DiskReads
from kvstore.store.remote_contents import RemoteContents
from kvstore.store.remote_deletes import RemoteDeletes
from kvstore.store.remote_stores import RemoteStores
from kvstore.store.requests import Requests, Tracked
from kvstore.store.stored import StoredBlocks
from kvstore.store.write_back import WriteBack


@dataclass(frozen=True, slots=True)
class RemoteSource:
    """read: reads a block from disk, in any thread; None without a disk. view: the bytes of an arena block. prefill:
    another server, which computes prompts for this one; None without one. is_told: its owner hears by itself of what is
    evicted by hand.
    """

    tier: RemoteTier
    reads: DiskReads
    read: Callable[[BlockRecord, memoryview], ReadResult] | None
    view: Callable[[int], memoryview]
    clock: Callable[[], float]
    prefill: PrefillServer | None = None
    is_told: bool = False


class RemoteBlocks:
    """disk: None without a disk. `connect` must be called first."""

    def __init__(self, source: RemoteSource, cpu: CpuTier, disk: WriteBack | None, stats: StoreStats) -> None:
        self._source, self._cpu, self._disk, self._stats = source, cpu, disk, stats
        self._ended: deque[RemoteDone] = deque()

    def connect(self, stored: StoredBlocks, planner: Planner, requests: Requests, prefetcher: Prefetcher) -> None:
        """Give it the parts of the store that it needs, and that need it."""
        source = self._source
        self._planner, self._requests, self._prefetcher = planner, requests, prefetcher
        self.contents = RemoteContents(source.tier, source.clock, self._answered, planner.always)
        self.deletes = RemoteDeletes(source.tier)
        self.stores = RemoteStores(source.tier, self._cpu, stored, source.read, source.view, source.clock)
        self.elsewhere = None
        if source.prefill is not None:
            self.elsewhere = Elsewhere(source.prefill, planner, source.clock, stored.block_size, self.contents.ask)

    @property
    def reads(self) -> DiskReads:
        return self._source.reads

    def is_known(self, block_id: BlockId) -> bool:
        """Whether it is worth reading from there."""
        return self.contents.contains(block_id)

    def arrive(self, request: Tracked) -> None:
        """Ask what is there of a new request, which waits a little for the answer."""
        if request.may_load:
            self.contents.ask(request)

    def _answered(self, request: Tracked) -> None:
        if request.key is None:
            self._prefetcher.hint(request)
        elif self._requests.by_id.get(request.request_id) is request:
            if self._requests.look_again(request):
                self._prefetcher.answered(request)
            if self.elsewhere is not None:
                self.elsewhere.ask(request)

    def hint(self, hint: Tracked) -> None:
        """Read what is there for a hint, once that is known."""
        if not self.contents.ask(hint):
            self._prefetcher.hint(hint)

    def poll(self) -> bool:
        """Collect what the threads have finished, and hand over what waits. Returns whether there was anything."""
        self._ended += self._source.tier.completed()
        moved = bool(self._ended)
        if self.elsewhere is not None:
            moved |= self.elsewhere.poll()
        while self._ended:  # one at a time, so that an error loses none of the others
            done = self._ended.popleft()
            if isinstance(done, Asked):
                self.contents.asked(done)
            elif isinstance(done, ReadDone):
                self._read_done(done)
            elif isinstance(done, PutsDone):
                for block_id in self.stores.put_done(done):
                    if block_id not in self.deletes:
                        self.contents.learn(block_id)
            else:
                self.deletes.done(done)
        self.deletes.pump()
        self.stores.pump()
        if moved:
            self._prefetcher.landed()
        return moved

    def _read_done(self, done: ReadDone) -> None:
        arena_block, block_id = done.read.arena_block, done.read.record.block_id
        if done.result is ReadResult.OK:
            self._planner.read_remote(done.read.view.nbytes, done.seconds, done.num_active)
            self._stats.remote_read += 1
            if self.reads.publish(arena_block) and self._disk is not None:
                self._disk.add_dirty(arena_block)
                return
        else:
            self.contents.lose([block_id])
            gone = self.reads.fail(done, self._stats.remote_read_failures)
            if gone is not None and self._disk is not None:  # blocks read behind it may already be there
                self._disk.space.delete_tree(block_id, gone)
        self._cpu.release(arena_block)

    def offer(self, request: Tracked) -> None:
        """A request has ended: share what is stored of its chain."""
        self.stores.offer(request, self.contents.contains)

    def is_asking(self, request: Tracked, is_next: bool) -> bool:
        """Whether a request waits to hear what is there, or for another server to compute it. is_next: it could be
        scheduled now, and is not held up for long.
        """
        if self.contents.is_asking(request, is_next):
            return True
        return self.elsewhere is not None and self.elsewhere.is_asking(request, is_next)

    def forget(self, block_ids: Iterable[BlockId]) -> None:
        """Delete these there, too."""
        block_ids = list(block_ids)
        self.contents.lose(block_ids)
        self.deletes.add(block_ids)

    def evicted(self, block_ids: Iterable[BlockId]) -> None:
        """These were evicted by hand here."""
        if not self._source.is_told:
            self.forget(block_ids)

    def is_sharing(self, chain: Sequence[BlockId]) -> bool:
        """Whether blocks of this chain are still on their way there."""
        return self.stores.is_storing(set(chain))

    def num_shared(self, chain: Sequence[BlockId]) -> int:
        """How many of its first blocks are there."""
        return next((i for i, one in enumerate(chain) if not self.contents.contains(one)), len(chain))

    @property
    def degraded(self) -> str | None:
        """Why the tier does not answer; None if it does."""
        return self._source.tier.breaker.error

    def stages(self) -> list[Stage]:
        """Chains that wait to be stored; what the tier has been given, and deletions."""
        return [self.stores.waiting, lambda: [*self.stores.running, *self.deletes.in_flight()]]

    @property
    def is_idle(self) -> bool:
        return self.stores.is_drained and not self.deletes.in_flight() and not self._ended and not self.reads

    def as_dict(self) -> dict[str, object]:
        return {
            **self._source.tier.as_dict(),
            "known_blocks": len(self.contents),
            "waiting_blocks": self.stores.num_waiting,
            "dropped_blocks": self.stores.num_dropped,
            **({} if self.elsewhere is None else {"prefill": self.elsewhere.server.as_dict()}),
        }

    def close(self, timeout_s: float) -> bool:
        """End after what runs. False when that took longer than given."""
        if self.elsewhere is not None:
            self.elsewhere.server.close(timeout_s)
        return self._source.tier.close(timeout_s)
