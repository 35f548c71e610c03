"""One request and its state, and what steps have brought for each prompt: tokens and ends, as plain data.

Knows token ids only; no block, no store, and nobody who reads the news.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from kvstore.blocks.ids import BlockId, Lineage, extend_chain
from kvstore.blocks.records import Loss
from kvstore.engine.core.state_slots import RequestState
from kvstore.engine.outputs import CachedTokensDetails, Timings, TokenLogprob
from kvstore.engine.sampling_params import SamplingParams
from kvstore.policy.conversation import Answer, Conversation
from kvstore.store.seam import StepSpan

if TYPE_CHECKING:
    from llguidance import LLMatcher


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
        """Blocks from this one on were found below HBM after the request had arrived, and those before it in HBM."""
        if self.arrival is not None and len(self.arrival) <= late_from:
            self.arrival += ["hbm"] * (late_from - len(self.arrival)) + list(tiers)

    def count(self, num_cached: int, num_hit: int, block_size: int, lineage: Lineage) -> None:
        """Count the tokens before `num_cached`. num_hit: how many of them were found in HBM now.

        lineage: of the blocks.
        """
        counts, arrival, first_reencoded = Counter[str](), self.arrival or [], lineage.first_reencoded
        for index in range(-(-self.num_seen // block_size), num_cached // block_size):
            if lineage.sources:
                counts["quantised"] += block_size
            if first_reencoded is not None and index >= first_reencoded:
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
    priority: int = 0
    arrival_s: float = 0.0
    tenant: str = ""
    turn_starts: Sequence[int] = ()  # in the prompt, as far as known
    shared_ends: Sequence[int] = ()  # of these turns, behind which other sessions may go on
    name: bytes = b""  # its client's of the conversation, as a digest
    num_had: int = 0  # how many of its first tokens an earlier request had, whose KV was there at had_s
    had_s: float = 0.0
    loss: tuple[int, Loss] | None = None  # the first of these that is computed, and why
    moved_from: int | None = None  # the first block whose KV was there, but moved, which it refuses
    num_saved_tokens: int = 0  # of its prompt: see `KVConnector.take_num_saved`
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
    first_window: int = 0  # it holds the window slots of its blocks from this one on, if there are any
    state: RequestState | None = None  # while it runs, of a model that keeps states
    conversation: Conversation | None = None  # which it continues, as the store has found
    fork: int = 0  # its blocks up to where it leaves what others have computed, or up to half of its own long prompt
    cached: CachedCount = field(default_factory=CachedCount)  # tokens that were never computed
    ask_at: int | None = None  # ask the store again after so many computed tokens: more may have come
    may_load: bool = True  # a failed load is not tried again
    takes_copies: bool = True  # quantised ones, when it is queued first
    num_unread: int = 0  # sampled tokens whose ids only the device knows; they count
    reads_at_once: bool = False  # no step may begin before its last token is read
    num_preemptions: int = 0
    num_told_blocks: int = 0  # how much of its chain the store knows, in blocks and in tokens
    num_told_tokens: int = 0
    children: list[Request] = field(default_factory=list)
    matcher: LLMatcher | None = None  # what the answer so far allows next; None: everything
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    calls_tool: bool = False  # as far as it was read by whoever parses it

    def __post_init__(self) -> None:
        self.prompt_id = self.prompt_id or self.request_id
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)
        self.reads_at_once = self.params.logprobs is not None or self.params.use_beam_search
        if self.params.kv_exact:
            self.takes_copies = False
            if self.lineage.splice_index is not None:
                self.moved_from = self.lineage.first_reencoded
                self.lineage, self.chain = self.lineage.exact, []
        self.extend_chain()

    def sibling(self, index: int) -> Request:
        """Choice `index` of the same prompt, with the same tokens so far, whose chain is not computed again. It holds
        nothing.
        """
        return replace(
            self,
            request_id=f"{self.prompt_id}-{index}",
            index=index,
            seed=self.seed + index,
            status=Status.WAITING,
            token_ids=list(self.token_ids),
            chain=list(self.chain),
            block_numbers=[],
            num_computed_tokens=0,
            num_hashed_blocks=0,
            state=None,
            cached=CachedCount(),
            ask_at=None,
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
    def stop_ids(self) -> list[int]:
        """The ids that end it. min_tokens forbids them for a while."""
        eos = () if self.params.ignore_eos and self.matcher is None else self.eos_token_ids
        return [*eos, *self.params.stop_token_ids]

    @property
    def answer(self) -> Answer:
        """The answer so far."""
        return Answer(self.num_output_tokens, self.calls_tool or isinstance(self.stop_reason, str))

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

    def halfway(self, num_begun: int, least: int) -> int:
        """Half of the blocks of its prompt behind so many, and behind its system prompt; 0 if a half has not more than
        `least`.
        """
        first = max([num_begun, *(start // self.block_size for start in self.turn_starts[:1])])
        half = (len(self.chain) - first) // 2
        return first + half if half > least else 0

    def give_up_splice(self) -> None:
        """Reused KV is missing: compute the same tokens under their exact chain, shared by all choices."""
        self.takes_copies = False
        self.build_on(self.lineage.exact)

    def build_on(self, lineage: Lineage) -> None:
        """Build the chain of the same tokens on this lineage, which begins with all that is known of it."""
        self.lineage = lineage
        self.chain[:] = lineage.with_copies(lineage.sources)
        self.extend_chain()
        for child in self.children:
            child.lineage = self.lineage
            child.chain[:] = self.chain

    def append(self, token_id: int) -> None:
        """Append a sampled token, whose KV does not exist yet."""
        self.token_ids.append(token_id)
        self.extend_chain()
        if self.matcher is not None:
            self.matcher.consume_token(token_id)
        self._check_stop(token_id)

    def _check_stop(self, token_id: int) -> None:
        enough = self.num_output_tokens >= self.params.min_tokens
        ends = self.matcher is not None or (enough and not self.params.ignore_eos)  # a grammar says where eos may be
        if ends and token_id in self.eos_token_ids:
            self.finish_reason = "stop"
        elif enough and token_id in self.params.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif self.num_output_tokens >= self.max_output_tokens:
            self.finish_reason = "length"


_NO_NEWS: tuple[tuple[BlockId, ...], tuple[int, ...]] = ((), ())


class Said(msgspec.Struct, array_like=True):
    """A new token of one choice, or its end without one."""

    index: int
    token_id: int | None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # what ended the choice: a token's id, or a string that its caller has found
    logprob: TokenLogprob | None = None


class Ended(msgspec.Struct, array_like=True):
    """A prompt's figures once every choice has ended. chain: of the first choice. error: why all of them have. loss:
    the first token that it has computed though an earlier request had it, and why. num_saved_tokens: of the prompt.
    """

    cached: CachedTokensDetails = CachedTokensDetails()
    chain: Sequence[BlockId] = ()
    lineage: Lineage | None = None
    timings: Timings = Timings()  # without `decode_s`
    error: Exception | None = None
    loss: tuple[int, Loss] | None = None
    num_saved_tokens: int = 0


class Update(msgspec.Struct, array_like=True):
    """What has come for one prompt. Without `Said` for a choice, that ends with the prompt, aborted."""

    request_id: str
    said: list[Said]
    ended: Ended | None = None


@dataclass(slots=True)
class _Prompt:
    """open: its choices that have not ended, by index."""

    open: dict[int, Request]
    said: list[Said] = field(default_factory=list)
    ended: Ended = field(default_factory=Ended)
    ttft_s: float | None = None
    num_completion: int = 0


class News:
    """Every choice of every running request, and what is new of them. The counters are those of `stats`."""

    def __init__(self) -> None:
        self.num_requests = self.num_aborted = 0
        self._num_prompt = self._num_completion = 0
        self._cached = CachedTokensDetails()
        self._prompts: dict[str, _Prompt] = {}  # by the id of the first choice
        self._told: dict[str, _Prompt] = {}  # those of which something is new

    def __bool__(self) -> bool:
        return bool(self._told)

    @property
    def running(self) -> list[str]:
        """Ids of the prompts that have not ended."""
        return list(self._prompts)

    def add(self, first: Request) -> None:
        """Begin to follow a prompt: its first choice, and the children of that."""
        self._prompts[first.request_id] = _Prompt({choice.index: choice for choice in (first, *first.children)})

    def say(self, request: Request, token_id: int, logprob: TokenLogprob | None = None) -> None:
        """A choice has a new token, and has ended with it if its finish_reason is set."""
        prompt = self._prompts.get(request.prompt_id)
        if prompt is None:
            return
        if prompt.ttft_s is None:
            prompt.ttft_s = time.monotonic() - request.arrival_s
        if request.params.use_beam_search:  # it comes as a whole
            prompt.said += [Said(request.index, earlier) for earlier in request.output_token_ids[:-1]]
        prompt.said.append(Said(request.index, token_id, request.finish_reason, request.stop_reason, logprob))
        self._told[request.prompt_id] = prompt
        if request.finish_reason is not None and self._close(prompt, request):
            self._count(request, prompt)

    def end(
        self, prompt_id: str, index: int | None = None, reason: str = "abort", error: Exception | None = None
    ) -> list[str]:
        """A prompt, or only choice `index` of it, has ended without a token. Returns ids of choices that still ran."""
        prompt = self._prompts.get(prompt_id)
        if prompt is None:
            return []
        self._told[prompt_id] = prompt
        prompt.ended.error = error
        ended = [choice for choice in prompt.open.values() if index in (None, choice.index)]
        for choice in ended:
            choice.finish_reason = reason
            prompt.said.append(Said(choice.index, None, reason))
            if self._close(prompt, choice) and reason != "abort":
                self._count(choice, prompt)
        self.num_aborted += reason == "abort" and error is None and bool(ended)
        return [choice.request_id for choice in ended]

    def note_call(self, prompt_id: str, index: int) -> None:
        """A choice has begun to call a tool. Ignores one that has ended."""
        prompt = self._prompts.get(prompt_id)
        if prompt is not None and index in prompt.open:
            prompt.open[index].calls_tool = True

    def _close(self, prompt: _Prompt, choice: Request) -> bool:
        """Returns whether it was the last one."""
        del prompt.open[choice.index]
        prompt.num_completion += choice.num_output_tokens
        if choice.index == 0:  # it has computed the prompt
            ended = prompt.ended
            ended.cached, ended.timings = choice.cached.details or ended.cached, _timings(choice, prompt.ttft_s)
            ended.chain, ended.lineage, ended.loss = tuple(choice.chain), choice.lineage, choice.loss
            ended.num_saved_tokens = choice.num_saved_tokens
        if not prompt.open:
            del self._prompts[choice.prompt_id]
        return not prompt.open

    def _count(self, request: Request, prompt: _Prompt) -> None:
        self.num_requests += 1
        self._num_prompt += request.num_prompt_tokens
        self._num_completion += prompt.num_completion
        self._cached += prompt.ended.cached

    def take_updates(self) -> list[Update]:
        """What is new since the last call."""
        told, self._told = self._told, {}
        updates = []
        for prompt_id, prompt in told.items():
            updates.append(Update(prompt_id, prompt.said, None if prompt.open else prompt.ended))
            prompt.said = []
        return updates

    def tokens(self) -> dict[str, object]:
        """Counts of tokens of all requests that were not aborted."""
        counts = {"prompt_tokens": self._num_prompt, "completion_tokens": self._num_completion}
        return {**counts, "cached_tokens": self._cached.total, "cached_by_tier": asdict(self._cached)}


def _timings(request: Request, ttft_s: float | None) -> Timings:
    if request.scheduled_s is None:
        return Timings()
    ready_s = request.scheduled_s if request.pending_s is None else request.pending_s
    prefill_s = None if ttft_s is None else request.arrival_s + ttft_s - request.scheduled_s
    return Timings(ready_s - request.arrival_s, request.scheduled_s - ready_s, prefill_s, ttft_s)
