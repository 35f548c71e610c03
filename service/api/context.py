"""What every handler can reach: the engine, the options and the service's own parts. Knows no route."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from aiohttp import web

from kvstore.engine.async_engine import AsyncEngine
from kvstore.engine.outputs import CachedTokensDetails, RequestOutput, Usage
from kvstore.engine.sessions.recall import Recall
from kvstore.engine.sessions.stored import Claims
from kvstore.engine.turns import Turn
from kvstore.service.api.metrics import Metrics
from kvstore.service.api.recent_stats import RecentStats
from kvstore.service.http.access import Access
from kvstore.service.http.errors import ApiError
from kvstore.service.http.limits import Deadline, Limits
from kvstore.service.settings.serve_options import ServeOptions
from kvstore.sessions.record import SessionKey

R = TypeVar("R")
State = Literal["starting", "running", "stopping", "failed"]
CLEAN_UP_S = 1.0  # for an answer whose reader has gone, unless its engine does not answer
SILENT_S = 5.0  # without a sign of life; there should be two a second


@dataclass(slots=True)
class Context:
    """The parts of one server. `engine`, `recall` and `stats` are set once `state` is no longer "starting".

    Until then only public routes are served.
    """

    options: ServeOptions
    access: Access
    limits: Limits
    metrics: Metrics
    started_s: int  # since the epoch
    state: State = "starting"
    engine: AsyncEngine = field(init=False)
    recall: Recall = field(init=False)
    stats: RecentStats = field(init=False)

    def open(self, engine: AsyncEngine, recall: Recall) -> None:
        """Mark the model as loaded: requests are served from now on."""
        self.engine, self.recall, self.stats = engine, recall, RecentStats(engine)
        self.state = "running"

    @property
    def has_failed(self) -> bool:
        """Whether the engine ended without being asked to."""
        return self.state == "failed" or (self.state == "running" and self.engine.engine.closed)

    @property
    def is_silent(self) -> bool:
        """Whether the engine's own process has given no sign of life for long enough to doubt it."""
        limit_s = min(SILENT_S, self.options.engine_timeout_s / 2)
        return self.state == "running" and self.engine.engine.silent_s >= limit_s

    @asynccontextmanager
    async def reading(self, turn: Turn[R], route: str, has_gaps: bool = True) -> AsyncIterator[Turn[R]]:
        """The turn once it has begun. Whoever leaves this context before its end abandons it.

        Then it is counted, for /metrics and for its request's line in the log: only at its end it is known how much was
        said to a client that has gone, so that is waited for a while. has_gaps: it is read as it comes, so the times
        between its tokens mean something.
        """
        try:
            yield await turn.begun()
        finally:
            turn.abandon()
            if turn.is_computed:
                await asyncio.wait([turn.task], timeout=CLEAN_UP_S)
                self.metrics.answer_ended(turn.output, route, turn.gaps_s if has_gaps else None)
                exchange = ANSWERED.get()
                if exchange is not None:
                    exchange.add(turn.output)

    @property
    def claims(self) -> Claims:
        return self.engine.engine.chats.claims

    def is_begun(self, key: SessionKey) -> bool:
        """Whether a turn of this session runs, perhaps its first."""
        hold = self.claims.on(key)
        return hold is not None and hold.turn is not None

    @property
    def model_name(self) -> str:
        return self.options.served_model_name or self.engine.engine.facts.model_name


@dataclass(slots=True)
class Exchange:
    """What is known of one open request.

    response: its stream, if any; abandon: ends that stream with an error from outside. status, error_code: its error's.
    usage: the sum over its answers that have ended; ttft_s: of the answer that began first.
    """

    request_id: str
    tenant: str = ""
    deadline: Deadline | None = None
    response: web.StreamResponse | None = None
    abandon: Callable[[ApiError], Awaitable[None]] | None = None
    status: int | None = None
    error_code: str | None = None
    usage: Usage | None = None
    ttft_s: float | None = None

    def add(self, output: RequestOutput) -> None:
        known = self.usage or Usage(0, 0, CachedTokensDetails())
        self.usage = Usage(
            known.prompt_tokens + output.usage.prompt_tokens,
            known.completion_tokens + output.usage.completion_tokens,
            known.cached_tokens_details + output.usage.cached_tokens_details,
        )
        if output.ttft_s is not None:
            self.ttft_s = output.ttft_s if self.ttft_s is None else min(self.ttft_s, output.ttft_s)


ANSWERED: ContextVar[Exchange | None] = ContextVar("answered", default=None)  # in the tasks that answer a request
CONTEXT: web.AppKey[Context] = web.AppKey("context", Context)
EXCHANGE: web.RequestKey[Exchange] = web.RequestKey("exchange", Exchange)


def context_of(request: web.Request) -> Context:
    return request.app[CONTEXT]


def tenant_of(request: web.Request) -> str:
    """The tenant whose key the request carries; "" where there are no keys."""
    return request[EXCHANGE].tenant
