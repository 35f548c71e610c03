"""POST /v1/messages, Anthropic's way to ask: each request brings its whole history, whose KV is found again."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from aiohttp import web
from msgspec import UNSET

from kvstore.engine.outputs import Piece, TextDelta, ToolCallEvent
from kvstore.engine.text.chat_template import Message, without_marks
from kvstore.engine.text.prompts import AnswerOptions, num_chars_of
from kvstore.engine.turns import Turn
from kvstore.service.api.anthropic import message_schema as schema
from kvstore.service.api.edge import check_tokenized
from kvstore.service.api.exchange import EXCHANGE, Context, Dialect, Event, answer, context_of, tenant_of
from kvstore.service.api.naming import name_of
from kvstore.service.api.openai.stateless import StatelessRequest, cleared_history, open_stateless
from kvstore.service.api.schema import check_model, edits_in, read_body, sampling_params
from kvstore.service.api.sessions.turns import TurnResult
from kvstore.service.http.errors import ApiError, Route, bad_request, json_response

PATH = "/v1/messages"
OWN_MODELS = "claude-"  # how the names begin that Anthropic's programs ask for where nobody tells them another
Turns = Sequence[Turn[TurnResult]]


@dataclass(slots=True)
class MessagesDialect(Dialect[TurnResult]):
    """An answer as one message of Anthropic's, in blocks. index, kind: of the block that is open, or comes next."""

    has_done: ClassVar[bool] = False
    id: str
    model: str
    request_id: str
    options: AnswerOptions
    index: int = 0
    kind: str = ""

    def first(self, turns: Turns) -> Iterable[Event]:
        """What the cache had is not known yet: the last event says it."""
        usage = schema.MessagesUsage(input_tokens=len(turns[0].output.prompt_token_ids))
        message = schema.MessageObject(id=self.id, model=self.model, usage=usage)
        yield self._event("message_start", message=message)
        yield self._event("ping")

    def piece(self, turns: Turns, number: int, piece: Piece) -> Iterable[Event]:
        for event in piece.parts:
            if isinstance(event, ToolCallEvent):
                yield from self._call(event)
            elif event.kind == "content":
                yield from self._text(event, "text")
            else:
                yield from self._text(event, "thinking")

    def last(self, turns: Turns, results: Sequence[TurnResult]) -> Iterable[Event]:
        yield from self._close()
        usage = results[0].usage
        reason, sequence = schema.ended(turns[0].output.choices[0], usage)
        edits = edits_in(self.options, results[0].applied_edits)
        more = {} if edits is UNSET else {"context_management": edits}
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield self._event("message_delta", delta=delta, usage=schema.MessagesUsage.of(usage), **more)
        yield self._event("message_stop")

    def whole(self, turns: Turns, results: Sequence[TurnResult]) -> schema.MessageObject:
        choice, usage = turns[0].output.choices[0], results[0].usage
        reason, sequence = schema.ended(choice, usage)
        return schema.MessageObject(
            id=self.id, model=self.model, content=schema.content_of(choice, self.id), stop_reason=reason,
            stop_sequence=sequence, usage=schema.MessagesUsage.of(usage),
            context_management=edits_in(self.options, results[0].applied_edits),
        )  # fmt: skip

    def error(self, error: ApiError) -> Event:
        return "error", schema.MessagesError.of(error, self.request_id)

    def _text(self, event: TextDelta, kind: str) -> Iterable[Event]:
        if self.kind != kind:
            yield from self._close()
            self.kind = kind
            begun = {"type": "text", "text": ""}
            if kind == "thinking":
                begun = {"type": "thinking", "thinking": "", "signature": ""}
            yield self._event("content_block_start", index=self.index, content_block=begun)
        yield self._delta(f"{kind}_delta", **{kind: event.text})

    def _call(self, event: ToolCallEvent) -> Iterable[Event]:
        """A call, once it is whole."""
        if event.state != "whole":
            return
        yield from self._close()
        self.kind = "tool_use"
        begun = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
        yield self._event("content_block_start", index=self.index, content_block=begun)
        yield self._delta("input_json_delta", partial_json=event.arguments)
        yield from self._close()

    def _close(self) -> Iterable[Event]:
        """End the block that is open, if any."""
        if self.kind == "thinking":
            yield self._delta("signature_delta", signature=self.id)
        if self.kind:
            yield self._event("content_block_stop", index=self.index)
            self.index, self.kind = self.index + 1, ""

    def _delta(self, kind: str, **fields: str) -> Event:
        return self._event("content_block_delta", index=self.index, delta={"type": kind, **fields})

    @staticmethod
    def _event(kind: str, **fields: Any) -> Event:
        return kind, {"type": kind, **fields}


