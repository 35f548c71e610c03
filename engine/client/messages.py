"""`Core`, which computes wherever it runs: what is said to it and what it answers, in one process or between two.

Token ids only. Between processes it is msgpack, which never names code: exceptions cross as data. Knows no socket and
no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar, cast, get_args

import msgspec

from kvstore.blocks.ids import BlockId, Lineage
from kvstore.blocks.records import Evict, Evicted
from kvstore.engine.core.request import Update
from kvstore.engine.outputs import Facts
from kvstore.engine.process import Failed, as_error
from kvstore.engine.sampling_params import SamplingParams

R = TypeVar("R", covariant=True)
Spliced = tuple[Sequence[BlockId], Lineage]  # the ids of a chain's first blocks, and what they are built on
Result = TypeVar("Result")
State = Literal["starting", "running", "restarting", "failed", "closed"]


# -- requests --------------------------------------------------------------------------------------------------------
class Submit(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A prompt that was checked. max_tokens: of its answer, at most. chain: known ids of its first blocks. turn_starts,
    shared_ends: see `CoreClient.submit`. num_had: how many of its first tokens an earlier request had, and had_s: when
    that ended; the core says why it computes any of these. conversation: a digest of its client's name, which goes to
    one engine.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams  # without stop strings: whoever makes the text looks for them
    max_tokens: int
    tenant: str
    priority: int
    chain: Sequence[BlockId]
    lineage: Lineage
    turn_starts: Sequence[int] = ()
    shared_ends: Sequence[int] = ()
    num_had: int = 0
    had_s: float = 0.0
    conversation: bytes = b""


class End(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """End a prompt, or choice `index` of it. stop_string: at which the answer ends; None: it is aborted."""

    request_id: str
    index: int | None
    stop_string: str | None


class CallsTool(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Choice `index` of a prompt has begun to call a tool: a program will go on soon."""

    request_id: str
    index: int


# -- verbs -----------------------------------------------------------------------------------------------------------
class Call(msgspec.Struct, Generic[R], tag=True, array_like=True):
    """A verb with its arguments; R is the type of its result. Nothing can be called but the classes below."""


class Splice(Call[tuple[list[BlockId], Lineage] | None]):
    """Make a new chain of these spans [begin, end) of tokens, reusing their KV; None if that is not stored, or the head
    is not. head: see `KVConnector.splice`.
    """

    chain: Sequence[BlockId]
    token_ids: Sequence[int]
    lineage: Lineage
    spans: Sequence[tuple[int, int]]
    tenant: str
    head: Spliced | None = None


class Prefetch(Call[None]):
    """Hint that this chain is likely to be needed soon."""

    chain: Sequence[BlockId]
    token_ids: Sequence[int]
    lineage: Lineage
    tenant: str


class Pin(Call[None]):
    """Evict the KV of this chain after others', for so many seconds (None: as it was), and before others' from
    `expires_s` on (of `time.time()`; math.inf: never; None: as it was). tenant: see `KVConnector.pin`.
    """

    chain: Sequence[BlockId]
    seconds: float | None = None
    expires_s: float | None = None
    tenant: str | None = None


class Unused(Call[list[BlockId]]):
    """Those of these blocks that no request needs which waits or runs."""

    block_ids: Sequence[BlockId]


class Forget(Call[bool]):
    """Delete these blocks from all tiers. Returns whether they are gone from disk within the timeout."""

    block_ids: Sequence[BlockId]
    timeout_s: float


class EvictBlocks(Call[dict[str, Evicted]]):
    """Evict matching KV from HBM, CPU, disk and the write queue, but not blocks in use. Returns counts per tier."""

    what: Evict


class VerifyBlocks(Call[dict[str, Any]]):
    """Check every stored block; delete: also delete damaged ones."""

    delete: bool


class CompactBlocks(Call[dict[str, Any]]):
    """Rewrite the file of blocks without what was deleted. codec: and its blocks in this one."""

    codec: str | None = None


