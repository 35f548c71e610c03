"""What callers see of running requests: text as it grows, stop strings, usage. No torch.

Between the scheduler, which knows tokens, and the caller, who wants text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.detokenizer import Detokenizer
from engine.outputs import CachedTokensDetails, Choice, Piece, RequestOutput, TokenLogprob, Usage
from engine.request import Request

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(slots=True)
class Handle:
    """A caller's end of one prompt: pieces of the stream in order, and the output, complete when `done`.

    Pieces are appended by whoever steps the engine and taken by the caller. error: why it ended without an output.
    """

    request_id: str
    output: RequestOutput
    pieces: deque[Piece] = field(default_factory=deque)
    done: bool = False
    error: Exception | None = None


class OutputProcessor:
    """Tracks every choice of every running request."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._tracked: dict[str, tuple[Handle, Detokenizer, Request]] = {}
        self._open: dict[str, int] = {}  # handle id -> choices still running

    @property
    def num_open(self) -> int:
        return len(self._open)

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
            text = Detokenizer(
                self._tokenizer, params.stop, prompt_token_ids=prompt, min_tokens=params.min_tokens
            )
            self._tracked[choice.request_id] = (handle, text, choice)
        self._open[handle.request_id] = len(choices)
        return handle

    def process(
        self, request: Request, token_ids: Iterable[int], logprobs: Iterable[TokenLogprob | None]
    ) -> tuple[Handle | None, bool]:
        """Take in new tokens of a choice. Returns its handle, and whether a stop string ended it here.

        The handle is None when nobody waits for this request any more.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return None, False
        handle, text, _ = tracked
        choice = handle.output.choices[request.index]
        if handle.output.ttft_s is None:
            request.first_token_s = time.monotonic()
            handle.output.ttft_s = request.first_token_s - request.arrival_s
        new = tuple(token_ids)
        choice.token_ids.extend(new)
        known = tuple(entry for entry in logprobs if entry is not None)
        if choice.logprobs is not None:
            choice.logprobs.extend(known)
        ended_by_token = request.finish_reason == "stop"  # that token is not part of the text
        released = text.append(new[:-1] if ended_by_token else new)
        stopped = text.stop_string is not None and request.finish_reason is None
        if text.stop_string is not None:
            request.finish_reason, request.stop_reason = "stop", text.stop_string
        if request.finish_reason is not None:
            released += text.finish()
        choice.text += released
        handle.pieces.append(Piece(request.index, released, new, request.finish_reason, known or None))
        if request.finish_reason is not None:
            self._close(request)
        return handle, stopped

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
        details = CachedTokensDetails(hbm=request.num_cached_tokens or 0)
        completion = handle.output.usage.completion_tokens + len(choice.token_ids)
        if request.index == 0:
            handle.output.usage = Usage(request.num_prompt_tokens, completion, details)
        else:
            handle.output.usage = Usage(
                request.num_prompt_tokens, completion, handle.output.usage.cached_tokens_details
            )
        self._open[handle.request_id] -= 1
        if self._open[handle.request_id] == 0:
            del self._open[handle.request_id]
            handle.done = True
