"""Turns histories that come back as text into the exact ids that the model has seen and said.

An answer is recognised by the digest of the whole history up to it, else by its text alone, within tenant and salt.
Knows no engine: a `CoreClient` computes, and `AnswerStore` holds known answers.
"""

from __future__ import annotations

from typing import Protocol

from kvstore.engine.outputs import RequestOutput
from kvstore.engine.sessions.chats import Chats
from kvstore.engine.sessions.recall_ids import Keys, answer_ids
from kvstore.engine.sessions.recall_lines import KnownConversation, Lines
from kvstore.engine.text.chat_template import Message
from kvstore.engine.text.prompts import check_length
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
        self._client = engine.chats.client
        self._language = engine.chats.language
        self._answers = engine.answers
        self._lines = Lines(max_tokens)
        tokenizer = self._language.tokenizer
        tokens = {} if tokenizer is None else tokenizer.added_tokens_decoder
        self._silent = frozenset(token_id for token_id, token in tokens.items() if token.special)

    def prompt(self, tenant: str, cache_salt: str, messages: list[Message]) -> tuple[list[int], list[int]]:
        """`prompt_ids`, and where the first turn begins in them; empty if unknown."""
        ids = self.prompt_ids(tenant, cache_salt, messages)
        system = [message for message in messages[:1] if message["role"] == "system"]
        return ids, self._language.chat_template().first_start(system, ids)

    def prompt_ids(self, tenant: str, cache_salt: str, messages: list[Message]) -> list[int]:
        """The ids of a history, with those of the answers in it that are known.

        Raises RequestError when the template refuses.
        """
        template = self._language.chat_template()
        if not messages:
            raise RequestError("messages is empty; give at least one", param="messages")
        texts = [message["content"] for message in messages]
        check_length(texts, self._language.tokenizer, self._client.facts.max_request_tokens)
        keys = Keys(self._client.facts.root(tenant), cache_salt)
        histories = keys.histories(messages)
        answered = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        known = self._lines.find_first(histories[index] for index in reversed(answered))
        beginning = None if known is None else (known.num_messages - 1, known.token_ids)
        rest = answered if known is None else [index for index in answered if index >= known.num_messages]
        found = self._answers.find_ids([_names_of_answer(keys, histories[i], texts[i]) for i in rest]) if rest else []
        answers = {index: ids for index, ids in zip(rest, found, strict=True) if ids is not None}
        recalled = template.history_ids(messages, answers, beginning) if answers or beginning else None
        return template.prompt_ids(messages) if recalled is None else recalled

    def note(
        self, tenant: str, cache_salt: str, messages: list[Message], output: RequestOutput, session_id: str = ""
    ) -> None:
        """Remember a finished answer: its choices are recognised from now on.

        messages: the prompt's, without those that a truncation dropped. session_id: the turn's session, if any; see
        `forget_session`.
        """
        template = self._language.template
        if template is None or not messages:
            return
        keys = Keys(self._client.facts.root(tenant), cache_salt)
        histories = keys.histories(messages)
        before = [digest for digest, message in zip(histories, messages, strict=True) if message["role"] == "assistant"]
        owner = owner_tag(tenant, session_id) if session_id else b""
        for choice in output.choices:
            if choice.finish_reason is None or not choice.token_ids:
                continue
            said = answer_ids(self._language.tokenizer, template, output.prompt_token_ids, choice)
            history = keys.after(histories[-1], {"role": "assistant", "content": choice.text})
            # Ids that its text does not show belong to this conversation only, not to others with the same text.
            text = "" if self._silent.intersection(said) else choice.text
            self._answers.put(_names_of_answer(keys, history, text), said, owner)
            known = KnownConversation(len(messages) + 1, [*output.prompt_token_ids, *said], owner)
            self._lines.add(history, before[-1] if before else b"", known)

    def forget_session(self, tenant: str, session_id: str) -> bool:
        """Forget all answers of this session. Returns whether they are gone from disk, too."""
        owner = owner_tag(tenant, session_id)
        self._lines.forget_owner(owner)
        return self._answers.forget_owner(owner)


def _names_of_answer(keys: Keys, history: bytes, text: str) -> list[bytes]:
    """Names of the answer, the best first. An empty text says nothing about its ids."""
    return [history, keys.text(text)] if text else [history]
