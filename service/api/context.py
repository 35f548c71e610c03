"""What every handler can reach: the engine, the options and the service's own parts. Knows no route."""

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

from aiohttp import web

from kvstore.engine.async_engine import AsyncEngine
from kvstore.engine.outputs import CachedTokensDetails, RequestOutput, Usage
from kvstore.engine.sessions.recall import Recall
from kvstore.service.api.metrics import Metrics
from kvstore.service.api.recent_stats import RecentStats
from kvstore.service.api.sessions.running import Turns
from kvstore.service.http.access import Access
from kvstore.service.http.errors import ApiError
from kvstore.service.http.limits import Deadline, Limits
from kvstore.service.settings.serve_options import ServeOptions

State = Literal["starting", "running", "stopping", "failed"]


@dataclass(slots=True)
class Context:
    """The parts of one server. `engine`, `recall` and `stats` are there once `state` is no longer "starting".

    No handler but those of public routes runs before that.
    """

    options: ServeOptions
    access: Access
    limits: Limits
    metrics: Metrics
    started_s: int  # since the epoch
    state: State = "starting"
    turns: Turns = field(default_factory=Turns)
    engine: AsyncEngine = field(init=False)
    recall: Recall = field(init=False)
    stats: RecentStats = field(init=False)

    def open(self, engine: AsyncEngine, recall: Recall) -> None:
        """The model is loaded: from now on requests are served."""
        self.engine, self.recall, self.stats = engine, recall, RecentStats(engine)
        self.state = "running"

    @property
    def has_failed(self) -> bool:
        """Whether the engine ended without being asked to."""
        return self.state == "failed" or (self.state == "running" and self.engine.engine.closed)

    def answer_ended(self, output: RequestOutput, route: str, itl_s: Sequence[float] | None = None) -> None:
        """The model has ended an answer: for /metrics, and for the log's line of the request that it belongs to."""
        self.metrics.answer_ended(output, route, itl_s)
        exchange = ANSWERED.get()
        if exchange is not None:
            exchange.add(output)

    @property
    def model_name(self) -> str:
        return self.options.served_model_name or self.engine.engine.facts.model_name


@dataclass(slots=True)
class Exchange:
    """What is known of one request on its way.

    response: its stream, if any, and abandon: ends that with an error from outside. status, error_code: of its error.
    usage: of its answers together, as far as they have ended; ttft_s: of the one that began first.
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
    """Whose key the request brought; "" where there are no keys."""
    return request[EXCHANGE].tenant
