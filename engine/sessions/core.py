"""What sessions ask of the core, in this process or in another one; and how a thread waits for answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.blocks.ids import BlockId, Lineage
from kvstore.blocks.records import Evict, Evicted
from kvstore.engine.core.output_processor import Handle, Listener
from kvstore.engine.outputs import Piece
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.text.prompts import check_fits, check_ids, check_ids_of, check_params


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about an open core.

    max_model_len: the window. max_request_tokens: prompt and answer of one request together: the window, or the HBM
    pool where that is smaller. vocab_size: of the model; a tokenizer's may be smaller. fingerprint: identifies weights
    and layout where KV outlives the process, else empty. sampling_defaults: what the model's authors recommend.
    """

    model_name: str
    max_model_len: int
    max_request_tokens: int
    block_size: int
    block_bytes: int
    vocab_size: int
    fingerprint: bytes
    sampling_defaults: dict[str, int | float]  # float alone would turn top_k into a float


def checked_request(token_ids: list[int], params: SamplingParams, facts: Facts) -> int:
    """Check a request. Returns the number of tokens that its answer may have. Raises RequestError, and
    ContextLengthError if the prompt leaves no room for an answer.
    """
    check_params(params)
    check_ids(token_ids, facts.vocab_size)
    check_ids_of(params, facts.vocab_size)
    return check_fits(len(token_ids), params, facts.max_model_len, facts.max_request_tokens)


class Core(Protocol):
    """Scheduler, model and tiers. Any thread may call it.

    life: changes when the core restarts and forgets pins, expiry times and roots. has_work: a request runs or waits.
    """

    @property
    def facts(self) -> Facts: ...

    @property
    def life(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    @property
    def has_work(self) -> bool: ...

    def check_open(self) -> None:
        """Raises EngineClosedError, or EngineDiedError where its process has ended."""

    def submit_all(
        self,
        prompts: Sequence[tuple[list[int], SamplingParams]],
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
        spliced: tuple[Sequence[BlockId], Lineage] | None = None,
        listener: Listener | None = None,
        turn_starts: Sequence[int] = (),
    ) -> list[Handle]:
        """See `Engine.submit`, for prompts that share a step if there is room. None is queued when one is wrong."""

    def abort(self, handle: Handle) -> None:
        """See `Engine.abort`."""

    def root(self, tenant: str) -> BlockId:
        """Lineage root of this tenant's chains."""

    def splice(
        self,
        chain: Sequence[BlockId],
        token_ids: Sequence[int],
        lineage: Lineage,
        spans: Sequence[tuple[int, int]],
        tenant: str,
    ) -> tuple[list[BlockId], Lineage] | None:
        """Make a new chain of these spans [begin, end) of tokens, reusing their KV; None if that is not stored."""

    def prefetch(self, chain: Sequence[BlockId], token_ids: Sequence[int], lineage: Lineage, tenant: str) -> None:
        """Hint that this chain is likely to be needed soon."""

    def pin(self, chain: Sequence[BlockId], seconds: float) -> None:
        """Evict the KV of this chain after others', for so many seconds."""

    def expire(self, chain: Sequence[BlockId], at_s: float | None) -> None:
        """From this time on (seconds since the epoch), evict the KV of this chain before others'.

        A hint: it raises nothing when the core is gone.
        """

    def forget(self, block_ids: Sequence[BlockId], timeout_s: float) -> bool:
        """Delete these blocks from all tiers. Returns whether they are gone from disk within the timeout."""

    def evict(self, what: Evict) -> dict[str, Evicted]:
        """Evict matching KV from HBM, CPU, disk and the write queue, but not blocks in use. Returns counts per tier."""

    def verify(self, delete: bool) -> dict[str, object]:
        """Check every stored block; delete: also delete damaged ones."""

    def compact(self) -> dict[str, object]:
        """Rewrite the file of blocks without what was deleted."""

    def flush(self, chain: Sequence[BlockId] = (), timeout_s: float = 60.0) -> int:
        """See `Engine.flush`. With a chain, whose request has ended: wait until nothing of it is on its way to the tier
        that servers share, and return how many of its first blocks are there.
        """

    def stats(self) -> dict[str, object]:
        """Counters and gauges, without sessions."""

    def close(self) -> None:
        """End running requests as aborted, and give back its share of the store."""


class Bell:
    """A listener that wakes one thread. only_ends: only when a request has ended, not for every piece."""

    def __init__(self, only_ends: bool = False) -> None:
        self._only_ends = only_ends
        self._rung = threading.Event()

    def __call__(self, handles: Sequence[Handle]) -> None:
        if not self._only_ends or any(handle.done for handle in handles):
            self._rung.set()

    def wait(self, is_so: Callable[[], object]) -> None:
        """Wait until the condition holds, which is checked whenever the bell rings."""
        while not is_so():
            self._rung.wait()
            self._rung.clear()


def stream(core: Core, handle: Handle) -> Iterator[Piece]:
    """See `Engine.stream`."""
    bell = handle.listener
    assert isinstance(bell, Bell), "somebody else listens to this request"
    try:
        while not handle.done or handle.pieces:
            if handle.pieces:
                yield handle.pieces.popleft()
            else:
                bell.wait(lambda: handle.done or handle.pieces)
        handle.raise_error()
    finally:
        core.abort(handle)
