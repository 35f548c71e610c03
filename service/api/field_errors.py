"""What is wrong with a JSON body, in words for who has written it: msgspec's errors with the field and the remedy."""

import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress

from kvstore.service.http.errors import ApiError, bad_request

MAX_SEARCHED_BYTES = 2**20
_KINDS = {
    "int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "null": "null",
    "array": "a list", "object": "an object",
}  # fmt: skip


def field_error(text: str) -> ApiError:
    """msgspec's "Expected `int` >= 1 - at `$.n`" as "n must be a whole number of at least 1"."""
    what, _, where = text.partition(" - at ")
    path = where.rpartition("`$")[2].rstrip("`").lstrip(".").replace("[...]", "")
    code = "invalid_value"
    if match := re.match(r"Object (missing required|contains unknown) field `(.*)`", what):
        is_missing = match[1] == "missing required"
        path, rule = f"{path}.{match[2][:64]}".lstrip("."), "is missing" if is_missing else "is not known here"
        code = "missing" if is_missing else "unknown_field"
    elif match := re.match(r"Expected `([^`]+)`, got `([^`]+)`", what):
        rule = f"is {_kinds(match[2])}; give {_kinds(match[1])}"
    elif match := re.match(r"Expected `([^`]+)`( of length)? ([<>]=?) (\S+)", what):
        rule = f"must be {_kinds(match[1])} {_bound(match[1], bool(match[2]), match[3], match[4])}"
    elif "out of range" in what:
        rule = "is a number out of range"
    else:
        rule = "is not valid"
    name = ("a key of " if "`key` in" in where else "") + (path or "the body")
    return bad_request(path or None, f"{name} {rule}", code)


def _kinds(names: str) -> str:
    return " or ".join(_KINDS.get(name, name) for name in names.split(" | "))


def _bound(kind: str, is_length: bool, sign: str, number: str) -> str:
    said = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}[sign]
    number = number.removesuffix(".0")
    if not is_length:
        return f"of {said} {number}"
    one, several = ("character", "characters") if kind == "str" else ("entry", "entries")
    return f"of {said} {number} {one if number == '1' else several}"


def syntax_error(raw: bytes | bytearray, text: str) -> ApiError:
    """The error for a body that is not JSON. If only a NaN or Infinity is wrong, it names the field."""
    param = None
    if len(raw) <= MAX_SEARCHED_BYTES and re.search(rb"NaN|Infinity", raw):
        with suppress(ValueError, RecursionError):
            param = next(_not_finite(json.loads(raw), ""), None)
    if param is not None:
        return bad_request(param, f"{param} is not a finite number")
    place = re.search(r"\(byte [0-9]+\)", text)
    return ApiError(400, f"the body is not valid JSON {place[0] if place else ''}".rstrip(), code="invalid_json")


def _not_finite(value: object, path: str) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from _not_finite(one, f"{path}.{name[:64]}".lstrip("."))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _not_finite(one, f"{path}[{index}]")
