"""A request of a trace on its way through a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from kvstore.blocks.ids import TOKEN_BYTES, BlockId, Lineage
from kvstore.planning.traces import TraceRequest
from kvstore.policy.conversation import Conversation
from kvstore.store.requests import Tracked

LINEAGE = Lineage(b"")  # the names of a trace's blocks say what they are built on


class Tokens:
    """Stands for the bytes of so many unknown tokens; all parts of it are equal."""

    def __init__(self, num_tokens: int) -> None:
        self._num_bytes = num_tokens * TOKEN_BYTES

    def __len__(self) -> int:
        return self._num_bytes

    def __getitem__(self, index: object) -> bytes:
        return b""


def chain_of(request: TraceRequest) -> list[BlockId]:
    """Names of the full blocks of the prompt and, if known, the answer. Pools and indexes take any hashable names."""
    return cast("list[BlockId]", list(request.chain))


def prompt_of(request: TraceRequest, block_size: int) -> list[BlockId]:
    return cast("list[BlockId]", list(request.chain[: request.num_tokens // block_size]))


@dataclass(slots=True, eq=False)
class Job:
    """A request from its arrival to its end.

    number: in order of arrival. index: in the trace. stored: the store's record of it. arrival: tiers of its stored
    blocks when it arrived. schedule: the same when the batch first had a place for it. blocks: its blocks in HBM, once
    it runs. num_hit: how many of them were not computed. num_known: of its blocks, in HBM when it arrived.
    """

    number: int
    index: int
    request: TraceRequest
    stored: Tracked
    arrived_s: float
    arrival: list[str]
    schedule: list[str] | None = None
    is_candidate: bool = False
    blocks: list[int] = field(default_factory=list)
    num_hit: int = 0
    num_known: int = 0

    @property
    def chain(self) -> list[BlockId]:
        return self.stored.chain

    def num_matchable(self, block_size: int) -> int:
        """Blocks that may be hits; one token is always left to compute."""
        return min((self.request.num_tokens - 1) // block_size, len(self.chain))

    @property
    def conversation(self) -> Conversation:
        assert self.stored.conversation is not None
        return self.stored.conversation
