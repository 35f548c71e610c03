"""A history's prompt, with the original ids of answers that are known.

Recent conversations are kept by digests: the exact ids that the model has seen and said. A digest is keyed with the
tenant's root and the salt, so nobody else can make it or guess a text from it. Bounded: the least recently used are
dropped. Holds no text.
"""

from __future__ import annotations

import hmac
import json
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from kvstore.blocks.ids import BlockId, Lineage, SpliceRun, chain_of
from kvstore.engine.client.messages import Spliced
from kvstore.engine.client.requests import CoreClient, Handle
from kvstore.engine.outputs import Earlier, RequestOutput
from kvstore.engine.sessions.chat import Chats
from kvstore.engine.sessions.misses import NO_RENDERING, MadePrompt, Rendering, compare, explained
from kvstore.engine.sessions.spans import Computing, unwatched, with_spans
from kvstore.engine.text.chat_template import Message, without_marks
from kvstore.engine.text.histories import history_ids
from kvstore.engine.text.language import answer_ids
from kvstore.engine.text.prompts import NO_OPTIONS, AnswerOptions, check_length, texts_of
from kvstore.errors import RequestError
from kvstore.sessions.answers import owner_tag

LINE_COST, TURN_COST = 250, 220  # costs beside the ids, in tokens of 4 bytes
DIGEST_BYTES = 16
MAX_TOKENS = 4_000_000  # to keep in memory: 16 MB with what is beside them; `Chats.answers` has a bound of its own


@dataclass(frozen=True, slots=True)
class KnownConversation:
    """A conversation at the end of an answer. owner: its session, if any. is_last: nothing is known that follows."""

    num_messages: int
    token_ids: Sequence[int]
    owner: bytes = b""
    rendering: Rendering = NO_RENDERING
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a turn within a line. history: the digest of all messages up to there. names: all digests that lead
    to it.
    """

    history: bytes
    num_messages: int
    num_tokens: int
    names: Sequence[bytes]


@dataclass(slots=True)
class _Line:
    """A growing conversation; all its turns share its ids. rendering: of its last turn."""

    number: int
    token_ids: array[int]
    owner: bytes
    ends: list[_End]
    rendering: Rendering

    @property
    def cost(self) -> int:
        return LINE_COST + len(self.token_ids) + TURN_COST * len(self.ends)

    def at(self, end: _End) -> KnownConversation:
        ids, is_last = self.token_ids[: end.num_tokens], end is self.ends[-1]
        return KnownConversation(end.num_messages, ids, self.owner, self.rendering, is_last)

    def last_in_common(self, end: _End, marks: Sequence[bytes]) -> _End:
        """The last end whose turn has a message that stands at the same place in another history; at least `end`."""
        pairs = enumerate(zip(self.rendering.marks, marks, strict=False))
        most = max((index for index, (mine, other) in pairs if mine == other), default=-1)
        return next((one for one in self.ends if one.num_messages > max(most, end.num_messages - 1)), end)

    def is_continued_by(self, before: bytes, new: KnownConversation) -> bool:
        known = array("I", new.token_ids[: len(self.token_ids)])
        return (self.ends[-1].history, self.owner, self.token_ids) == (before, new.owner, known)


class Lines:
    """The most recently used conversations. Any thread may call it."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._lines: OrderedDict[int, _Line] = OrderedDict()  # the least recently used first
        self._by_name: dict[bytes, tuple[_Line, _End]] = {}
        self._next_number = 0
        self.num_tokens = 0  # with the costs beside them

    def add(self, history: bytes, before: bytes, new: KnownConversation, names: Sequence[bytes] | None = None) -> None:
        """Remember a conversation; if the one up to the previous answer is known, extend that. history, before: digests
        of the messages of each. names: what leads to it; None: its history.
        """
        names = [history] if names is None else names
        with self._lock:
            line, _ = self._by_name.get(before, (None, None))
            if line is None or not line.is_continued_by(before, new):
                line = _Line(self._next_number, array("I"), new.owner, [], new.rendering)
                self._next_number += 1
                self._lines[line.number] = line
            else:
                self.num_tokens -= line.cost
            line.token_ids.extend(new.token_ids[len(line.token_ids) :])
            line.ends.append(_End(history, new.num_messages, len(line.token_ids), names))
            line.rendering = new.rendering
            self._by_name.update(dict.fromkeys(names, (line, line.ends[-1])))
            self._lines.move_to_end(line.number)
            self.num_tokens += line.cost
            while self.num_tokens > self._max_tokens:
                self._remove(next(iter(self._lines.values())))

    def find_first(self, names: Iterable[bytes], marks: Sequence[bytes] = ()) -> KnownConversation | None:
        """The first known conversation that one of these leads to. marks: of a history; the conversation is taken as
        far as they have something in common.
        """
        with self._lock:
            for name in names:
                line, end = self._by_name.get(name, (None, None))
                if line is not None and end is not None:
                    self._lines.move_to_end(line.number)
                    return line.at(line.last_in_common(end, marks) if marks else end)
        return None

    def forget_owner(self, owner: bytes) -> None:
        with self._lock:
            for line in [line for line in self._lines.values() if line.owner == owner]:
                self._remove(line)

    def _remove(self, line: _Line) -> None:
        del self._lines[line.number]
        self.num_tokens -= line.cost
        for name in {name for end in line.ends for name in end.names}:
            if self._by_name.get(name, (None, None))[0] is line:
                del self._by_name[name]


