"""The aiohttp application: all routes, and what happens around each of them. Does not know what handlers do."""

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from functools import partial

from aiohttp import HttpVersion10, HttpVersion11, web
from msgspec import UNSET
from msgspec.structs import asdict

from kvstore.service.api import admin, edge, health, openapi, page
from kvstore.service.api.anthropic import messages
from kvstore.service.api.exchange import CONTEXT, EXCHANGE, Context, Exchange, context_of
from kvstore.service.api.openai import chat as openai
from kvstore.service.api.openai import completions, responses
from kvstore.service.api.schema import sum_usage
from kvstore.service.api.sessions import routes as sessions
from kvstore.service.api.sessions import turns
from kvstore.service.http.errors import ApiError, Handler, ReaderGone, Route, api_error, error_response, unavailable
from kvstore.service.http.limits import new_request_id
from kvstore.service.http.logs import log

ROUTES: tuple[Route, ...] = (
    *health.ROUTES, *edge.ROUTES, *openai.ROUTES, *completions.ROUTES, *turns.ROUTES, *sessions.ROUTES,
    *responses.ROUTES, *messages.ROUTES, *admin.ROUTES, *openapi.ROUTES, *page.ROUTES,
)  # fmt: skip

POLLED = frozenset({"/metrics", *(route.path for route in health.ROUTES)})  # by machines, every few seconds
REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# W3C Trace Context: version, trace, span, flags. A later version may have more, which is left out.
TRACE = re.compile(r"(?!ff|00.{54})([0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(?:-.*)?")
CLIENT_GONE = 499  # nginx's number for a client that did not wait; it is never sent


def make_app(context: Context, routes: Sequence[Route] = ROUTES) -> web.Application:
    app = web.Application(
        middlewares=[observe, answer_errors, guard], client_max_size=context.options.max_body_bytes + 1
    )
    app[CONTEXT] = context
    for route in routes:
        for method in ("GET", "HEAD") if route.method == "GET" else (route.method,):
            app.router.add_route(method, route.path, _bound(route), expect_handler=_expect_later)
    app.on_response_prepare.append(_add_headers)
    return app


def _bound(route: Route) -> Handler:
    """Wrap the handler, with its route where the middlewares find it."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await route.handler(request)

    handle.route = route  # type: ignore[attr-defined]
    return handle


async def _expect_later(request: web.Request) -> None:
    """`read_body` asks a waiting client for its body (100 Continue), not before the request is admitted."""


def route_of(request: web.Request) -> Route | None:
    """None for an unknown path or method."""
    return getattr(request.match_info.handler, "route", None)


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "kvstore"
    for name in ("X-Request-Id", "Request-Id"):  # OpenAI's clients read the one, Anthropic's the other
        response.headers[name] = request[EXCHANGE].request_id
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers.update(context_of(request).access.shared_with(request))
    response.headers.setdefault("Cache-Control", "no-store")
    # The rest of a body must not be read as the next request. Who is told to go elsewhere must connect anew.
    if not request.content.is_eof() or context_of(request).limits.is_draining:
        response.force_close()
        response.headers["Connection"] = "close"


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Write one line in the log and count one for every request, however it ends."""
    given = request.headers.get("X-Request-Id", "")
    route = route_of(request)
    exchange = request[EXCHANGE] = Exchange(
        given if REQUEST_ID.fullmatch(given) else new_request_id(), "unknown" if route is None else route.template
    )
    started_s, status = time.monotonic(), CLIENT_GONE
    try:
        response = await handler(request)
        status = exchange.status or response.status
        return response
    finally:
        _tell(request, exchange, status, started_s)


