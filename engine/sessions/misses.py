"""Why a prompt computes what an earlier request of its conversation had: where every miss gets its name.

Two things can be the cause. The prompt differs from what the earlier request had: that is known here, when the prompt
is made, by comparing digests of messages, tools and variables. Or no tier has the blocks any more: that only the core
knows (`kvstore.blocks.records.Loss`), and tells with the request's end. Nothing is guessed: what neither knows is
"unknown".

A prompt that goes on where the earlier request ended, and hits, does not come here. Holds no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import structs

from kvstore.blocks.ids import SpliceRun
from kvstore.blocks.records import Loss
from kvstore.engine.client.requests import Handle
from kvstore.engine.outputs import Earlier, Miss
from kvstore.engine.text.chat_template import ChatTemplate, Message

MANY_HEADS = 3  # so many system messages of one conversation: each request has its own


@dataclass(frozen=True, slots=True)
class Rendering:
    """What the ids of a conversation were made of.

    marks: a digest of each message; reasoned: which of them are answers with reasoning. options: see
    `AnswerOptions.digest`. salt: a digest. heads: digests of the first messages that it has had, MANY_HEADS at most;
    all renderings of a conversation share them. ended_s: when its last request ended, in seconds since the epoch.
    splices: see `Lineage`.
    """

    marks: Sequence[bytes] = ()
    reasoned: frozenset[int] = frozenset()
    options: bytes = b""
    salt: bytes = b""
    heads: set[bytes] = field(default_factory=set)
    ended_s: float = 0.0
    splices: tuple[SpliceRun, ...] = ()


NO_RENDERING = Rendering()


@dataclass(frozen=True, slots=True)
class MadePrompt:
    """A prompt that was just made, and what it was made of. new_from: where in it what is new begins, if something
    before that was left out; is_truncated: turns were, to make room.
    """

    token_ids: Sequence[int]
    messages: Sequence[Message]
    template: ChatTemplate
    new_from: int | None = None
    is_truncated: bool = False

    def message_at(self, token: int) -> int | None:
        """The message that this token is in; None if it comes before all, or if that cannot be told."""
        return self.template.message_of_last(self.messages, self.token_ids[: token + 1])


def compare(prompt: MadePrompt, now: Rendering, known_ids: Sequence[int], known: Rendering) -> Earlier:
    """What an earlier request with these ids had of a prompt. now: what the prompt was made of.

    Its first message is added to the heads that are known.
    """
    had, num_same = max(0, len(known_ids) - 1), common_prefix(known_ids, prompt.token_ids)
    most = min(had, len(prompt.token_ids) - 1 if prompt.new_from is None else prompt.new_from)
    if known.salt != now.salt:
        return Earlier(0, known.ended_s, _miss(prompt, "salt", 0, most))
    if len(known.heads) < MANY_HEADS:
        known.heads.update(now.marks[:1])
    if most <= num_same:
        return Earlier(min(had, num_same), known.ended_s, None, known.heads)
    changed = next((i for i, (old, new) in enumerate(zip(known.marks, now.marks, strict=False)) if old != new), None)
    message = changed
    if known.options != now.options:
        cause, message = changed_options(known.options, now.options), None
    elif changed is not None:
        is_head = changed == 0 and prompt.messages[0]["role"] == "system" and len(known.heads) == MANY_HEADS
        cause = "head" if is_head else "edit"
    elif prompt.is_truncated:
        cause, message = "truncation", prompt.message_at(num_same)
    elif known.reasoned:
        cause, message = "thinking", _reasoned_at(prompt, num_same, known.reasoned)
    else:  # the template itself: it shows the time, say, or an answer in another way than the model gave it
        message = prompt.message_at(num_same)
        cause = "head" if message is None else "template"
    miss = _miss(prompt, cause, num_same, most - num_same, message)
    return Earlier(num_same, known.ended_s, miss, known.heads)


def had_by_other_weights(prompt: MadePrompt, num_tokens: int, ended_s: float) -> Earlier:
    """num_tokens: of the conversation, as another model has read it."""
    return Earlier(0, ended_s, _miss(prompt, "weights", 0, min(num_tokens, len(prompt.token_ids) - 1)))


def changed_options(old: bytes, new: bytes) -> str:
    """Which part of `AnswerOptions.digest` has changed first: the tools, their order, or the template's variables."""
    parts = [options or bytes(48) for options in (old, new)]
    (old_ordered, old_tools, _), (new_ordered, new_tools, _) = [
        [part[at : at + 16] for at in (0, 16, 32)] for part in parts
    ]
    if old_tools != new_tools:
        return "tools"
    return "tool_order" if old_ordered != new_ordered else "template"


def explained(handle: Handle, prompt: MadePrompt, block_size: int) -> Miss | None:
    """The miss of a request that has ended; None if it has computed nothing that the earlier one had."""
    earlier, num_cached = handle.earlier, handle.output.usage.cached_tokens
    if num_lost := handle.num_lost(block_size):
        token, loss = handle.loss or (num_cached, Loss("unknown"))
        found = _miss(prompt, loss.cause, token, num_lost, prompt.message_at(token))
        return structs.replace(found, tier=loss.tier, at_s=loss.at_s, why=loss.why)
    if earlier.miss is None:
        return None
    token = earlier.miss.token
    num_lost = (token + earlier.miss.tokens - max(num_cached, token)) // block_size * block_size
    return structs.replace(earlier.miss, tokens=num_lost) if num_lost > 0 else None


def _miss(prompt: MadePrompt, cause: str, token: int, num_tokens: int, message: int | None = None) -> Miss:
    role = None if message is None else prompt.messages[message]["role"]
    return Miss(cause, num_tokens, token, message, role)


def _reasoned_at(prompt: MadePrompt, token: int, reasoned: frozenset[int]) -> int:
    """The answer whose reasoning a prompt lacks from this token on. The text that opens it counts as the one before."""
    near = prompt.message_at(token) or 0
    return min((index for index in reasoned if index >= near), default=max(reasoned))


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many of the first ids are the same."""
    count = min(len(left), len(right))
    differs = np.asarray(left[:count]) != np.asarray(right[:count])
    return int(differs.argmax()) if differs.any() else count
