"""A history's prompt, with the original ids of answers that are known.

Recent conversations are kept by digests: the exact ids that the model has seen and said. A digest is keyed with the
tenant's root and the salt, so nobody else can make it or guess a text from it. Bounded: the least recently used are
dropped. Holds no text.
"""

from __future__ import annotations

import hmac
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.blocks.ids import BlockId
from kvstore.engine.outputs import RequestOutput
from kvstore.engine.sessions.chat import Chats
from kvstore.engine.text.chat_template import Message, answer_ids, texts_of
from kvstore.engine.text.language import NO_OPTIONS, AnswerOptions
from kvstore.engine.text.prompts import check_length
from kvstore.errors import RequestError
from kvstore.sessions.answers import AnswerStore, owner_tag

LINE_COST, TURN_COST = 190, 100  # costs beside the ids, in tokens of 4 bytes
DIGEST_BYTES = 16
MAX_TOKENS = 4_000_000  # 16 MB with what is beside them


@dataclass(frozen=True, slots=True)
class KnownConversation:
    """A conversation at the end of an answer. owner: its session, if any."""

    num_messages: int
    token_ids: Sequence[int]
    owner: bytes = b""


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a turn within a line. history: the digest of all messages up to there."""

    history: bytes
    num_messages: int
    num_tokens: int


@dataclass(slots=True)
class _Line:
    """A growing conversation; all its turns share its ids."""

    number: int
    token_ids: array[int]
    owner: bytes
    ends: list[_End]

    @property
    def cost(self) -> int:
        return LINE_COST + len(self.token_ids) + TURN_COST * len(self.ends)

    def at(self, end: _End) -> KnownConversation:
        return KnownConversation(end.num_messages, self.token_ids[: end.num_tokens], self.owner)

    def is_continued_by(self, before: bytes, new: KnownConversation) -> bool:
        known = array("I", new.token_ids[: len(self.token_ids)])
        return (self.ends[-1].history, self.owner, self.token_ids) == (before, new.owner, known)


class Lines:
    """The most recently used conversations. Any thread may call it."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._lines: OrderedDict[int, _Line] = OrderedDict()  # the least recently used first
        self._by_history: dict[bytes, tuple[_Line, _End]] = {}
        self._next_number = 0
        self.num_tokens = 0  # with the costs beside them

    def add(self, history: bytes, before: bytes, new: KnownConversation) -> None:
        """Remember a conversation; if the one up to the previous answer is known, extend that. history, before: digests
        of the messages of each.
        """
        with self._lock:
            line, _ = self._by_history.get(before, (None, None))
            if line is None or not line.is_continued_by(before, new):
                line = _Line(self._next_number, array("I"), new.owner, [])
                self._next_number += 1
                self._lines[line.number] = line
            else:
                self.num_tokens -= line.cost
            line.token_ids.extend(new.token_ids[len(line.token_ids) :])
            line.ends.append(_End(history, new.num_messages, len(line.token_ids)))
            self._by_history[history] = (line, line.ends[-1])
            self._lines.move_to_end(line.number)
            self.num_tokens += line.cost
            while self.num_tokens > self._max_tokens:
                self._remove(next(iter(self._lines.values())))

    def find_first(self, histories: Iterable[bytes]) -> KnownConversation | None:
        """The first known conversation among those with these digests."""
        with self._lock:
            for history in histories:
                line, end = self._by_history.get(history, (None, None))
                if line is not None and end is not None:
                    self._lines.move_to_end(line.number)
                    return line.at(end)
        return None

    def forget_owner(self, owner: bytes) -> None:
        with self._lock:
            for line in [line for line in self._lines.values() if line.owner == owner]:
                self._remove(line)

    def _remove(self, line: _Line) -> None:
        del self._lines[line.number]
        self.num_tokens -= line.cost
        for end in line.ends:
            if self._by_history.get(end.history, (None, None))[0] is line:
                del self._by_history[end.history]


