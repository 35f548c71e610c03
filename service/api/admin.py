"""Routes of the administrator: counters, eviction, flush, tenants, drain. All need the administrator's key."""

from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from kvstore.service.api.exchange import context_of
from kvstore.service.api.schema import read_body
from kvstore.service.http.errors import Route, json_response


class EvictBody(msgspec.Struct, kw_only=True, rename={"everything": "all"}, omit_defaults=True):
    """What to evict: everything, or what meets all the given conditions. session: {"tenant", "session_id"}."""

    everything: bool = False
    unused_for_s: Annotated[float, Meta(ge=0, lt=1e18)] | None = None
    session: dict[str, str] | None = None
    model: str | None = None
    to_bytes: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    dry_run: bool = False


class Amount(msgspec.Struct):
    blocks: int
    bytes: int


class EvictAnswer(msgspec.Struct):
    """What was evicted per tier, or would be."""

    dry_run: bool
    tiers: dict[str, Amount]


class Flushed(msgspec.Struct):
    flushed: bool


class Drained(msgspec.Struct):
    """running: requests that compute or wait."""

    draining: bool
    running: int


class TenantCounts(msgspec.Struct):
    """running: its sequences, whether they compute or wait."""

    tenant: str
    running: int


class TenantList(msgspec.Struct):
    tenants: list[TenantCounts]


async def stats(request: web.Request) -> web.Response:
    engine = context_of(request).engine
    return json_response(await engine.call(engine.engine.stats))


async def evict(request: web.Request) -> web.Response:
    engine, body = context_of(request).engine, await read_body(request, EvictBody)
    return json_response(await engine.call_that_waits(engine.engine.admin.handle, "evict", msgspec.to_builtins(body)))


async def flush(request: web.Request) -> web.Response:
    engine = context_of(request).engine
    await engine.flush()
    await engine.call_that_waits(engine.engine.answers.flush)
    return json_response(Flushed(True))


async def drain(request: web.Request) -> web.Response:
    """Until it is undone, `Limits.admit` takes nothing and balancers are told to look elsewhere."""
    return _draining(request, True)


async def undo_drain(request: web.Request) -> web.Response:
    return _draining(request, False)


def _draining(request: web.Request, is_draining: bool) -> web.Response:
    limits = context_of(request).limits
    limits.is_draining = is_draining
    return json_response(Drained(is_draining, limits.num_admitted))


async def tenants(request: web.Request) -> web.Response:
    context = context_of(request)
    counts = context.limits.counts()
    names = sorted({*context.access.tenants, *counts})
    found = [TenantCounts(name, counts.get(name, 0)) for name in names]
    return json_response(TenantList(found))


ROUTES = (
    Route("GET", "/admin/stats", stats, "admin", "The engine's counters.", None, dict[str, Any], "admin"),
    Route("POST", "/admin/evict", evict, "admin", "Give up cached KV.", EvictBody, EvictAnswer, "admin"),
    Route("POST", "/admin/flush", flush, "admin", "Wait until all is on disk.", None, Flushed, "admin"),
    Route("POST", "/admin/drain", drain, "admin", "Take no new requests.", None, Drained, "admin"),
    Route("DELETE", "/admin/drain", undo_drain, "admin", "Take requests again.", None, Drained, "admin"),
    Route("GET", "/admin/tenants", tenants, "admin", "Who has a key, and its requests.", None, TenantList, "admin"),
)
