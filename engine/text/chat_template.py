"""Turns messages into token ids with the model's own chat template; from turn to turn, by what the template adds.

An answer is never tokenized again: the next prompt is the ids so far plus the ids of the template's delta. Template
text is encoded with its control tokens, people's text without any.
"""

from __future__ import annotations

import inspect
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from hashlib import sha256
from itertools import product
from typing import Any

from jinja2 import TemplateError

from kvstore.errors import RequestError

# role and content; of an assistant also reasoning_content and tool_calls, with which content may be None; of a tool
# also tool_call_id: as in OpenAI's chat completions.
Message = dict[str, Any]

# Stand-ins for contents while the template's own text is found. Plain letters: templates trim and escape.
_USER, _ANSWER, _NEXT = "kvstorefirstquestion", "kvstorefirstanswer", "kvstoresecondquestion"
_TOOL, _KEY, _CALL_ID = "kvstoretool", "kvstorekey", "kvstore01"  # some templates want ids of nine characters
MAX_VIEWS = 32  # of one template, by tools and variables
# A private token before a part that is encoded alone: without it, tokenizers that mark the beginning of a text with a
# space would mark every part.
_ANCHOR = "\ue0f0kvstore\ue0f1"
SPAN_BEGINS, SPAN_ENDS = -1, -2  # stand-ins among ids: no vocabulary has them


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """The template's text between an answer and the next user message, and after that message. opening: the text that
    opens an answer which others follow.
    """

    before: str
    after: str
    opening: str


