"""What a route declares: method, path, handler, who may use it, and the types of its bodies; and how it answers."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import msgspec
from aiohttp import web

from kvstore.service.http.errors import RETRY_AFTER_S

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Access = Literal["public", "user", "admin", "fleet"]
PARAMETER = re.compile(r"\{(\w+)(?::((?:[^{}]|\{[^{}]*\})+))?\}")  # of a path: its name, and its pattern if it has one


@dataclass(frozen=True)
class Route:
    """One route of the service. body, answer, status: types of the JSON and the status of a success, for the
    description of the interface.
    """

    method: str
    path: str
    handler: Handler
    access: Access
    summary: str
    body: type | None = None
    answer: type | None = None
    tag: str = ""
    status: int = 200

    def __post_init__(self) -> None:
        if self.body is not None:
            msgspec.json.Decoder(self.body)  # any thread may decode it from now on (see `kvstore.disk.records`)

    @cached_property
    def template(self) -> str:
        """The path with the names of its parameters alone, such as /sessions/{id}."""
        return PARAMETER.sub(r"{\1}", self.path)


def json_response(body: Any, status: int = 200) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json", headers=headers)
