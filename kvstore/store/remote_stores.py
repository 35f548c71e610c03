"""What is stored in the remote tier: chains whose requests have ended.

Control plane, one thread. Only a few batches are handed over at a time, and what waits holds no arena memory. A chain
is offered whenever one of its requests ends, so what was dropped once is stored after the next turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, ReadResult
from kvstore.memory.tier import ArenaBlockState, CpuTier
from kvstore.remote.spread import Believed
from kvstore.store.stored import ChainContent, Deletions, StoredBlocks
from kvstore.tiers.port import Chain, WriteDone, WriteJob, chain_batch_blocks

MOST_OFFERED = 1 << 17  # blocks that wait, with the ids and tokens of their chains
MOST_TRIED = 64  # chains that are looked at in one poll
MOST_BATCHES = 4  # that the tier has at a time
OFFER_S = 60.0  # how long a chain may wait until its blocks are on disk
LENT_SHARE = 8  # without a disk, at most one in so many arena blocks is lent to the tier


@dataclass(slots=True, eq=False)
class Offer:
    """Blocks [next, end) of a chain that are to be stored."""

    content: ChainContent
    chain: Chain
    next: int
    end: int
    until_s: float


@dataclass(eq=False)
class RemoteStores:
    """read: reads a block from disk into memory, in any thread. None without a disk: blocks are sent from the arena.
    deletes: of the tier; what is stored is deleted no more.
    """

    _tier: Believed
    _cpu: CpuTier
    _stored: StoredBlocks
    _read: Callable[[BlockRecord, memoryview], ReadResult] | None
    _view: Callable[[int], memoryview]
    _clock: Callable[[], float]
    _deletes: Deletions

    def __post_init__(self) -> None:
        self._offers: deque[Offer] = deque()
        # Batches that the tier has: what their chain is built on, and what is lent to it.
        self._batches: dict[int, tuple[BlockId, dict[BlockId, int | None]]] = {}
        self._undeleted = set[BlockId]()  # of these, what waited to be deleted; it does so again where a write fails
        self._numbers = count()
        self.num_dropped = self.num_waiting = 0  # offered blocks: given up, and not handed over yet
        self._block_bytes = self._view(0).nbytes
        self._batch_blocks = chain_batch_blocks(self._block_bytes)

    def offer(
        self, content: ChainContent, ends: Sequence[int], is_known: Callable[[BlockId], bool], behind: int = 0
    ) -> None:
        """Offer a chain, from the first block on that is not known to be there. ends, behind: see `Chain`."""
        size = self._stored.block_size
        end = min(len(content.chain), len(content.tokens) // (4 * size))
        first = next((i for i, one in enumerate(content.chain[:end]) if not is_known(one)), end)
        if first == end:
            return
        if self.num_waiting + end - first > MOST_OFFERED:
            self.num_dropped += end - first
            return
        self.num_waiting += end - first
        chain = Chain(content.lineage.root, tuple(content.chain[:end]), tuple(ends), behind)
        self._offers.append(Offer(content, chain, first, end, self._clock() + OFFER_S))

    def pump(self) -> None:
        """Hand over as much as the tier takes now. Called once per poll."""
        for _ in range(min(len(self._offers), MOST_TRIED)):
            if self._tier.is_refusing or len(self._batches) >= MOST_BATCHES:
                return
            offer = self._offers.popleft()
            self.num_waiting -= offer.end - offer.next
            if self._hand_over(offer) and offer.next < offer.end:
                self._offers.append(offer)
                self.num_waiting += offer.end - offer.next

    def _hand_over(self, offer: Offer) -> bool:
        """Hand over the next blocks of a chain, as far as possible. Returns False if no more of it ever can be."""
        number, jobs, batch = next(self._numbers), list[WriteJob](), dict[BlockId, int | None]()
        end = min(offer.end, offer.next - offer.next % self._batch_blocks + self._batch_blocks)
        is_over, size = False, self._block_bytes
        while offer.next < end:
            index = offer.next
            record = self._stored.record(offer.content, index)
            source = self._stored.arena_block_of(offer.content, index)
            if self._read is not None and self._stored.is_on_disk(record.block_id):
                jobs.append(WriteJob(number, record, size, partial(self._from_disk, record), index))
                batch[record.block_id] = None
            elif self._read is None and source is not None and self._cpu.state(source) is ArenaBlockState.READY:
                if not self._may_lend(len(batch)):
                    break
                self._cpu.acquire(source)
                batch[record.block_id] = source
                jobs.append(WriteJob(number, record, size, partial(self._view, source), index))
            else:  # still on its way to disk, or gone
                is_over = source is None or self._clock() > offer.until_s
                break
            offer.next += 1
        if is_over:
            self.num_dropped += offer.end - offer.next
        if jobs:
            self._batches[number] = offer.chain.root, batch
            self._undeleted |= batch.keys() & self._deletes.sizes.keys()
            for job in jobs:
                self._deletes.drop(job.record.block_id)
            self._tier.submit_writes(jobs, offer.chain)
        return not is_over

    def _may_lend(self, num_more: int) -> bool:
        num_lent = num_more + sum(len(batch) for _, batch in self._batches.values())
        return num_lent == 0 or num_lent < self._cpu.pool.num_blocks // LENT_SHARE

    def _from_disk(self, record: BlockRecord) -> memoryview | None:
        """Read a block, in the tier's thread."""
        assert self._read is not None
        into = memoryview(bytearray(self._block_bytes))
        return into if self._read(record, into) is ReadResult.OK else None

    def ended(self, done: WriteDone) -> list[BlockId]:
        """A batch has ended, or one server's part of it, or a deletion. Returns the blocks that are there now."""
        for job in done.batch.jobs:
            _, batch = self._batches[job.handle]
            if (arena_block := batch.pop(job.record.block_id)) is not None:
                self._cpu.release(arena_block)
            if not batch:
                del self._batches[job.handle]
        stored = [one.block_id for one in done.stored if one.error is None]
        handed_over = {job.record.block_id for job in done.batch.jobs}
        for block_id in self._undeleted & handed_over - {*stored}:
            self._deletes.add(block_id)
        self._undeleted -= handed_over
        self.num_dropped += len(done.batch.jobs) - len(stored)
        return stored

    def is_storing(self, block_ids: set[BlockId]) -> bool:
        """Whether some of these, or states behind them, are on their way, or wait and may be handed over."""
        waiting = ((offer.chain.root, offer.chain.ids[offer.next : offer.end]) for offer in self.waiting())
        running = self._batches.values()
        return any(root in block_ids or not block_ids.isdisjoint(ids) for root, ids in chain(running, waiting))

    def waiting(self) -> Collection[Offer]:
        """Those that could be handed over."""
        return () if self._tier.is_refusing else self._offers

    @property
    def running(self) -> Collection[int]:
        """The numbers of batches that the tier has."""
        return self._batches.keys()

    @property
    def is_drained(self) -> bool:
        """Whether nothing is in flight, and nothing is waiting that could be handed over."""
        return not self._batches and not self.waiting()
