"""What the CPU tier and the disk hold together: which of a chain's blocks are there, and whose they are.

Control plane, one thread. Holds nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.blocks.ids import TOKEN_BYTES, BlockId, Lineage
from kvstore.blocks.records import BlockRecord
from kvstore.disk.records import label
from kvstore.memory.tier import CpuTier
from kvstore.policy.conversation import Conversation
from kvstore.stats import StoreStats
from kvstore.store.disk_contents import DiskContents
from kvstore.store.reads import DiskReads


@dataclass(frozen=True, slots=True)
class Identity:
    """What every block of this engine has in common."""

    fingerprint: bytes
    model: str
    block_size: int


@dataclass(slots=True, eq=False)
class ChainContent:
    """A chain as far as it is named, and its tokens: little-endian u32."""

    chain: list[BlockId]
    tokens: bytes | bytearray
    lineage: Lineage
    tenant: str


@dataclass(eq=False)
class StoredBlocks:
    """disk, reads: None without a disk. is_remote: whether the remote tier is known to have a block; None without
    one.
    """

    _cpu: CpuTier
    _disk: DiskContents | None
    _reads: DiskReads | None
    _identity: Identity
    _stats: StoreStats
    _clock: Callable[[], float]
    _is_remote: Callable[[BlockId], bool] | None = None

    def __post_init__(self) -> None:
        self.block_size = self._identity.block_size

    def record(self, content: ChainContent, index: int) -> BlockRecord:
        """The record of a full block."""
        return BlockRecord(
            block_id=content.chain[index],
            parent_id=content.lineage.parent(content.chain, index),
            tokens=self._tokens(content, index),
            fingerprint=self._identity.fingerprint,
            tenant=label(content.tenant),
            model=self._identity.model,
            created_s=self._clock(),
        )

    def _tokens(self, content: ChainContent, index: int) -> bytes:
        block_bytes = self.block_size * TOKEN_BYTES
        return bytes(content.tokens[index * block_bytes : (index + 1) * block_bytes])

    def is_on_disk(self, block_id: BlockId) -> bool:
        return self._disk is not None and self._disk.contains(block_id)

    def is_below_cpu(self, block_id: BlockId) -> bool:
        """Whether a block can be read from disk or from the remote tier."""
        return self.is_on_disk(block_id) or (self._is_remote is not None and self._is_remote(block_id))

    def holds(self, block_id: BlockId) -> bool:
        """Whether CPU or disk have this block, even if it is still in flight."""
        return self._cpu.arena_block_of(block_id) is not None or self.is_on_disk(block_id)

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
            and stored.parent_id == content.lineage.parent(content.chain, index)
            and stored.tokens == self._tokens(content, index)
            and stored.fingerprint == self._identity.fingerprint
        ):
            return arena_block
        self._stats.identity_mismatches += 1
        return None

    def tiers(self, chain: Sequence[BlockId], first: int, end: int) -> list[str]:
        """Which tier has each block from `first` on, as far as they are stored. What is being read counts as on
        disk.
        """
        found: list[str] = []
        for block_id in chain[first:end]:
            arena_block = self._cpu.arena_block_of(block_id)
            if arena_block is None and not self.is_below_cpu(block_id):
                break
            found.append(self._tier(block_id, arena_block))
        return found

    def _tier(self, block_id: BlockId, arena_block: int | None) -> str:
        is_read = arena_block is not None and self._reads is not None and arena_block in self._reads
        if arena_block is not None and not is_read and self._cpu.keep:
            return "cpu"
        if is_read and arena_block is not None and self._reads is not None:
            return "remote" if self._reads.is_from_remote(arena_block) else "disk"
        return "disk" if arena_block is not None or self.is_on_disk(block_id) else "remote"

    def claim(self, chain: Sequence[BlockId], lineage: Lineage, conversation: Conversation) -> None:
        """Give what is stored of a chain the conversation's value, including the head in front of a splice."""
        index = lineage.splice_index
        for tier in (self._cpu, self._disk):
            if tier is not None:
                tier.claim(chain, conversation)
                if index and index < len(chain):
                    tier.link(chain[index], chain[index - 1])