class Flush(Call[int]):
    """See `Engine.flush`. With a chain, whose request has ended: wait until nothing of it is on its way to the tier
    that servers share, and return how many of its first blocks are there.
    """

    chain: Sequence[BlockId] = ()
    timeout_s: float = 60.0


class ReadStats(Call[dict[str, Any]]):
    """Counters and gauges, without sessions."""


Verb = Splice | Prefetch | Pin | Unused | Forget | EvictBlocks | VerifyBlocks | CompactBlocks | Flush | ReadStats


# -- between two processes -------------------------------------------------------------------------------------------
class Called(msgspec.Struct, tag=True, array_like=True):
    """A call. number: the answer carries the same."""

    number: int
    verb: Verb


class Close(msgspec.Struct, tag=True, array_like=True):
    """Close the core in order and end the process."""


class Starting(msgspec.Struct, tag=True, array_like=True):
    """The core begins a stage of its start."""

    stage: str


class Opened(msgspec.Struct, tag=True, array_like=True):
    """The core is ready."""

    facts: Facts


class Updates(msgspec.Struct, tag=True, array_like=True):
    """What is new of all requests."""

    updates: list[Update]


class Answered(msgspec.Struct, tag=True, array_like=True):
    """The result of a call, or why it failed."""

    number: int
    result: msgspec.Raw
    error: Exception | None = None


_RESULTS = {verb: msgspec.msgpack.Decoder(get_args(verb.__orig_bases__[0])[0]) for verb in get_args(Verb)}


def decode_result(verb: Call[R], data: msgspec.Raw) -> R:
    return cast(R, _RESULTS[type(verb)].decode(data))


decode_inbound = msgspec.msgpack.Decoder(Submit | End | CallsTool | Called | Close).decode


decode_outbound = msgspec.msgpack.Decoder(Updates | Answered | Starting | Opened | Failed, dec_hook=as_error).decode


class Core(Protocol):
    """Scheduler, model and tiers. Any thread may call it.

    on_news: called while there is something to take, by one thread at a time, which `is_reader`. life: changes when the
    core restarts and forgets pins and expiry times.
    """

    on_news: Callable[[], None]

    @property
    def facts(self) -> Facts: ...

    @property
    def life(self) -> int: ...

    @property
    def state(self) -> State:
        """ "running"; "restarting"; "failed" if its process has ended more than max_restarts times within an hour,
        failed restarts included, or if a rank has; "closed". Of several that of the one that is best off.
        """

    @property
    def pid(self) -> int | None:
        """Of its own process; None while it has none, or if it has several."""

    @property
    def silent_s(self) -> float:
        """Seconds since its own process gave its last sign of life, due every half second; 0 without one."""

    @property
    def is_reader(self) -> bool:
        """Whether this thread is the one that takes news: it must not wait for any."""

    def check_open(self) -> None:
        """Raises EngineClosedError, or EngineDiedError where its process has ended."""

    def submit(self, prompts: Sequence[Submit]) -> None:
        """Queue checked prompts, which share a step if there is room. Never waits.

        Raises as `check_open`, and EngineOverloadedError. Some of them may then have to be ended.
        """

    def end(self, request_id: str, index: int | None = None, stop_string: str | None = None) -> None:
        """End a prompt, or one choice of it: at a stop string, or as aborted. Never waits; its news say when it has.

        Does nothing for a prompt that has ended. Raises EngineClosedError.
        """

    def note_call(self, request_id: str, index: int) -> None:
        """Choice `index` of a prompt has begun to call a tool. Never waits. Raises EngineClosedError."""

    def call(self, verb: Call[Result]) -> Result:
        """Carry out one of the verbs in `messages`. Waits for the result. Raises what the verb raises, and as
        `submit`.
        """

    def take_news(self) -> list[Update]:
        """What has come since the last call."""

    def fileno(self) -> int:
        """A descriptor that is readable while there is news, once `read_here` has returned True."""

    def read_here(self) -> bool:
        """From now on only this thread takes news, and must not wait for the core in any other way. False where the
        thread that steps takes them.
        """

    def close(self) -> None:
        """End running requests as aborted, and give back its share of the store."""
