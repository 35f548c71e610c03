"""Bodies and answers of OpenAI's chat completions and completions. Fields that are not listed are ignored."""

from typing import Annotated

import msgspec
from msgspec import Meta

from kvstore.service.api.schema import Count, Messages, Sampling, TokenId, TopLogprobs
from kvstore.service.api.usage import UsageObject
from kvstore.service.http.errors import bad_request

MAX_PROMPTS = 256
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=2**20)]


# -- chat completions ------------------------------------------------------------------------------------------------
class ChatCompletionBody(Sampling, kw_only=True):
    """truncation_reuse: "exact", as every history that comes as text is; sessions have another."""

    model: str | None = None
    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    truncation_reuse: str | None = None

    def check(self) -> None:
        """Raises ApiError 400 for fields that do not go together."""
        check_exact(self.truncation_reuse)
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs", "top_logprobs needs logprobs to be true")


def check_exact(truncation_reuse: str | None) -> None:
    """Raises ApiError 400 for another reuse than that of a history which belongs to no session."""
    if truncation_reuse not in (None, "exact"):
        raise bad_request(
            "truncation_reuse", f"truncation_reuse is {truncation_reuse!r}, and only sessions re-encode; leave it out"
        )


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobObject(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprobObject]
    refusal: None = None


class AssistantMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """stop_reason: the stop string or token id that ended it."""

    index: int
    message: AssistantMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    system_fingerprint: str


class ChunkDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: ChunkDelta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageObject | None = None
    system_fingerprint: str


# -- completions -----------------------------------------------------------------------------------------------------
class CompletionBody(Sampling, kw_only=True):
    """prompt: a text, token ids, or up to MAX_PROMPTS of either."""

    model: str | None = None
    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1, max_length=2**20)]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    suffix: str | None = None

    def prompts(self) -> list[str | list[int]]:
        """Raises ApiError 400 for a list of several kinds, and for too many."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(one) for one in self.prompt}
        if len(kinds) > 1:
            raise bad_request("prompt", "prompt mixes texts, ids and lists; give one kind")
        if kinds == {int}:
            return [list(self.prompt)]  # type: ignore[arg-type]
        if len(self.prompt) > MAX_PROMPTS:
            raise bad_request("prompt", f"prompt has {len(self.prompt)} entries; at most {MAX_PROMPTS}")
        return list(self.prompt)  # type: ignore[arg-type]

    def check(self) -> None:
        """Raises ApiError 400 for what would change the answer and is not supported."""
        if self.suffix:
            raise bad_request("suffix", "suffix is not supported", "unsupported_parameter")
        if self.best_of not in (None, self.n or 1):
            raise bad_request("best_of", "best_of other than n is not supported", "unsupported_parameter")


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None = None
    stop_reason: str | int | None = None


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject | None = None
    system_fingerprint: str
