"""Tools for tests. Their arguments are finite, so that a model which is held to their schemas ends its calls."""

import json
from typing import Any

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather", "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"], "additionalProperties": False,
        },
    },
}  # fmt: skip
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {
            "type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
TOOLS = [WEATHER, CLOCK]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]  # as /v1/responses has them
OURS = [  # as /v1/messages has them
    {"name": tool["function"]["name"], "description": "A tool.", "input_schema": tool["function"]["parameters"]}
    for tool in TOOLS
]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip


def said(text: str) -> list[dict[str, Any]]:
    """A history of one question."""
    return [{"role": "user", "content": text}]


def is_weather(arguments: str) -> bool:
    """Whether these are arguments that its schema allows."""
    given = json.loads(arguments)
    return set(given) == {"city", "days"} and given["city"] in ("Rome", "Oslo") and 1 <= given["days"] <= 9


def reordered(arguments: str) -> str:
    """The same JSON values with other keys first and other white space, as clients send calls back."""
    return json.dumps(dict(reversed(json.loads(arguments).items())), indent=2)