# -- the routes --------------------------------------------------------------------------------------------------------
async def create(request: web.Request) -> web.StreamResponse:
    context, body, said = await _asked(request)
    defaults = context.engine.engine.facts.sampling_defaults
    params = sampling_params(body, defaults, stop=body.stop_sequences or body.stop)
    continues = said[-1]["role"] == "assistant"
    if continues and "tool_calls" in said[-1]:
        where = f"messages[{len(body.messages) - 1}].content"
        raise bad_request(where, f"{where} ends with calls, after which no answer goes on; give their tool_result")
    options = body.options
    history = StatelessRequest(
        tenant_of(request), said, params, body.cache_salt or "", body.priority or 0, options,
        name_of(request.headers, body), continues, body.pin_s,
    )  # fmt: skip
    request_id = request[EXCHANGE].request_id
    dialect = MessagesDialect("msg_" + secrets.token_hex(12), context.model_name, request_id, options)
    return await answer(request, open_stateless(context, request[EXCHANGE], history), dialect, body.stream)


async def count_tokens(request: web.Request) -> web.Response:
    """How many tokens the prompt has, as this model reads it."""
    context, body, said = await _asked(request)
    tenant, options = tenant_of(request), body.options
    num_chars = check_tokenized(num_chars_of(said), "messages")
    continues = said[-1]["role"] == "assistant" and "tool_calls" not in said[-1]

    def counted() -> web.Response:
        shown, _ = cleared_history(context, said, options)

        def count(told: list[Message]) -> int:
            ids = context.recall.prompt_ids(tenant, body.cache_salt or "", told, options, continues)
            return len(without_marks(ids)[0])

        original = UNSET if body.context_management is None else schema.OriginalCount(count(said))
        return json_response(schema.TokenCount(count(shown), original))

    with context.limits.admit(tenant):
        return await context.engine.call_with_text(num_chars, counted)


async def _asked(request: web.Request) -> tuple[Context, schema.MessagesBody, list[Message]]:
    """The body and its messages. Anthropic's own names of models, which its programs send for themselves, count as this
    server's model. Raises as `schema.messages_of`, and as `accept`.
    """
    context, body = context_of(request), await read_body(request, schema.MessagesBody)
    if body.model is not None and not body.model.startswith(OWN_MODELS):
        check_model(context, body.model)
    if body.n not in (None, 1):
        raise bad_request("n", f"n is {body.n}; this route gives one answer")
    template = context.engine.engine.chats.language.template
    return context, body, schema.messages_of(body, template is None or template.shows_late_system)


_TAG, _BODY, _ERROR = "anthropic", schema.MessagesBody, schema.MessagesError
ROUTES = (
    Route(
        "POST", PATH, create, "user", "The next message of a conversation.", _BODY, schema.MessageObject, _TAG,
        errors=_ERROR,
    ),
    Route(
        "POST", f"{PATH}/count_tokens", count_tokens, "user", "How many tokens a conversation has.", _BODY,
        schema.TokenCount, _TAG, errors=_ERROR,
    ),
)  # fmt: skip
