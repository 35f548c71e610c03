"""A CPU tier and a disk without bytes, whose reads end when the test says so, and a planner that is told its rates."""

from kvstore.blocks.ids import Lineage, extend_chain
from kvstore.memory.tier import CpuTier
from kvstore.policy.conversation import Conversation
from kvstore.policy.planner import Planner
from kvstore.policy.steering import Steering
from kvstore.stats import StoreStats
from kvstore.store.lookup import Identity, Lookups, Match, Tracked
from kvstore.store.prefetch import Prefetcher
from kvstore.store.reads import DiskReads

ROOT, SIZE = b"r" * 32, 4


class FakeIo:
    """Reads stay queued until the test begins and ends them."""

    def __init__(self) -> None:
        self.queued: dict[int, tuple] = {}
        self.running: set[int] = set()
        self.stalled_s = 0.0

    def submit_read(self, read, rank):
        self.queued[read.slot] = rank

    def rank_read(self, slot, rank):
        if slot in self.queued:
            del self.queued[slot]
            self.queued[slot] = rank

    def cancel_read(self, slot):
        return self.queued.pop(slot, None) is not None


class FakeDisk:
    """`stored` ids are on disk."""

    def __init__(self, reads: DiskReads) -> None:
        self.reads = reads
        self.stored: set[bytes] = set()

    def contains(self, block_id):
        return block_id in self.stored

    def claim(self, chain, conversation):
        """What stays on disk is not asked here."""

    def link(self, block_id, parent_id):
        """Nor here."""


class Bench:
    """A CPU tier and a disk without bytes."""

    def __init__(self, num_slots: int, load_s: float | None = None, compute_s: float | None = None) -> None:
        """load_s, compute_s: of a block, from disk and anew; None: unknown, so everything is loaded."""
        self.now, self.stats, self.io = [0.0], StoreStats(), FakeIo()
        steering = Steering("lru", lambda: self.now[0], {"cpu": num_slots})
        self.cpu = CpuTier(num_slots, order=steering.order("cpu"))
        self.disk = FakeDisk(DiskReads(self.cpu, self.io, lambda slot: memoryview(b""), self.stats))
        identity = Identity(b"f" * 32, "model", SIZE)
        self.lookups = Lookups(self.cpu, self.disk, identity, self.stats, lambda: self.now[0])
        self.planner = Planner(1000, SIZE)
        if compute_s is not None:
            self.planner.computed(10_000 * SIZE, 10_000 * compute_s)
        if load_s is not None:
            self.planner.read(1000, load_s)
            self.planner.loaded(1000, 1e-6)
        self.refreshed: list[Conversation] = []
        self.prefetcher = Prefetcher(
            self.cpu, self.disk, self.lookups, self.planner, self.stats, lambda: self.now[0], SIZE, 1000,
            self.refreshed.append,
        )  # fmt: skip
        self.num_made = 0

    def request(self, num_blocks: int, sequence: int | None = None, priority: int = 0, stored: bool = True) -> Tracked:
        self.num_made += 1
        tokens = [1000 * self.num_made + i for i in range(num_blocks * SIZE + 1)]
        chain: list[bytes] = []
        extend_chain(chain, ROOT, tokens, SIZE)
        if stored:
            self.disk.stored |= set(chain)
        key = (priority, self.num_made if sequence is None else sequence)
        conversation = Conversation(self.num_made, self.num_made, 0.0, 0.0)
        return Tracked(f"r{self.num_made}", chain, tokens, Lineage(ROOT), "", key, conversation)

    def arrive(self, request: Tracked) -> Tracked:
        self.lookups.arrive(request, 0, len(request.chain))
        self.prefetcher.arrive(request)
        return request

    def match(self, request: Tracked, first: int = 0) -> Match:
        return self.prefetcher.match(request, first, len(request.chain))

    def take(self, request: Tracked, first: int, match: Match) -> None:
        num_blocks = match.num_tokens // SIZE
        loads = self.lookups.take(request, range(num_blocks), first, num_blocks)
        assert [load.block_id for load in loads] == request.chain[first : first + num_blocks]
        for load in reversed(loads):
            self.cpu.release(load.slot)

    def leave(self, request: Tracked) -> None:
        self.prefetcher.leave(request.request_id)
        self.lookups.leave(request.request_id)

    def next_read(self) -> int:
        """The queued read that goes next, which now runs."""
        slot = min(self.io.queued, key=lambda slot: (self.io.queued[slot], list(self.io.queued).index(slot)))
        del self.io.queued[slot]
        return slot

    def end_read(self, slot: int, succeeded: bool = True) -> bytes | None:
        record = self.cpu.record(slot)
        self.disk.reads.end(slot)
        if not succeeded:
            self.cpu.fail(slot)
        elif self.cpu.find(record.block_id) == slot:
            self.cpu.publish(slot)
        self.cpu.release(slot)
        self.prefetcher.landed()
        self.prefetcher.poll()
        return record.block_id

    def read(self, count: int = 1_000_000) -> list[bytes]:
        """End so many reads; returns their blocks in order."""
        done = []
        while self.io.queued and len(done) < count:
            done.append(self.end_read(self.next_read()))
        return done

    def check_idle(self) -> None:
        self.read()
        self.prefetcher.drop_hints()
        self.prefetcher.check_integrity(idle=True)
        self.cpu.check_integrity(idle=True)
        assert not self.disk.reads
