"""How a family of models writes reasoning and tool calls: data, one file a family in `response_templates/`.

The part `response_template` of a file is what transformers' `ResponseParser` reads; the rest is for whoever chooses a
family (`parsers`, `marks`) and for grammars (`reasoning`, `content`, `calls`). No pattern may repeat without a bound:
the parser tries an unfinished one again with every piece of text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError

CALLS = "tool_calls"  # the region of a template that holds calls
REASONING = ("thinking", "reasoning", "reasoning_content")  # names that templates give the region of reasoning
UNSEEN = "unseen"  # a region for text that belongs to none of a template's


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a family writes calls: opener, then calls with the separator between them (None: only one), then closer.

    A call is `begin`, its arguments, `end`; `{name}` in `begin` is the function's name. arguments: "json" is one
    object; "parameters" is `parameter` for each, with `{key}` and `{value}` (a string as it is, anything else as JSON);
    "python" is keyword arguments; "gemma" is an object with bare keys and strings between `<|"|>`. trigger: with this
    text calls begin; "": they begin with the answer, or there are none.
    """

    arguments: str
    trigger: str
    begin: str
    end: str
    opener: str = ""
    separator: str | None = ""
    closer: str = ""
    parameter: str = ""


@dataclass(frozen=True)
class ResponseTemplate:
    """What tells the regions of an answer apart.

    spec: as transformers reads it. reasoning: the texts that open and close it; None if the model does not reason.
    content: the text that opens the content, where a family has one. calls: None if nothing is known for grammars.
    shown_tokens: special tokens that delimit regions or arguments, by id; the text of an answer must show them.
    """

    spec: Mapping[str, Any]
    reasoning: tuple[str, str] | None = None
    content: str = ""
    calls: CallSyntax | None = None
    shown_tokens: Mapping[int, str] = field(default_factory=dict)

    @cached_property
    def calls_alone(self) -> Any:
        """transformers' template that parses the text of a call."""
        return _compiled(self.spec, {CALLS: self.spec["fields"][CALLS]})

    @cached_property
    def regions(self) -> Any:
        """transformers' template that only cuts an answer into regions: no text of a model raises an error."""
        return _compiled(self.spec, self._bare_fields())

    @cached_property
    def regions_without_calls(self) -> Any:
        """The same for a request without tools: what looks like a call is content."""
        return _compiled(self.spec, {name: bare for name, bare in self._bare_fields().items() if name != CALLS})

    def _bare_fields(self) -> dict[str, dict[str, Any]]:
        """Each field without its content's form. One is for text outside all regions; that is never closed."""
        bare: dict[str, dict[str, Any]] = {UNSEEN: {}} if all(map(_opens, self.spec["fields"].values())) else {}
        for name, given in self.spec["fields"].items():
            kept = {key: value for key, value in given.items() if key.startswith(("open", "close")) and _opens(given)}
            bare[name] = kept | {"transform": "{content}"}
        return bare


def choose_template(tokenizer: Any, parser: str | None = None) -> ResponseTemplate | None:
    """The template for a transformers tokenizer: its own, or the family's whose marks are in its chat template.

    parser: a name that vLLM gives with `--tool-call-parser`; it decides before both. None if nothing is known. Raises
    ConfigError for an unknown name.
    """
    shown = str(tokenizer.chat_template or "")  # several templates are shown, too
    known = families_of(parser)
    marked = [family for family in known if all(mark in shown for mark in family["marks"])]
    candidates = marked or (known if parser else [])
    family = max(candidates, key=lambda known: ("calls" in known, len(known["marks"])), default={})
    own = None if parser else getattr(tokenizer, "response_template", None)
    spec = own or family.get("response_template")
    if spec is None:
        return None
    opened, closed = family.get("reasoning", ("", ""))
    return ResponseTemplate(
        spec,
        (opened, closed) if closed and closed in shown else None,  # else this model of the family does not reason
        family.get("content", ""),
        CallSyntax(**family["calls"]) if "calls" in family else None,
        _shown_tokens(spec, tokenizer),
    )


def families_of(parser: str | None) -> Sequence[Mapping[str, Any]]:
    """Those that vLLM's name stands for; None: all. Raises ConfigError for an unknown name."""
    known = [family for family in _families() if parser is None or parser in family["parsers"]]
    if not known:
        names = ", ".join(sorted({name for family in _families() for name in family["parsers"]}))
        raise ConfigError("tool_call_parser", repr(parser), f"give one of {names}")
    return known


def _shown_tokens(spec: Mapping[str, Any], tokenizer: Any) -> dict[int, str]:
    used = json.dumps(list(filter(_opens, spec["fields"].values())), ensure_ascii=False)
    used = used.replace("\\", "")  # of patterns and of JSON
    added = tokenizer.added_tokens_decoder.items()
    return {i: token.content for i, token in added if token.special and token.content in used}


@cache
def _families() -> Sequence[Mapping[str, Any]]:
    paths = sorted((Path(__file__).parent / "response_templates").glob("*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _compiled(spec: Mapping[str, Any], fields: Mapping[str, Any]) -> Any:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template({**spec, "fields": fields})


def _opens(given: Mapping[str, Any]) -> bool:
    return "open" in given or "open_pattern" in given
