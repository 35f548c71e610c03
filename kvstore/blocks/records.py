"""Data between tiers: a block's record, the outcome of a read, how a block was lost, what an eviction covers.

Knows no tensor, no thread and no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from kvstore.blocks.ids import BLOCK_ID_BYTES, NO_TOKENS, BlockId

Id = Annotated[bytes, Meta(min_length=BLOCK_ID_BYTES, max_length=BLOCK_ID_BYTES)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=-1e18, le=1e18)]  # finite: NaN is not between any bounds


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of everything stored as a record (see `kvstore.disk.records`). Its fields, in order, are the format."""


class BlockRecord(Record, frozen=True):
    """A stored block's description, without its bytes.

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

    @property
    def is_state(self) -> bool:
        """Whether it holds a part of a state, and no KV (see `kvstore.blocks.ids.state_chain`)."""
        return self.tokens.startswith(NO_TOKENS)

    def same_content(self, other: BlockRecord) -> bool:
        """Whether both name the same tokens after the same history, computed by the same model."""
        mine = (self.block_id, self.parent_id, self.tokens, self.fingerprint)
        return mine == (other.block_id, other.parent_id, other.tokens, other.fingerprint)


class Expected(Protocol):
    """What a read expects: a block's record, or anything else that recognises the block by its record."""

    @property
    def block_id(self) -> BlockId: ...

    def same_content(self, other: BlockRecord) -> bool: ...


class ReadResult(Enum):
    """How a read ended. Everything but OK ends in recompute, counted by its cause."""

    OK = "ok"
    MISSING = "missing"  # no such block
    CORRUPT = "corrupt"  # header or checksum do not match; the block is to be deleted
    MISMATCH = "mismatch"  # intact, but of another history, model or size than expected; it stays
    FAILED = "failed"  # the medium failed; the block may still be there

    @property
    def lost_by(self) -> str:
        """The cause of the loss of a block whose read has ended like this; see `Loss`."""
        return "unreadable" if self is ReadResult.FAILED else "damaged"


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a block that was there has to be computed again.

    cause: evicted, deleted, not_written, being_written, damaged, unreadable, load_failed, no_checkpoint, not_loaded
    (it is there), store_replaced, remote_away or unknown. tier: which had it last, or was to get it. at_s: when, in
    seconds since the epoch. why: more, in a few fixed words.
    """

    cause: str
    tier: str | None = None
    at_s: float | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A read or a write of a `BlockStore` that has ended; its memory belongs to the caller again.

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
    """One block from an arena block into an HBM block; position: of its first token."""

    block_number: int
    arena_block: int
    position: int
    block_id: BlockId


@dataclass(frozen=True, slots=True)
class Save:
    """A run of one request's tokens into an arena block.

    scheduled: which of the step's scheduled requests; first: token of its part of the step; offset: token in the block.
    """

    scheduled: int
    first: int
    num_tokens: int
    arena_block: int
    offset: int


@dataclass(frozen=True, slots=True)
class StatePiece:
    """The part of a state that one arena block has or gets. row: of the engine's states. index: among its parts."""

    row: int
    index: int
    arena_block: int


class WindowRun(NamedTuple):
    """Tokens of a state that go to a spliced one: arena blocks, offset and position of the first, and where it goes."""

    sources: Sequence[int]
    source_offset: int
    source_position: int
    offset: int
    position: int
    length: int


class SplicedState(NamedTuple):
    """The KV of layers with a window behind a spliced block: its arena blocks, and what fills them."""

    arena_blocks: Sequence[int]
    runs: Sequence[WindowRun]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Transfers of one step, of all its requests; loads in chain order. ticket: names the step when they have ended.

    states: loaded with the KV before them; of a plan that saves states, saved.
    """

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    ticket: int = 0
    states: tuple[StatePiece, ...] = ()


class SaveFence(Protocol):
    """A fence of a step's saves, on a device that runs behind its host: what they read must not be written before they
    end.
    """

    def order(self) -> None:
        """Let all further work of the current stream begin after the saves. Returns at once."""
        ...


@dataclass(frozen=True, slots=True)
class Transferred:
    """The loads or saves of one step have ended: nobody reads or writes their arena blocks any more."""

    ticket: int
    is_load: bool
    succeeded: bool
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Evict:
    """Which blocks to evict: those that match every given condition; no condition selects nothing.

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
    """What an eviction evicted from one tier, or would with dry_run."""

    num_blocks: int = 0
    num_bytes: int = 0
