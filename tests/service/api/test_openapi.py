"""/openapi.json: a valid document that says what the routes take and answer, and a fuzzer that holds them to it."""

import re
from typing import Any

import hypothesis
import jsonschema_rs
import msgspec
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.specs.openapi.definitions import OPENAPI_31

from kvstore import SamplingParams
from kvstore.service.api.openapi import describe
from kvstore.service.app import ROUTES
from kvstore.service.http.errors import Route
from tests.support.service.serving import ADMIN_KEY, KEY, server_fixture

DOCUMENT = describe(ROUTES)
OPERATIONS = [(path, method, found) for path, item in DOCUMENT["paths"].items() for method, found in item.items()]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
MOST_TOKENS = 4
MODEL, SESSION = "the-model", "fuzzed"  # that there are
# What a request may have at most, so that it is answered soon, and texts that are known.
MOST = dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), MOST_TOKENS) | {
    "n": 2, "best_of": 2, "min_tokens": 2, "tokens": 256, "prompt": 256,
}  # fmt: skip
KNOWN = {"role": ("user", "system", "assistant"), "type": ("text",), "model": (MODEL,)}
UNSUPPORTED = {
    "tools", "tool_choice", "functions", "audio", "chat_template", "chat_template_kwargs", "response_format",
    "modalities", "add_generation_prompt", "continue_final_message", "top_logprobs", "echo", "suffix", "best_of",
}  # fmt: skip


# -- the document ----------------------------------------------------------------------------------------------------
def references(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(references, value)) if value else set()
    if not isinstance(value, dict):
        return set()
    own = {value["$ref"]} if "$ref" in value else set()
    return own.union(*map(references, value.values())) if value else own


def test_it_is_a_valid_document():
    jsonschema_rs.Draft202012Validator(OPENAPI_31).validate(DOCUMENT)
    schemas = DOCUMENT["components"]["schemas"]
    assert references(DOCUMENT) == {f"#/components/schemas/{name}" for name in schemas}, "all found, none unused"
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in schemas)
    assert schemas["Timings"]["required"] == ["queue_s", "load_s", "prefill_s", "ttft_s", "decode_s"]
    assert "quantised" in schemas["CachedTokensDetails"]["required"]
    for schema in schemas.values():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})


def test_every_route_is_described_with_who_may_use_it():
    described = {(method.upper(), path): found for path, method, found in OPERATIONS}
    assert len(described) == len(ROUTES)
    for route in ROUTES:
        found = described[(route.method, re.sub(r"\{(\w+)[^/]*\}", r"{\1}", route.path))]
        assert found["summary"] == route.summary and found["responses"][str(route.status)]
        assert (found["security"] == []) is (route.access == "public"), route.path
        assert ("401" in found["responses"]) is (route.access != "public"), route.path
        assert ("requestBody" in found) is (route.body is not None), route.path
    assert len({found["operationId"] for _, _, found in OPERATIONS}) == len(OPERATIONS)


def test_every_parameter_of_a_path_is_described():
    for path, _, found in OPERATIONS:
        in_path = [parameter for parameter in found.get("parameters", ()) if parameter["in"] == "path"]
        assert [parameter["name"] for parameter in in_path] == re.findall(r"\{(\w+)\}", path)
        assert all(re.compile(parameter["schema"]["pattern"]) for parameter in in_path)


def test_queries_and_bodies_that_may_be_missing_are_described():
    described = {(method, path): found for path, method, found in OPERATIONS}
    items = described["get", "/v1/responses/{id}/input_items"]["parameters"]
    assert {each["name"]: each["schema"]["default"] for each in items if each["in"] == "query"} == {
        "limit": 20, "order": "desc", "after": None,
    }  # fmt: skip
    needed = {
        path: found["requestBody"]["required"] for (_, path), found in described.items() if "requestBody" in found
    }
    assert needed["/sessions/{id}/pin"] and not needed["/sessions/{id}/fork"] and not needed["/sessions/{id}/prefetch"]


class Streamed(msgspec.Struct):
    stream: bool = False
    limit: int = 1


async def handler(request): ...


