"""Chains of blocks whose bytes follow from their ids, so that a mix-up is seen."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvstore.blocks.ids import NO_TOKENS, child_block_id, state_chain, token_bytes
from kvstore.blocks.records import BlockRecord, ReadResult
from kvstore.remote.names import BlockNames, FleetSecret
from kvstore.tiers.port import BlockTier, Chain, ReadJob, WriteBatch, WriteJob

FINGERPRINT = bytes(range(32))
SECRET = FleetSecret("a secret of the fleet, 32 characters or more")
NAMES = BlockNames(SECRET, FINGERPRINT)
SIZE = 12_288


def payload(block_id: bytes, size: int = SIZE) -> bytes:
    return hashlib.shake_128(block_id).digest(size)


@dataclass(frozen=True)
class Made:
    """A chain with its records."""

    chain: Chain
    records: tuple[BlockRecord, ...]

    def jobs(self, first: int = 0, end: int | None = None, size: int = SIZE) -> tuple[WriteJob, ...]:
        return tuple(
            WriteJob(i, one, size, lambda one=one: memoryview(payload(one.block_id, size)), i)
            for i, one in list(enumerate(self.records))[first:end]
        )

    def batch(self, first: int = 0, end: int | None = None, size: int = SIZE) -> WriteBatch:
        return WriteBatch(self.jobs(first, end, size), chain=self.chain)

    def reads(self, first: int = 0, end: int | None = None, size: int = SIZE) -> list[ReadJob]:
        return [ReadJob(i, one, memoryview(bytearray(size))) for i, one in list(enumerate(self.records))[first:end]]


def make_chain(length: int, seed: int = 0, fingerprint: bytes = FINGERPRINT, root: bytes | None = None) -> Made:
    """root: what it is built on, the end of another one."""
    root = hashlib.sha256(b"%d" % seed).digest() if root is None else root
    records, parent = [], root
    for index in range(length):
        tokens = token_bytes(range(seed + index, seed + index + 16))
        records.append(BlockRecord(child_block_id(parent, tokens), parent, tokens, fingerprint))
        parent = records[-1].block_id
    return Made(Chain(root, tuple(record.block_id for record in records)), tuple(records))


def make_state(block_id: bytes, num_blocks: int) -> Made:
    """The state behind this block."""
    ids, tokens = state_chain(block_id, num_blocks, 16), NO_TOKENS * 16
    records = (BlockRecord(one, parent, tokens, FINGERPRINT) for parent, one in pairwise([block_id, *ids]))
    return Made(Chain(block_id, tuple(ids), (num_blocks,)), tuple(records))


def are_right(reads: list[ReadJob]) -> bool:
    return all(read.view == payload(read.record.block_id, read.view.nbytes) for read in reads)


class Server:
    """A session of a tier. put, read: why blocks were not stored, and how reads ended, which are compared."""

    def __init__(self, tier: BlockTier, size: int = SIZE) -> None:
        self.tier, self.session, self.size = tier, tier.session(), size

    def put(self, made: Made, first: int = 0, end: int | None = None) -> list[str | None]:
        written = self.session.write(made.batch(first, end, self.size))
        assert written.error is None
        return [one.error for one in written.stored]

    def delete(self, block_ids: Sequence[bytes]) -> None:
        assert self.session.write(WriteBatch(deletes=tuple(block_ids))).error is None

    def count(self, made: Made) -> int:
        """How many blocks are there, from the first one on."""
        there = self.session.ask(made.chain)
        assert there == sorted(there, reverse=True)
        return sum(there)

    def read(self, made: Made, first: int = 0, end: int | None = None) -> list[ReadResult]:
        reads = made.reads(first, end, self.size)
        results = self.session.read(reads)
        assert are_right([read for read, result in zip(reads, results, strict=True) if result is ReadResult.OK])
        return results

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()
