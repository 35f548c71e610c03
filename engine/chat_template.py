"""From messages to token ids with the model's own chat template, and from turn to turn by what the template adds.

An answer is never tokenized again: the next prompt is the ids so far plus the ids of the template's delta.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from kvstore.errors import RequestError

Message = dict[str, str]

# Stand-ins for contents while the template's own text is found. Plain letters: templates trim and escape.
_USER, _ANSWER, _NEXT = "kvstorefirstquestion", "kvstorefirstanswer", "kvstoresecondquestion"


@dataclass(frozen=True, slots=True)
class Delta:
    """What the template puts between an answer and the next user message, and after that message."""

    before: str
    after: str


class ChatTemplate:
    """The chat template of one tokenizer. Make it with `of`."""

    def __init__(self, tokenizer: Any, plain_tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._plain = plain_tokenizer  # the same, but text that spells a special token stays text
        self._special = [str(token) for token in tokenizer.all_special_tokens]
        self._deltas: dict[bool, Delta | None] = {}

    @classmethod
    def of(cls, tokenizer: Any) -> ChatTemplate | None:
        """None when the tokenizer has no chat template."""
        if not tokenizer.chat_template:
            return None
        plain = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
        plain.encode_special_tokens = True
        return cls(tokenizer, plain)

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """Ids of a whole conversation, ready for the assistant's answer. Raises RequestError if the template refuses.

        Contents that spell a special token are encoded as text.
        """
        if not any(token in m["content"] for m in messages for token in self._special):
            return self._encode(self._render(messages, answer_next=True))
        marks = [f"kvstorecontent{i}end" for i in range(len(messages))]
        marked = [{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)]
        rest, ids = self._render(marked, answer_next=True), []
        for message, mark in zip(messages, marks, strict=True):
            before, found, rest = rest.partition(mark)
            if not found:
                raise RequestError("a message spells a control token and the template does not show it as it is")
            ids += self._encode(before) + self._encode_content(message["content"])
        return ids + self._encode(rest)

    def next_ids(self, token_ids: list[int], has_system: bool, content: str) -> list[int] | None:
        """The next prompt: `token_ids`, which end with an answer (without its end token), and one user message more.

        None when the template rewrites history, so that the whole conversation must be rendered again.
        """
        delta = self._delta(has_system)
        if delta is None:
            return None
        if any(token in content for token in self._special):
            added = self._encode(delta.before) + self._encode_content(content) + self._encode(delta.after)
        else:
            added = self._encode(delta.before + content + delta.after)
        return token_ids + added

    def encode_answer(self, text: str) -> list[int]:
        """Ids of an answer's text, or of a part of it, as plain text."""
        return self._encode_content(text)

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.backend_tokenizer.decode(token_ids)

    def _delta(self, has_system: bool) -> Delta | None:
        if has_system not in self._deltas:
            self._deltas[has_system] = self._find_delta(has_system)
        return self._deltas[has_system]

    def _find_delta(self, has_system: bool) -> Delta | None:
        """Compare the render of a first prompt with that of a second one that contains it."""
        history = [{"role": "system", "content": "kvstoresystem"}] if has_system else []
        history += [{"role": "user", "content": _USER}]
        longer = [*history, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _NEXT}]
        first, second = self._render(history, answer_next=True), self._render(longer, answer_next=True)
        if not second.startswith(first + _ANSWER) or second.count(_NEXT) != 1:
            return None
        before, after = second[len(first) + len(_ANSWER) :].split(_NEXT)
        return Delta(before, after)

    def _render(self, messages: list[Message], answer_next: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer_next)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    def _encode_content(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids)
