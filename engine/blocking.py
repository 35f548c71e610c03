"""The library's blocking verbs, the same for an engine in this process and for one in a process of its own.

Knows an engine by what it takes to queue a request, to step until it is done, and to abort it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from engine.output_processor import Handle
from engine.outputs import Piece, RequestOutput
from engine.prompts import checked_prompts, prompt_ids
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.engine import Engine


def generate(
    engine: Engine,
    prompts: Sequence[str | Sequence[int]] | str,
    params: SamplingParams | Sequence[SamplingParams] | None,
    tenant: str,
    cache_salt: str,
    priority: int,
) -> list[RequestOutput]:
    """See `Engine.generate`."""
    texts, each = checked_prompts(prompts, params)
    ids = [prompt_ids(prompt, engine.tokenizer, engine.vocab_size) for prompt in texts]
    for token_ids, one in zip(ids, each, strict=True):
        engine.max_output_tokens(token_ids, one)
    handles: list[Handle] = []
    try:
        for token_ids, one in zip(ids, each, strict=True):
            handles.append(engine.submit(token_ids, one, tenant, cache_salt, priority))
        for handle in handles:
            while not handle.done:
                engine.step_for(handle)
            _raise_error(handle)
    finally:
        for handle in handles:
            engine.abort(handle)
    return [handle.output for handle in handles]


def stream(engine: Engine, handle: Handle) -> Iterator[Piece]:
    """See `Engine.stream`."""
    try:
        while not handle.done or handle.pieces:
            if handle.pieces:
                yield handle.pieces.popleft()
            else:
                engine.step_for(handle)
        _raise_error(handle)
    finally:
        engine.abort(handle)


def _raise_error(handle: Handle) -> None:
    if handle.error is not None:
        raise handle.error
