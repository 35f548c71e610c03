"""Checks of what callers hand in: prompts, session ids, lengths. Bounds first, work later; no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from engine.sampling_params import SamplingParams
from kvstore.errors import ContextLengthError, RequestError

_SURROGATE = re.compile("[\ud800-\udfff]")  # in a str of its own: half a pair
SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def check_session_id(session_id: str) -> None:
    """Raises RequestError unless it is 1 to 128 letters, digits, "_" or "-"."""
    if not isinstance(session_id, str) or not SESSION_ID.fullmatch(session_id):
        raise RequestError("a session id has 1 to 128 letters, digits, '_' or '-'", param="session_id")


def checked_prompts(
    prompts: Sequence[str | Sequence[int]] | str, params: SamplingParams | Sequence[SamplingParams] | None
) -> tuple[list[str | Sequence[int]], list[SamplingParams]]:
    """Prompts as a list, with one SamplingParams each."""
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {prompts!r}; give a list of prompts", param="prompt")
    listed: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
    if listed and _is_integer(listed[0]):
        raise RequestError("prompts is a list of numbers; give a list of prompts, such as [[1, 2, 3]]", param="prompt")
    if params is None or isinstance(params, SamplingParams):
        return listed, [params or SamplingParams()] * len(listed)
    each = list(params)
    if len(each) != len(listed):
        raise RequestError(f"{len(listed)} prompts, but {len(each)} sampling parameters; give one for all or one each")
    return listed, each


def prompt_ids(prompt: str | Sequence[int], tokenizer: Any, vocab_size: int) -> list[int]:
    """Token ids of a prompt: tokenized with the tokenizer's own special tokens, or checked against the vocabulary.

    vocab_size is the model's, which may be larger than the tokenizer's.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("this model has no tokenizer; give prompts as token ids", param="prompt")
        if _SURROGATE.search(prompt):
            raise RequestError("the prompt is not valid Unicode: it holds half a surrogate pair", param="prompt")
        token_ids = list(tokenizer(prompt)["input_ids"])
    elif not isinstance(prompt, Iterable):
        raise RequestError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}", param="prompt")
    else:
        token_ids = [int(token_id) if _is_integer(token_id) else -1 for token_id in prompt]
    if not token_ids:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise RequestError(f"a prompt's token ids must be whole numbers from 0 to {vocab_size - 1}", param="prompt")
    return token_ids


def _is_integer(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def check_fits(num_prompt_tokens: int, params: SamplingParams, max_model_len: int, pool_tokens: int) -> int:
    """Tokens that the answer may have. Raises ContextLengthError with both numbers when the request cannot fit."""
    limit = min(max_model_len, pool_tokens)
    where = f"the context window has {limit}" if limit == max_model_len else f"the HBM pool holds {limit}"
    if num_prompt_tokens >= limit:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens, but {where}, and an answer needs at least one",
            num_prompt_tokens,
            limit,
        )
    if params.max_tokens is None:
        return limit - num_prompt_tokens
    total = num_prompt_tokens + params.max_tokens
    if total > limit:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {params.max_tokens}, {total} together, "
            f"but {where}",
            total,
            limit,
        )
    return params.max_tokens
