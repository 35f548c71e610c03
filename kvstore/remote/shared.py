"""What any shared store does. Worker threads ask, read, write and delete, each in a session of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, ReadResult
from kvstore.disk.io_queue import Read

BATCH_BYTES, BATCH_BLOCKS = 4 << 20, 512
FULL = "OOM"  # why a block was not stored: there is no room, but what is there can be read


def batch_blocks(block_bytes: int) -> int:
    """How many blocks of a chain are put at a time; batches begin at its multiples."""
    most = max(1, min(BATCH_BYTES // block_bytes, BATCH_BLOCKS))
    return most if most < 64 else most // 64 * 64


@dataclass(frozen=True, slots=True)
class SharedChain:
    """A chain from its first block on, and the root that it is built on. ends: numbers of its first blocks that other
    chains may have in common with it, ascending, as far as known.
    """

    root: BlockId
    ids: tuple[BlockId, ...]
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Put:
    """Block `index` of a chain. fetch: returns its bytes, valid until the next one is fetched; None if they are
    gone.
    """

    index: int
    record: BlockRecord
    fetch: Callable[[], memoryview | None]


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of one block. error None: it is stored, or was before. num_bytes: how many were sent."""

    block_id: BlockId
    error: str | None = None
    num_bytes: int = 0


class Session(Protocol):
    """For one thread. All verbs raise RemoteError if the store does not answer in time."""

    def ask(self, chain: SharedChain) -> list[bool]:
        """Which of the chain's blocks are there. The time to live of those begins anew."""
        ...

    def read(self, reads: Sequence[Read]) -> list[ReadResult]:
        """Read into memory that nobody can see yet, and check everything."""
        ...

    def put(self, chain: SharedChain, puts: Sequence[Put]) -> list[PutResult]:
        """Store those of these blocks that are not there, in the chain's order; the chain is refreshed as by `ask`."""
        ...

    def delete(self, block_ids: Sequence[BlockId]) -> None: ...

    def ping(self) -> None: ...

    def close(self) -> None: ...


class Shared(Protocol):
    """A shared store. str() is its address, without secrets. most_read_bytes: that are best read at a time."""

    @property
    def most_read_bytes(self) -> int: ...

    def session(self) -> Session: ...
