"""One request and its state, and a count of its tokens that were never computed. Knows no block and no store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from kvstore.blocks.ids import BlockId, Lineage, extend_chain
from kvstore.engine.outputs import CachedTokensDetails
from kvstore.engine.sampling_params import SamplingParams
from kvstore.policy.conversation import Answer, Conversation
from kvstore.store.seam import StepSpan


@dataclass(slots=True)
class CachedCount:
    """A token is counted once, under the tier that held its block when the request arrived."""

    details: CachedTokensDetails | None = None  # None: the request was not scheduled yet
    arrival: list[str] | None = None  # the tier of each stored block of the prompt when the request arrived
    num_seen: int = 0  # tokens that were computed or counted already: they are not counted again
    before: tuple[CachedTokensDetails | None, int] | None = None  # `details` and `num_seen` before this step's loads

    def note_arrival(self, tiers: Iterable[str]) -> None:
        """Later arrivals, after a preemption, change nothing."""
        if self.arrival is None:
            self.arrival = list(tiers)

    def note_late(self, late_from: int, tiers: Iterable[str]) -> None:
        """Blocks from this one on were found after the request had arrived."""
        if self.arrival is not None and len(self.arrival) == late_from:
            self.arrival += tiers

    def count(self, num_cached: int, num_hit: int, block_size: int, splice_index: int | None) -> None:
        """Count the tokens before `num_cached`. num_hit: how many of them were found in HBM now.

        splice_index: blocks from this one on are spliced.
        """
        counts, arrival = Counter[str](), self.arrival or []
        for index in range(-(-self.num_seen // block_size), num_cached // block_size):
            if splice_index is not None and index >= splice_index:
                counts["reencoded"] += block_size
            elif index < len(arrival):
                counts[arrival[index]] += block_size
            else:  # the block was stored after the request had arrived
                counts["hbm" if index < num_hit // block_size else "cpu"] += block_size
        self.before = (self.details, self.num_seen)
        self.details = (self.details or CachedTokensDetails()) + CachedTokensDetails(**counts)
        self.num_seen = max(self.num_seen, num_cached)

    def pass_over(self, num_tokens: int) -> None:
        """The first `num_tokens` tokens will never be counted."""
        self.num_seen = max(self.num_seen, num_tokens)

    def confirm(self, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens exists: this step's loads, if any, have succeeded."""
        self.pass_over(num_tokens)
        self.before = None

    def undo(self) -> None:
        """This step's loads have failed."""
        if self.before is not None:
            self.details, self.num_seen = self.before

    def inherit(self, owner: CachedCount) -> None:
        """Another choice of the same prompt has the counts of the choice that computed it."""
        self.details, self.num_seen = owner.details, owner.num_seen
        self.arrival = None if owner.arrival is None else list(owner.arrival)


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A token sequence that the engine extends. With n > 1 each choice is a Request of its own.

    The first choice computes the prompt; the others are its `children`, which hold nothing until the prompt is
    computed and then share its blocks. The chain may be given: the ids of a spliced beginning
    (`kvstore.blocks.ids.Lineage`).
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_output_tokens: int
    lineage: Lineage
    block_size: int
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    call_token_ids: frozenset[int] = frozenset()  # an answer with one of them calls a tool
    priority: int = 0
    arrival_s: float = 0.0
    tenant: str = ""
    turn_starts: Sequence[int] = ()  # in the prompt, as far as known
    pending_s: float | None = None  # when it could have started, had its blocks not been on their way
    scheduled_s: float | None = None  # when its first step began
    index: int = 0  # of the choice
    prompt_id: str = ""  # the request_id of the first choice

    sequence: int = 0  # order of arrival, given by the scheduler
    place: int = 0  # in the order in which the requests of all tenants are expected to start
    status: Status = Status.WAITING
    token_ids: list[int] = field(default_factory=list)  # prompt and answer
    chain: list[BlockId] = field(default_factory=list)  # ids of the full blocks of token_ids
    block_numbers: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_hashed_blocks: int = 0  # blocks that this request has put into the pool's map, or hit there
    conversation: Conversation | None = None  # which it continues, as the store has found
    cached: CachedCount = field(default_factory=CachedCount)  # tokens that were never computed
    ask_at: int | None = None  # ask the store again after so many computed tokens: more may have come
    may_load: bool = True  # a failed load is not tried again
    num_unread: int = 0  # sampled tokens whose ids only the device knows; they count
    reads_at_once: bool = False  # no step may begin before its last token is read
    num_preemptions: int = 0
    num_told_blocks: int = 0  # how much of its chain the store knows, in blocks and in tokens
    num_told_tokens: int = 0
    children: list[Request] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def __post_init__(self) -> None:
        self.prompt_id = self.prompt_id or self.request_id
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)
        self.reads_at_once = self.params.logprobs is not None
        self.extend_chain()

    def sibling(self, index: int) -> Request:
        """Choice `index` of the same prompt, whose chain is not computed again."""
        return replace(
            self,
            request_id=f"{self.request_id}-{index}",
            index=index,
            seed=self.seed + index,
            token_ids=list(self.token_ids),
            chain=list(self.chain),
            block_numbers=[],
            cached=CachedCount(),
            children=[],
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_unread

    @property
    def is_answered(self) -> bool:
        """Whether its last token was sampled: max_tokens is reached, whatever that token is."""
        return self.num_unread > 0 and self.num_output_tokens + self.num_unread >= self.max_output_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def answer(self) -> Answer:
        """The answer so far."""
        calls_tool = not self.call_token_ids.isdisjoint(self.output_token_ids)
        return Answer(self.num_output_tokens, calls_tool or isinstance(self.stop_reason, str))

    def extend_chain(self) -> None:
        """Add the ids of blocks that have become full. No id is computed twice."""
        if len(self.token_ids) >= (len(self.chain) + 1) * self.block_size:
            extend_chain(self.chain, self.lineage.root, self.token_ids, self.block_size)

    def take_news(self, is_end: bool = False) -> tuple[tuple[BlockId, ...], tuple[int, ...]]:
        """Blocks that have become full since the last call, with their tokens.

        is_end: include all remaining tokens.
        """
        if len(self.chain) == self.num_told_blocks and not is_end:
            return _NO_NEWS
        first, end = self.num_told_tokens, len(self.token_ids) if is_end else len(self.chain) * self.block_size
        new_ids = tuple(self.chain[self.num_told_blocks :])
        self.num_told_blocks, self.num_told_tokens = len(self.chain), max(first, end)
        return new_ids, tuple(self.token_ids[first:end])

    def span(self, first_token: int, num_tokens: int) -> StepSpan:
        """The tokens that the request computes in a step, as the store is told."""
        return StepSpan(self.request_id, first_token, num_tokens, *self.take_news())

    def give_up_splice(self) -> None:
        """Reused KV is missing: compute the same tokens under their exact chain, shared by all choices."""
        self.lineage = self.lineage.exact
        self.chain.clear()
        self.extend_chain()
        for child in self.children:
            child.lineage = self.lineage
            child.chain[:] = self.chain

    def append(self, token_id: int) -> None:
        """Append a sampled token, whose KV does not exist yet."""
        self.token_ids.append(token_id)
        self.extend_chain()
        self._check_stop(token_id)

    def _check_stop(self, token_id: int) -> None:
        enough = self.num_output_tokens >= self.params.min_tokens
        if enough and not self.params.ignore_eos and token_id in self.eos_token_ids:
            self.finish_reason = "stop"
        elif enough and token_id in self.params.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif self.num_output_tokens >= self.max_output_tokens:
            self.finish_reason = "length"


_NO_NEWS: tuple[tuple[BlockId, ...], tuple[int, ...]] = ((), ())
