"""Grammars from what a request wants its answer to match, as texts that llguidance compiles.

Pure functions; knows no tokenizer but the ids of its special tokens, and no request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from kvstore.engine.sampling_params import JSON_OPTIONS, StructuredOutputsParams

MAX_TRIALS = 200  # subschemas that are compiled by themselves, to find the one that is wrong
MAX_CALLS = 16  # in a list, or where nothing but calls may follow: a weak model would go on until max_tokens
_TEXT = r"TEXT: /(.|\n)*/"
_OF_NAMES = ("properties", "patternProperties")  # keywords whose values are schemas by name
_OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not")


def grammar_of(wanted: StructuredOutputsParams, special_token_ids: Mapping[str, int]) -> str:
    """The grammar of a whole answer. special_token_ids: tokens that a text of a tag may name, but no free text holds.

    Raises ValueError for a text that is no JSON or GBNF, also RecursionError.
    """
    grammar = _without_reasoning(wanted, special_token_ids)
    if wanted.reasoning is None:
        return grammar
    lines = [_TEXT]
    opener, closer = (_terms(text, special_token_ids) for text in wanted.reasoning)
    reasoning = " ".join([*opener, *_text_up_to(closer, "end_of_reasoning", lines)])
    lines.insert(0, f"start: ({reasoning})? @rest" if opener else f"start: {reasoning} @rest")
    is_json = grammar.startswith("{")  # else it is the text of a single grammar in Lark
    first, *inner = json.loads(grammar)["grammars"] if is_json else [{"lark_grammar": grammar}]
    outer = {"name": "whole", "lark_grammar": "\n".join(lines)}
    return json.dumps({"grammars": [outer, {**first, "name": "rest"}, *inner]})


def _without_reasoning(wanted: StructuredOutputsParams, special_token_ids: Mapping[str, int]) -> str:
    if wanted.tags:
        return _tags_grammar(wanted, special_token_ids)
    if wanted.json is not None:
        return json_grammar(_text_of(wanted.json))
    if wanted.json_object:
        return json_grammar('{"type":"object"}')
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        # A terminal is compiled at once, a rule for each choice by itself.
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(_literal, wanted.choice)))
    return LLMatcher.grammar_from_lark(_as_lark(wanted.grammar or ""))


def json_grammar(schema: str) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)  # type: ignore[arg-type]


def _text_of(schema: str | dict[str, Any]) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_lark(text: str) -> str:
    return any_to_lark(text) if "::=" in text else text


# -- tags --------------------------------------------------------------------------------------------------------------
def _tags_grammar(wanted: StructuredOutputsParams, special_token_ids: Mapping[str, int]) -> str:
    """Free text until a trigger, then the rest of the tag, then text again. A trigger is lazy: text ends at the first.

    A special token is no text: it is named by its id.
    """
    tags = " | ".join(f"tag_{index}" for index in range(len(wanted.tags)))
    lines, is_free = ["", _TEXT], not wanted.required
    if wanted.listing is not None:
        before, between, after = (_terms(text, special_token_ids) for text in wanted.listing)
        opening = _text_up_to(before, "list_trigger", lines) if is_free else before
        more = "" if wanted.single else f"({' '.join([*between, f'({tags})'])}){{0,{MAX_CALLS - 1}}}"
        lines.append(f"list: {' '.join([*opening, f'({tags})', more, *after])}")
        tags, is_free = "list", False
    may_be_text = "" if wanted.required else " | TEXT"
    if wanted.single or wanted.listing is not None:
        lines[0] = f"start: {tags}{may_be_text}"
    else:
        lines[0] = f"start: ({tags}){{1,{MAX_CALLS}}}" if wanted.required else f"start: ({tags})* TEXT"
    if wanted.json is not None:
        lines[0] += f" | %json {_with_options(_text_of(wanted.json))}"
    inner = list[dict[str, str]]()
    for index, tag in enumerate(wanted.tags):
        trigger = tag.trigger if is_free and tag.trigger else tag.begin
        terms = _terms(tag.begin.removeprefix(trigger), special_token_ids)
        opening = _terms(trigger, special_token_ids)
        if is_free:
            opening = _text_up_to(opening, f"tag_{index}_trigger", lines)
        if tag.json is not None:
            terms.append(f"%json {_with_options(_text_of(tag.json))}")
        else:
            terms.append(f"@inner_{index}")
            inner.append({"name": f"inner_{index}", "lark_grammar": _as_lark(tag.grammar or "")})
        lines.append(f"tag_{index}: {' '.join([*opening, *terms, *_terms(tag.end, special_token_ids)])}")
    return json.dumps({"grammars": [{"name": "answer", "lark_grammar": "\n".join(lines)}, *inner]})


def _terms(text: str, special_token_ids: Mapping[str, int]) -> list[str]:
    """A text as terms of Lark: literals, and special tokens by their ids."""
    if not special_token_ids:
        return [_literal(text)] if text else []
    specials = "|".join(map(re.escape, sorted(special_token_ids, key=len, reverse=True)))
    parts = [part for part in re.split(f"({specials})", text) if part]
    return [f"<[{special_token_ids[part]}]>" if part in special_token_ids else _literal(part) for part in parts]


def _text_up_to(terms: list[str], name: str, lines: list[str]) -> list[str]:
    """Terms for free text that ends at the first of these. name: of a rule that it may need among the lines."""
    if terms[0].startswith("<"):
        return ["TEXT", *terms]
    lines.append(f"{name}[lazy]: TEXT {terms[0]}")
    return [name, *terms[1:]]


def _with_options(schema: str) -> str:
    parsed = json.loads(schema)
    return json.dumps({**parsed, "x-guidance": JSON_OPTIONS})


# -- where a schema is wrong -------------------------------------------------------------------------------------------
def place_of(schema: str, fault: str, fault_of: Callable[[str], str]) -> str:
    """JSON pointer of the innermost subschema that has this fault by itself, "" for the schema as a whole.

    fault_of: what is wrong with a grammar.
    """
    root = json.loads(schema)
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    place, inside, trials = "", root, 0
    while True:
        for name, child in _children(inside):
            trials += 1
            if trials > MAX_TRIALS:
                return place
            if isinstance(child, dict) and fault_of(json_grammar(json.dumps({**shared, **child}))) == fault:
                place, inside = f"{place}/{name}", child
                break
        else:
            return place


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword, value in schema.items():
        if keyword in _SINGLE:
            yield keyword, value
        elif keyword in _OF_NAMES and isinstance(value, dict):
            yield from ((f"{keyword}/{name}", child) for name, child in value.items())
        elif keyword in _OF_LISTS and isinstance(value, list):
            yield from ((f"{keyword}/{index}", child) for index, child in enumerate(value))
