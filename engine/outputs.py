"""What a caller gets back: facts about the engine, choices, usage, the pieces of a stream; sizes as text.

Plain data, no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from kvstore.blocks.ids import BlockId, lineage_root
from kvstore.config import format_size
from kvstore.sessions.record import TurnRecord

MOST_ASKED = 10_000  # requests of a server whose usages are known


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about an open core.

    max_model_len: the window. max_request_tokens: prompt and answer of one request together: the window, or the HBM
    pool where that is smaller. vocab_size: of the model; a tokenizer's may be smaller. fingerprint: identifies weights
    and layout where KV outlives the process, else empty. root_secret: of its lineage roots. sampling_defaults: what the
    model's authors recommend. max_num_seqs: how many sequences run at once. can_splice: whether KV of any run of tokens
    can be kept and used elsewhere: there is a CPU tier, and the model has neither states nor windows. compute_price: of
    a token, in loads of one; it stays while the core lives.
    """

    model_name: str
    max_model_len: int
    max_request_tokens: int
    block_size: int
    block_bytes: int
    vocab_size: int
    fingerprint: bytes
    root_secret: bytes = field(repr=False)
    sampling_defaults: dict[str, int | float]  # float alone would turn top_k into a float
    max_num_seqs: int
    can_splice: bool = False
    compute_price: float = 8.0

    def clearing_pays(self, num_loaded: int, num_computed: int, num_copied: int = 0) -> bool:
        """Whether it pays to clear tokens of a prompt: not to have done so has cost as much as it costs to do it.

        num_loaded: these tokens, added up over the prompts that they could have been cleared from. num_computed: what
        stands behind them, and is computed once instead of loaded. num_copied: what is re-encoded instead; a copy costs
        about a load. So it is decided where nobody knows how many turns are to come: it does not cost twice what it
        would if that were known (Karlin et al., Competitive Snoopy Caching, Algorithmica 1988).
        """
        return num_loaded > (self.compute_price - 1) * num_computed + num_copied

    def root(self, tenant: str, cache_salt: str = "") -> BlockId:
        """The lineage root of this tenant's chains."""
        return lineage_root(self.root_secret, self.fingerprint.hex(), tenant, cache_salt)


@dataclass(frozen=True, slots=True)
class CachedTokensDetails:
    """Prompt tokens that were not computed, by the tier that held their block when the request arrived. reencoded: that
    were reused at another position. quantised: of all these, those of a chain that begins with quantised copies; no
    summand.
    """

    hbm: int = 0
    cpu: int = 0
    disk: int = 0
    remote: int = 0
    reencoded: int = 0
    quantised: int = 0

    @property
    def total(self) -> int:
        return self.hbm + self.cpu + self.disk + self.remote + self.reencoded

    def __add__(self, other: "CachedTokensDetails") -> "CachedTokensDetails":
        return CachedTokensDetails(
            self.hbm + other.hbm, self.cpu + other.cpu, self.disk + other.disk, self.remote + other.remote,
            self.reencoded + other.reencoded, self.quantised + other.quantised,
        )  # fmt: skip


# The causes of a miss: the prompt differs, or, from "evicted" on, the tiers lack it (`kvstore.blocks.records.Loss`).
MISSES = {
    "tools": "the list of tools changed",
    "tool_order": "the tools came in another order",
    "template": "the chat template shows the conversation otherwise, or has other variables",
    "thinking": "the chat template drops the reasoning of earlier answers",
    "edit": "the message was edited",
    "head": "the head of the prompt changes at each request, as a time stamp does",
    "truncation": "turns were dropped to make room in the window",
    "salt": "it was computed with another cache_salt",
    "weights": "it was computed with other weights",
    "evicted": "it was evicted",
    "deleted": "it was deleted",
    "not_written": "it was never written",
    "being_written": "it was still being written",
    "damaged": "its block was damaged",
    "unreadable": "its block could not be read",
    "load_failed": "its load failed",
    "no_checkpoint": "its KV was there, but no state, or window, of the model's other layers",
    "not_loaded": "it was there and was not loaded",
    "store_replaced": "the file of blocks is younger than it",
    "remote_away": "the remote tier did not answer",
    "unknown": "nobody knows why",
}


