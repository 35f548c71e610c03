"""Whether the server works: /health and its like, /ready, and a log line when a reason of /health comes or goes."""

import asyncio
import logging
from typing import Any

import msgspec
from aiohttp import web

from kvstore.service.api.exchange import Context, context_of
from kvstore.service.http.errors import Handler, Route, json_response
from kvstore.service.http.telling import log

WATCH_S = 5.0


class Health(msgspec.Struct):
    """status: ok, degraded (it answers, but some part does not work), starting, draining, stopping or failed."""

    status: str
    reasons: list[str]


class Ready(msgspec.Struct):
    ready: bool


async def health(request: web.Request) -> web.Response:
    status, reasons = await _look(context_of(request))
    return json_response(Health(status, list(reasons)), 200 if status in ("ok", "degraded") else 503)


async def healthz(request: web.Request) -> web.Response:
    return await health(request)


async def ping(request: web.Request) -> web.Response:
    return await health(request)


async def live(request: web.Request) -> web.Response:
    """Like `health`, but 200 while it starts, drains, stops or begins again: who ends it then makes it worse."""
    status, reasons = await _look(context_of(request))
    return json_response(Health(status, list(reasons)), 503 if status == "failed" else 200)


async def ready(request: web.Request) -> web.Response:
    context = context_of(request)
    fails = context.state != "running" or context.has_failed or context.limits.is_draining
    is_ready = not (fails or _is_restarting(context) or context.is_silent)
    return json_response(Ready(is_ready), 200 if is_ready else 503)


async def watch(context: Context) -> None:
    """Log what /health tells when that changes, whether anybody asks or not. Ends when it is cancelled."""
    known: dict[str, Any] = {}
    while True:
        before = known
        status, known = await _look(context)
        for reason, value in known.items():
            if reason not in before:
                cause = value if isinstance(value, str) else None
                log("health has got worse", {"reason": reason, "cause": cause, "status": status}, logging.WARNING)
        for reason in before:
            if reason not in known:
                log("health has got better", {"reason": reason, "status": status})
        await asyncio.sleep(WATCH_S)


async def _look(context: Context) -> tuple[str, dict[str, Any]]:
    """The status, and its reasons as `health_reasons` gives them."""
    if context.has_failed:
        return "failed", {"engine_failed": True}
    if context.state != "running":
        return context.state, {}
    if context.limits.is_draining:
        return "draining", {"draining": True}
    if _is_restarting(context):
        return "degraded", {"engine_restarting": True}
    reasons = health_reasons(await context.stats.get(), context.stats.sessions_fail)
    if context.is_silent or context.stats.is_stuck:
        reasons["engine_not_answering"] = True
    return "degraded" if reasons else "ok", reasons


def _is_restarting(context: Context) -> bool:
    """Whether the engine's own process has ended and the next one is being started."""
    return context.engine.engine.core.state == "restarting"


def health_reasons(stats: dict[str, Any], sessions_fail: bool) -> dict[str, Any]:
    """Why it is degraded: by the words of /health; the cause, where that is a text."""
    disk, sessions, answers, remote = (stats.get(name) or {} for name in ("disk", "sessions", "answers", "remote"))
    found = {
        "stats_unavailable": stats.get("error"),
        "replica_down": any(one["process"]["state"] != "running" for one in stats.get("replicas", ())),
        "disk_degraded": disk.get("degraded"),
        "disk_broken": disk.get("broken"),
        "remote_degraded": remote.get("degraded"),
        "prefill_degraded": (remote.get("prefill") or {}).get("degraded"),
        "disk_was_reset": disk.get("was_reset"),
        "disk_file_lost": disk.get("lost"),
        "store_lost": stats.get("lost"),
        "sessions_file_lost": not stats.get("lost") and sessions.get("lost"),
        "sessions_missing": sessions.get("missing"),
        "session_store_unreachable": sessions.get("unreachable"),
        "sessions_damaged": sessions.get("damaged"),
        "answers_failing": answers.get("failing"),
        "sessions_failing": sessions_fail and (sessions.get("last_failure") or True),
    }
    return {code: value for code, value in found.items() if value}


def _polled(path: str, handler: Handler, summary: str, answer: type = Health) -> Route:
    return Route("GET", path, handler, "public", summary, None, answer, "server", is_polled=True)


ROUTES = (
    _polled("/health", health, "Whether the server works."),
    _polled("/healthz", healthz, "The same, under Kubernetes' name."),
    _polled("/ping", ping, "The same, under SageMaker's name."),
    _polled("/livez", live, "Whether only a restart helps: then 503."),
    _polled("/ready", ready, "Whether new requests are taken.", Ready),
)
