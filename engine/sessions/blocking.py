"""The library's blocking verbs over a core, which another thread steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstore.engine.core.output_processor import Handle
from kvstore.engine.outputs import Piece, RequestOutput
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.sessions.core import Core
from kvstore.engine.text.prompts import checked_prompts, prompt_ids


class Bell:
    """A listener that wakes one thread. only_ends: not for every piece, but when a request has ended."""

    def __init__(self, only_ends: bool = False) -> None:
        self._only_ends = only_ends
        self._rung = threading.Event()

    def __call__(self, handles: Sequence[Handle]) -> None:
        if not self._only_ends or any(handle.done for handle in handles):
            self._rung.set()

    def wait(self, is_so: Callable[[], object]) -> None:
        """Returns once it is so, which is asked whenever the bell has rung."""
        while not is_so():
            self._rung.wait()
            self._rung.clear()


def generate(
    core: Core,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]] | str,
    params: SamplingParams | Sequence[SamplingParams] | None,
    tenant: str,
    cache_salt: str,
    priority: int,
) -> list[RequestOutput]:
    """See `Engine.generate`."""
    texts, each = checked_prompts(prompts, params)
    ids = [prompt_ids(prompt, tokenizer, core.facts.vocab_size) for prompt in texts]
    bell = Bell(only_ends=True)
    handles = core.submit_all(list(zip(ids, each, strict=True)), tenant, cache_salt, priority, listener=bell)
    try:
        for handle in handles:
            bell.wait(lambda: handle.done)  # noqa: B023 (it is asked here only)
            handle.raise_error()
    finally:
        for handle in handles:
            core.abort(handle)
    return [handle.output for handle in handles]


def stream(core: Core, handle: Handle) -> Iterator[Piece]:
    """See `Engine.stream`."""
    bell = handle.listener
    assert isinstance(bell, Bell), "somebody else listens to this request"
    try:
        while not handle.done or handle.pieces:
            if handle.pieces:
                yield handle.pieces.popleft()
            else:
                bell.wait(lambda: handle.done or handle.pieces)
        handle.raise_error()
    finally:
        core.abort(handle)