class Miss(msgspec.Struct, frozen=True, omit_defaults=True, rename={"at_s": "at"}):
    """Prompt tokens that were computed although an earlier request of the conversation had them, and why.

    cause: one of MISSES. tokens: how many at most, in whole blocks. token: where the first of them is in the prompt.
    message, role: the message that it is in, from 0; None if in none, or if that cannot be told. tier, at_s, why: as in
    `kvstore.blocks.records.Loss`.
    """

    cause: str
    tokens: int
    token: int
    message: int | None = None
    role: str | None = None
    tier: str | None = None
    at_s: float | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Earlier:
    """What an earlier request of the same conversation had of a prompt.

    num_tokens: of its first ones; ended_s: when that request ended, in seconds since the epoch. miss: what it had of
    the rest, and why that cannot be used; None if it had nothing. heads: digests of the conversation's first
    messages; None if it is not known. conversation: a digest of the client's name of it; empty for none. begun_s: when
    work for the prompt itself began, of `time.monotonic()`, if that was before it was submitted.
    """

    num_tokens: int = 0
    ended_s: float = 0.0
    miss: Miss | None = None
    heads: set[bytes] | None = None
    conversation: bytes = b""
    begun_s: float = 0.0


NO_EARLIER = Earlier()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request.

    cached_tokens is a subset of prompt_tokens, and cache_write_tokens another: those that it computed and handed to the
    tiers below HBM, which did not have them, in whole blocks. reasoning_tokens: of completion_tokens, up to where the
    reasoning of each answer ended. capped_max_tokens: what the window had left for an
    answer, if `max_tokens` was more. miss: only where there was one in a conversation that is known. thinking: whether
    the prompt has the reasoning of earlier answers, "kept" or "dropped"; None if there was none.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens_details: CachedTokensDetails
    capped_max_tokens: int | None = None
    miss: Miss | None = None
    thinking: str | None = None
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def cached_tokens(self) -> int:
        return self.cached_tokens_details.total


