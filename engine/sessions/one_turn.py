"""One turn of a session while it runs: its prompt and request, and what it leaves behind.

Knows no store of sessions: what is to be stored is a record, and whoever ends the turn stores it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvstore.blocks.ids import BlockId, Lineage, extend_chain
from kvstore.engine.client.requests import Handle
from kvstore.engine.outputs import RequestOutput
from kvstore.engine.sessions.recall_ids import answer_ids
from kvstore.engine.sessions.window import NextTurn, Window
from kvstore.engine.text.chat_template import ChatTemplate, Message
from kvstore.sessions.record import TurnRecord


@dataclass(frozen=True, slots=True)
class OneTurn:
    """A running turn.

    before: the conversation so far, with the history that a first turn may bring. text: the user's message. next: the
    prompt. handle: the request's.
    """

    before: Window
    text: str
    next: NextTurn
    handle: Handle
    idempotency_key: str | None = None

    @property
    def lineage(self) -> Lineage:
        """What its chain is built on. The splice was given up where reused KV was missing."""
        return self.handle.lineage or self.next.lineage

    def after(self, tokenizer: Any, template: ChatTemplate, block_size: int) -> Window:
        """The conversation with this turn: text for people, ids for the next prompt."""
        output, lineage = self.handle.output, self.lineage
        said = [{"role": "user", "content": self.text}, {"role": "assistant", "content": output.text}]
        said_ids = answer_ids(tokenizer, template, output.prompt_token_ids, output.choices[0])
        token_ids = [*output.prompt_token_ids, *said_ids]
        chain = list(self.next.chain) if lineage == self.next.lineage else []
        extend_chain(chain, lineage.root, token_ids, block_size)
        messages = [*self.before.messages, *said]
        return Window(
            self.before.system, messages, self.next.num_dropped, token_ids, chain, lineage, self.next.turn_starts
        )

    def record(self, number: int, after: Window) -> TurnRecord:
        """What is stored of it: the ids that it adds, or all ids if they do not continue those before."""
        output, before = self.handle.output, self.before
        append = not self.next.rebase and after.lineage == before.lineage
        messages: Sequence[Message] = after.messages if number == 1 else after.messages[-2:]
        return TurnRecord(
            number=number,
            messages=messages,
            token_ids=after.token_ids[len(before.token_ids) :] if append else after.token_ids,
            chain=after.chain[len(before.chain) :] if append else after.chain,
            base="append" if append else "rebase",
            first_reencoded=after.lineage.splice_index,
            splice_parent=after.lineage.splice_parent,
            splice_end=after.lineage.splice_end,
            turn_starts=after.turn_starts,
            num_dropped_messages=after.num_dropped,
            truncated_tokens=self.next.truncated_tokens,
            finish_reason=output.finish_reason or "",
            usage=_usage(output),
            created_s=time.time(),
            idempotency_key=self.idempotency_key,
        )

    def unneeded_blocks(self, is_stored: bool, is_deleted: bool, block_size: int) -> Sequence[BlockId]:
        """Blocks that nothing refers to once the turn has ended. is_deleted: its session was deleted before it was
        stored.
        """
        before, spliced = self.before, self.next.spliced_blocks
        if is_stored:
            return spliced(before.lineage, self.lineage)
        return [*(self._own_blocks(block_size) if is_deleted else ()), *spliced(before.lineage)]

    def _own_blocks(self, block_size: int) -> Sequence[BlockId]:
        """Blocks of this turn alone, not of earlier turns or the system prompt."""
        known, chain = self.before.chain, self.handle.chain
        first = self.next.turn_starts[0] // block_size if self.next.turn_starts else 0
        while first < min(len(known), len(chain)) and known[first] == chain[first]:
            first += 1
        return chain[first:]


def record_of_truncation(number: int, before: Window, after: Window, template: ChatTemplate) -> TurnRecord:
    """A turn without messages: what is stored when turns are removed from the window without a new one."""
    return TurnRecord(
        number=number, messages=(), token_ids=after.token_ids, chain=after.chain, base="rebase",
        first_reencoded=after.lineage.splice_index, splice_parent=after.lineage.splice_parent,
        splice_end=after.lineage.splice_end, turn_starts=after.turn_starts, num_dropped_messages=after.num_dropped,
        truncated_tokens=max(0, len(before.token_ids) - after.num_tokens(template)),
        finish_reason="truncated", created_s=time.time(),
    )  # fmt: skip


def _usage(output: RequestOutput) -> dict[str, int]:
    """Counts of tokens, and known times in microseconds."""
    usage, times = output.usage, asdict(output.timings)
    capped = {} if usage.capped_max_tokens is None else {"capped_max_tokens": usage.capped_max_tokens}
    return {
        **capped,
        **{f"{name[:-2]}_us": round(seconds * 1e6) for name, seconds in times.items() if seconds is not None},
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        **asdict(usage.cached_tokens_details),
    }
