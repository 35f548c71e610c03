"""Errors as clients see them: OpenAI's shape, with a stable `code`, on all routes that have none of their own.

`Route` is a row of the table of routes. The text of an unexpected exception never reaches a client.
"""

import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

import msgspec
from aiohttp import web

from kvstore import errors as kv

NO_RETRY = {"x-should-retry": "false"}  # the OpenAI SDK would else send a 409 or a 5xx again
RETRY_AFTER_S = 5  # of a 503, where nothing else is known
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Access = Literal["public", "user", "admin", "fleet"]
PARAMETER = re.compile(r"\{(\w+)(?::((?:[^{}]|\{[^{}]*\})+))?\}")  # of a path: its name, and its pattern if it has one


class ErrorInfo(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of every answer that is not a success."""

    error: ErrorInfo

    @classmethod
    def of(cls, error: "ApiError", request_id: str) -> Self:
        return cls(ErrorInfo(error.message, error.type, error.param, error.code))


class ApiError(kv.KVStoreError):
    """An answer with an error status, foreseen as every KVStoreError is. `headers` go with it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> ErrorBody:
        return ErrorBody.of(self, "")


class ReaderGone(ConnectionError):
    """The reader is gone: the connection was closed, or dropped because its reader received nothing for too long."""


@contextmanager
def renaming(**names: str) -> Iterator[None]:
    """Errors name a route's own fields. names: the engine's words, and the route's."""
    try:
        yield
    except (ApiError, kv.RequestError) as error:
        error.param = names.get(error.param or "", error.param)
        raise


def bad_request(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """A 400. param: the wrong field."""
    return ApiError(400, message, param=param, code=code)


def error_response(error: ApiError, body: msgspec.Struct | None = None) -> web.Response:
    """body: None for OpenAI's."""
    return web.Response(
        status=error.status,
        body=msgspec.json.encode(error.body() if body is None else body),
        content_type="application/json",
        headers={"Server": "kvstore", **error.headers},
    )


_REFUSED: tuple[tuple[type[Exception], int, str], ...] = (  # with the error's own message; the first class that matches
    (kv.ContextLengthError, 400, "context_length_exceeded"),
    (kv.SessionBusyError, 409, "session_busy"),
    (kv.SessionExistsError, 409, "session_exists"),
    (kv.SessionNotFoundError, 404, "session_not_found"),
    (kv.SessionDamagedError, 409, "session_damaged"),
    (kv.SessionTakenError, 409, "session_busy"),
    (kv.RequestError, 400, "invalid_value"),
    (kv.ConfigError, 400, "invalid_value"),  # arguments of an administrator's command
)


_UNAVAILABLE: tuple[tuple[type[Exception], str, str], ...] = (  # with this message, else the error's own
    (kv.EngineClosedError, "engine_closed", "the server is shutting down or its engine has failed"),
    (kv.EngineDiedError, "engine_died", "the engine has ended and may be started again; try again"),
    (kv.EngineOverloadedError, "server_overloaded", "the engine takes no more at the moment; try again"),
    (
        kv.StoreLostError, "store_lost",
        "not kept: what the store held was removed or replaced while it was open; the server's log says more",
    ),
    (kv.DiskFullError, "store_degraded", ""),
    (kv.DegradedError, "store_degraded", "the disk tier cannot write at the moment: what was to be kept is not"),
    (
        kv.RemoteError, "session_store_unavailable",
        "the store of sessions does not answer at the moment, or cannot store: what was to be kept is not",
    ),
    (kv.StoreError, "store_error", "the store could not carry this out"),
)  # fmt: skip


def api_error(error: Exception) -> ApiError:
    """The answer to an exception, its cause; anything not known to be the client's fault is an "internal error"."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code in _REFUSED:
        if isinstance(error, kind):
            type_ = "server_error" if code == "session_damaged" else "invalid_request_error"
            headers: Mapping[str, str] = NO_RETRY if status == 409 else {}
            if (retry_after_s := getattr(error, "retry_after_s", None)) is not None:
                headers = {"Retry-After": str(math.ceil(retry_after_s) or 1)}
            param = getattr(error, "param", None)
            answer = ApiError(status, str(error), type=type_, param=param, code=code, headers=headers)
            answer.__cause__ = error
            return answer
    for kind, code, message in _UNAVAILABLE:
        if isinstance(error, kind):
            retry_after_s = 1 if kind is kv.EngineOverloadedError else RETRY_AFTER_S
            return unavailable(message or str(error), code, retry_after_s, is_final=kind is kv.StoreLostError)
    if isinstance(error, web.HTTPException):
        return _http_error(error)
    return ApiError(500, "internal error", type="server_error", code="internal_error")


def unavailable(message: str, code: str, retry_after_s: int = RETRY_AFTER_S, is_final: bool = False) -> ApiError:
    """A 503. is_final: a retry will not help before somebody has done something."""
    headers = {"Retry-After": str(retry_after_s), **(NO_RETRY if is_final else {})}
    return ApiError(503, message, type="server_error", code=code, headers=headers)


def _http_error(error: web.HTTPException) -> ApiError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{error.method} is not possible here; use {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
    if error.status >= 500:
        return ApiError(error.status, "internal error", type="server_error", code="internal_error")
    return ApiError(error.status, error.reason, code="bad_request")


@dataclass(frozen=True)
class Route:
    """One route of the service. body, answer, query, status: types of the JSON and the query, and the status of a
    success, for the description of the interface. errors: type of the JSON of an error, with `ErrorBody.of`. is_polled:
    by machines, every few seconds.
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
    errors: type[Any] = ErrorBody
    query: type | None = None
    is_polled: bool = False

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