def sum_usage(usages: Sequence[Usage]) -> Usage:
    """Of several answers: the first miss, and the least that the window had left for one."""
    return Usage(
        sum(usage.prompt_tokens for usage in usages), sum(usage.completion_tokens for usage in usages),
        sum((usage.cached_tokens_details for usage in usages), CachedTokensDetails()),
        min((usage.capped_max_tokens for usage in usages if usage.capped_max_tokens is not None), default=None),
        next((usage.miss for usage in usages if usage.miss is not None), None),
        next((usage.thinking for usage in usages if usage.thinking is not None), None),
        sum(usage.cache_write_tokens for usage in usages), sum(usage.reasoning_tokens for usage in usages),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one sampled token and of its best alternatives (token id -> logprob)."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went, in seconds; None for phases that it did not reach."""

    queue_s: float | None = None  # waiting for its turn
    load_s: float | None = None  # waiting for blocks on their way from disk before it could start
    prefill_s: float | None = None  # from its first step to its first token, loads from CPU included
    ttft_s: float | None = None  # the sum of these three
    decode_s: float | None = None  # from its first token to its end


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of an answer's reasoning or of its content."""

    kind: Literal["reasoning", "content"]
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEvent:
    """Call `index` of an answer.

    "begun": its opener was met; the name is "" if it comes later, and what follows may still turn out to be content.
    "whole": arguments is the text of a JSON object, and the call has an id. "cut": the answer ended within it;
    arguments is what there is, as the model wrote it.
    """

    state: Literal["begun", "whole", "cut"]
    index: int
    name: str = ""
    arguments: str = ""
    id: str = ""


AnswerEvent: TypeAlias = TextDelta | ToolCallEvent


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model wrote. arguments: the text of a JSON object, or, of a call that was cut off, what there is.

    id: cannot be guessed; "" of a call that was cut off.
    """

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Choice:
    """One answer. text: as the model wrote it. content, reasoning, tool_calls: its parts, where it is parsed.

    parsed_content: None where it is not. cut_call: a call within which the answer ended, which is not to be run.
    before_stop: how many of its tokens stand whole before its stop string, and the text between them and that.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "tool_calls", "length" or "abort"
    stop_reason: str | int | None = None  # the string or id that ended it
    logprobs: list[TokenLogprob] | None = None
    parsed_content: str | None = None
    reasoning: str = ""
    reasoning_tokens: int = 0
    tool_calls: list[ToolCall] = field(default_factory=list)
    cut_call: ToolCall | None = None
    before_stop: tuple[int, str] = (0, "")

    def add(self, event: AnswerEvent) -> None:
        """Take in a part of the answer."""
        if isinstance(event, TextDelta):
            if event.kind == "reasoning":
                self.reasoning += event.text
                self.reasoning_tokens = len(self.token_ids)
            else:
                self.parsed_content = (self.parsed_content or "") + event.text
        elif event.state == "whole":
            self.tool_calls.append(ToolCall(event.id, event.name, event.arguments))
        elif event.state == "cut":
            self.cut_call = ToolCall("", event.name, event.arguments)

    @property
    def content(self) -> str:
        return self.text if self.parsed_content is None else self.parsed_content

    @property
    def message(self) -> dict[str, Any]:
        """The answer in a conversation, as in chat completions."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


class AppliedEdit(msgspec.Struct, frozen=True):
    """What was cleared: from the history that came, or, in a session, by this turn. Each type has one of the counts."""

    type: str
    cleared_input_tokens: int
    cleared_tool_uses: int | UnsetType = UNSET
    cleared_thinking_turns: int | UnsetType = UNSET

    @property
    def counts(self) -> dict[str, int]:
        return {name: count for name, count in msgspec.structs.asdict(self).items() if isinstance(count, int)}


@dataclass(frozen=True, slots=True)
class EditResult:
    """What an edit has done. turn: its number. reuse: "exact" also where "reencode" found no KV to keep. num_tokens: in
    the window now; num_reencoded_tokens: of these, whose KV was kept behind the edit.
    """

    turn: int
    reuse: str
    num_tokens: int
    num_reencoded_tokens: int


@dataclass(slots=True)
class RequestOutput:
    """The result of one prompt. text, token_ids, content, and so on are those of the first choice."""

    request_id: str
    prompt_token_ids: list[int]
    choices: list[Choice]  # n of them
    usage: Usage
    ttft_s: float | None  # seconds from the request's arrival to its first token; None if it ended without one
    timings: Timings = Timings()  # complete once every choice has ended
    arrival_s: float | None = None  # when it came, on the clock of time.monotonic; set at its end
    applied_edits: Sequence[AppliedEdit] = ()

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason

    @property
    def content(self) -> str:
        return self.choices[0].content

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        return self.choices[0].tool_calls


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a stream: new text and token ids of choice `index`; finish_reason is set on its last piece.

    events: the same text as reasoning, content and calls; None if the answer is not parsed.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    events: tuple[AnswerEvent, ...] | None = None

    @property
    def parts(self) -> tuple[AnswerEvent, ...]:
        """Its events; without, its text is content."""
        if self.events is None:
            return (TextDelta("content", self.text),) if self.text else ()
        return self.events


def events_of(message: Mapping[str, Any]) -> tuple[AnswerEvent, ...]:
    """The parts of an answer that was given before."""
    reasoning, calls = message.get("reasoning_content"), message.get("tool_calls") or ()
    said = [TextDelta("reasoning", reasoning)] if reasoning else []
    said += [TextDelta("content", message["content"])] if message["content"] else []
    return (*said, *(
        ToolCallEvent("whole", index, call["function"]["name"], call["function"]["arguments"], call["id"])
        for index, call in enumerate(calls)
    ))  # fmt: skip


def counts_of(output: RequestOutput) -> dict[str, int]:
    """Counts of tokens, and known times in microseconds."""
    usage, times = output.usage, asdict(output.timings)
    capped = {} if usage.capped_max_tokens is None else {"capped_max_tokens": usage.capped_max_tokens}
    thinking = {} if usage.thinking is None else {"thinking_dropped": int(usage.thinking == "dropped")}
    return {
        **capped,
        **thinking,
        **{f"{name[:-2]}_us": round(seconds * 1e6) for name, seconds in times.items() if seconds is not None},
        **{f"{edit.type}.{name}": count for edit in output.applied_edits for name, count in edit.counts.items()},
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "cache_write_tokens": usage.cache_write_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        **asdict(usage.cached_tokens_details),
    }


def usage_of(turn: TurnRecord) -> tuple[Usage, Timings]:
    """Of a stored turn, what `counts_of` has made of it."""
    counts = turn.usage
    details = CachedTokensDetails(*(counts.get(tier, 0) for tier in CachedTokensDetails.__annotations__))
    thinking = {None: None, 0: "kept", 1: "dropped"}[counts.get("thinking_dropped")]
    usage = Usage(
        counts.get("prompt_tokens", 0), counts.get("completion_tokens", 0), details, counts.get("capped_max_tokens"),
        None if turn.miss is None else Miss(**turn.miss), thinking, counts.get("cache_write_tokens", 0),
        counts.get("reasoning_tokens", 0),
    )  # fmt: skip
    times = [counts.get(f"{name[:-2]}_us") for name in Timings.__annotations__]
    return usage, Timings(*(None if us is None else us / 1e6 for us in times))


def describe_tiers(stats: Mapping[str, Any]) -> str:
    """The sizes that an engine has taken, such as "hbm 512.0 MiB (auto), cpu 1.0 GiB, disk 8.0 GiB"."""
    sizes = {tier: stats[tier]["blocks"] * stats[tier]["block_bytes"] for tier in ("hbm", "cpu") if stats.get(tier)}
    if stats.get("disk"):
        sizes["disk"] = stats["disk"]["capacity_bytes"]
    auto = {"hbm": " (auto)"} if stats["hbm"].get("is_auto") else {}
    return ", ".join(f"{tier} {format_size(size)}{auto.get(tier, '')}" for tier, size in sizes.items() if size)
