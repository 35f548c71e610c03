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
    texts, contents = shown
    first = next(iter(contents))
    if known and first == known[0]:
        ids = list(known[1])
    else:
        ids = template.prompt_ids(messages[:first]) + list(kept[first])
    after = [*contents][1:]
    for text, index in zip(texts[1:], [*after, None], strict=True):
        ids += template.text.encode_part(text)
        if index in kept:
            ids += kept[index]
        elif index is not None:
            ids += template.text.encode_plain(contents[index])
    return ids


def _shown(
    template: ChatTemplate, messages: list[Message], kept: Mapping[int, Sequence[int]]
) -> tuple[list[str], dict[int, str]] | None:
    """Cut the rendered history at the answers to keep, from the first required one on; None if that is impossible.

    Returns the texts between the cuts, and the contents as the template shows them (it may trim), by their indices.
    """
    first = min(kept)
    spells = template.text.spells_control
    cuts = [i for i, m in enumerate(messages) if i in kept or (i > first and spells(content_of(m)))]
    nonce = secrets.token_hex(8)  # no content can contain it
    marked = list(messages)
    for index in cuts:
        kept_parts = {"role": "assistant"} if index in kept else messages[index]  # ids stand for calls, too
        marked[index] = {**kept_parts, "content": f"kvstore{nonce}x{index}end"}
    try:
        parts = re.split(f"kvstore{nonce}x([0-9]+)end", template.render(marked))
    except RequestError:  # a template may want to see the calls
        return None
    if parts[1::2] != [str(index) for index in cuts]:
        return None
    texts, rendered = parts[::2], template.render(messages)
    if not rendered.endswith(texts[-1]):
        return None
    end = len(rendered) - len(texts[-1])
    contents: dict[int, str] = {}
    for number in reversed(range(len(cuts))):
        index, before = cuts[number], texts[number]
        if "tool_calls" in messages[index] and index in kept:  # however the template shows them
            start = rendered.rfind(before, 0, end) + len(before)
            content = rendered[start:end] if start >= len(before) else None
        else:
            content = _content_before(rendered, end, before, content_of(messages[index]))
        if content is None or (index in kept and not before.endswith(template.opening)):
            break
        contents[index] = content
        end -= len(before) + len(content)
    while contents and next(reversed(contents)) not in kept:
        contents.popitem()  # everything before the first kept answer is encoded in one piece
    contents = dict(reversed(contents.items()))
    return (texts[len(texts) - len(contents) - 1 :], contents) if contents else None


def _content_before(rendered: str, end: int, before: str, content: str) -> str | None:
    """How the template shows a content that ends at `end` and follows `before`."""
    for shown in (content, content.strip()):
        start = end - len(shown)
        if rendered.startswith(shown, start) and rendered.endswith(before, 0, start):
            return shown
    return None