def _tell(request: web.Request, exchange: Exchange, status: int, started_s: float) -> None:
    path, context, seconds = exchange.route, context_of(request), time.monotonic() - started_s
    trace = TRACE.fullmatch(request.headers.get("traceparent", ""))
    context.metrics.request_ended(path, request.method, status, seconds)
    fields = {
        "request_id": exchange.request_id,
        "method": request.method[:20],
        "route": path,
        "status": status,
        "seconds": seconds,
        "traceparent": trace and trace[1],
        "tenant": exchange.tenant or None,
        "code": exchange.error_code,
        **_answered(exchange),
    }
    log("request", fields, logging.DEBUG if path in POLLED else logging.INFO)
    if context.traces is not None and path not in POLLED:
        answers = [output.timings for output in exchange.outputs]
        context.traces.request_ended(fields, request.headers, answers, started_s)


def _answered(exchange: Exchange) -> dict[str, object]:
    if not exchange.outputs:
        return {}
    usage = sum_usage([output.usage for output in exchange.outputs])
    cached = usage.prompt_tokens_details
    tiers = {f"{tier}_tokens": count for tier, count in asdict(cached.cached_tokens_details).items()}
    counts = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    first_s = min((output.ttft_s for output in exchange.outputs if output.ttft_s is not None), default=None)
    found = {} if cached.miss is UNSET else {"miss": cached.miss.cause, "miss_tokens": cached.miss.tokens}
    return {**counts, "cached_tokens": cached.cached_tokens, **tiers, **found, "ttft_s": first_s}


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every exception into an answer. After a stream's headers it has already been sent as an event."""
    exchange = request[EXCHANGE]
    try:
        async with context_of(request).limits.deadline() as exchange.deadline:
            return await handler(request)
    except ReaderGone:
        raise asyncio.CancelledError from None  # as for every client that went away
    except Exception as error:
        told = api_error(error)
        if told.code in ("internal_error", "store_error"):  # the client is not told why
            log("a handler failed", {"request_id": exchange.request_id}, logging.ERROR, error)
        _let_go(error)
        if told.status in (401, 403, 413, 429, 503) and told.code is not None:  # refused before any work
            context_of(request).metrics.refused(told.code)
        exchange.status, exchange.error_code = told.status, told.code
        begun = exchange.response
        if begun is not None and begun.prepared:
            return begun
        route = route_of(request)
        return error_response(told, None if route is None else route.errors.of(told, exchange.request_id))


def _let_go(error: BaseException | None) -> None:
    """Drop the exception's frames: their tasks refer to it, and their texts would stay for the collector."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse requests without the route's key, and all but public routes until the model is loaded."""
    context, route = context_of(request), route_of(request)
    if request.version not in (HttpVersion10, HttpVersion11):  # aiohttp takes a line without a version for HTTP/0.9
        raise ApiError(400, "this is not HTTP/1.0 or HTTP/1.1", code="bad_request")
    if (preflight := context.access.preflight(request)) is not None:
        return preflight
    if route is not None:
        exchange = request[EXCHANGE]
        exchange.tenant = context.access.check(request, route)
        if exchange.deadline is not None:
            exchange.deadline.check_key = partial(context.access.check, request, route)
        if route.access != "public":
            _check_state(context)
    elif isinstance(request.match_info.http_exception, web.HTTPNotFound):
        raise _nowhere(request)
    return await handler(request)


def _nowhere(request: web.Request) -> ApiError:
    """A client of OpenAI's is told which of those routes there are."""
    message, prefix = "there is nothing at this path", "/v1/"
    if request.path.startswith(prefix):
        known = (getattr(one.handler, "route", None) for one in request.app.router.routes())
        paths = {route.template for route in known if route is not None and route.path.startswith(prefix)}
        message += f"; there are {', '.join(sorted(paths))}"
    return ApiError(404, message, code="not_found")


def _check_state(context: Context) -> None:
    if context.state == "starting":
        raise unavailable("the model is being loaded; try again", "starting")
    if context.state == "stopping":
        raise unavailable("the server is shutting down", "stopping")
    if context.has_failed:
        raise unavailable("the engine has failed", "engine_failed")
