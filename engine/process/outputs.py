"""Running requests on the front's side: token ids come from the engine's process, text and stop strings are made here.

Knows no socket and no thread; its owner holds a lock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvstore.engine.core.output_processor import Handle, Listener, new_handle, with_decode
from kvstore.engine.outputs import Piece, Timings
from kvstore.engine.process.wire import Ended, Said, Update, error_of
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.text.detokenizer import ChoiceText

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(slots=True)
class _Running:
    """One request."""

    handle: Handle
    texts: list[ChoiceText]
    arrival_s: float
    block_size: int
    # By choice: the last piece of a choice that a stop string has ended here, until the engine has ended it, too.
    held: dict[int, Piece] = field(default_factory=dict)


class RemoteOutputs:
    """All running requests, by id."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}
        self.untold: list[Handle] = []  # ended by `end_all`; whoever waits for them is still to be told

    def __len__(self) -> int:
        return len(self._running)

    def add(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        max_output_tokens: int,
        tokenizer: Tokenizer | None,
        block_size: int,
        listener: Listener,
    ) -> Handle:
        handle = new_handle(request_id, token_ids, params, max_output_tokens, listener)
        texts = [ChoiceText(handle.output, index, params, tokenizer) for index in range(params.n)]
        self._running[request_id] = _Running(handle, texts, time.monotonic(), block_size)
        return handle

    def is_running(self, handle: Handle) -> bool:
        return handle.request_id in self._running

    def apply(self, update: Update) -> tuple[Handle | None, Sequence[int]]:
        """Apply an update.

        Returns the handle, and the choices that a stop string has just ended, which the engine must be told. The handle
        is None when the request has already ended.
        """
        running = self._running.get(update.request_id)
        if running is None:
            return None, ()
        stopped = [said.index for said in update.said if self._add_token(running, said)]
        if update.ended is not None:
            self._finish(running, update.ended)
        return running.handle, stopped

    @staticmethod
    def _add_token(running: _Running, said: Said) -> bool:
        """Add a token. Returns whether a stop string ended this choice here, which the engine does not know."""
        index, handle, text = said.index, running.handle, running.texts[said.index]
        if index in running.held:  # this token came after the stop string
            if said.finish_reason is not None:
                handle.pieces.append(running.held.pop(index))
            return False
        if handle.output.ttft_s is None and said.token_id is not None:
            handle.output.ttft_s = time.monotonic() - running.arrival_s
        if said.token_id is None:
            piece = text.end(said.finish_reason or "abort")
        else:
            piece = text.add_token(said.token_id, said.logprob, said.finish_reason)
        if piece.finish_reason is not None:
            by_string = text.stop_string is not None
            text.choice.finish_reason = piece.finish_reason
            text.choice.stop_reason = text.stop_string if by_string else said.stop_reason
        if piece.finish_reason is not None and said.finish_reason is None:
            running.held[index] = piece
            return True
        handle.pieces.append(piece)
        return False

    def _finish(self, running: _Running, ended: Ended) -> None:
        """Set usage, chain and times, as far as the request got; `done` is set last."""
        handle, output = running.handle, running.handle.output
        self._end_choices(running)
        num_prompt, spoken = len(output.prompt_token_ids), [len(choice.token_ids) for choice in output.choices]
        output.usage = replace(output.usage, completion_tokens=sum(spoken), cached_tokens_details=ended.cached)
        # The engine may have computed blocks beyond a stop string; they are built on those that are named.
        handle.chain = tuple(ended.chain[: (num_prompt + spoken[0]) // running.block_size])
        handle.lineage = ended.lineage
        output.timings = with_decode(_seen_from_here(ended.timings, output.ttft_s), running.arrival_s)
        handle.fail(None if ended.failure is None else error_of(ended.failure))
        del self._running[handle.request_id]
        handle.done = True

    @staticmethod
    def _end_choices(running: _Running) -> None:
        for index, text in enumerate(running.texts):
            if index in running.held:
                running.handle.pieces.append(running.held.pop(index))
            elif text.choice.finish_reason is None:
                running.handle.pieces.append(text.end("abort"))
                text.choice.finish_reason = "abort"

    def end_all(self, error: Exception | None) -> None:
        """End all requests as aborted, with this error if there is one: the engine is gone."""
        self.untold += [handle for request_id in list(self._running) if (handle := self.end(request_id, error))]

    def take_untold(self) -> list[Handle]:
        untold, self.untold = self.untold, []
        return untold

    def end(self, request_id: str, error: Exception | None) -> Handle | None:
        """End one request as aborted, without the engine; None when it has already ended."""
        running = self._running.pop(request_id, None)
        if running is None:
            return None
        self._end_choices(running)
        handle = running.handle
        spoken = sum(len(choice.token_ids) for choice in handle.output.choices)
        handle.output.usage = replace(handle.output.usage, completion_tokens=spoken)
        handle.fail(error)
        handle.done = True
        return handle


def _seen_from_here(timings: Timings, ttft_s: float | None) -> Timings:
    """Count the time to the engine's process and back as time in the queue."""
    if timings.queue_s is None or timings.ttft_s is None or ttft_s is None:
        return timings
    return replace(timings, queue_s=timings.queue_s + max(0.0, ttft_s - timings.ttft_s), ttft_s=ttft_s)
