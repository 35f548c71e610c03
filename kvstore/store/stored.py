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
    """disk, reads None: there is none."""

    _cpu: CpuTier
    _disk: DiskContents | None
    _reads: DiskReads | None
    _identity: Identity
    _stats: StoreStats
    _clock: Callable[[], float]

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

    def holds(self, block_id: BlockId) -> bool:
        """Whether CPU or disk have this block, in flight included."""
        return self._cpu.slot_of(block_id) is not None or self.is_on_disk(block_id)

    def has_end(self, chain: Sequence[BlockId], num_hbm_tokens: int) -> bool:
        """Whether the last block of this chain is in some tier."""
        if num_hbm_tokens // self.block_size >= len(chain):
            return bool(chain)
        return self.holds(chain[-1])

    def slot_of(self, content: ChainContent, index: int) -> int | None:
        """The slot of this block after comparing whose it is."""
        slot = self._cpu.slot_of(content.chain[index])
        if slot is None:
            return None
        stored = self._cpu.record(slot)
        if (
            stored is not None
            and stored.parent_id == content.lineage.parent(content.chain, index)
            and stored.tokens == self._tokens(content, index)
            and stored.fingerprint == self._identity.fingerprint
        ):
            return slot
        self._stats.identity_mismatches += 1
        return None

    def tiers(self, chain: Sequence[BlockId], first: int, end: int) -> list[str]:
        """Which tier has each block from `first` on, as far as they are stored; what is being read is on disk."""
        found: list[str] = []
        for block_id in chain[first:end]:
            slot = self._cpu.slot_of(block_id)
            if slot is None and not self.is_on_disk(block_id):
                break
            is_there = slot is not None and self._cpu.keep and (self._reads is None or slot not in self._reads)
            found.append("cpu" if is_there else "disk")
        return found

    def claim(self, chain: Sequence[BlockId], lineage: Lineage, conversation: Conversation) -> None:
        """What is stored of a chain has the conversation's value from now on, the head in front of a splice too."""
        index = lineage.splice_index
        for tier in (self._cpu, self._disk):
            if tier is not None:
                tier.claim(chain, conversation)
                if index and index < len(chain):
                    tier.link(chain[index], chain[index - 1])