class Keys:
    """The digests of one owner: a tenant and a salt."""

    def __init__(self, root: BlockId, cache_salt: str) -> None:
        self._key = hmac.digest(root, b"answers" + cache_salt.encode("utf-8", "surrogatepass"), "sha256")

    def histories(self, messages: Sequence[Message], options: AnswerOptions = NO_OPTIONS) -> list[bytes]:
        """The digest of each message with all before it, and with the tools and variables at the prompt's head."""
        history, found = (self._digest(b"op", options.key.encode()) if options.key else b""), []
        for message in messages:
            history = self.after(history, message)
            found.append(history)
        return found

    def after(self, history: bytes, message: Message) -> bytes:
        """The digest of a history, given by its own, and a message."""
        return self._digest(b"hi", history + self.message(message))

    def message(self, message: Message) -> bytes:
        """The digest of a message: all fields of it, as a template may show any, but its reasoning. Calls count as JSON
        values: clients order keys anew, and change white space.
        """
        shown = {key: value for key, value in message.items() if value is not None and key != "reasoning_content"}
        if "tool_calls" in shown:
            shown["tool_calls"] = json.dumps([_canonical(call) for call in shown["tool_calls"]], sort_keys=True)
            shown["content"] = shown.get("content") or ""
        parts = [text.encode("utf-8", "surrogatepass") for item in sorted(shown.items()) for text in item]
        return self._digest(b"ms", b"".join(len(part).to_bytes(8, "little") + part for part in parts))

    def text(self, answer: str) -> bytes:
        """The digest of an answer's text, whatever came before it."""
        return self._digest(b"tx", answer.encode("utf-8", "surrogatepass"))

    def _digest(self, tag: bytes, value: bytes) -> bytes:
        return hmac.digest(self._key, tag + value, "sha256")[:DIGEST_BYTES]


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

    def prompt(
        self, tenant: str, cache_salt: str, messages: list[Message], options: AnswerOptions = NO_OPTIONS
    ) -> tuple[list[int], list[int]]:
        """`prompt_ids`, and where the first turn begins in them; empty if unknown. Raises ContextLengthError."""
        texts = [text for message in messages for text in texts_of(message)]
        check_length(texts, self._language.tokenizer, self._client.facts.max_request_tokens)
        ids = self.prompt_ids(tenant, cache_salt, messages, options)
        system = [message for message in messages[:1] if message["role"] == "system"]
        return ids, self._language.chat_template(options).first_start(system, ids)

    def prompt_ids(
        self, tenant: str, cache_salt: str, messages: list[Message], options: AnswerOptions = NO_OPTIONS
    ) -> list[int]:
        """The ids of a history, with those of the answers in it that are known.

        Raises RequestError when the template refuses.
        """
        template = self._language.chat_template(options)
        if not messages:
            raise RequestError("messages is empty; give at least one", param="messages")
        keys = Keys(self._client.facts.root(tenant), cache_salt)
        histories = keys.histories(messages, options)
        answered = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        known = self._lines.find_first(histories[index] for index in reversed(answered))
        beginning = None if known is None else (known.num_messages - 1, known.token_ids)
        rest = answered if known is None else [index for index in answered if index >= known.num_messages]
        names = [_names_of_answer(keys, histories[i], messages[i], messages[i]["content"]) for i in rest]
        found = self._answers.find_ids(names) if rest else []
        answers = {index: ids for index, ids in zip(rest, found, strict=True) if ids is not None}
        recalled = template.history_ids(messages, answers, beginning) if answers or beginning else None
        return template.prompt_ids(messages) if recalled is None else recalled

    def note(
        self, tenant: str, cache_salt: str, messages: list[Message], output: RequestOutput, session_id: str = "",
        options: AnswerOptions = NO_OPTIONS,
    ) -> None:  # fmt: skip
        """Remember a finished answer: its choices are recognised from now on.

        messages: the prompt's, without those that a truncation dropped. session_id: the turn's session, if any; see
        `forget_session`.
        """
        template = self._language.template
        if template is None or not messages:
            return
        keys = Keys(self._client.facts.root(tenant), cache_salt)
        histories = keys.histories(messages, options)
        before = [digest for digest, message in zip(histories, messages, strict=True) if message["role"] == "assistant"]
        owner = owner_tag(tenant, session_id) if session_id else b""
        for choice in output.choices:
            # Templates drop the reasoning of earlier answers, or show it where a client brings it back: as text.
            if choice.finish_reason is None or not choice.token_ids or choice.reasoning:
                continue
            said = answer_ids(self._language.tokenizer, template, output.prompt_token_ids, choice)
            message = choice.message
            history = keys.after(histories[-1], message)
            # Ids that its text does not show belong to this conversation only, not to others with the same text.
            text = "" if self._silent.intersection(said) else choice.content
            self._answers.put(_names_of_answer(keys, history, message, text), said, owner)
            known = KnownConversation(len(messages) + 1, [*output.prompt_token_ids, *said], owner)
            self._lines.add(history, before[-1] if before else b"", known)

    def forget_session(self, tenant: str, session_id: str) -> bool:
        """Forget all answers of this session. Returns whether they are gone from disk, too."""
        owner = owner_tag(tenant, session_id)
        self._lines.forget_owner(owner)
        return self._answers.forget_owner(owner)


def _names_of_answer(keys: Keys, history: bytes, message: Message, text: str | None) -> list[bytes]:
    """Names of the answer, the best first. An empty text says nothing about its ids; ids of calls, which nobody can
    guess, say all.
    """
    if "tool_calls" in message:
        return [history, keys.message(message)]
    return [history, keys.text(text)] if text else [history]


def _canonical(call: Mapping[str, Any]) -> list[Any]:
    """A call as JSON values."""
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return [call.get("id"), call["function"]["name"], arguments]