def test_parameters_bodies_and_streams_are_told_from_the_table():
    routes = [
        Route("POST", "/a/{id:[a-z]{1,4}}/b/{name}", handler, "user", "Does a.", Streamed, dict[str, int], "tag"),
        Route("GET", "/text", handler, "public", "A text.", None, str),
        Route("GET", "/file", handler, "admin", "A file."),
    ]
    found = describe(routes)["paths"]
    first = found["/a/{id}/b/{name}"]["post"]
    assert [(one["name"], one["schema"]["pattern"]) for one in first["parameters"]] == [
        ("id", "^(?:[a-z]{1,4})$"), ("name", "^(?:[^{}/]+)$"),
    ]  # fmt: skip
    assert first["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Streamed"}
    assert set(first["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert {"400", "401", "403", "404", "408", "409", "413", "429", "500", "503"} <= set(first["responses"])
    error = {"$ref": "#/components/schemas/ErrorBody"}
    assert first["responses"]["429"]["content"]["application/json"]["schema"] == error
    assert set(found["/text"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
    assert "content" not in found["/file"]["get"]["responses"]["200"] and found["/file"]["get"]["security"]


# -- the service against it ------------------------------------------------------------------------------------------
TIERS = {"hbm": "8MiB", "cpu": "8MiB", "disk": "64MiB"}
server = server_fixture(TIERS, api_key=KEY, admin_key=ADMIN_KEY, served_model_name=MODEL)


def tame(value: Any, name: str = "") -> Any:
    """The same request, more likely to be carried out, and soon: few tokens, known roles, mostly what is supported.

    A whole number may come as 1.0, which JSON Schema allows and the service does not.
    """
    if isinstance(value, dict):
        if "type" in value and value.get("text") is None:
            value = {**value, "text": "a"}
        return {key: tame(one, key) for key, one in value.items() if key not in UNSUPPORTED or len(str(one)) % 4 == 0}
    if isinstance(value, list):
        return [tame(one, name) for one in value[:3]]
    if isinstance(value, float) and value.is_integer() and name not in ("logit_bias", "temperature"):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and name in MOST:
        return value % MOST[name] if value > MOST[name] else value
    if isinstance(value, str) and name in KNOWN and len(value) % 4 != 1:
        return KNOWN[name][len(value) % len(KNOWN[name])]
    return value


GENERATES = {"messages", "prompt", "message", "input"}  # a body with one of these is answered with tokens


def bound(body: Any) -> Any:
    found = tame(body)
    if not isinstance(found, dict):
        return found
    for other in {"prompt", "message"} & found.keys():  # one of them is needed, both are refused
        if found.get("messages") is not None:
            del found[other]
        elif found[other] is None:
            found[other] = "Hello."
    if GENERATES & found.keys():
        for name in ("max_tokens", "max_output_tokens"):
            if found.get(name) is None:
                found[name] = MOST_TOKENS
    return found


SCHEMA = schemathesis.openapi.from_dict(
    DOCUMENT,
    config=SchemathesisConfig.from_dict(
        {
            "phases": {"coverage": {"enabled": False}, "stateful": {"enabled": False}},
            "generation": {"database": "none", "with-security-parameters": False},
        }
    ),
)


@SCHEMA.hook
def map_body(context, body):
    return bound(body)


@SCHEMA.hook
def map_path_parameters(context, path_parameters):
    """Every second one is of something that there is."""
    known = MODEL if "/models/" in context.operation.path else SESSION
    given = path_parameters or {}
    return {name: known if isinstance(value, str) and len(value) % 2 else value for name, value in given.items()}


def make_session(server, case) -> None:
    """The one that the request names, which another one may have deleted."""
    if SESSION in (case.path_parameters or {}).values():
        server.engine.chat(SESSION).send("Hello.", SamplingParams(max_tokens=1))


def key_of(case) -> str:
    is_admin = any(route.access == "admin" and route.path == case.operation.path for route in ROUTES)
    return ADMIN_KEY if is_admin else KEY


@SCHEMA.parametrize()
@hypothesis.settings(
    max_examples=5,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_every_route_answers_as_described(server, case):
    make_session(server, case)
    case.call_and_validate(
        base_url=server.url, headers={"Authorization": f"Bearer {key_of(case)}"}, checks=CHECKS, timeout=60
    )


def test_the_document_that_is_served_is_this_one(server):
    reply = server.get("/openapi.json")
    assert reply.status == 200 and reply.json() == DOCUMENT
    assert reply.headers["content-type"].startswith("application/json")


def test_nothing_is_left_behind(server):
    server.wait_until_idle()
