"""Turns histories that come back as text into the exact ids that the model has seen and said.

An answer is recognised by the digest of the whole history up to it, else by its text alone, within tenant and salt.
Knows no engine: a `Core` computes, and `AnswerStore` holds known answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvstore.blocks.ids import BlockId, Lineage, extend_chain
from kvstore.engine.outputs import RequestOutput
from kvstore.engine.sessions.chats import Chats
from kvstore.engine.sessions.recall_ids import Digests, Keys, answer_ids
from kvstore.engine.sessions.recall_lines import KnownConversation, Lines, Names
from kvstore.engine.sessions.window import NextTurn
from kvstore.engine.text.chat_template import ChatTemplate, Message
from kvstore.engine.text.prompts import check_length, check_truncation
from kvstore.errors import RequestError
from kvstore.sessions.answers import AnswerStore, owner_tag

MAX_TOKENS = 4_000_000  # 16 MB with what is beside them


class RecallEngine(Protocol):
    """The parts of an engine that recall uses."""

    chats: Chats
    answers: AnswerStore


class Recall:
    """Recognises the histories of stateless clients, for one engine.

    Any thread may call it. max_tokens: how many to keep in memory; `engine.answers` has a bound of its own.
    """

    def __init__(self, engine: RecallEngine, max_tokens: int = MAX_TOKENS) -> None:
        self._core = engine.chats.core
        self._language = engine.chats.language
        self._answers = engine.answers
        self._lines = Lines(max_tokens)
        tokenizer = self._language.tokenizer
        tokens = {} if tokenizer is None else tokenizer.added_tokens_decoder
        self._silent = frozenset(token_id for token_id, token in tokens.items() if token.special)

    def next_turn(self, tenant: str, cache_salt: str, messages: list[Message], reuse: str = "exact") -> NextTurn:
        """The prompt of a history, with the ids of the answers in it that are known.

        reuse "reencode": if a client drops its oldest turns, the rest is spliced, in this request and in later ones.
        With "exact", or a salt, no prompt has a splice. Raises RequestError when the template refuses.

        Blocks that are spliced for a request that never ends age out like any others.
        """
        check_truncation("auto", reuse)
        template = self._language.chat_template()
        if not messages:
            raise RequestError("messages is empty; give at least one", param="messages")
        texts = [message["content"] for message in messages]
        check_length(texts, self._language.tokenizer, self._core.facts.max_request_tokens)
        keys = Keys(self._core.root(tenant), cache_salt)
        digests = keys.of(messages)
        answered = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        known = self._lines.find_first(digests.histories[index] for index in reversed(answered))
        may_splice = reuse == "reencode" and not cache_salt
        if may_splice and answered and (known is None or len(known.messages) <= answered[-1]):
            shorter = self._shortened(template, tenant, keys, digests, messages, answered[-1])
            if shorter is not None:
                return shorter
        return self._continued(template, keys, digests, messages, known, may_splice)

    def note(
        self,
        tenant: str,
        cache_salt: str,
        messages: list[Message],
        output: RequestOutput,
        chain: Sequence[BlockId] = (),
        lineage: Lineage | None = None,
        turn_starts: Sequence[int] = (),
        session_id: str = "",
    ) -> None:
        """Remember a finished answer: its choices are recognised from now on.

        messages: the prompt's, without those that a truncation dropped. chain, turn_starts: the NextTurn's. lineage:
        the one in use, which has no splice if that was given up. session_id: the turn's session, if any; see
        `forget_session`.
        """
        template = self._language.template
        if template is None or not messages:
            return
        keys = Keys(self._core.root(tenant), cache_salt)
        digests = keys.of(messages)
        starts = _turn_messages(messages)
        turns = list(zip(starts, turn_starts, strict=True)) if len(starts) == len(turn_starts) else []
        if lineage is None or lineage.splice_index is None or len(chain) < lineage.splice_end:
            chain, lineage = (), keys.lineage
        owner = owner_tag(tenant, session_id) if session_id else b""
        for choice in output.choices:
            if choice.finish_reason is None or not choice.token_ids:
                continue
            said = answer_ids(self._language.tokenizer, template, output.prompt_token_ids, choice)
            digest, history = keys.after(digests.histories[-1], {"role": "assistant", "content": choice.text})
            each = [*digests.messages, digest]
            # Ids that its text does not show belong to this conversation only, not to others with the same text.
            text = "" if self._silent.intersection(said) else choice.text
            self._answers.put(_names_of_answer(keys, history, text), said, owner)
            names = Names(history, _before(messages, digests), keys.end(each[: starts[0]], each[-2:]))
            ids = [*output.prompt_token_ids, *said]
            self._lines.add(names, KnownConversation(each, ids, chain[: lineage.splice_end], lineage, turns, owner))

    def forget_session(self, tenant: str, session_id: str) -> bool:
        """Forget all answers of this session. Returns whether they are gone from disk, too."""
        owner = owner_tag(tenant, session_id)
        self._lines.forget_owner(owner)
        return self._answers.forget_owner(owner)

    # -- prompts -----------------------------------------------------------------------------------------------------
    def _continued(
        self,
        template: ChatTemplate,
        keys: Keys,
        digests: Digests,
        messages: list[Message],
        known: KnownConversation | None,
        may_splice: bool,
    ) -> NextTurn:
        """The prompt of a history whose beginning is known; single answers in the rest may be known, too."""
        first = 0 if known is None else len(known.messages)
        answered = [index for index in range(first, len(messages)) if messages[index]["role"] == "assistant"]
        names = [_names_of_answer(keys, digests.histories[i], messages[i]["content"]) for i in answered]
        found = self._answers.find_ids(names) if names else []
        answers = {index: ids for index, ids in zip(answered, found, strict=True) if ids is not None}
        beginning = None if known is None else (first - 1, known.token_ids)
        recalled = template.history_ids(messages, answers, beginning) if answers or beginning else None
        if recalled is None:
            prompt, ends = template.prompt_ids(messages), dict[int, int]()
        else:
            prompt, ends = recalled.token_ids, recalled.ends
        chain: Sequence[BlockId] = ()
        lineage = keys.lineage
        if known is not None and first - 1 in ends:
            turns = [start for _, start in known.turns]
            if may_splice:
                chain, lineage = known.chain, known.lineage
        else:
            turns = template.first_start(messages[: _turn_messages(messages)[0]], prompt)
        starts = self._starts(template, messages, prompt, ends, turns)
        return NextTurn(prompt, chain, lineage, 0, starts)

    def _shortened(
        self,
        template: ChatTemplate,
        tenant: str,
        keys: Keys,
        digests: Digests,
        messages: list[Message],
        last: int,
    ) -> NextTurn | None:
        """The prompt of a history without the oldest turns of a known conversation; None if it is no such history.

        last: index of the last answer.
        """
        num_system = _turn_messages(messages)[0]
        system, rest = digests.messages[:num_system], digests.messages[num_system : last + 1]
        source = self._lines.find_longer(keys.end(system, rest[-2:]), system, rest) if len(rest) > 1 else None
        starts = {} if source is None else dict(source.turns)
        cut = starts.get(0 if source is None else len(source.messages) - len(rest))
        if source is None or cut is None:
            return None
        ids, head = list(source.token_ids), source.turns[0][1]
        recalled = template.history_ids(messages, {}, (last, ids[:head] + ids[cut:]))
        if recalled is None:
            return None
        prompt = recalled.token_ids
        kept = [head, *(start - (cut - head) for _, start in source.turns if start > cut)]
        following = self._starts(template, messages, prompt, recalled.ends, kept)
        exact = NextTurn(prompt, (), keys.lineage, 0, following)
        if len(prompt) >= self._core.facts.max_request_tokens:
            return exact  # it will be refused
        size = self._core.facts.block_size
        chain = list(source.chain)
        extend_chain(chain, source.lineage.root, ids, size)
        # The KV of the last token may not have been computed.
        chain = chain[: max((len(ids) - 1) // size, source.lineage.splice_end)]
        spans = [(0, head), (cut, len(ids))]
        spliced = self._core.splice(chain, ids, source.lineage, spans, tenant)
        return exact if spliced is None else NextTurn(prompt, spliced[0], spliced[1], 0, following)

    @staticmethod
    def _starts(
        template: ChatTemplate, messages: list[Message], prompt: list[int], ends: Mapping[int, int], known: list[int]
    ) -> list[int]:
        """Where each turn begins, given the first turns' starts, as far as known."""
        turns = _turn_messages(messages)
        end = template.end_ids(turns[0] > 0)
        if not known or end is None:
            return known
        starts = list(known)
        for message in turns[len(known) :]:
            at = ends.get(message - 1)
            if at is None or prompt[at : at + len(end)] != end:
                break
            starts.append(at + len(end))
        return starts


def _names_of_answer(keys: Keys, history: bytes, text: str) -> list[bytes]:
    """Names of the answer, the best first. An empty text says nothing about its ids."""
    return [history, keys.text(text)] if text else [history]


def _before(messages: list[Message], digests: Digests) -> bytes:
    """The digest of all messages before the last answer."""
    for message, history in zip(reversed(messages), reversed(digests.histories), strict=True):
        if message["role"] == "assistant":
            return history
    return b""


def _turn_messages(messages: list[Message]) -> list[int]:
    """Index of the first message of each turn: the first after the system prompt, and each after an answer."""
    num_system = int(messages[0]["role"] == "system")
    after = range(num_system + 1, len(messages))
    return [num_system, *(index for index in after if messages[index - 1]["role"] == "assistant")]
