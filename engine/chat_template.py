"""From messages to token ids with the model's own chat template, and from turn to turn by what the template adds.

An answer is never tokenized again: the next prompt is the ids so far plus the ids of the template's delta.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from kvstore.errors import RequestError

Message = dict[str, str]

# Stand-ins for contents while the template's own text is found. Plain letters: templates trim and escape.
_USER, _ANSWER, _NEXT = "kvstorefirstquestion", "kvstorefirstanswer", "kvstoresecondquestion"
# A private token before a part that is encoded by itself: tokenizers that mark the beginning of a text with a space
# would else mark the beginning of every part.
_ANCHOR = "\ue0f0kvstore\ue0f1"


@dataclass(frozen=True, slots=True)
class Delta:
    """What the template puts between an answer and the next user message, and after that message."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Boundary:
    """end: what closes an answer before the next turn begins. turn_chars: what opens a turn has so many characters."""

    end: str
    turn_chars: int


class ChatTemplate:
    """The chat template of one tokenizer. Make it with `of`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._controls = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        self._deltas: dict[bool, Delta | None] = {}
        self._boundaries: dict[bool, Boundary | None] = {}

    @classmethod
    def of(cls, tokenizer: Any) -> ChatTemplate | None:
        """None when the tokenizer has no chat template."""
        return cls(tokenizer) if tokenizer.chat_template else None

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """Ids of a whole conversation, ready for the assistant's answer. Raises RequestError if the template refuses.

        Contents that spell a control token are encoded as text.
        """
        if not any(self._spells_control(m["content"]) for m in messages):
            return self._encode(self._render(messages))
        contents = {f"kvstorecontent{i}end": m["content"] for i, m in enumerate(messages)}
        marked = [{**m, "content": mark} for m, mark in zip(messages, contents, strict=True)]
        parts = re.split("(kvstorecontent[0-9]+end)", self._render(marked))
        if missing := set(contents) - set(parts):
            raise RequestError(f"the chat template does not show {len(missing)} of the messages", param="messages")
        ids: list[int] = []
        for part in parts:
            ids += self._encode_plain(contents[part]) if part in contents else self._encode_part(part)
        return ids

    def next_ids(self, token_ids: list[int], messages: list[Message], content: str) -> list[int] | None:
        """The next prompt: the conversation so far and one user message more.

        token_ids: exactly what the model saw and said, up to the last answer without its end token; messages: the same
        as texts, the last one that answer. None when the template shows it otherwise (rewrites history, drops the
        reasoning of an answer), so that the whole conversation must be rendered again.
        """
        delta = self._delta(messages[0]["role"] == "system")
        if delta is None:
            return None
        rendered = self._render([*messages, {"role": "user", "content": content}])
        answer = messages[-1]["content"].strip()  # a template that trims does not rewrite
        for shown in (content, content.strip()):
            if rendered.endswith(answer + delta.before + shown + delta.after):
                break
        else:
            return None
        if self._spells_control(shown):
            before, after = self._encode_part(delta.before), self._encode_part(delta.after)
            return token_ids + before + self._encode_plain(shown) + after
        return token_ids + self._encode_part(delta.before + shown + delta.after)

    def head_ids(self, system: list[Message]) -> list[int] | None:
        """Ids of what stands before the first turn: of a prompt, the part that every truncation keeps."""
        boundary = self._boundary(bool(system))
        if boundary is None:
            return None
        rendered = self._render([*system, {"role": "user", "content": _USER}])
        before = rendered[: rendered.index(_USER)]
        head = before[: len(before) - boundary.turn_chars]
        if not system or not self._spells_control(system[0]["content"]):
            return self._encode(head)
        start, content, rest = head.partition(system[0]["content"])
        if not content:
            return None
        return self._encode(start) + self._encode_plain(content) + (self._encode_part(rest) if rest else [])

    def end_ids(self, has_system: bool) -> list[int] | None:
        """Ids of what the template puts behind an answer before the next turn begins."""
        boundary = self._boundary(has_system)
        return None if boundary is None else self._encode_part(boundary.end)

    def _boundary(self, has_system: bool) -> Boundary | None:
        if has_system not in self._boundaries:
            self._boundaries[has_system] = self._find_boundary(has_system)
        return self._boundaries[has_system]

    def _find_boundary(self, has_system: bool) -> Boundary | None:
        """Where turns begin: what stands before the first user message and before a later one has the same end."""
        delta = self._delta(has_system)
        if delta is None:
            return None
        system = [{"role": "system", "content": "kvstoresystem"}] if has_system else []
        rendered = self._render([*system, {"role": "user", "content": _USER}])
        first = rendered[: rendered.index(_USER)]
        count = 0
        while count < min(len(first), len(delta.before)) and first[-count - 1] == delta.before[-count - 1]:
            count += 1
        count = min(self._whole_tokens(first, count), self._whole_tokens(delta.before, count))
        return Boundary(delta.before[: len(delta.before) - count], count)

    def _whole_tokens(self, text: str, count: int) -> int:
        """The last `count` characters, or fewer: a cut through a control token moves behind it."""
        cut = len(text) - count
        for token in self._controls:
            for start in range(max(0, cut - len(token) + 1), cut):
                if text.startswith(token, start):
                    return self._whole_tokens(text, len(text) - start - len(token))
        return count

    def encode_answer(self, text: str) -> list[int]:
        """Ids of a part of an answer, as plain text that continues what stands before it."""
        return self._encode_plain(text)

    def _spells_control(self, text: str) -> bool:
        return any(token in text for token in self._controls)

    def _delta(self, has_system: bool) -> Delta | None:
        if has_system not in self._deltas:
            self._deltas[has_system] = self._find_delta(has_system)
        return self._deltas[has_system]

    def _find_delta(self, has_system: bool) -> Delta | None:
        """Compare the render of a first prompt with that of a second one that contains it."""
        history = [{"role": "system", "content": "kvstoresystem"}] if has_system else []
        history += [{"role": "user", "content": _USER}]
        longer = [*history, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _NEXT}]
        first, second = self._render(history), self._render(longer)
        if not second.startswith(first + _ANSWER) or second.count(_NEXT) != 1:
            return None
        before, after = second[len(first) + len(_ANSWER) :].split(_NEXT)
        return Delta(before, after)

    def _render(self, messages: list[Message]) -> str:
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error

    @property
    def _backend(self) -> Any:
        return self._tokenizer.backend_tokenizer

    @cached_property
    def _plain(self) -> Any:
        """The same tokenizer without any control token but the anchor: whatever a text spells stays text."""
        description = json.loads(self._backend.to_str())
        description["added_tokens"] = []
        plain = type(self._backend).from_str(json.dumps(description))
        plain.add_special_tokens([_ANCHOR])
        return plain

    def _encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _encode_part(self, text: str) -> list[int]:
        """Template text within a prompt: what it gives behind a control token, if the tokenizer has one."""
        if not text or not self._controls or text.startswith(tuple(self._controls)):
            return self._encode(text)
        return self._encode(self._controls[0] + text)[1:]

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        return list(self._plain.encode(_ANCHOR + text.replace(_ANCHOR, ""), add_special_tokens=False).ids)[1:]
