"""/openapi.json: the description of the interface, made from the table of routes and the types of their bodies.

The tests check the handlers' answers against it. Knows no handler.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from kvstore import __version__
from kvstore.engine.outputs import CachedTokensDetails, Timings
from kvstore.service.api.schema import must_be_given
from kvstore.service.http.errors import PARAMETER, Route

VERSION = "3.1.0"
REF = "#/components/schemas/{name}"
SEGMENT = "[^{}/]+"  # what aiohttp takes for a parameter without a pattern

WRITTEN_WHOLE = {CachedTokensDetails.__name__, Timings.__name__}  # with their defaults, as dataclasses are

Json = dict[str, Any]


def describe(routes: Sequence[Route]) -> Json:
    types: dict[type | None, None] = dict.fromkeys(
        type_ for route in routes for type_ in (route.body, route.answer, route.errors)
    )
    found, components = msgspec.json.schema_components(types, ref_template=REF)
    for whole in WRITTEN_WHOLE & components.keys():
        components[whole]["required"] = [*components[whole]["properties"]]
    schemas = dict(zip(types, found, strict=True))
    paths: Json = {}
    for route in routes:
        paths.setdefault(route.template, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": VERSION,
        "info": {
            "title": "kvstore",
            "version": __version__,
            "description": "Answers of a language model, with the KV of conversations kept in tiers.",
        },
        "tags": [{"name": tag} for tag in dict.fromkeys(route.tag for route in routes if route.tag)],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer", "description": "A key, if any is set."}},
        },
    }


def _operation(route: Route, schemas: dict[type | None, Json]) -> Json:
    found: Json = {
        "operationId": f"{route.handler.__module__.rpartition('.')[2]}_{route.handler.__name__}",
        "summary": route.summary,
        "tags": [route.tag] if route.tag else [],
        "security": [] if route.access == "public" else [{"bearer": []}],
        "responses": _responses(route, schemas),
    }
    if parameters := [*_parameters(route.path), *_queries(route.query)]:
        found["parameters"] = parameters
    if route.body is not None:
        content = {"application/json": {"schema": schemas[route.body]}}
        found["requestBody"] = {"required": must_be_given(route.body), "content": content}
    return found


def _parameters(path: str) -> Iterator[Json]:
    for name, pattern in PARAMETER.findall(path):
        schema = {"type": "string", "pattern": f"^(?:{pattern or SEGMENT})$"}
        yield {"name": name, "in": "path", "required": True, "schema": schema}


def _queries(query: type | None) -> Iterator[Json]:
    fields = {} if query is None else msgspec.json.schema_components([query])[1][query.__name__]["properties"]
    for name, schema in fields.items():
        yield {"name": name, "in": "query", "required": False, "schema": schema}


def _responses(route: Route, schemas: dict[type | None, Json]) -> Json:
    content: Json = {}
    if route.answer is str:
        content["text/plain"] = {"schema": {"type": "string"}}
    elif route.answer is not None:
        content["application/json"] = {"schema": schemas[route.answer]}
    if _may_stream(route.body):
        content["text/event-stream"] = {}  # OpenAPI 3.1 has no word for the events of a stream
    success = {"description": route.summary, **({"content": content} if content else {})}
    found: Json = {str(route.status): success}
    for status in sorted(_error_statuses(route)):
        shown = {"application/json": {"schema": schemas[route.errors]}}
        found[str(status)] = {"description": HTTPStatus(status).phrase, "content": shown}
    if route.access == "public" and content:
        found["503"] = {**success, "description": "Not at the moment."}  # what it says has the same shape
    return found


def _may_stream(body: type | None) -> bool:
    """Whether a request may ask for its answer in pieces."""
    is_struct = isinstance(body, type) and issubclass(body, msgspec.Struct)
    return is_struct and any(field.name == "stream" for field in msgspec.structs.fields(body))  # type: ignore[arg-type]


def _error_statuses(route: Route) -> set[int]:
    """403: a browser's page of another origin. 504: it took longer than a request may."""
    found = {403, 500, 504}
    if route.access != "public":
        found |= {400, 401, 503}
    if "{" in route.path:
        found |= {404}
    if route.method != "GET" and route.access in ("user", "fleet"):
        found |= {409}  # a session that is busy, or exists; another model
    if route.body is not None:
        found |= {400, 404, 408, 413, 415}
        found |= {429} if route.access in ("user", "fleet") else set()
    return found


# -- the route -------------------------------------------------------------------------------------------------------
async def openapi(request: web.Request) -> web.Response:
    handlers = [route.handler for route in request.app.router.routes()]
    routes = dict.fromkeys(found for handler in handlers if (found := getattr(handler, "route", None)) is not None)
    return web.Response(body=_encoded(tuple(routes)), content_type="application/json")


@lru_cache(maxsize=1)
def _encoded(routes: tuple[Route, ...]) -> bytes:
    return msgspec.json.encode(describe(routes))


ROUTES = (Route("GET", "/openapi.json", openapi, "user", "This description.", None, dict[str, Any], "server"),)