class Keys:
    """The digests of one owner: a tenant and a salt. name: of a conversation; conversation: a digest of it, empty for
    none.
    """

    def __init__(self, root: BlockId, cache_salt: str, name: str = "") -> None:
        self._root = root
        self._key = hmac.digest(root, b"answers" + cache_salt.encode("utf-8", "surrogatepass"), "sha256")
        self.conversation = self._digest(b"cn", name.encode("utf-8", "surrogatepass")) if name else b""

    def marks(self, messages: Sequence[Message]) -> list[bytes]:
        """The digest of each message."""
        return [self.message(message) for message in messages]

    def histories(self, marks: Sequence[bytes], options: bytes = b"") -> list[bytes]:
        """The digest of each message with all before it, and with the tools and variables at the prompt's head. marks:
        those of the messages alone.
        """
        history, found = (self._digest(b"op", options) if options else b""), []
        for mark in marks:
            history = self.after(history, mark)
            found.append(history)
        return found

    def after(self, history: bytes, mark: bytes) -> bytes:
        """The digest of a history, given by its own, and a message, given by its mark."""
        return self._digest(b"hi", history + mark)

    def of_history(self, history: bytes) -> list[bytes]:
        """What leads to a history, given by its digest: first in the named conversation, then in any."""
        return [self._digest(b"nh", self.conversation + history), history] if self.conversation else [history]

    def exchange(self, asked: bytes, answer: bytes) -> bytes:
        """The digest of an answer and the message before it, whatever came before these; given by their marks. Agents
        that do the same work have the same, so it leads to the named conversation only.
        """
        return self._digest(b"ex", asked + answer + self.conversation)

    def requests(self, marks: Sequence[bytes]) -> list[bytes]:
        """What leads to the named conversation where no answer comes back: the messages after the first one, up to each
        of them. Agents that share their beginning ask for other things next.
        """
        histories = self.histories(marks[1:]) if self.conversation else []
        return [self._digest(b"rq", self.conversation + history) for history in histories]

    def call(self, call: Mapping[str, Any]) -> bytes:
        """The digest of a call's id, which nobody can guess."""
        return self._digest(b"id", str(call.get("id")).encode("utf-8", "surrogatepass"))

    @property
    def without_salt(self) -> Keys:
        return Keys(self._root, "")

    @property
    def tag(self) -> bytes:
        """Names the owner."""
        return self._digest(b"ow", b"")

    def message(self, message: Message) -> bytes:
        """The digest of a message: all fields of it, as a template may show any, but its reasoning, which not all
        clients send back; but that it was cleared. Calls count as JSON values: clients order keys anew, and change
        white space.
        """
        shown = {key: value for key, value in message.items() if value is not None}
        if shown.get("reasoning_content"):
            del shown["reasoning_content"]
        if "tool_calls" in shown:
            shown["tool_calls"] = json.dumps([_canonical(call) for call in shown["tool_calls"]], sort_keys=True)
            shown["content"] = shown.get("content") or ""
        if "reuse" in shown:
            shown["reuse"] = json.dumps(shown["reuse"])
        parts = [text.encode("utf-8", "surrogatepass") for item in sorted(shown.items()) for text in item]
        return self._digest(b"ms", b"".join(len(part).to_bytes(8, "little") + part for part in parts))

    def text(self, answer: str) -> bytes:
        """The digest of an answer's text, whatever came before it."""
        return self._digest(b"tx", answer.encode("utf-8", "surrogatepass"))

    def _digest(self, tag: bytes, value: bytes) -> bytes:
        return hmac.digest(self._key, tag + value, "sha256")[:DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class RecalledPrompt:
    """A history's prompt. turn_starts: where its first turn begins; empty if unknown. earlier: what an earlier request
    had of it. spans: ranges whose KV may be that of spans; lineage: of the chain that it goes on with.
    """

    token_ids: list[int]
    turn_starts: list[int]
    earlier: Earlier
    spans: Sequence[tuple[int, int]]
    lineage: Lineage

    def with_spans(
        self, client: CoreClient, tenant: str, computing: Computing = unwatched
    ) -> tuple[Spliced, Earlier]:  # fmt: skip
        """The chain of its first blocks, with the KV of its spans, which is computed if need be; and `earlier`."""
        begun_s, size = time.monotonic(), client.facts.block_size
        known = (chain_of(self.lineage, self.token_ids, size), self.lineage)
        spliced, _ = with_spans(client, self.token_ids, self.spans, tenant, known, computing)
        return spliced, replace(self.earlier, begun_s=begun_s)


class Recall:
    """Recognises the histories of stateless clients, for one engine. Any thread may call it."""

    def __init__(self, chats: Chats) -> None:
        self._client = chats.client
        self._language = chats.language
        self._answers = chats.answers
        chats.on_deleted = lambda key: self._lines.forget_owner(owner_tag(key.tenant, key.session_id))
        self._lines = Lines(MAX_TOKENS)
        tokenizer = self._language.tokenizer
        tokens = {} if tokenizer is None else tokenizer.added_tokens_decoder
        self._silent = frozenset(token_id for token_id, token in tokens.items() if token.special)

    def prompt(
        self, tenant: str, cache_salt: str, messages: list[Message], options: AnswerOptions = NO_OPTIONS,
        conversation: str = "", continues: bool = False,
    ) -> RecalledPrompt:  # fmt: skip
        """The prompt of a history, with the ids of the answers in it that are known.

        conversation: the client's name of it, or "": of several with the same beginning, it is that one. continues: the
        last message is an answer that goes on. Raises ContextLengthError, and RequestError when the template refuses.
        """
        check_length(texts_of(messages), self._language.tokenizer, self._client.facts.max_request_tokens)
        keys = Keys(self._client.facts.root(tenant), cache_salt, conversation)
        made, earlier, splices = self._prompt(keys, messages, options, continues)
        ids, spans = without_marks(made, _num_plain(made, messages))
        system = [message for message in messages[:1] if message["role"] == "system"]
        starts = self._language.chat_template(options).first_start(system, ids)
        lineage = Lineage(self._client.facts.root(tenant, cache_salt), splices)
        return RecalledPrompt(ids, starts, replace(earlier, conversation=keys.conversation), spans, lineage)

    def named(self, tenant: str, cache_salt: str, conversation: str) -> Earlier:
        """Of a prompt that is no history: only the client's name of its conversation is known."""
        return Earlier(conversation=Keys(self._client.facts.root(tenant), cache_salt, conversation).conversation)

    def prompt_ids(
        self, tenant: str, cache_salt: str, messages: list[Message], options: AnswerOptions = NO_OPTIONS,
        continues: bool = False,
    ) -> list[int]:  # fmt: skip
        """The ids of a history, with those of the answers in it that are known, and stand-ins around spans.

        Raises RequestError when the template refuses.
        """
        return self._prompt(Keys(self._client.facts.root(tenant), cache_salt), messages, options, continues)[0]

    def _prompt(
        self, keys: Keys, messages: list[Message], options: AnswerOptions, continues: bool = False
    ) -> tuple[list[int], Earlier, tuple[SpliceRun, ...]]:
        """`prompt_ids`, what an earlier request had of it, and the splices of the conversation that it goes on with."""
        template = self._language.chat_template(options, continues)
        if not messages:
            raise RequestError("messages is empty; give at least one", param="messages")
        marks = keys.marks(messages)
        histories = keys.histories(marks, options.digest)
        answered = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        known = self._lines.find_first(name for i in reversed(answered) for name in keys.of_history(histories[i]))
        beginning = None if known is None else (known.num_messages - 1, known.token_ids)
        rest = answered if known is None else [index for index in answered if index >= known.num_messages]
        names = [
            _names_of_answer(keys, keys.of_history(histories[i]), messages[i], messages[i]["content"]) for i in rest
        ]
        found = self._answers.find_ids(names) if rest else []
        answers = {index: ids for index, ids in zip(rest, found, strict=True) if ids is not None}
        shown, splices = template.marked(messages), tuple[SpliceRun, ...]()
        recalled = history_ids(template, shown, answers, beginning) if answers or beginning else None
        ids = template.prompt_ids(shown) if recalled is None else recalled
        if known and known.rendering.splices and ids[: len(known.token_ids)] == list(known.token_ids):
            most = len(known.token_ids) // self._client.facts.block_size
            splices = tuple(run for run in known.rendering.splices if run.end <= most)
        if known is not None and known.is_last and recalled is not None:  # it goes on
            rendering = known.rendering
            return ids, Earlier(len(known.token_ids) - 1, rendering.ended_s, None, rendering.heads), splices
        names_of_each = (
            (*keys.of_history(histories[i]), *_names_of_turn(keys, marks, messages, i)) for i in reversed(answered)
        )
        names_of_all = chain(chain.from_iterable(names_of_each), reversed(keys.requests(marks)))
        likely = self._lines.find_first(names_of_all, marks)
        if likely is None:
            return ids, Earlier(), splices
        now = Rendering(marks, options=options.digest, salt=keys.tag)
        prompt = MadePrompt(without_marks(ids, _num_plain(ids, messages))[0], messages, template)
        return ids, compare(prompt, now, likely.token_ids, likely.rendering), splices

    def note(
        self, tenant: str, cache_salt: str, messages: list[Message], output: RequestOutput, session_id: str = "",
        options: AnswerOptions = NO_OPTIONS, handle: Handle | None = None, conversation: str = "",
        continues: bool = False,
    ) -> None:  # fmt: skip
        """Remember a finished answer: its choices are recognised from now on. If it has calls, they are durable on
        return; unless the disk fails, which `AnswerStore.stats` says.

        messages: the prompt's, without those that a truncation dropped. session_id: the turn's session, if any; see
        `forget_session`. handle: of a prompt that was made here, whose misses are explained now. conversation: as in
        `prompt`. continues: the answer goes on with the last message, and both are one from now on, but in memory
        alone.
        """
        template = self._language.template
        if template is None or not messages:
            return
        asked = self._language.chat_template(options)
        if handle is not None and any(message.get("reasoning_content") for message in messages):
            thinking = "dropped" if asked.hidden_thinking(messages) else "kept"
            output.usage = replace(output.usage, thinking=thinking)
        if handle is not None and handle.has_missed(self._client.facts.block_size):
            prompt = MadePrompt(output.prompt_token_ids, messages, asked)
            output.usage = replace(output.usage, miss=explained(handle, prompt, self._client.facts.block_size))
        keys = Keys(self._client.facts.root(tenant), cache_salt, conversation)
        messages, begun = (messages[:-1], messages[-1]["content"]) if continues else (messages, "")
        marks, digest = keys.marks(messages), options.digest
        histories = keys.histories(marks, digest)
        before = [one for one, message in zip(histories, messages, strict=True) if message["role"] == "assistant"]
        owner = owner_tag(tenant, session_id) if session_id else b""
        reasoned = {index for index, message in enumerate(messages) if message.get("reasoning_content")}
        heads = (None if handle is None else handle.earlier.heads) or set(marks[:1])
        requests = keys.requests(marks)[-1:]
        lineage = None if handle is None else handle.lineage
        splices = () if lineage is None or lineage.sources else lineage.splices  # copies are looked for at each request
        for choice in output.choices:
            if choice.finish_reason is None or not choice.token_ids:
                continue
            said = answer_ids(template, choice)
            message = choice.message | {"content": begun + choice.content}
            told, mark = [*messages, message], keys.message(message)
            after = keys.of_history(keys.histories([*marks, mark], digest)[-1])
            names = [*_names_of_turn(keys, [*marks, mark], told, len(messages)), *requests]
            # Templates drop the reasoning of earlier answers, or show it where a client brings it back: as text.
            if choice.reasoning:
                reasoned |= {len(messages)}
            else:
                names = [*after, *names]
            if not choice.reasoning and not continues:
                # Ids that its text does not show belong to this conversation only, not to others with the same text.
                text = "" if self._silent.intersection(said) else choice.content
                self._answers.put(_names_of_answer(keys, after, message, text), said, owner)
            rendering = Rendering([*marks, mark], frozenset(reasoned), digest, keys.tag, heads, time.time(), splices)
            known = KnownConversation(len(told), [*output.prompt_token_ids, *said], owner, rendering)
            self._lines.add(after[0], keys.of_history(before[-1])[0] if before else b"", known, names)
        if any("tool_calls" in choice.message for choice in output.choices):
            self._answers.flush()

    def forget_session(self, tenant: str, session_id: str) -> bool:
        """Forget all answers of this session. Returns whether they are gone from disk, too."""
        owner = owner_tag(tenant, session_id)
        self._lines.forget_owner(owner)
        return self._answers.forget_owner(owner)


def _num_plain(ids: Sequence[int], messages: Sequence[Message]) -> int:
    """How many of the first ids of these messages certainly have no stand-ins."""
    return 0 if any("reuse" in message for message in messages) else len(ids)


def _names_of_answer(keys: Keys, histories: list[bytes], message: Message, text: str | None) -> list[bytes]:
    """Names of the answer, the best first. An empty text says nothing about its ids; ids of calls, which nobody can
    guess, say all.
    """
    if "tool_calls" in message:
        return [*histories, keys.message(message)]
    return [*histories, keys.text(text)] if text else histories


def _names_of_turn(keys: Keys, marks: Sequence[bytes], messages: Sequence[Message], index: int) -> Iterator[bytes]:
    """What leads to the conversation of the answer with this index, whatever came before: ids of its calls, whatever
    the salt; the answer with the message before it. Others could guess that, so across salts it does not count.
    """
    if calls := messages[index].get("tool_calls"):
        yield from map(keys.without_salt.call, calls)
    if index:
        yield keys.exchange(marks[index - 1], marks[index])


def _canonical(call: Mapping[str, Any]) -> list[Any]:
    """A call as JSON values."""
    arguments = call["function"]["arguments"]
    with suppress(ValueError, RecursionError):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        arguments = json.dumps(json.loads(text, parse_float=_number), sort_keys=True)
    return [call.get("id"), call["function"]["name"], arguments]


def _number(text: str) -> float:
    """1.0 is 1."""
    number = float(text)
    return int(number) if number.is_integer() else number
