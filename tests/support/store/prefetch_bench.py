"""A CPU tier and a disk without bytes, whose reads end when the test says so, and a planner that is told its rates."""

from kvstore.blocks.ids import Lineage, extend_chain, token_bytes
from kvstore.blocks.records import ReadResult
from kvstore.memory.tier import CpuTier
from kvstore.policy.conversation import Conversation
from kvstore.policy.planner import Planner
from kvstore.policy.policies import Steering
from kvstore.stats import StoreStats
from kvstore.store.context import Identity, StoreContext
from kvstore.store.prefetch import Prefetcher
from kvstore.store.requests import Requests, Tracked
from kvstore.store.seam import Match
from kvstore.store.stored import StoredBlocks, TierReads
from kvstore.tiers.port import ReadDone, ReadJob

ROOT, SIZE = b"r" * 32, 4


class FakeIo:
    """Reads stay queued until the test begins and ends them."""

    name, is_believed = "disk", False

    def __init__(self) -> None:
        self.queued: dict[int, tuple] = {}
        self.stalled_s = 0.0

    def home(self, block_id):
        return self

    def submit_read(self, read, rank):
        self.queued[read.handle] = rank

    def change_rank(self, arena_block, rank):
        if arena_block in self.queued:
            del self.queued[arena_block]
            self.queued[arena_block] = rank

    def cancel(self, arena_block):
        return self.queued.pop(arena_block, None) is not None


class FakeDisk:
    """`stored` ids are on disk."""

    quantises = False

    def __init__(self) -> None:
        self.stored: set[bytes] = set()

    def contains(self, block_id):
        return block_id in self.stored

    def claim(self, chain, conversation):
        """What stays on disk is not asked here."""

    def link(self, block_id, parent_id):
        """Nor here."""


class SeenSteering(Steering):
    """refreshed: each conversation, as often as it was refreshed."""

    def __init__(self, num_arena_blocks: int) -> None:
        super().__init__("lru", lambda: 0.0, {"cpu": num_arena_blocks})
        self.refreshed: list[Conversation] = []

    def refresh(self, conversation: Conversation) -> None:
        self.refreshed.append(conversation)
        super().refresh(conversation)


class Bench:
    """A CPU tier and a disk without bytes."""

    def __init__(
        self, num_arena_blocks: int, load_s: float | None = None, compute_s: float | None = None, erase=lambda _: None
    ) -> None:
        """load_s, compute_s: of a block, from disk and anew; None: unknown, so everything is loaded."""
        self.stats, self.io = StoreStats(), FakeIo()
        steering = SeenSteering(num_arena_blocks)
        self.cpu = CpuTier(num_arena_blocks, erase, order=steering.order("cpu"), clock=lambda: 0.0)
        self.disk = FakeDisk()
        self.context = StoreContext(self.cpu, lambda _: memoryview(b""), steering, self.stats, lambda: 0.0)
        self.reads = TierReads(self.context, [self.io])
        identity = Identity(b"f" * 32, "model", SIZE)
        self.stored = StoredBlocks(self.context, self.disk, self.reads, identity)
        self.requests = Requests(self.cpu, self.stored, self.reads, self.stats)
        self.planner = Planner(1000, SIZE)
        if compute_s is not None:
            self.planner.computed(10_000 * SIZE, 10_000 * compute_s)
        if load_s is not None:
            self.planner.read(1000, load_s)
            self.planner.loaded(1000, 1e-6)
        self.refreshed = steering.refreshed
        self.prefetcher = Prefetcher(self.context, self.requests, self.planner, self.reads, 1000)
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
        content = bytearray(token_bytes(tokens))
        return Tracked(chain, content, Lineage(ROOT), "", f"r{self.num_made}", key, conversation)

    def in_memory(self, request: Tracked, num_ready: int | None = None) -> None:
        """All of its blocks are in the CPU tier, and so many have landed there."""
        for index, _ in enumerate(request.chain):
            arena_block = self.cpu.reserve()
            assert self.cpu.announce(arena_block, self.stored.record(request, index))
            if num_ready is None or index < num_ready:
                self.cpu.publish(arena_block)
            self.cpu.release(arena_block)

    def arrive(self, request: Tracked, num_hbm_blocks: int = 0) -> Tracked:
        self.requests.arrive(request, num_hbm_blocks)
        self.prefetcher.arrive(request)
        return request

    def match(self, request: Tracked, first: int = 0) -> Match:
        return self.prefetcher.match(request, first, len(request.chain))

    def load(self, request: Tracked, first: int, match: Match) -> None:
        num_blocks = match.num_tokens // SIZE
        loads = self.requests.hand_out(request, range(num_blocks), first, num_blocks)
        assert [load.block_id for load in loads] == request.chain[first : first + num_blocks]
        for load in reversed(loads):
            self.cpu.release(load.arena_block)

    def remove(self, request: Tracked) -> None:
        self.prefetcher.remove(request.request_id)
        self.requests.remove(request.request_id)

    def next_read(self) -> int:
        """The queued read that goes next, which now runs."""
        queued = self.io.queued
        first = min(queued, key=lambda one: (queued[one], list(queued).index(one)))
        del queued[first]
        return first

    def end_read(self, arena_block: int, succeeded: bool = True) -> bytes | None:
        record = self.cpu.record(arena_block)
        if succeeded:
            self.reads.publish(arena_block)
        else:
            done = ReadDone(ReadJob(arena_block, record, memoryview(b"")), ReadResult.FAILED, 0.0)
            self.reads.fail(done, self.stats.read_failures)
        self.cpu.release(arena_block)
        self.prefetcher.landed()
        self.prefetcher.poll()
        return record.block_id

    def hint(self, request: Tracked) -> int:
        """Returns how many reads were begun for it."""
        request.key, num_before = None, self.stats.prefetched
        self.prefetcher.hint(request)
        return self.stats.prefetched - num_before

    def same(self, request: Tracked, name: str, key: tuple[int, int], end: int | None = None) -> Tracked:
        """Another request for the blocks of this one, or the first of them."""
        chain, tokens = request.chain[:end], request.tokens
        if end is not None:
            tokens = tokens[: 4 * (end * SIZE + 1)]
        return Tracked(chain, tokens, request.lineage, "", name, key, request.conversation)

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
        assert not self.reads
