"""What callers see of running requests: pieces, ends, usage. Text is made by a part that the owner hands in."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Protocol, TypeAlias

from kvstore.blocks.ids import BlockId, Lineage
from kvstore.engine.core.request import Request
from kvstore.engine.outputs import CachedTokensDetails, Choice, Piece, RequestOutput, Timings, TokenLogprob, Usage
from kvstore.engine.sampling_params import SamplingParams


@dataclass(slots=True)
class Handle:
    """A caller's end of one prompt: pieces of the stream in order, and the output, complete when `done`.

    The stepping thread appends pieces, and the caller takes them.
    """

    request_id: str
    output: RequestOutput
    listener: Listener  # notified of new pieces and of the end
    pieces: deque[Piece] = field(default_factory=deque)
    done: bool = False
    error: Exception | None = None  # why it ended without an output
    trace: TracebackType | None = None  # of the error when it was raised first
    chain: Sequence[BlockId] = ()  # ids of the first choice's full blocks, once it has ended
    lineage: Lineage | None = None  # what the chain is built on

    def fail(self, error: Exception | None) -> None:
        """End with this error, which others may share."""
        self.error, self.trace = error, None if error is None else error.__traceback__

    def raise_error(self) -> None:
        """Raise its error, if it ended with one."""
        if self.error is not None:
            raise self.error.with_traceback(self.trace)


# The stepping thread calls a listener with those of its handles that have new pieces or have ended. It must not wait.
Listener: TypeAlias = Callable[[Sequence[Handle]], None]


def tell(handles: Iterable[Handle]) -> None:
    """Notify their listeners, each once."""
    by_listener: dict[Listener, list[Handle]] = {}
    for handle in handles:
        by_listener.setdefault(handle.listener, []).append(handle)
    for listener, mine in by_listener.items():
        listener(mine)


class Totals:
    """Requests and tokens of all completed outputs, and the number of aborted ones."""

    def __init__(self) -> None:
        self.num_requests = self.num_aborted = self._num_prompt = self._num_completion = 0
        self._cached = CachedTokensDetails()

    def add(self, usage: Usage) -> None:
        self.num_requests += 1
        self._num_prompt += usage.prompt_tokens
        self._num_completion += usage.completion_tokens
        self._cached += usage.cached_tokens_details

    def as_dict(self) -> dict[str, object]:
        """The counts of tokens."""
        counts = {"prompt_tokens": self._num_prompt, "completion_tokens": self._num_completion}
        return {**counts, "cached_tokens": self._cached.total, "cached_by_tier": asdict(self._cached)}


def new_handle(
    request_id: str, prompt_token_ids: list[int], params: SamplingParams, max_output_tokens: int, listener: Listener
) -> Handle:
    """A handle with `params.n` empty choices. max_output_tokens: of each, what `max_tokens` comes to."""
    choices = [Choice(logprobs=None if params.logprobs is None else []) for _ in range(params.n)]
    capped = None if params.max_tokens in (None, max_output_tokens) else max_output_tokens
    usage = Usage(len(prompt_token_ids), 0, CachedTokensDetails(), capped)
    return Handle(request_id, RequestOutput(request_id, prompt_token_ids, choices, usage, ttft_s=None), listener)


class AnswerText(Protocol):
    """One choice as its caller sees it: takes token ids, gives pieces with text."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it."""

    def add_token(self, token_id: int, logprob: TokenLogprob | None, finish_reason: str | None) -> Piece:
        """The piece for a new token. finish_reason: why the choice ends with it, unless a stop string ends it."""

    def end(self, finish_reason: str) -> Piece:
        """Its last piece, if it ends without a token."""


class OutputProcessor:
    """Tracks every choice of every running request. text_of: makes the text of choice `index` of an output."""

    def __init__(self, text_of: Callable[[RequestOutput, int, SamplingParams], AnswerText]) -> None:
        self._text_of = text_of
        self._tracked: dict[str, tuple[Handle, AnswerText, Request]] = {}
        self._open: dict[str, int] = {}  # handle id -> choices still running

    def add(self, handle: Handle, choices: Sequence[Request]) -> None:
        """Begin to track the n choices of one prompt."""
        for choice in choices:
            text = self._text_of(handle.output, choice.index, choice.params)
            self._tracked[choice.request_id] = (handle, text, choice)
        self._open[handle.request_id] = len(choices)

    def process(
        self, request: Request, token_id: int, logprob: TokenLogprob | None = None
    ) -> tuple[Handle | None, bool]:
        """Process a new token of a choice.

        Returns its handle, and whether a stop string ended it here. The handle is None when nobody waits for this
        request any more.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return None, False
        handle, text, _ = tracked
        if handle.output.ttft_s is None:
            handle.output.ttft_s = time.monotonic() - request.arrival_s
        running = request.finish_reason is None
        piece = text.add_token(token_id, logprob, request.finish_reason)
        if text.stop_string is not None:
            request.finish_reason, request.stop_reason = "stop", text.stop_string
        handle.pieces.append(piece)
        if request.finish_reason is not None:
            self._close(request)
        return handle, running and request.finish_reason is not None

    def abort(
        self, handle: Handle, error: Exception | None = None, index: int | None = None, reason: str = "abort"
    ) -> list[str]:
        """Stop tracking a handle, or only choice `index`. Returns the ids of the choices that were still running."""
        handle.fail(error)  # first, because the handle may be done below
        mine = [i for i, (owner, _, _) in self._tracked.items() if owner is handle]
        ids = [i for i in mine if index is None or self._tracked[i][2].index == index]
        for request_id in ids:
            _, text, request = self._tracked[request_id]
            request.finish_reason = reason
            handle.pieces.append(text.end(reason))
            self._close(request)
        return ids

    def is_running(self, handle: Handle) -> bool:
        return handle.request_id in self._open

    def handles(self) -> list[Handle]:
        """Handles that are not done, each once."""
        return list({id(handle): handle for handle, _, _ in self._tracked.values()}.values())

    def _close(self, request: Request) -> None:
        handle, _, _ = self._tracked.pop(request.request_id)
        choice = handle.output.choices[request.index]
        choice.finish_reason, choice.stop_reason = request.finish_reason, request.stop_reason
        usage = handle.output.usage
        details = usage.cached_tokens_details
        if request.index == 0:
            handle.chain, handle.lineage = tuple(request.chain), request.lineage
            handle.output.timings = _timings(request, handle.output.ttft_s)
            details = request.cached.details or details
        num_completion = usage.completion_tokens + len(choice.token_ids)
        handle.output.usage = replace(usage, completion_tokens=num_completion, cached_tokens_details=details)
        self._open[handle.request_id] -= 1
        if self._open[handle.request_id] == 0:
            del self._open[handle.request_id]
            handle.output.timings = with_decode(handle.output.timings, request.arrival_s)
            handle.done = True


def _timings(request: Request, ttft_s: float | None) -> Timings:
    """Timings of the first choice, which computed the prompt."""
    if request.scheduled_s is None:
        return Timings()
    ready_s = request.scheduled_s if request.pending_s is None else request.pending_s
    prefill_s = None if ttft_s is None else request.arrival_s + ttft_s - request.scheduled_s
    return Timings(ready_s - request.arrival_s, request.scheduled_s - ready_s, prefill_s, ttft_s)


def with_decode(timings: Timings, arrival_s: float) -> Timings:
    """Add the decode time. Call it at the end of the last choice."""
    if timings.ttft_s is None:
        return timings
    return replace(timings, decode_s=time.monotonic() - arrival_s - timings.ttft_s)
