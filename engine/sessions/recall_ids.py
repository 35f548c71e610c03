"""Digests that identify histories and answers without their text; and the ids of an answer.

A digest is keyed with the tenant's root and the salt, so nobody else can make it or guess a text from it.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Any

from kvstore.blocks.ids import BlockId
from kvstore.engine.outputs import Choice
from kvstore.engine.text.chat_template import ChatTemplate, Message
from kvstore.engine.text.detokenizer import Detokenizer

DIGEST_BYTES = 16


def answer_ids(
    tokenizer: Any, template: ChatTemplate, prompt_token_ids: Sequence[int], choice: Choice
) -> Sequence[int]:
    """Ids of an answer without its end token, which the template adds, and without its stop string."""
    if choice.finish_reason != "stop":
        return list(choice.token_ids)
    if not isinstance(choice.stop_reason, str):
        return choice.token_ids[:-1]
    said = Detokenizer(tokenizer.backend_tokenizer, prompt_token_ids=prompt_token_ids)
    count, known = 0, ""
    for number, token_id in enumerate(choice.token_ids, start=1):
        said.append([token_id])
        if not choice.text.startswith(said.text):
            break
        count, known = number, said.text
    return choice.token_ids[:count] + template.encode_answer(choice.text[len(known) :])


class Keys:
    """The digests of one owner: a tenant and a salt."""

    def __init__(self, root: BlockId, cache_salt: str) -> None:
        self._key = hmac.digest(root, b"answers" + cache_salt.encode("utf-8", "surrogatepass"), "sha256")

    def histories(self, messages: Sequence[Message]) -> list[bytes]:
        """The digest of each message with all before it."""
        history, found = b"", []
        for message in messages:
            history = self.after(history, message)
            found.append(history)
        return found

    def after(self, history: bytes, message: Message) -> bytes:
        """The digest of a history, given by its own, and a message: all fields of it, as a template may show any."""
        parts = [text.encode("utf-8", "surrogatepass") for item in sorted(message.items()) for text in item]
        said = self._digest(b"ms", b"".join(len(part).to_bytes(8, "little") + part for part in parts))
        return self._digest(b"hi", history + said)

    def text(self, answer: str) -> bytes:
        """The digest of an answer's text, whatever came before it."""
        return self._digest(b"tx", answer.encode("utf-8", "surrogatepass"))

    def _digest(self, tag: bytes, value: bytes) -> bytes:
        return hmac.digest(self._key, tag + value, "sha256")[:DIGEST_BYTES]
