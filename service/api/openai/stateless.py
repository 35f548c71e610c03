"""Answers a whole history that belongs to no session, in the shape of a turn; and what OpenAI's routes have in common.

Knows no route.

Answers that this server gave are recognised in the history, and the prompt holds their original ids
(`engine/sessions/recall.py`).
"""

import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvstore.engine.client.messages import Spliced
from kvstore.engine.client.requests import Handle
from kvstore.engine.outputs import AppliedEdit, RequestOutput
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.text.chat_template import Message
from kvstore.engine.text.prompts import NO_OPTIONS, AnswerOptions, num_chars_of, texts_of
from kvstore.engine.turns import Turn
from kvstore.errors import KVStoreError, RequestError
from kvstore.service.api.edge import MAX_TOKENIZED_CHARS
from kvstore.service.api.exchange import Context, Exchange, Opened
from kvstore.service.api.schema import check_chars_of
from kvstore.service.api.sessions.turns import ID_BYTES, TurnResult
from kvstore.service.http.errors import bad_request, unavailable


def check_exact(truncation_reuse: str | None) -> None:
    """Raises ApiError 400 for another reuse than that of a history which belongs to no session."""
    if truncation_reuse not in (None, "exact"):
        raise bad_request(
            "truncation_reuse", f"truncation_reuse is {truncation_reuse!r}, and only sessions re-encode; leave it out"
        )


async def output_of(turn: Turn[Any], handle: Handle) -> RequestOutput:
    """The request's answer once it has ended. Raises ApiError 503 where the server itself broke it off."""
    await turn.computed(handle)
    handle.raise_error()
    if any(choice.finish_reason in (None, "abort") for choice in handle.output.choices):
        raise unavailable("the request was ended by the server", "aborted", 1)
    return handle.output


def head_of(context: Context, prefix: str) -> dict[str, Any]:
    """What an answer and all its events repeat. system_fingerprint: for clients to compare; it changes with the
    weights, if these have a fingerprint.
    """
    return {
        "id": prefix + secrets.token_hex(12),
        "created": int(time.time()),
        "model": context.model_name,
        "system_fingerprint": "fp_" + (context.engine.engine.facts.fingerprint.hex()[:10] or "memory"),
    }


def token_text(tokenizer: Any, token_id: int) -> str:
    return "" if tokenizer is None else tokenizer.decode([token_id])


@dataclass(frozen=True, slots=True)
class StatelessRequest:
    """What to answer. conversation: the client's name of it, or "". continues: the last message is an answer, which
    goes on. pin_s: for how many seconds the conversation is pinned.
    """

    tenant: str
    messages: list[Message]
    params: SamplingParams
    salt: str = ""
    priority: int = 0
    options: AnswerOptions = NO_OPTIONS
    conversation: str = ""
    continues: bool = False
    pin_s: float | None = None


def open_stateless(context: Context, exchange: Exchange, history: StatelessRequest) -> Opened[TurnResult]:
    """Begin an answer. Nothing of it is stored: it has no number, and its session id names nothing.

    Raises ApiError 429 or 503 where there is no room, and RequestError.
    """
    # What is cleared need not fit the window.
    if history.options.context_management is None or num_chars_of(history.messages) > MAX_TOKENIZED_CHARS:
        check_chars_of(context, texts_of(history.messages))
    return context.reading(partial(_stateless, context, history), exchange)


async def _stateless(context: Context, history: StatelessRequest, turn: Turn[TurnResult]) -> TurnResult:
    engine, params, messages, options = context.engine, history.params, history.messages, history.options
    language, continues = engine.engine.chats.language, history.continues
    with context.limits.admit(history.tenant, params.num_sequences):
        shown, applied = await engine.call_with_text(
            num_chars_of(messages) if options.context_management is not None else 0, cleared_history, context, messages,
            options,
        )  # fmt: skip
        made = await engine.call_with_text(
            num_chars_of(shown), context.recall.prompt, history.tenant, history.salt, shown, options,
            history.conversation, continues,
        )  # fmt: skip
        if params.structured_outputs is not None or options.tools:
            params = await engine.call(language.constrained, params, options)
        if continues and params.structured_outputs is not None:
            param = params.structured_outputs.param
            message = f"{param} is about a whole answer, and continue_final_message asks for the rest of one"
            raise RequestError(f"{message}; leave one of them out", param=param)
        spliced: Spliced = ((), made.lineage)
        earlier = made.earlier
        if (made.spans or made.lineage.splices) and not params.kv_exact:
            spliced, earlier = await engine.call_that_waits(
                made.with_spans, engine.engine.client, history.tenant, turn.waits_for
            )
        handle = await engine.submit(
            turn, made.token_ids, params, history.tenant, history.salt, history.priority, spliced, made.turn_starts,
            language.parser(options, messages[-1] if continues else None), earlier,
        )  # fmt: skip
        turn.session_id = secrets.token_hex(ID_BYTES)
        output = await output_of(turn, handle)
        # Before the client learns that its answer has ended: its next request may follow at once.
        note = partial(context.recall.note, history.tenant, history.salt, shown, output, options=options)
        await engine.call(partial(note, handle=handle, conversation=history.conversation, continues=continues))
        if history.pin_s is not None:
            with suppress(KVStoreError):  # the answer is whole without it
                await engine.call(engine.engine.admin.pin_chain, handle.chain, history.pin_s, history.tenant)
    return TurnResult(
        turn.session_id, None, output.choices[0].message, output.finish_reason or "", output.usage, output.timings, 0,
        time.time(), applied,
    )  # fmt: skip


def cleared_history(
    context: Context, messages: list[Message], options: AnswerOptions
) -> tuple[list[Message], list[AppliedEdit]]:
    """The messages as the prompt has them, and what was cleared from them. Raises RequestError."""
    engine = context.engine.engine
    changed, applied = engine.chats.language.cleared(messages, options, engine.facts)
    return [changed.get(index, message) for index, message in enumerate(messages)], applied
