"""The ids of a history that comes as text, around those of answers that are known.

Knows a chat template, and not where answers are known from.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence

from kvstore.engine.text.chat_template import ChatTemplate, Message, content_of
from kvstore.errors import RequestError


def history_ids(
    template: ChatTemplate, messages: list[Message], answers: Mapping[int, Sequence[int]],
    known: tuple[int, Sequence[int]] | None = None,
) -> list[int] | None:  # fmt: skip
    """`prompt_ids` of a history in which some answers keep the ids that the model gave them.

    answers: ids without the end token, by the index of the assistant's message. known: all ids up to the end of the
    answer with this index; they replace everything before it. If the template shows an answer differently from what
    the model saw (it drops reasoning, or opens an answer in another way), that answer and everything before it are
    encoded as text. None if no answer is left.
    """
    if template.end_ids(messages[0]["role"] == "system") is None:
        return None
    kept = {known[0]: known[1]} if known else {}
    kept |= {index: answers[index] for index in sorted(answers) if known is None or index > known[0]}
    shown = _shown(template, messages, kept) if kept else None
    if shown is None:
        return None
    indices, texts = shown
    ids = [] if known and indices[0] == known[0] else template.prompt_ids(messages[: indices[0]])
    for index, text in zip(indices, texts, strict=True):
        ids += [*kept[index], *template.text.encode_part(text)]
    return ids


def _shown(
    template: ChatTemplate, messages: list[Message], kept: Mapping[int, Sequence[int]]
) -> tuple[list[int], list[str]] | None:
    """Cut the rendered history at the answers to keep. Returns their indices, from the first one that can be kept, and
    the text after each; None if none can.
    """
    nonce = secrets.token_hex(8)  # no content can contain it
    marked = list(messages)
    for index in kept:
        marked[index] = {"role": "assistant", "content": f"kvstore{nonce}x{index}end"}  # ids stand for calls, too
    try:
        head, *parts = re.split(f"kvstore{nonce}x([0-9]+)end", template.render(marked))
    except RequestError:  # a template may want to see the calls
        return None
    indices, texts = [*kept], parts[1::2]
    if parts[::2] != [str(index) for index in indices]:
        return None
    rendered = template.render(messages)
    if not rendered.endswith(texts[-1]):
        return None
    end, num_shown = len(rendered) - len(texts[-1]), 0
    for index, before in zip(reversed(indices), reversed([head, *texts[:-1]]), strict=True):
        if "tool_calls" in messages[index]:  # however the template shows them
            start = rendered.rfind(before, 0, end) + len(before)
            content = rendered[start:end] if start >= len(before) else None
        else:
            content = _content_before(rendered, end, before, template.text.hide(content_of(messages[index])))
        if content is None or not before.endswith(template.opening):
            break
        num_shown += 1
        end -= len(before) + len(content)
    return (indices[-num_shown:], texts[-num_shown:]) if num_shown else None


def _content_before(rendered: str, end: int, before: str, content: str) -> str | None:
    """How the template shows a content that ends at `end` and follows `before`."""
    for shown in (content, content.strip()):
        start = end - len(shown)
        if rendered.startswith(shown, start) and rendered.endswith(before, 0, start):
            return shown
    return None
