"""From text to token ids with one tokenizer, where template text has control tokens and people's text has none."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Any

# A private token before a part that is encoded alone: without it, tokenizers that mark the beginning of a text with a
# space would mark every part.
_ANCHOR = "\ue0f0kvstore\ue0f1"


class TextEncoder:
    """Encodes with one tokenizer. Template text may contain its control tokens; people's text may not."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._controls = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        self._mark = f"kvstore{secrets.token_hex(8)}x"  # nobody can spell it

    def spells_control(self, text: str) -> bool:
        return any(token in text for token in self._controls)

    def whole_tokens(self, text: str, count: int) -> int:
        """At most the last `count` characters. A cut through a control token moves behind it."""
        cut = len(text) - count
        for token in self._controls:
            for start in range(max(0, cut - len(token) + 1), cut):
                if text.startswith(token, start):
                    return self.whole_tokens(text, len(text) - start - len(token))
        return count

    @cached_property
    def _plain(self) -> Any:
        """The same tokenizer without any control token but the anchor: any text stays text."""
        description = json.loads(self._backend.to_str())
        description["added_tokens"] = []
        plain = type(self._backend).from_str(json.dumps(description))
        plain.add_special_tokens([_ANCHOR])
        return plain

    def hide_controls(self, value: Any) -> Any:
        """The same JSON with a mark for each control token that its texts spell: `encode` makes plain text of it.

        Marks are letters and digits, which templates neither escape nor trim.
        """
        if isinstance(value, Mapping):
            return {self.hide_controls(key): self.hide_controls(part) for key, part in value.items()}
        if isinstance(value, list):
            return [self.hide_controls(part) for part in value]
        if not isinstance(value, str) or not self._controls:
            return value
        return self._spelled.sub(lambda found: f"{self._mark}{self._controls.index(found.group())}end", value)

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self._controls, key=len, reverse=True))))

    def encode(self, text: str) -> list[int]:
        """Ids of template text, and of control tokens hidden in it as text."""
        if self._mark not in text:
            return _ids(self._backend, text)
        first, *rest = re.split(f"{self._mark}([0-9]+)end", text)
        ids = _ids(self._backend, first)
        for index, part in zip(rest[::2], rest[1::2], strict=True):
            ids += self.encode_plain(self._controls[int(index)]) + self.encode_part(part)
        return ids

    def encode_part(self, text: str) -> list[int]:
        """Ids of template text within a prompt, as after a control token if the tokenizer has one."""
        if not text or not self._controls or text.startswith(tuple(self._controls)):
            return self.encode(text)
        return self.encode(self._controls[0] + text)[1:]

    def encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        return _ids(self._plain, _ANCHOR + text.replace(_ANCHOR, ""))[1:]


def _ids(tokenizer: Any, text: str) -> list[int]:
    """Encode as a batch of one, which, unlike `encode`, lets other threads run meanwhile."""
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)
