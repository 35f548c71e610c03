"""/v1/responses: OpenAI's way to hold a conversation, on the same sessions as /chat.

A response is a turn of a session. A response that continues the last turn becomes the session's next turn. One that
continues an earlier turn, or comes while another runs, begins a fork. A conversation is the session of that id: its
response is the next turn, whichever was the last one.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, ClassVar

from aiohttp import web

from kvstore.engine.engine import Engine
from kvstore.engine.outputs import Piece, ToolCallEvent
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.text.chat_template import Message
from kvstore.engine.text.prompts import AnswerOptions, check_truncation
from kvstore.engine.turns import Turn
from kvstore.errors import RequestError, SessionBusyError, SessionNotFoundError
from kvstore.service.api.exchange import EXCHANGE, Context, Dialect, Event, Exchange, answer, context_of, tenant_of
from kvstore.service.api.naming import name_of
from kvstore.service.api.openai import response_schema as schema
from kvstore.service.api.openai.stateless import StatelessRequest, check_exact, open_stateless
from kvstore.service.api.schema import accept, edits_in, read_body, read_query, sampling_params
from kvstore.service.api.sessions import turns
from kvstore.service.api.sessions.routes import EmptyBody
from kvstore.service.api.sessions.turns import TurnRequest, TurnResult, new_session_id, open_turn, request_key_of
from kvstore.service.http.errors import ApiError, Route, bad_request, json_response, renaming
from kvstore.sessions.record import Parent, SessionHead, SessionKey, TurnRecord

ROUTE = "/v1/responses"
Turns = Sequence[Turn[TurnResult]]
MAKE: dict[str, Callable[[str, str | None, str], schema.TextItem]] = {
    "content": schema.message_item, "reasoning": schema.reasoning_item
}  # fmt: skip
RESPONSE_ID = re.compile(r"resp_([A-Za-z0-9_-]{1,128})_([1-9][0-9]{0,9})")


@dataclass(frozen=True, slots=True)
class Before:
    """What a response continues: the turn that it names, and the transcript up to there."""

    parent: Parent
    system: str
    transcript: list[Message]


def response_id(session_id: str, number: int | None) -> str:
    """Without a number it is the id of a response that is not stored."""
    return f"resp_{session_id}" if number is None else f"resp_{session_id}_{number}"


def _unknown(name: str, param: str) -> ApiError:
    return ApiError(404, f"there is no response {name[:160]!r}", param=param, code="response_not_found")


def _place(name: str, param: str) -> tuple[str, int]:
    """Session and turn that an id names. Raises ApiError 404."""
    match = RESPONSE_ID.fullmatch(name)
    if match is None:
        raise _unknown(name, param)
    return match[1], int(match[2])


# -- making one ------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class ResponsesDialect(Dialect[TurnResult]):
    """A turn of a session, or of none, in OpenAI's events of a response, which are numbered."""

    draft: schema.ResponseObject
    options: AnswerOptions
    has_done: ClassVar[bool] = False
    numbers: Iterator[int] = field(default_factory=count)
    items: list[schema.OutputItem] = field(default_factory=list)  # that were begun, in order
    kind: str = ""  # of the text that the last of them has, while that goes on; `said`: of it so far
    said: list[str] = field(default_factory=list)
    made: Callable[[str | None, str], schema.TextItem] = field(init=False)  # that item, with this text and status

    def first(self, turns: Turns) -> Iterable[Event]:
        self.draft.id = response_id(turns[0].session_id, turns[0].number)
        yield self._event("response.created", response=self.draft)
        yield self._event("response.in_progress", response=self.draft)

    def piece(self, turns: Turns, number: int, piece: Piece) -> Iterable[Event]:
        for event in piece.parts:
            if isinstance(event, ToolCallEvent):
                yield from self._call(event)
                continue
            if event.kind != self.kind:
                yield from self._close("completed")
                yield from self._open(event.kind)
            self.said.append(event.text)
            yield self._of_text("delta", delta=event.text)

    def last(self, turns: Turns, results: Sequence[TurnResult]) -> Iterable[Event]:
        response = self.whole(turns, results)
        if not self.items:
            yield from self._open("content")
        yield from self._close(response.status)
        response.output = self.items
        yield self._event(f"response.{response.status}", response=response)

    def _open(self, kind: str) -> Iterable[Event]:
        """Begin an item with a text."""
        make, name = MAKE[kind], self.draft.id
        if any(item.id == make(name, None, "").id for item in self.items):  # such a text goes on behind a call
            name = f"{name}_{len(self.items)}"
        self.kind, self.made = kind, partial(make, name)
        self.items.append(self.made(None, "in_progress"))
        yield self._event("response.output_item.added", output_index=len(self.items) - 1, item=self.items[-1])
        yield self._of_part("content_part.added", part=self.made("", "in_progress").content[0])

    def _close(self, status: str) -> Iterable[Event]:
        """End the text that goes on, if any, and its item: an item ends before the next one begins."""
        if not self.kind:
            return
        self.items[-1] = item = self.made("".join(self.said), status)
        yield self._of_text("done", text=item.content[0].text)
        yield self._of_part("content_part.done", part=item.content[0])
        yield self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)
        self.kind, self.said = "", []

    def _call(self, event: ToolCallEvent) -> Iterable[Event]:
        """A call, once it is whole."""
        if event.state != "whole":
            return
        yield from self._close("completed")
        item = schema.call_item(event.id, event.name, event.arguments, "completed")
        begun = schema.call_item(event.id, event.name, "", "in_progress")
        place = {"item_id": item.id, "output_index": len(self.items)}
        self.items.append(item)
        yield self._event("response.output_item.added", output_index=place["output_index"], item=begun)
        yield self._event("response.function_call_arguments.delta", **place, delta=item.arguments)
        yield self._event("response.function_call_arguments.done", **place, arguments=item.arguments, name=item.name)
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def whole(self, turns: Turns, results: Sequence[TurnResult]) -> schema.ResponseObject:
        self.draft.id = response_id(turns[0].session_id, turns[0].number)
        self.draft.context_management = edits_in(self.options, results[0].applied_edits)
        return schema.completed(self.draft, results[0])

    def error(self, error: ApiError) -> Event:
        """OpenAI's event, and beside it what its clients raise an error for."""
        said = error.body().error
        return self._event("error", code=said.code, message=said.message, param=said.param, error=said)

    def _of_text(self, what: str, **fields: str) -> Event:
        if self.kind == "content":
            return self._of_part(f"output_text.{what}", **fields, logprobs=[])
        return self._of_part(f"reasoning_text.{what}", **fields)

    def _of_part(self, kind: str, **fields: Any) -> Event:
        place = {"item_id": self.items[-1].id, "output_index": len(self.items) - 1, "content_index": 0}
        return self._event(f"response.{kind}", **place, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        return kind, {"type": kind, "sequence_number": next(self.numbers), **fields}


async def create(request: web.Request) -> web.StreamResponse:
    context, body = await accept(request, schema.ResponseBody)
    schema.check_supported(body)
    wanted, before = await _wanted(context, request, body)
    draft = schema.ResponseObject(
        id="",
        created_at=int(time.time()),
        conversation={"id": wanted.session_id} if wanted.create else None,
        status="in_progress",
        instructions=(before.system or None) if before is not None else wanted.system,
        max_output_tokens=wanted.params.max_tokens,
        metadata=body.metadata or {},
        model=context.model_name,
        previous_response_id=body.previous_response_id,
        store=body.store is not False,
        temperature=wanted.params.temperature,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        text=body.text if body.text is not None and body.text.format else schema.TextConfig(schema.Format("text")),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_p=wanted.params.top_p,
        truncation=wanted.truncation,
        user=body.user,
    )
    opened = _opened(request, body, wanted, before)
    return await answer(request, opened, ResponsesDialect(draft, wanted.options), body.stream)


async def compact(request: web.Request) -> web.Response:
    """A summary of a conversation, as the answer to one message more: what came before is hit. Nothing is stored."""
    context, body = await accept(request, schema.CompactBody)
    schema.check_supported(body)
    asking = body.asking()
    wanted, before = await _wanted(context, request, asking)
    history = [*(() if before is None else before.transcript), *wanted.messages[:-1]]
    if not history:
        raise bad_request("conversation", f"there is no conversation {wanted.session_id!r} to sum up", "not_found")
    async with _opened(request, asking, wanted, before) as (turn,):
        result = await turn.result()
    return json_response(schema.compacted(response_id(result.session_id, None), history, result))


async def _wanted(
    context: Context, request: web.Request, body: schema.ResponseBody
) -> tuple[TurnRequest, Before | None]:
    """The turn to run if nothing has continued the previous turn meanwhile."""
    truncation, reuse = body.truncation or "disabled", body.truncation_reuse or "reencode"
    check_truncation(truncation, reuse)
    if body.store is False:
        check_exact(body.truncation_reuse)
    system, said = schema.said_of(body)
    params = _params(context, body)
    tenant, request_key = tenant_of(request), request_key_of(request)
    before, conversation, engine = None, schema.conversation_of(body), context.engine.engine
    if body.previous_response_id is not None:
        place = _place(body.previous_response_id, "previous_response_id")
        before = await context.engine.call(_before, engine, SessionKey(tenant, place[0]), place[1])
        if before is None:
            raise _unknown(body.previous_response_id, "previous_response_id")
    elif conversation is not None:
        before = await context.engine.call(_before, engine, SessionKey(tenant, conversation), None)
    goes_on = before is not None and system in (None, before.system)
    if before is not None and goes_on:
        system = None
    elif before is not None and conversation is not None and body.store is not False:
        message = "instructions are not those that the conversation began with; leave them out, or begin another one"
        raise bad_request("instructions", message, "system_mismatch")
    elif before is not None:  # another system prompt: none of the old conversation's KV fits
        said = [*before.transcript, *said]
    session_id = conversation or await new_session_id(context, request, f"{ROUTE} {body.previous_response_id}")
    is_new = not goes_on and conversation is None
    wanted = TurnRequest(
        tenant, session_id, is_new, system, said, params, truncation, reuse, request_key, conversation is not None,
        options=body.options, pin_s=body.pin_s,
    )  # fmt: skip
    return wanted, before if goes_on else None


def _params(context: Context, body: schema.ResponseBody) -> SamplingParams:
    params = sampling_params(body, context.engine.engine.facts.sampling_defaults)
    if params.n != 1:
        raise RequestError(f"n is {params.n}; a response has one answer", param="n")
    return params


def _before(engine: Engine, key: SessionKey, number: int | None) -> Before | None:
    """number: of the turn that is continued; None: the last one. None if it is not there, or has no answer."""
    turn = None if number is None else engine.sessions.turn(key, number)
    state = engine.sessions.load(key, number)
    if state is None or (turn is not None and not turns.has_answer(turn)):
        return None
    system = "".join(message["content"] for message in state.head.system)
    transcript = [message for message in state.messages if message["role"] != "system"]
    return Before(Parent(key.session_id, number or state.head.num_turns), system, transcript)


@asynccontextmanager
async def _opened(
    request: web.Request, body: schema.ResponseBody, wanted: TurnRequest, before: Before | None
) -> AsyncIterator[Turns]:
    context, exchange = context_of(request), request[EXCHANGE]
    with renaming(messages="input", tool_call_id="call_id", session_id="conversation", system="instructions"):
        if body.store is False:
            said, system = ([], wanted.system) if before is None else (before.transcript, before.system)
            messages = [*([{"role": "system", "content": system}] if system else ()), *said, *wanted.messages]
            history = StatelessRequest(
                wanted.tenant, messages, wanted.params, options=wanted.options,
                conversation=name_of(request.headers, body), pin_s=wanted.pin_s,
            )  # fmt: skip
            opening = open_stateless(context, exchange, history)
        elif before is None or wanted.create:
            opening = open_turn(context, exchange, wanted)
        else:
            opening = _going_on(context, exchange, wanted, before.parent)
        async with opening as opened:
            yield opened


@asynccontextmanager
async def _going_on(context: Context, exchange: Exchange, wanted: TurnRequest, after: Parent) -> AsyncIterator[Turns]:
    """The next turn of a session, or of a fork where the session has moved on."""
    direct = replace(wanted, session_id=after.session_id, after_turn=after.turn)
    fork = replace(wanted, is_new=True, fork_of=after)
    async with AsyncExitStack() as stack:
        if await _is_there(context, wanted):  # the same request came before, and went to a fork
            yield await stack.enter_async_context(open_turn(context, exchange, fork))
            return
        try:
            begun = await stack.enter_async_context(open_turn(context, exchange, direct))
        except SessionBusyError:
            begun = await stack.enter_async_context(open_turn(context, exchange, fork))
        yield begun


async def _is_there(context: Context, wanted: TurnRequest) -> bool:
    """Whether its fork exists; only an Idempotency-Key leads to the same fork again."""
    if wanted.request_key is None:
        return False
    is_held = context.claims.on(wanted.key) is not None
    return is_held or await context.engine.call(context.engine.engine.sessions.exists, wanted.key)


# -- one that is stored ----------------------------------------------------------------------------------------------
async def show(request: web.Request) -> web.Response:
    context, tenant, name = context_of(request), tenant_of(request), request.match_info["id"]
    session_id, number = _place(name, "response_id")
    found = await context.engine.call(_read, context.engine.engine, SessionKey(tenant, session_id), number, name)
    return json_response(_stored(*found))


def _read(engine: Engine, key: SessionKey, number: int, name: str) -> tuple[SessionHead, TurnRecord, int]:
    """The session, the turn, and the last one before it with an answer; 0: there is none."""
    try:
        head = turns.find_session(engine, key)
    except SessionNotFoundError:
        raise _unknown(name, "response_id") from None
    record = engine.sessions.turn(key, number)
    if record is None or not turns.has_answer(record):
        raise _unknown(name, "response_id")
    last = number - 1
    while last and (before := engine.sessions.turn(key, last)) is not None and not turns.has_answer(before):
        last -= 1
    return head, record, last


def _stored(head: SessionHead, record: TurnRecord, last: int) -> schema.ResponseObject:
    session_id = head.key.session_id
    if head.parent is not None and head.parent.turn == record.number - 1:
        session_id = head.parent.session_id
    draft = schema.ResponseObject(
        id=response_id(head.key.session_id, record.number),
        created_at=int(record.created_s),
        status="completed",
        instructions="".join(message["content"] for message in head.system) or None,
        model=head.model,
        previous_response_id=response_id(session_id, last) if last else None,
    )
    return schema.completed(draft, turns.result_of(head.key.session_id, record))


async def input_items(request: web.Request) -> web.Response:
    """What a stored response answers: the conversation up to it, the last item first unless `order` is "asc"."""
    context, tenant, name = context_of(request), tenant_of(request), request.match_info["id"]
    session_id, number = _place(name, "response_id")
    key, asked = SessionKey(tenant, session_id), read_query(request, schema.ItemsQuery)
    if asked.order not in ("asc", "desc"):
        raise bad_request("order", f"order is {asked.order[:40]!r}; give asc or desc")
    await context.engine.call(_read, context.engine.engine, key, number, name)
    before = await context.engine.call(_before, context.engine.engine, key, number)
    if before is None:  # deleted just now
        raise _unknown(name, "response_id")
    items = schema.input_items(session_id, before.transcript[:-1])
    items = items if asked.order == "asc" else items[::-1]
    if asked.after is not None:
        ids = [item.id for item in items]
        if asked.after not in ids:
            raise bad_request("after", f"after is {asked.after[:160]!r}, and no item of this response has that id")
        items = items[ids.index(asked.after) + 1 :]
    page, has_more = items[: asked.limit], len(items) > asked.limit
    first_id, last_id = (page[0].id, page[-1].id) if page else (None, None)
    return json_response(schema.ItemList(data=page, first_id=first_id, last_id=last_id, has_more=has_more))


async def cancel(request: web.Request) -> web.Response:
    """End a stored response that is being made, and keep what was said. One that has ended stays as it is."""
    context, tenant, name = context_of(request), tenant_of(request), request.match_info["id"]
    await read_body(request, EmptyBody)
    session_id, number = _place(name, "response_id")
    hold = context.claims.on(SessionKey(tenant, session_id))
    if hold is not None and hold.owner is not None and hold.owner.number == number:
        await hold.owner.stop()
        await asyncio.wrap_future(hold.released)
    return await show(request)


async def delete(request: web.Request) -> web.Response:
    """Delete the whole conversation: later turns quote this response, and so does their KV."""
    context, tenant, name = context_of(request), tenant_of(request), request.match_info["id"]
    session_id, number = _place(name, "response_id")
    key = SessionKey(tenant, session_id)
    await context.engine.call(_read, context.engine.engine, key, number, name)
    await turns.delete(context, key)
    return json_response(schema.ResponseDeleted(name, "response", True))


_TAG, _ANSWER = "responses", schema.ResponseObject
ROUTES = (
    Route("POST", ROUTE, create, "user", "A response, as one turn of a session.", schema.ResponseBody, _ANSWER, _TAG),
    Route("GET", f"{ROUTE}/{{id}}", show, "user", "A stored response.", None, _ANSWER, _TAG),
    Route(
        "GET",
        f"{ROUTE}/{{id}}/input_items",
        input_items,
        "user",
        "What it answers.",
        None,
        schema.ItemList,
        _TAG,
        query=schema.ItemsQuery,
    ),
    Route("POST", f"{ROUTE}/{{id}}/cancel", cancel, "user", "End it, keeping what was said.", EmptyBody, _ANSWER, _TAG),
    Route(
        "POST",
        f"{ROUTE}/compact",
        compact,
        "user",
        "A summary to go on with.",
        schema.CompactBody,
        schema.CompactedResponse,
        _TAG,
    ),
    Route("DELETE", f"{ROUTE}/{{id}}", delete, "user", "Delete its conversation.", None, schema.ResponseDeleted, _TAG),
)
