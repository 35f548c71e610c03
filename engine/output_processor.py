"""What callers see of running requests: text as it grows, stop strings, usage. No torch.

Between the scheduler, which knows tokens, and the caller, who wants text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine.detokenizer import Detokenizer
from engine.outputs import CachedTokensDetails, Choice, Piece, RequestOutput, Timings, TokenLogprob, Usage
from engine.request import Request
from kvstore.block import BlockId, Lineage

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(slots=True)
class Handle:
    """A caller's end of one prompt: pieces of the stream in order, and the output, complete when `done`.

    Pieces are appended by whoever steps the engine and taken by the caller. error: why it ended without an output.
    chain, lineage: the ids of the first choice's full blocks and what they are built on, once it has ended.
    """

    request_id: str
    output: RequestOutput
    pieces: deque[Piece] = field(default_factory=deque)
    done: bool = False
    error: Exception | None = None
    chain: Sequence[BlockId] = ()
    lineage: Lineage | None = None


class Totals:
    """Requests and tokens of all outputs that were completed."""

    def __init__(self) -> None:
        self.num_requests = 0
        self._tokens = dict.fromkeys(("prompt_tokens", "cached_tokens", "completion_tokens"), 0)
        self._cached_by_tier = dict.fromkeys(("hbm", "cpu", "disk", "reencoded"), 0)

    def add(self, usage: Usage) -> None:
        self.num_requests += 1
        for name in self._tokens:
            self._tokens[name] += getattr(usage, name)
        for tier in self._cached_by_tier:
            self._cached_by_tier[tier] += getattr(usage.cached_tokens_details, tier)

    def as_dict(self) -> dict[str, object]:
        """The tokens."""
        return {**self._tokens, "cached_by_tier": dict(self._cached_by_tier)}


class OutputProcessor:
    """Tracks every choice of every running request."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._tracked: dict[str, tuple[Handle, Detokenizer, Request]] = {}
        self._open: dict[str, int] = {}  # handle id -> choices still running

    def add(self, choices: list[Request]) -> Handle:
        """Begin to track the n choices of one prompt."""
        first = choices[0]
        usage = Usage(first.num_prompt_tokens, 0, CachedTokensDetails())
        logprobs = first.params.logprobs is not None
        output = RequestOutput(
            request_id=first.request_id,
            prompt_token_ids=first.prompt_token_ids,
            choices=[Choice(logprobs=[] if logprobs else None) for _ in choices],
            usage=usage,
            ttft_s=None,
        )
        handle = Handle(first.request_id, output)
        for choice in choices:
            params, prompt = choice.params, choice.prompt_token_ids
            text = Detokenizer(self._tokenizer, params.stop, prompt_token_ids=prompt, min_tokens=params.min_tokens)
            self._tracked[choice.request_id] = (handle, text, choice)
        self._open[handle.request_id] = len(choices)
        return handle

    def process(
        self, request: Request, token_id: int, logprob: TokenLogprob | None = None
    ) -> tuple[Handle | None, bool]:
        """Take in a new token of a choice. Returns its handle, and whether a stop string ended it here.

        The handle is None when nobody waits for this request any more.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return None, False
        handle, text, _ = tracked
        choice = handle.output.choices[request.index]
        if handle.output.ttft_s is None:
            handle.output.ttft_s = time.monotonic() - request.arrival_s
        choice.token_ids.append(token_id)
        if choice.logprobs is not None and logprob is not None:
            choice.logprobs.append(logprob)
        running = request.finish_reason is None
        released = "" if request.finish_reason == "stop" else text.append((token_id,))  # an end token has no text
        if not running:
            released += text.finish()
        if text.stop_string is not None:
            request.finish_reason, request.stop_reason = "stop", text.stop_string
        choice.text += released
        logprobs = None if logprob is None else (logprob,)
        handle.pieces.append(Piece(request.index, released, (token_id,), request.finish_reason, logprobs))
        if request.finish_reason is not None:
            self._close(request)
        return handle, running and request.finish_reason is not None

    def abort(self, handle: Handle, error: Exception | None = None) -> list[str]:
        """Stop tracking a handle; returns the ids of its choices that were still running."""
        ids = [i for i, (owner, _, _) in self._tracked.items() if owner is handle]
        for request_id in ids:
            _, text, request = self._tracked[request_id]
            request.finish_reason = "abort"
            released = text.finish()
            handle.output.choices[request.index].text += released
            handle.pieces.append(Piece(request.index, released, (), "abort"))
            self._close(request)
        handle.error = error
        return ids

    def handles(self) -> list[Handle]:
        """Handles that are not done, each once."""
        return list({id(handle): handle for handle, _, _ in self._tracked.values()}.values())

    def _close(self, request: Request) -> None:
        handle, _, _ = self._tracked.pop(request.request_id)
        choice = handle.output.choices[request.index]
        choice.finish_reason, choice.stop_reason = request.finish_reason, request.stop_reason
        details = request.cached or CachedTokensDetails()
        completion = handle.output.usage.completion_tokens + len(choice.token_ids)
        if request.index == 0:
            handle.chain, handle.lineage = tuple(request.chain), request.lineage
            handle.output.timings = _timings(request, handle.output.ttft_s)
            handle.output.usage = Usage(request.num_prompt_tokens, completion, details)
        else:
            handle.output.usage = Usage(
                request.num_prompt_tokens, completion, handle.output.usage.cached_tokens_details
            )
        self._open[handle.request_id] -= 1
        if self._open[handle.request_id] == 0:
            del self._open[handle.request_id]
            handle.output.timings = _with_decode(handle.output.timings, request.arrival_s)
            handle.done = True


def _timings(request: Request, ttft_s: float | None) -> Timings:
    """Of the first choice, which computed the prompt."""
    if request.scheduled_s is None:
        return Timings()
    ready_s = request.scheduled_s if request.pending_s is None else request.pending_s
    prefill_s = None if ttft_s is None else request.arrival_s + ttft_s - request.scheduled_s
    return Timings(ready_s - request.arrival_s, request.scheduled_s - ready_s, prefill_s, ttft_s)


def _with_decode(timings: Timings, arrival_s: float) -> Timings:
    if timings.ttft_s is None:
        return timings
    return replace(timings, decode_s=time.monotonic() - arrival_s - timings.ttft_s)
