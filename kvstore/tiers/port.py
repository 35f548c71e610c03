"""What a tier below the CPU does, whatever it is; the jobs that it is given, and how they ended.

Knows no thread, and nothing of what owns the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, Expected, ReadResult

Rank = tuple[int, ...]  # of a read that is queued; the smallest goes first
AT_ONCE: Rank = (0,)
AS_HINT: Rank = (2,)  # nobody waits for it yet
CHAIN_BATCH_BYTES, CHAIN_BATCH_BLOCKS = 4 << 20, 512  # of a chain, that a believed tier is given at a time
FULL = "OOM"  # why a block was not stored: there is no room, but what is there can be read
GONE = "gone before it was stored"


def rank_of_request(key: tuple[int, int]) -> Rank:
    """The rank of a read that a request waits for, with this place in the queue."""
    return (1, *key)


def chain_batch_blocks(block_bytes: int) -> int:
    """How many blocks of a chain are written at a time; batches begin at its multiples."""
    most = max(1, min(CHAIN_BATCH_BYTES // block_bytes, CHAIN_BATCH_BLOCKS))
    return most if most < 64 else most // 64 * 64


class Keeps(Enum):
    """How it is known what a tier has."""

    EXACT = "exact"  # by an index; what goes is decided by the tier's owner
    BELIEVED = "believed"  # by its answers, which age; it decides alone what goes, and may be away


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain from its first block on, and the root that it is built on. ends: numbers of its first blocks that other
    chains may have in common with it, ascending, as far as known. behind: so many blocks of a conversation, of a state.
    """

    root: BlockId
    ids: tuple[BlockId, ...]
    ends: tuple[int, ...] = ()
    behind: int = 0


@dataclass(frozen=True, slots=True)
class ReadJob:
    """One block to be read into `view`, which nobody else looks at until that has ended."""

    handle: int
    record: Expected
    view: memoryview


@dataclass(frozen=True, slots=True)
class WriteJob:
    """One block to be written. fetch: returns its `num_bytes` bytes, which stay as they are until the batch has ended;
    None if they are gone. index: its place in the batch's chain.
    """

    handle: int
    record: BlockRecord
    num_bytes: int
    fetch: Callable[[], memoryview | None]
    index: int = 0


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """What is written at once. touched: times of last use. chain: whose blocks the jobs are, in its order; None: they
    are of any chains, parents before children. An exact tier is given no chain; a believed one is given jobs or
    deletions.
    """

    jobs: tuple[WriteJob, ...] = ()
    deletes: tuple[BlockId, ...] = ()
    touched: Mapping[BlockId, float] = field(default_factory=dict)
    chain: Chain | None = None


class Stored(NamedTuple):
    """What became of one block. error None: it is stored, or was before. num_bytes: how many it took."""

    block_id: BlockId
    error: str | None = None
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """How a batch ended. error None: it is durable, but for the blocks that were refused; else nothing of it is.
    stored: each job's outcome, in any order.
    """

    stored: Sequence[Stored] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ReadDone:
    """num_active: reads at work meanwhile, this one included, on average."""

    job: ReadJob
    result: ReadResult
    seconds: float
    num_active: float = 1.0


@dataclass(frozen=True, slots=True)
class WriteDone:
    """A batch has ended; see `Written`."""

    batch: WriteBatch
    stored: Sequence[Stored] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TaskDone:
    key: int
    succeeded: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """there None: unknown, as the tier did not answer; also of a block that it did not look for."""

    number: int
    chain: Chain
    there: Sequence[bool | None] | None = None


Done = ReadDone | WriteDone | TaskDone | Asked


class TierSession(Protocol):
    """For one thread. A session of a believed tier raises RemoteError if the tier does not answer in time."""

    def ask(self, chain: Chain) -> Sequence[bool | None]:
        """Which of the chain's blocks are there; None where that is not known. The time to live of those begins anew.
        For a model that keeps states, the first blocks of the states behind the chain's blocks follow these.
        """
        ...

    def read(self, jobs: Sequence[ReadJob]) -> list[ReadResult]:
        """Read into memory that nobody can see yet, and check everything."""
        ...

    def write(self, batch: WriteBatch) -> Written:
        """Store those of these blocks that are not there; delete others. An exact tier does it in one transaction."""
        ...

    def ping(self) -> None: ...

    def close(self) -> None: ...


class BlockTier(Protocol):
    """str() is its address, without secrets. most_read_bytes: that are best read at a time."""

    @property
    def keeps(self) -> Keeps: ...

    @property
    def most_read_bytes(self) -> int: ...

    def session(self) -> TierSession: ...