class ChatTemplate:
    """The chat template of one tokenizer, for requests with the same tools and variables; made by `of` and `using`."""

    def __init__(self, tokenizer: Any, text: TextEncoder | None = None, given: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self.text = text or TextEncoder(tokenizer)
        self._given = {key: self.text.hide_controls(value) for key, value in (given or {}).items()}
        self._delta = cache(self._find_delta)
        self._boundary = cache(self._find_boundary)
        self._views = lru_cache(MAX_VIEWS)(self._view)

    @classmethod
    def of(cls, tokenizer: Any | None) -> ChatTemplate | None:
        """The template of a tokenizer; None without a tokenizer, or if it has no chat template."""
        return cls(tokenizer) if tokenizer is not None and tokenizer.chat_template else None

    def using(
        self, tools: Sequence[Mapping[str, Any]] = (), kwargs: Mapping[str, Any] | None = None, continues: bool = False
    ) -> ChatTemplate:
        """This template with a request's tools, as in chat completions, and its `chat_template_kwargs`. continues: an
        answer that ends the messages is left open, and no other is opened after it.

        Raises RequestError for variables that are not the request's to set, and for what is nested too deep.
        """
        ours = {*inspect.signature(self._tokenizer.apply_chat_template).parameters, "messages", "self"}
        if wrong := sorted(ours.union(self._tokenizer.special_tokens_map) & set(kwargs or ())):
            raise RequestError(
                f"chat_template_kwargs sets {', '.join(wrong)}; give only variables of the model's own template",
                param="chat_template_kwargs",
            )
        given = dict(kwargs or {}) | ({"tools": list(tools)} if tools else {})
        given |= {"continue_final_message": True} if continues else {}
        try:
            return self._views(json.dumps(given)) if given else self
        except RecursionError:
            param = "chat_template_kwargs" if kwargs else "tools"
            raise RequestError(f"{param} is nested too deep", param=param) from None

    def _view(self, given: str) -> ChatTemplate:
        return ChatTemplate(self._tokenizer, self.text, json.loads(given))

    @cached_property
    def knows_tools(self) -> bool:
        """Whether a prompt shows the tools that it is rendered with."""
        parameters = {"type": "object", "properties": {_KEY: {"type": "string", "description": _KEY}}}
        function = {"name": _TOOL, "description": _TOOL, "parameters": parameters}
        with suppress(RequestError):
            return _TOOL in self.using([{"type": "function", "function": function}]).render([_user(_USER)])
        return False

    @cached_property
    def shows_late_system(self) -> bool:
        """Whether a system message that comes after others is shown, and after them."""
        with suppress(RequestError):
            rendered = self.render([_user(_USER), {"role": "system", "content": _NEXT}])
            return 0 <= rendered.find(_USER) < rendered.find(_NEXT)
        return False

    def fault(self) -> str | None:
        """Why it cannot show a plain message, in one line: no chat would work. None: it can."""
        try:
            self.prompt_ids([{"role": "user", "content": "Hello"}])
        except RequestError as error:
            return str(error.__cause__ or error).strip().split("\n")[0][:300]
        return None

    def marked(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with marks in the place of their spans; ids that are made of them have stand-ins, see
        `without_marks`.
        """
        return [self._marked(message) if "reuse" in message else message for message in messages]

    def _marked(self, message: Message) -> Message:
        content, shown, at = content_of(message), "", 0
        for begin, end in message["reuse"]:
            shown += self.text.hide_controls(content[at:begin]) + self.text.mark_span(content[begin:end])
            at = end
        plain = {name: part for name, part in message.items() if name != "reuse"}
        return plain | {"content": shown + self.text.hide_controls(content[at:])}

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """Ids of a whole conversation, ready for the assistant's answer. Raises RequestError if the template refuses.

        Contents that spell a control token are encoded as text.
        """
        return self.text.encode(self.render(messages))

    def next_ids(self, token_ids: list[int], messages: list[Message], content: str) -> list[int] | None:
        """The next prompt: the conversation so far and one user message more.

        token_ids: exactly the ids that the model read and generated, up to the last answer without its end token;
        messages: the same as texts, of which that answer is the last. None if the template changes earlier text
        (rewrites history, drops an answer's reasoning), so that the whole conversation must be rendered again.
        """
        delta = self._delta(messages[0]["role"] == "system")
        if delta is None:
            return None
        rendered = self.render([*messages, {"role": "user", "content": content}])
        answer, asked = self.text.hide(content_of(messages[-1])), self.text.hide(content)
        for said, shown in product((answer, answer.strip()), (asked, asked.strip())):  # trimming is not rewriting
            if rendered.endswith(said + delta.before + shown + delta.after):
                return token_ids + self.text.encode_part(delta.before + shown + delta.after)
        return None

    def following_ids(self, token_ids: list[int], messages: list[Message], said: Sequence[Message]) -> list[int] | None:
        """`next_ids` for any messages: a user's, or results of the calls in the last answer."""
        (first, *others), last = said, messages[-1]
        if first["role"] == "user" and not others and "tool_calls" not in last:
            return self.next_ids(token_ids, messages, content_of(first))
        if self._delta(messages[0]["role"] == "system") is None:
            return None
        mark = f"kvstore{secrets.token_hex(8)}x"
        try:
            _, *after = self.render([*messages[:-1], {"role": "assistant", "content": mark}, *said]).split(mark)
        except RequestError:  # a template may want to see the calls
            return None
        return token_ids + self.text.encode_part(after[0]) if len(after) == 1 else None

    @cached_property
    def opening(self) -> str:
        """The text that opens the next answer."""
        asked = [{"role": "user", "content": _USER}]
        return self.render(asked).removeprefix(self.render(asked, opens_answer=False))

    def opening_with(self, begun: Message) -> str:
        """The text that opens an answer, and what there is of it, as this template continues it."""
        asked = [_user(_USER)]
        return self.text.shown(self.render([*asked, begun]).removeprefix(self.render(asked, opens_answer=False)))

    def opens_with(self, has_system: bool) -> str:
        """The text between a user's message and its answer, in a conversation that goes on; "" if that is unknown."""
        delta = self._delta(has_system)
        return "" if delta is None else delta.opening

    def opened_ids(self, has_system: bool) -> list[int]:
        """What a prompt opens its answer with and a history does not show of one without reasoning, as "<think>"."""
        delta = self._delta(has_system)
        return [] if delta is None else self.text.encode_part(delta.after.removeprefix(delta.opening))

    def hidden_thinking(self, messages: Sequence[Message]) -> list[int]:
        """The answers whose reasoning a prompt does not show, by their index."""
        nonce = secrets.token_hex(8)  # no content can contain it
        marks = {i: f"kvstore{nonce}x{i}end" for i, m in enumerate(messages) if m.get("reasoning_content")}
        shown = self.render(
            [m | ({"reasoning_content": marks[i]} if i in marks else {}) for i, m in enumerate(messages)]
        )
        return [index for index, mark in marks.items() if mark not in shown]

    def head_ids(self, system: list[Message]) -> list[int] | None:
        """The ids before a prompt's first turn, which every truncation keeps."""
        boundary = self._boundary(bool(system))
        if boundary is None:
            return None
        rendered = self.render([*system, {"role": "user", "content": _USER}])
        return self.text.encode(rendered[: rendered.index(_USER) - boundary[1]])

    def message_of_last(self, messages: Sequence[Message], token_ids: Sequence[int]) -> int | None:
        """The message that the last of these first ids of their prompt belongs to; None if it stands before all, or if
        that cannot be told. What the template adds counts as the end of the message before.
        """
        nonce = secrets.token_hex(8)  # no content can contain it
        marked = [{**m, "content": f"kvstore{nonce}x{i}end{content_of(m)}"} for i, m in enumerate(messages)]
        (shown,) = self._tokenizer.backend_tokenizer.decode_batch([list(token_ids)], skip_special_tokens=False)
        try:
            first, *parts = re.split(f"kvstore{nonce}x([0-9]+)end", self.text.shown(self.render(marked)))
        except RequestError:
            return None
        found, start = None, len(first)
        for index, text in zip(parts[::2], parts[1::2], strict=True):
            if start >= len(shown):
                break
            found, start = int(index), start + len(text)
        return found

    def first_start(self, system: list[Message], prompt: list[int]) -> list[int]:
        """Where the first turn of a prompt begins; empty if unknown."""
        head = self.head_ids(system)
        return [len(head)] if head is not None and prompt[: len(head)] == head else []

    def end_ids(self, has_system: bool) -> list[int] | None:
        """The ids that the template adds after an answer, before the next turn."""
        boundary = self._boundary(has_system)
        return None if boundary is None else self.text.encode_part(boundary[0])

    def _find_boundary(self, has_system: bool) -> tuple[str, int] | None:
        """The text that closes an answer, and the number of characters that open a turn: the common end of what comes
        before the first user message and before a later one.
        """
        delta = self._delta(has_system)
        if delta is None:
            return None
        system = [{"role": "system", "content": "kvstoresystem"}] if has_system else []
        rendered = self.render([*system, {"role": "user", "content": _USER}])
        first = rendered[: rendered.index(_USER)]
        count = 0
        while count < min(len(first), len(delta.before)) and first[-count - 1] == delta.before[-count - 1]:
            count += 1
        count = min(self.text.whole_tokens(first, count), self.text.whole_tokens(delta.before, count))
        return delta.before[: len(delta.before) - count], count

    def encode_answer(self, text: str) -> list[int]:
        """Ids of a part of an answer, as plain text that continues what is before it."""
        return self.text.encode_plain(text)

    def _find_delta(self, has_system: bool) -> TurnDelta | None:
        """Compare the render of a first prompt with that of a second one that contains it."""
        history = [*([{"role": "system", "content": "kvstoresystem"}] if has_system else []), _user(_USER)]
        longer = [*history, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _NEXT}]
        first, (head, *rest) = self.render(history), self.render(longer).split(_ANSWER)
        # The prompt may open the answer with more than a history shows of it, such as "<think>".
        if not first.startswith(head) or len(rest) != 1 or rest[0].count(_NEXT) != 1:
            return None
        before, after = rest[0].split(_NEXT)
        return TurnDelta(before, after, head[head.index(_USER) + len(_USER) :])

    def render(self, messages: Sequence[Message], opens_answer: bool = True) -> str:
        return self._apply([self._shown_message(message) for message in messages], opens_answer)

    def _shown_message(self, message: Message) -> Message:
        """A message as templates expect it. What people wrote becomes no control token."""
        shown = {key: self.text.hide_controls(value) for key, value in message.items() if value and key != "content"}
        if "reasoning_content" in shown and "reasoning_content" not in str(self._tokenizer.chat_template):
            shown["thinking"] = shown.pop("reasoning_content")
        if "tool_calls" in shown:
            shown["tool_calls"] = [self._shown_call(call) for call in shown["tool_calls"]]
        if "tool_call_id" in shown:
            shown["tool_call_id"] = self._shown_id(shown["tool_call_id"])
        return shown | {"content": self.text.hide(content_of(message))}

    def _shown_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """A call with its arguments as the template takes them; clients give the text of a JSON object."""
        arguments = call["function"]["arguments"]
        if self._takes_mappings and isinstance(arguments, str):
            with suppress(ValueError, RecursionError):  # then it is shown as it is, or the template refuses it
                given = json.loads(arguments or "{}")
                json.dumps(given, ensure_ascii=False).encode()  # half a surrogate pair would have no tokens
                arguments = given
        elif not self._takes_mappings and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        named = {"id": self._shown_id(str(call["id"]))} if "id" in call else {}
        return {**call, **named, "function": {**call["function"], "arguments": arguments}}

    def _shown_id(self, call_id: str) -> str:
        """A call's id as the template takes it: Mistral's want nine letters and digits."""
        if not self._wants_short_ids or (len(call_id) == len(_CALL_ID) and call_id.isalnum()):
            return call_id
        return sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[: len(_CALL_ID)]

    @cached_property
    def _wants_short_ids(self) -> bool:
        return self._with_call(f"call_{_CALL_ID}") is None and self._with_call(_CALL_ID) is not None

    @cached_property
    def _takes_mappings(self) -> bool:
        """Whether a call's arguments can be a mapping, as transformers' documentation has it; else they are text."""
        shown = self._with_call(_CALL_ID)
        return shown is not None and f"{{'{_KEY}'" not in shown

    def _with_call(self, call_id: str) -> str | None:
        """An answer with a call, as the template shows it; None if it refuses."""
        calls = [{"id": call_id, "type": "function", "function": {"name": _TOOL, "arguments": {_KEY: _ANSWER}}}]
        with suppress(RequestError):
            return self._apply([_user(_USER), {"role": "assistant", "content": "", "tool_calls": calls}], False)
        return None

    def _apply(self, messages: list[Message], opens_answer: bool) -> str:
        given = self._given
        if "continue_final_message" in given:
            continues = opens_answer and messages[-1]["role"] == "assistant"
            given, opens_answer = {**given, "continue_final_message": continues}, opens_answer and not continues
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=opens_answer, **given
            )
        except (TemplateError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def content_of(message: Message) -> str:
    """Null beside calls counts as empty."""
    return message.get("content") or ""


# -- text to ids -----------------------------------------------------------------------------------------------------


def parts_of(message: Message) -> list[str]:
    """What it brings into a prompt: its content, its reasoning, and the arguments of its calls."""
    given = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    calls = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in given]
    return [message.get("content") or "", message.get("reasoning_content") or "", *calls]


def without_marks(ids: Sequence[int], num_plain: int = 0) -> tuple[list[int], list[tuple[int, int]]]:
    """The ids without stand-ins, and the ranges [begin, end) of the spans in them. num_plain: so many have none."""
    plain, spans = list(ids[:num_plain]), list[tuple[int, int]]()
    begin = 0
    for token_id in ids[num_plain:]:
        if token_id >= 0:
            plain.append(token_id)
        elif token_id == SPAN_BEGINS:
            begin = len(plain)
        else:
            spans.append((begin, len(plain)))
    return plain, spans


class TextEncoder:
    """Encodes with one tokenizer. Template text may contain its control tokens; people's text may not."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._controls = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        self._numbers = {token: number for number, token in enumerate(self._controls)}
        self._mark = f"kvstore{secrets.token_hex(8)}x"  # nobody can spell it
        self._marks = re.compile(f"{self._mark}(?:([0-9]+)end|([0-9a-f]+)(span|text))")

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
        return self._spelled.sub(lambda found: f"{self._mark}{self._numbers[found.group()]}end", value)

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        return re.compile(_any_of(self._controls))

    def hide(self, text: str) -> str:
        """The same text, or a mark for the whole of it if it spells a control token: it is encoded alone."""
        return self._whole(text, "text") if self._controls and self._spelled.search(text) else text

    def mark_span(self, text: str) -> str:
        """A mark that `encode` makes the ids of this text of, between two stand-ins: it is encoded alone, so its ids
        are the same wherever it stands. See `without_marks`.
        """
        return self._whole(text, "span") if text else ""

    def _whole(self, text: str, kind: str) -> str:
        return f"{self._mark}{text.encode('utf-8', 'surrogatepass').hex()}{kind}"

    def shown(self, rendered: str) -> str:
        """With what marks stand for in their place."""
        return self._marks.sub(lambda mark: self._behind(mark[1], mark[2]), rendered)

    def _behind(self, control: str | None, whole: str) -> str:
        if control is not None:
            return self._controls[int(control)]
        return bytes.fromhex(whole).decode("utf-8", "surrogatepass")

    def encode(self, text: str) -> list[int]:
        """Ids of template text, of what is hidden in it as text, and of spans. Raises RequestError if the template has
        cut a mark.
        """
        first, *rest = self._marks.split(text)
        if any(self._mark in part for part in (first, *rest[3::4])):
            raise RequestError("the chat template changes a message that spells a control token", param="messages")
        ids = _ids(self._backend, first)
        for control, whole, kind, part in zip(rest[::4], rest[1::4], rest[2::4], rest[3::4], strict=True):
            hidden = self.encode_plain(self._behind(control, whole))
            ids += [SPAN_BEGINS, *hidden, SPAN_ENDS] if kind == "span" else hidden
            ids += self.encode_part(part)
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


def _any_of(tokens: Sequence[str]) -> str:
    """A pattern for the longest of these. Those that begin alike stand together: there may be thousands."""
    if len(tokens) == 1:
        return re.escape(tokens[0])
    by_first: dict[str, list[str]] = {}
    for token in tokens:
        by_first.setdefault(token[:1], []).append(token[1:])
    may_end = by_first.pop("", None) is not None
    branches = "|".join(re.escape(first) + _any_of(rest) for first, rest in by_first.items())
    return f"(?:{branches}){'?' if may_end else ''}" if may_end or len(by_first) > 1 else branches


def _ids(tokenizer: Any, text: str) -> list[int]:
    """Encode as a batch of one, which, unlike `encode`, lets other threads run meanwhile."""
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)
