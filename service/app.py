"""The aiohttp application: all routes, behind what happens around each of them. Does not know what handlers do."""

from collections.abc import Sequence
from functools import partial

from aiohttp import web

from kvstore.service.api import admin, edge, health, openapi, page
from kvstore.service.api.anthropic import messages
from kvstore.service.api.exchange import CONTEXT, Context, add_headers, answer_errors, guard, observe
from kvstore.service.api.openai import chat as openai
from kvstore.service.api.openai import completions, responses
from kvstore.service.api.sessions import routes as sessions
from kvstore.service.api.sessions import turns
from kvstore.service.http.errors import Route

ROUTES: tuple[Route, ...] = (
    *health.ROUTES, *edge.ROUTES, *openai.ROUTES, *completions.ROUTES, *turns.ROUTES, *sessions.ROUTES,
    *responses.ROUTES, *messages.ROUTES, *admin.ROUTES, *openapi.ROUTES, *page.ROUTES,
)  # fmt: skip


def make_app(context: Context, routes: Sequence[Route] = ROUTES) -> web.Application:
    app = web.Application(middlewares=[observe, answer_errors, guard])
    app[CONTEXT] = context
    for route in routes:
        handler = partial(route.handler)
        handler.route = route  # type: ignore[attr-defined]  # where the middlewares find it
        for method in ("GET", "HEAD") if route.method == "GET" else (route.method,):
            app.router.add_route(method, route.path, handler, expect_handler=_expect_later)
    app.on_response_prepare.append(add_headers)
    return app


async def _expect_later(request: web.Request) -> None:
    """`read_body` asks a waiting client for its body (100 Continue), not before the request is admitted."""
