"""What is on disk; which of a chain's blocks CPU and the tiers below hold together, and with which states behind them.

Reads in flight, from disk and from the remote tier: how urgent each is, how it ends, and what becomes of those that
nobody waits for. An arena block that is being read is PENDING and holds a reference for the read.

Control plane, one thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvstore.blocks.forest import InFlight
from kvstore.blocks.holdings import Holdings, Place
from kvstore.blocks.ids import NO_TOKENS, TOKEN_BYTES, BlockId, Lineage, quantised_id, state_chain
from kvstore.blocks.records import BlockRecord
from kvstore.disk.index import DiskIndex, IndexEntry
from kvstore.disk.records import label
from kvstore.disk.tier import DiskTier
from kvstore.memory.tier import ArenaBlockState
from kvstore.policy.conversation import Conversation
from kvstore.policy.policies import Steering
from kvstore.remote.spread import Believed, BelievedContents
from kvstore.store.context import Identity, StoreContext
from kvstore.tiers.port import AS_HINT, AT_ONCE, Rank, ReadDone, ReadJob
from kvstore.tiers.worker import TierWorker


class Deletions:
    """Repeated until a tier has confirmed them. most: how many may wait for a server; None: all. Of what is dropped, a
    believed tier rids itself in time.

    sizes: of all that are not confirmed, in bytes. num_bytes: their sum, which will be free.
    """

    def __init__(self, tier: Believed, most: int | None = None) -> None:
        self._tier, self._most = tier, most
        self.sizes: dict[BlockId, int] = {}
        self.num_bytes = 0
        # Of these: not handed over yet, or to be tried again.
        self._waiting: defaultdict[TierWorker, dict[BlockId, None]] = defaultdict(dict)

    def add(self, block_id: BlockId, num_bytes: int = 0) -> None:
        self.drop(block_id)
        self.sizes[block_id] = num_bytes
        self.num_bytes += num_bytes
        waiting = self._waiting[self._tier.home(block_id)]
        waiting[block_id] = None
        if self._most is not None and len(waiting) > self._most:
            self.drop(next(iter(waiting)))

    def drop(self, block_id: BlockId) -> None:
        """Delete it no more: it is written again."""
        self.num_bytes -= self.sizes.pop(block_id, 0)
        self._waiting[self._tier.home(block_id)].pop(block_id, None)

    def pump(self) -> bool:
        """Hand over what waits, but for servers that are away. Returns whether there was anything."""
        ready = [(worker, waiting) for worker, waiting in self._waiting.items() if waiting and not worker.is_away]
        for worker, waiting in ready:
            worker.submit_deletes(tuple(waiting))
            waiting.clear()
        return bool(ready)

    def ended(self, block_ids: Iterable[BlockId], error: str | None) -> None:
        """The tier has tried these. What was added again meanwhile waits: it may have been written in between."""
        for block_id in block_ids:
            waiting = self._waiting[self._tier.home(block_id)]
            if error is None and block_id not in waiting:
                self.drop(block_id)
            elif block_id in self.sizes:
                waiting[block_id] = None

    def has_some(self, block_ids: Iterable[BlockId]) -> bool:
        """Whether some of these are not deleted yet."""
        return not self.sizes.keys().isdisjoint(block_ids)

    def have_failed(self, block_ids: Collection[BlockId]) -> bool:
        """Whether some of these wait for another try."""
        return any(not waiting.keys().isdisjoint(block_ids) for waiting in self._waiting.values())

    def held(self) -> set[BlockId]:
        """Those that wait for a server that is away."""
        return {one for worker, waiting in self._waiting.items() if worker.is_away for one in waiting}

    def in_flight(self) -> Collection[BlockId]:
        """Those that run, and those that could be handed over."""
        held = self.held()
        return self.sizes.keys() - held if held else self.sizes.keys()

    def clear(self) -> None:
        self.sizes.clear()
        self._waiting.clear()
        self.num_bytes = 0


class DiskContents:
    """index: of all that is on disk when the store opens; its conversations are known from then on. removing: blocks
    that are being deleted. holdings: where it reports what comes and goes.
    """

    def __init__(
        self, disk: DiskTier, index: DiskIndex, removing: Deletions, steering: Steering, clock: Callable[[], float],
        holdings: Holdings | None = None,
    ) -> None:  # fmt: skip
        self._disk, self.index, self._clock, self._holdings = disk, index, clock, holdings
        self.removing = removing
        steering.adopt(index.name_conversations(steering.order("disk")))
        self.link, self.take_touched = index.tree.link, index.take_touched

    def begin_anew(self) -> None:
        """Start again with an empty file, after the old one was set aside."""
        self.index.clear()
        self.removing.clear()
        if self._holdings is not None:
            self._holdings.emptied(Place.DISK)

    def contains(self, block_id: BlockId) -> bool:
        """Whether the disk has this block; False while it is being deleted."""
        return block_id in self.index and block_id not in self.removing.sizes and not self._disk.file.broken

    def with_descendants(self, block_ids: Iterable[BlockId]) -> list[BlockId]:
        """These blocks and all below them on disk."""
        found = dict.fromkeys(block_ids)
        for block_id, entry in [(block_id, self.index.get(block_id)) for block_id in found]:
            if entry is None or entry.parent_id not in found:  # the others are below one of these
                found |= dict.fromkeys(self.index.links.descendants(block_id))
        return list(found)

    def touch(self, chain: Sequence[BlockId], conversation: Conversation | None = None) -> None:
        """Mark these blocks, head first, as just used. conversation: their owner."""
        if (last := self._last_of(chain)) is not None:
            self.index.touch(last, self._clock(), conversation)

    def claim(self, chain: Sequence[BlockId], conversation: Conversation, keeps_pin: bool = False) -> None:
        """See `EvictionTree.claim`."""
        if (last := self._last_of(chain)) is not None:
            self.index.tree.claim(conversation, last, keeps_pin)

    def _last_of(self, chain: Sequence[BlockId]) -> BlockId | None:
        """The last block of a chain that is here, or whose quantised copy is; None if there is none."""
        copies = ((one, quantised_id(one)) if self.quantises else (one,) for one in reversed(chain))
        return next((one for some in copies for one in some if one in self.index), None)

    @property
    def quantises(self) -> bool:
        """Whether what is written is quantised copies."""
        return self._disk.codec == "int8"

    def written(self, record: BlockRecord, stored_bytes: int, conversation: Conversation | None) -> None:
        """Add a block that was written."""
        before = self.index.get(record.parent_id)
        parent_id = record.parent_id if before is None else before.block_id  # one object for each id
        entry = IndexEntry(record.block_id, parent_id, stored_bytes, self._clock(), record.model, record.tenant)
        self.index.add(entry, None if record.is_state else conversation)
        if record.is_state and conversation is not None:  # one of several branches that it ends
            self.index.tree.claim(conversation, record.block_id, keeps_pin=True)
        if self._holdings is not None:
            self._holdings.stored_record(Place.DISK, record)

    def leaves(self, block_id: BlockId, num_bytes: int) -> None:
        """Note that a block, no longer in the index, is being deleted; this many bytes will be free."""
        self.removing.add(block_id, num_bytes)
        if self._holdings is not None:
            self._holdings.gone(Place.DISK, block_id)

    def remove(self, block_id: BlockId) -> int | None:
        """Remove a block; returns its bytes, None when it is not there."""
        entry = self.index.get(block_id)
        self.index.remove(block_id)
        return None if entry is None else entry.stored_bytes


class TierReads:
    """tiers: those that are read from, one of a kind at most. exact, believed: their names."""

    def __init__(self, context: StoreContext, tiers: Iterable[Believed]) -> None:
        self._cpu, self._view, self._stats = context.cpu, context.view, context.stats
        self._tiers = {tier.name: tier for tier in tiers}
        self.exact = next((tier.name for tier in self._tiers.values() if not tier.is_believed), None)
        self.believed = next((tier.name for tier in self._tiers.values() if tier.is_believed), None)
        self._running: dict[int, tuple[Rank, TierWorker]] = {}  # of each arena block: its rank, and who reads it
        self._counts = InFlight[tuple[Rank, TierWorker]]()

    def __contains__(self, arena_block: int) -> bool:
        return arena_block in self._running

    def __len__(self) -> int:
        return len(self._running)

    def start(self, arena_block: int, record: BlockRecord, tier: str, rank: Rank = AT_ONCE) -> None:
        """Begin to read into an announced arena block. The read takes over a reference, which is released when it has
        ended.
        """
        worker = self._tiers[tier].home(record.block_id)
        self._note(arena_block, (rank, worker))
        worker.submit_read(ReadJob(arena_block, record, self._view(arena_block)), rank)

    def tier_of(self, arena_block: int) -> str:
        """Where what is being read into this arena block comes from."""
        return self._running[arena_block][1].name

    def rank(self, arena_block: int) -> Rank:
        return self._running[arena_block][0]

    def set_rank(self, arena_block: int, rank: Rank) -> None:
        """Change the rank of a read: somebody else waits for it now, or nobody does."""
        before, worker = self._running[arena_block]
        if before != rank:
            self._end(arena_block)
            self._note(arena_block, (rank, worker))
            worker.change_rank(arena_block, rank)

    def let_go(self, arena_blocks: Sequence[int]) -> frozenset[int]:
        """Somebody no longer waits for these arena blocks, given tail first: drop reads that nobody else waits for.

        A read goes on as a hint if somebody uses a block that builds on it. Returns the dropped arena blocks.
        """
        dropped, is_kept = set[int](), False
        for arena_block in arena_blocks:
            if arena_block in self._running and self._cpu.pool.ref_count(arena_block) == 1:
                is_kept = is_kept or self._is_built_on(arena_block)
                if is_kept:
                    self.set_rank(arena_block, AS_HINT)
                elif self._cancel(arena_block):
                    dropped.add(arena_block)
        return frozenset(dropped)

    def _cancel(self, arena_block: int) -> bool:
        """Drop a read that has not begun, and forget its block and what builds on it. Returns False if it runs."""
        if not self._running[arena_block][1].cancel(arena_block):
            return False
        self._end(arena_block)
        self._stats.cancelled_reads += 1
        self._cpu.fail(arena_block)
        self._cpu.release(arena_block)
        return True

    def publish(self, arena_block: int) -> bool:
        """A read has succeeded. Returns False if its block was deleted meanwhile."""
        self._end(arena_block)
        is_wanted = self._cpu.state(arena_block) is ArenaBlockState.PENDING
        if is_wanted:
            self._cpu.publish(arena_block)
        return is_wanted

    def fail(self, done: ReadDone, failures: dict[str, int]) -> list[BlockId] | None:
        """A read has failed: forget its block and what builds on it in the CPU tier. `failures` counts it by its cause.

        Returns the forgotten blocks. None if the block was given up before: what has its id now may be another copy.
        """
        arena_block, cause = done.job.handle, done.result.value
        self._end(arena_block)
        failures[cause] = failures.get(cause, 0) + 1
        if self._cpu.arena_block_of(done.job.record.block_id) != arena_block:
            return None
        records = map(self._cpu.record, self._cpu.fail(arena_block))
        return [record.block_id for record in records if record is not None]

    def _note(self, arena_block: int, kind: tuple[Rank, TierWorker]) -> None:
        self._running[arena_block] = kind
        self._counts[kind] += 1

    def _end(self, arena_block: int) -> None:
        """Note that a read is no longer in flight."""
        self._counts.end(self._running.pop(arena_block))

    def num_before(self, rank: Rank, tier: str | None) -> int:
        """How many blocks are read from there before one of this rank."""
        return sum(num for (other, worker), num in self._counts.items() if other < rank and worker.name == tier)

    @property
    def stalled_s(self) -> float:
        """For how long the oldest read has been running."""
        return max((tier.stalled_s for tier in self._tiers.values()), default=0.0) if self._running else 0.0

    def _is_built_on(self, arena_block: int) -> bool:
        """Whether somebody uses a block below this one: it could not stay without this one."""
        below = self._cpu.pool.tree.links.descendants(arena_block)[1:]
        return any(self._cpu.pool.ref_count(one) > (one in self._running) for one in below)

    def finish(self) -> None:
        """Prepare for closing: drop reads that nobody will ever want."""
        for arena_block in [arena_block for arena_block, (rank, _) in self._running.items() if rank != AT_ONCE]:
            if arena_block in self._running and not self._is_built_on(arena_block):
                self._cancel(arena_block)


@dataclass(slots=True, eq=False)
class ChainContent:
    """A chain as far as it is named, and its tokens: little-endian u32."""

    chain: list[BlockId]
    tokens: bytes | bytearray
    lineage: Lineage
    tenant: str

    def parent(self, index: int) -> BlockId:
        """Parent id of block `index`."""
        return self.lineage.parent(self.chain, index)


@dataclass(slots=True, eq=False)
class Restorable(ChainContent):
    """The first `border` blocks of a chain, and those of the states that a request needs to begin there, the earliest
    state first. num_state_blocks: of one.
    """

    border: int
    num_state_blocks: int

    def owner(self, index: int) -> int:
        """The number of the block that block `index`, of a state, stands behind."""
        num_states = (len(self.chain) - self.border) // self.num_state_blocks
        return self.border - num_states + (index - self.border) // self.num_state_blocks

    def parent(self, index: int) -> BlockId:
        if index < self.border:
            return self.lineage.parent(self.chain, index)
        return self.chain[index - 1 if (index - self.border) % self.num_state_blocks else self.owner(index)]

    def states(self) -> Iterator[list[BlockId]]:
        """The blocks of each state."""
        for start in range(self.border, len(self.chain), self.num_state_blocks):
            yield self.chain[start : start + self.num_state_blocks]


class StoredBlocks:
    """disk, remote: None without such a tier. reads: None without either."""

    def __init__(
        self, context: StoreContext, disk: DiskContents | None, reads: TierReads | None, identity: Identity,
        remote: BelievedContents | None = None,
    ) -> None:  # fmt: skip
        self._cpu, self._stats, self._clock = context.cpu, context.stats, context.clock
        self._disk, self._reads, self._identity, self._remote = disk, reads, identity, remote
        self.block_size, self.num_state_blocks = identity.block_size, identity.num_state_blocks
        self.state_span, self.has_windows = max(identity.window_blocks, 1), identity.window_blocks > 0

    def with_states(self, content: ChainContent, border: int) -> Restorable:
        """The first `border` blocks of a chain, and the blocks of the states that a request needs there."""
        chain = content.chain[:border]
        for block_id in chain[max(0, border - self.state_span) :]:
            chain += state_chain(block_id, self.num_state_blocks, self.block_size)
        tokens = bytes(content.tokens[: border * self.block_size * TOKEN_BYTES])
        tokens += NO_TOKENS * self.block_size * (len(chain) - border)
        return Restorable(chain, tokens, content.lineage, content.tenant, border, self.num_state_blocks)

    def state(self, content: ChainContent, border: int) -> ChainContent:
        """The state behind so many blocks of a chain, as a chain of its own, which is built on the last of these."""
        num_blocks, block_id = self.num_state_blocks, content.chain[border - 1]
        chain = state_chain(block_id, num_blocks, self.block_size)
        return ChainContent(chain, NO_TOKENS * self.block_size * num_blocks, Lineage(block_id), content.tenant)

    def state_records(self, content: ChainContent, border: int) -> list[BlockRecord]:
        """The records of the state behind so many blocks of a chain."""
        state = self.state(content, border)
        return [self.record(state, index) for index in range(len(state.chain))]

    def has_state(self, block_id: BlockId) -> bool:
        """Whether there is a state behind this block, or a part of it."""
        return self._tier(state_chain(block_id, 1, self.block_size)[0]) is not None

    def is_fork(self, block_id: BlockId) -> bool:
        """Whether several chains go on behind this block."""
        arena_block, pool = self._cpu.arena_block_of(block_id), self._cpu.pool
        behind = set[BlockId | None]() if self._disk is None else set(self._disk.index.links.children(block_id))
        if arena_block is not None:
            behind |= {pool.block_id(child) for child in pool.tree.links.children(arena_block)}
        return len(behind - {state_chain(block_id, 1, self.block_size)[0]}) > 1

    def last_border(self, chain: Sequence[BlockId], border: int) -> int:
        """The last one up to this, where all states that a request needs are there, or a part of each."""
        number = border
        while number > max(0, border - self.state_span):
            number -= 1
            if not self.has_state(chain[number]):
                border = number
        return border

    def restorable(self, content: ChainContent, first: int, end: int) -> Restorable | None:
        """The longest prefix of a chain that ends in blocks [first, end), which are stored, and has its states, with
        these; None if there is none. Of a state that a believed tier has begun to have, it is thought to have all.
        """
        while (end := self.last_border(content.chain, end)) > first:
            found = self.with_states(content, end)
            for state in found.states() if self._remote is not None else ():
                if self._tier(state[0]) == self._remote.name:  # type: ignore[union-attr]
                    for block_id in state:
                        self._remote.learn(block_id)  # type: ignore[union-attr]
            if all(self._tier(block_id) is not None for block_id in found.chain[end:]):
                return found
            end -= 1
        return None

    def record(self, content: ChainContent, index: int) -> BlockRecord:
        """The record of a full block."""
        own, tokens = self._identity, self._tokens(content, index)
        return BlockRecord(
            content.chain[index], content.parent(index), tokens, own.fingerprint, label(content.tenant), own.model,
            self._clock(),
        )  # fmt: skip

    def _tokens(self, content: ChainContent, index: int) -> bytes:
        block_bytes = self.block_size * TOKEN_BYTES
        return bytes(content.tokens[index * block_bytes : (index + 1) * block_bytes])

    def is_on_disk(self, block_id: BlockId) -> bool:
        return self._disk is not None and self._disk.contains(block_id)

    def source(self, block_id: BlockId) -> str | None:
        """The tier below the CPU tier that a block is read from; None if none is known to have it."""
        if self.is_on_disk(block_id):
            return "disk"
        return self._remote.name if self._remote is not None and self._remote.contains(block_id) else None

    def holds(self, block_id: BlockId) -> bool:
        """Whether CPU or disk have this block, even if it is still in flight."""
        return self._cpu.arena_block_of(block_id) is not None or self.is_on_disk(block_id)

    def keeps(self, block_id: BlockId) -> bool:
        """Whether they have this block or, on disk, its quantised copy: what is computed behind it can be stored."""
        if self.holds(block_id):
            return True
        return self._disk is not None and self._disk.quantises and self._disk.contains(quantised_id(block_id))

    def has_end(self, chain: Sequence[BlockId], num_hbm_tokens: int) -> bool:
        """Whether the last block of this chain is in some tier."""
        if num_hbm_tokens // self.block_size >= len(chain):
            return bool(chain)
        return self.holds(chain[-1])

    def arena_block_of(self, content: ChainContent, index: int) -> int | None:
        """Where this block lies in the arena, after comparing its identity."""
        arena_block = self._cpu.arena_block_of(content.chain[index])
        if arena_block is None:
            return None
        stored = self._cpu.record(arena_block)
        if (
            stored is not None
            and stored.parent_id == content.parent(index)
            and stored.tokens == self._tokens(content, index)
            and stored.fingerprint == self._identity.fingerprint
        ):
            return arena_block
        self._stats.identity_mismatches += 1
        return None

    def tiers(self, chain: Sequence[BlockId], first: int, end: int) -> list[str]:
        """Which tier has each block from `first` on, as far as they are stored. What is being read counts as
        where it comes from.
        """
        found: list[str] = []
        for block_id in chain[first:end]:
            tier = self._tier(block_id)
            if tier is None:
                break
            found.append(tier)
        return found

    def _tier(self, block_id: BlockId) -> str | None:
        arena_block = self._cpu.arena_block_of(block_id)
        if arena_block is None:
            return self.source(block_id)
        if self._reads is not None and arena_block in self._reads:
            return self._reads.tier_of(arena_block)
        return "cpu" if self._cpu.keep else "disk"

    def is_being_saved(self, block_id: BlockId) -> bool:
        """Whether it is on its way from HBM."""
        arena_block = self._cpu.arena_block_of(block_id)
        if arena_block is None or self._cpu.state(arena_block) is not ArenaBlockState.PENDING:
            return False
        return self._reads is None or arena_block not in self._reads

    def claim(self, chain: Sequence[BlockId], lineage: Lineage, conversation: Conversation) -> None:
        """Give what is stored of a chain the conversation's value, including what stands in front of splices."""
        firsts = [run.first for run in lineage.splices if 0 < run.first < len(chain)]
        for tier in (self._cpu, self._disk):
            if tier is not None:
                tier.claim(chain, conversation)
                for first in firsts:
                    tier.link(chain[first], chain[first - 1])

    def claim_states(self, content: Restorable, conversation: Conversation) -> None:
        """Give the conversation's value to its states, each of which ends a branch; to the last of them last."""
        for tier in (self._cpu, self._disk):
            for state in content.states() if tier is not None else ():
                tier.claim(state, conversation, keeps_pin=True)  # type: ignore[union-attr]
