"""Turns the engine's answers into what clients get: log probabilities, ends. Knows no route."""

from collections.abc import Sequence
from typing import Any

from kvstore.engine.outputs import RequestOutput, TokenLogprob
from kvstore.service.api.context import Context
from kvstore.service.api.openai.schema import ChatLogprobs, TokenLogprobObject, TopLogprob
from kvstore.service.http.errors import unavailable


def check_ended(output: RequestOutput) -> None:
    """Raises ApiError 503 for an answer that the server itself broke off."""
    if any(choice.finish_reason in (None, "abort") for choice in output.choices):
        raise unavailable("the request was ended by the server", "aborted", 1)


def fingerprint(context: Context) -> str:
    """`system_fingerprint` for clients to compare: it changes with the weights, if these have a fingerprint."""
    return "fp_" + (context.engine.engine.facts.fingerprint.hex()[:10] or "memory")


def token_text(tokenizer: Any, token_id: int) -> str:
    return "" if tokenizer is None else tokenizer.decode([token_id])


def chat_logprobs(tokenizer: Any, logprobs: Sequence[TokenLogprob], num_top: int) -> ChatLogprobs:
    content = []
    for one in logprobs:
        text = token_text(tokenizer, one.token_id)
        top = [
            TopLogprob(shown, logprob, list(shown.encode()))
            for shown, logprob in ((token_text(tokenizer, i), logprob) for i, logprob in one.top.items())
        ]
        content.append(TokenLogprobObject(text, one.logprob, list(text.encode()), top[:num_top]))
    return ChatLogprobs(content)
