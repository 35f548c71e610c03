"""What steps have brought for each prompt: tokens and ends, as plain data. Knows token ids only, and nobody who reads.

One thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import msgspec

from kvstore.blocks.ids import BlockId, Lineage
from kvstore.engine.core.request import Request
from kvstore.engine.outputs import CachedTokensDetails, Timings, TokenLogprob


class Said(msgspec.Struct, array_like=True):
    """A new token of one choice, or its end without one."""

    index: int
    token_id: int | None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # what ended the choice: a token's id, or a string that its caller has found
    logprob: TokenLogprob | None = None


class Ended(msgspec.Struct, array_like=True):
    """A prompt's figures once every choice has ended. chain: of the first choice. error: why all of them have."""

    cached: CachedTokensDetails = CachedTokensDetails()
    chain: Sequence[BlockId] = ()
    lineage: Lineage | None = None
    timings: Timings = Timings()  # without `decode_s`
    error: Exception | None = None


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
        self.num_aborted += reason == "abort" and bool(ended)
        return [choice.request_id for choice in ended]

    def _close(self, prompt: _Prompt, choice: Request) -> bool:
        """Returns whether it was the last one."""
        del prompt.open[choice.index]
        prompt.num_completion += choice.num_output_tokens
        if choice.index == 0:  # it has computed the prompt
            ended = prompt.ended
            ended.cached, ended.timings = choice.cached.details or ended.cached, _timings(choice, prompt.ttft_s)
            ended.chain, ended.lineage = tuple(choice.chain), choice.lineage
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
