"""What crosses the borders between tiers: a block's record, the outcome of a read, what an eviction covers.

Knows no tensor, no thread and no file.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from kvstore.blocks.ids import BLOCK_ID_BYTES, BlockId

Id = Annotated[bytes, Meta(min_length=BLOCK_ID_BYTES, max_length=BLOCK_ID_BYTES)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=-1e18, le=1e18)]  # finite: NaN is not between any bounds


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is stored as such (see `kvstore.disk.records`); its fields in their order are the format."""


class BlockRecord(Record, frozen=True):
    """What a stored block is, without its bytes.

    tokens: its token ids, little-endian u32 (see `kvstore.blocks.ids.token_bytes`). fingerprint: 32 bytes, of the model
    and layout that computed it. tenant, model: labels (`kvstore.disk.records.label`). created_s: seconds since the
    epoch.
    """

    block_id: Id
    parent_id: Id
    tokens: bytes
    fingerprint: Id
    tenant: str = ""
    model: str = ""
    created_s: Seconds = 0.0

    def same_content(self, other: "BlockRecord") -> bool:
        """Whether both name the same tokens after the same history, computed by the same model."""
        mine = (self.block_id, self.parent_id, self.tokens, self.fingerprint)
        return mine == (other.block_id, other.parent_id, other.tokens, other.fingerprint)


class Expected(Protocol):
    """What a read asks for: a block's record, or whatever else knows that block when it sees its record."""

    @property
    def block_id(self) -> BlockId: ...

    def same_content(self, other: BlockRecord) -> bool: ...


class ReadResult(Enum):
    """How a read ended. Everything but OK ends in recompute, and is counted by this cause."""

    OK = "ok"
    MISSING = "missing"  # no such block
    CORRUPT = "corrupt"  # header or checksum do not match; the block is to be deleted
    MISMATCH = "mismatch"  # sound, but of another history, model or size than expected; it stays, it is somebody else's
    FAILED = "failed"  # the medium failed; the block may still be there


@dataclass(frozen=True, slots=True)
class Finished:
    """A read or a write of a `BlockStore` has ended, and its memory is the caller's again.

    ok: a write is durable; a read has passed all checks, and else the memory may hold anything. reason: "" where it is
    ok; of a read "missing", "damaged" (the block is deleted), "mismatch" (the memory has another size than the block)
    or "io_error"; of a write "no_room", "io_error" or "forgotten". seconds: since it was asked for.
    """

    ticket: int
    ok: bool
    reason: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Load:
    """One block from an arena slot into an HBM block; position: of its first token."""

    block_number: int
    slot: int
    position: int
    block_id: BlockId


@dataclass(frozen=True, slots=True)
class Save:
    """A run of one request's tokens into a slot.

    scheduled: which of the step's scheduled requests; first: token of its part of the step; offset: token in the slot.
    """

    scheduled: int
    first: int
    num_tokens: int
    slot: int
    offset: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Transfers of one step, of all its requests; loads in chain order. ticket: names the step when they have ended."""

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    ticket: int = 0


class SaveFence(Protocol):
    """Of a step's saves, on a device that runs behind its host: what they read must not be written before they end."""

    def order(self) -> None:
        """What the current stream is given from now on begins after the saves. Returns at once."""
        ...


@dataclass(frozen=True, slots=True)
class Transferred:
    """The loads or the saves of one step have ended; nobody reads or writes their slots any more."""

    ticket: int
    is_load: bool
    succeeded: bool
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Evict:
    """Which blocks to give up: those that match every condition that is set; nothing set selects nothing.

    everything: all blocks. unused_for_s: last used at least so long ago. model: computed by this model. block_ids: only
    these. to_bytes: the least recently used, until each tier holds at most so many bytes. dry_run: only count them.
    """

    everything: bool = False
    unused_for_s: float | None = None
    model: str | None = None
    block_ids: frozenset[BlockId] | None = None
    to_bytes: int | None = None
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Evicted:
    """What an eviction gave up on one tier, or with dry_run would."""

    num_blocks: int = 0
    num_bytes: int = 0
