"""Takes requests from Ray's HTTP proxy, finds the replica that each should go to, and passes the answer on."""

import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvstore.remote.names import fleet_secret
from kvstore.service.api.sessions.turns import NEW_SESSION
from kvstore.service.http.access import Access
from kvstore.service.http.errors import unavailable
from kvstore.service.http.telling import log, set_up_logging
from kvstore.service.replicas.replica import Head, PassedRequest, Whole, is_of_one_hop, refusal
from kvstore.service.replicas.routing import affinity_of, concerns_everyone, joined
from kvstore.service.settings.serve_options import ServeOptions

EVENT_END = b"\n\n"
LOOK_S, ACT_S = 10.0, 120.0  # for all replicas to say how they are, and to do what an administrator asks for
LOST = unavailable("the replica that answered was lost; try again", "replica_lost", 1)
SILENT = unavailable("a replica does not answer in time", "replica_silent")


class Ingress:
    """replicas: Ray's handle of them. secret_file: with a secret that all servers share, or the environment has it;
    is_named: sessions are shared, and new ones get their ids here.
    """

    def __init__(
        self, replicas: DeploymentHandle[Any], options: ServeOptions, is_named: bool, secret_file: str | Path | None
    ) -> None:
        set_up_logging(options.log_format, options.log_level)
        self._replicas = replicas
        self._most_bytes = options.max_body_bytes
        self._access = Access(options)
        self._naming_key = fleet_secret(secret_file).derived("ids of new sessions") if is_named else None

    async def __call__(self, request: Request) -> Response:
        call = await self._call(request)
        path = request.scope["path"]
        if concerns_everyone(path):
            return await self._everyone(path, call)
        headers = dict(reversed(call.headers))  # of those that came twice the first one, as for a server
        tenant = self._access.tenant_of(headers)
        found = affinity_of(call.method, path, headers, call.body, tenant, self._naming_key)
        if found.new_session is not None:
            call = replace(call, headers=(*call.headers, (NEW_SESSION.lower(), found.new_session)))
        replica = self._replicas.options(method_name="answer", stream=True, session_id=found.key)
        return Relayed(replica.remote(call))

    async def _call(self, request: Request) -> PassedRequest:
        """The request as it came. Of a body that is too large only so much is read that a server sees it is."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._most_bytes:
                del body[self._most_bytes + 1 :]
                break
        query = request.scope["query_string"].decode("latin-1")
        path = request.scope["raw_path"].decode("latin-1")
        return PassedRequest(request.method, f"{path}?{query}" if query else path, _passed_on(request), bytes(body))

    async def _everyone(self, path: str, call: PassedRequest) -> Response:
        looks = call.method in ("GET", "HEAD")
        try:
            asked = self._replicas.broadcast("whole", replace(call, method="GET") if looks else call)
            found = await asked.results_async(timeout_s=LOOK_S if looks else ACT_S, return_exceptions=True)
            answers = [one for one in found if isinstance(one, Whole)]
            is_whole = looks or len(answers) == len(found)  # what was to be done everywhere was done everywhere
            head, body = joined(path, answers) if is_whole else refusal(SILENT)
        except TimeoutError:
            head, body = refusal(SILENT)
        except (RayError, RayServeException):  # there is none
            head, body = joined(path, [])
        response = Response(body, head.status)
        others = [(name, value) for name, value in head.headers if name.lower() != b"content-length"]
        response.raw_headers = [*others, (b"content-length", b"%d" % len(body))]
        return response


def _passed_on(request: Request) -> tuple[tuple[str, str], ...]:
    """Headers by their names in lower case. U+FFFD stands for what is no UTF-8: a server refuses it like that, too."""
    given = [(name.decode("latin-1"), value.decode("utf-8", "replace")) for name, value in request.scope["headers"]]
    ours = (NEW_SESSION.lower(), "content-length")
    return tuple(one for one in given if one[0] not in ours and not is_of_one_hop(one[0]))


class Relayed(Response):
    """An answer that goes on to the client piece by piece. When the client goes, so does its request at the replica."""

    def __init__(self, pieces: "DeploymentResponseGenerator[Any]") -> None:
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for piece in self._with_errors():
                if isinstance(piece, Head):
                    await send({"type": "http.response.start", "status": piece.status, "headers": piece.headers})
                else:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._pieces.cancel()

    async def _with_errors(self) -> AsyncIterator[Head | bytes]:
        """A replica that is lost is an error in our shape: an answer, or an event behind a stream's last whole one."""
        head: Head | None = None
        begun = b""  # what has come of the next event
        try:
            async for piece in self._pieces:
                if isinstance(piece, Head):
                    head = piece
                elif head is not None and head.is_stream:
                    whole, end, begun = (begun + piece).rpartition(EVENT_END)
                    piece = whole + end
                if piece:
                    yield piece
        except (RayError, RayServeException) as error:
            log("a replica was lost", {"error": type(error).__name__}, logging.WARNING)
            if head is None:
                for part in refusal(LOST):
                    yield part
            elif head.is_stream:  # Anthropic's clients know an error by the event's name, OpenAI's by the field
                said = msgspec.json.encode({"type": "error", "error": LOST.body().error})
                yield b"event: error\ndata: " + said + EVENT_END
            else:
                raise
