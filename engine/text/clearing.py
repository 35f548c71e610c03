"""Clears old results of tools, inputs of calls and thinking from a history, as its client asks in Anthropic's words.

A clearing moves the prefix: all behind it is computed once more. So it is done in steps, each of which pays (see
`Facts.clearing_pays`), and between two steps the prompt only grows. Knows no store and no session.

Clients send their whole history each time, without what was cleared before. Their prompts are stable all the same, as
what is cleared is a function of the history alone: `cleared` goes through it from the beginning and decides at each
prompt that has an answer, with what stood there then, and at last for the prompt that is asked now. A longer history
repeats the decisions of a shorter one, and adds its own. What else they depend on stays while a server runs: window,
tokenizer, and the price of computing. A session keeps its steps as edits, and takes one for its next prompt only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstore.engine.outputs import AppliedEdit, Facts
from kvstore.engine.text.chat_template import ChatTemplate, Message, parts_of
from kvstore.errors import RequestError

TOOL_USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"
CLEARED, NO_INPUT = "[cleared to save room]", "{}"
DEFAULT_TRIGGER, DEFAULT_USES, DEFAULT_TURNS = 100_000, 3, 1  # Anthropic's
ANSWER_SHARE = 8  # a prompt that leaves less than 1/8 of the window for its answer is full
PARAM = "context_management"


# -- what a client asks ------------------------------------------------------------------------------------------------
class EditAmount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """type: input_tokens, tool_uses, thinking_turns, or all, which has no value: -1."""

    type: str
    value: Annotated[int, Meta(ge=0, le=2**31)] = -1


class ContextEdit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """type: TOOL_USES or THINKING. keep: how many of the last uses of tools, or turns with thinking, stay.

    The rest is of TOOL_USES alone. trigger: nothing is cleared before the prompt has more than so many tokens, or uses
    that are not cleared. clear_at_least: nor if fewer tokens go. exclude_tools: whose uses stay. clear_tool_inputs:
    what was given to the tools goes, too; to all, or to these.
    """

    type: str
    trigger: EditAmount | None = None
    keep: EditAmount | str | None = None
    clear_at_least: EditAmount | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None

    def check(self, path: str) -> None:
        """Raises RequestError, which names the field."""
        if self.type not in (TOOL_USES, THINKING):
            message = f"{path}.type is {self.type[:40]!r}; give {TOOL_USES} or {THINKING}"
            raise RequestError(message, param=f"{path}.type")
        is_thinking, keep = self.type == THINKING, self.keep
        known = {"keep": ("thinking_turns", "all")} if is_thinking else {
            "trigger": ("input_tokens", "tool_uses"), "keep": ("tool_uses",), "clear_at_least": ("input_tokens",),
        }  # fmt: skip
        for name in ("trigger", "clear_at_least", "exclude_tools", "clear_tool_inputs"):
            if is_thinking and getattr(self, name) is not None:
                raise RequestError(f"{path}.{name} is not of {THINKING}; leave it out", param=f"{path}.{name}")
        for name, types in known.items():
            given = getattr(self, name)
            if given is None or (name == "keep" and is_thinking and given == "all"):
                continue
            if isinstance(given, str):
                raise RequestError(f"{path}.keep is {given[:40]!r}; give an object", param=f"{path}.keep")
            if given.type not in types:
                message = f"{path}.{name}.type is {given.type[:40]!r}; give {' or '.join(types)}"
                raise RequestError(message, param=f"{path}.{name}.type")
            if given.type != "all" and given.value < 0:
                raise RequestError(f"{path}.{name}.value is missing", param=f"{path}.{name}.value")
        if isinstance(keep, EditAmount) and keep.type == "thinking_turns" and not keep.value:
            raise RequestError(f"{path}.keep.value must be at least 1", param=f"{path}.keep.value")

    @property
    def keeps_all(self) -> bool:
        return self.keep == "all" or (isinstance(self.keep, EditAmount) and self.keep.type == "all")

    @property
    def num_kept(self) -> int:
        if isinstance(self.keep, EditAmount):
            return self.keep.value
        return DEFAULT_TURNS if self.type == THINKING else DEFAULT_USES


class ContextManagement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """reuse: of the KV behind what a session clears: "exact" (it is computed again) or "reencode" (it is kept, and
    remembers what it has read).
    """

    edits: Annotated[list[ContextEdit], Meta(max_length=16)] = []
    reuse: str | None = None

    def check(self, is_session: bool) -> None:
        """Raises RequestError, which names the field."""
        known = ("exact", "reencode") if is_session else ("exact",)
        if self.reuse not in (None, *known):
            only = "" if is_session else "; only sessions re-encode"
            message = f"{PARAM}.reuse is {str(self.reuse)[:40]!r}; give {' or '.join(known)}{only}"
            raise RequestError(message, param=f"{PARAM}.reuse")
        for index, edit in enumerate(self.edits):
            path = f"{PARAM}.edits[{index}]"
            edit.check(path)
            if edit.type in [other.type for other in self.edits[:index]]:
                raise RequestError(f"{path}.type is {edit.type} again", param=f"{path}.type")

    def of(self, kind: str) -> ContextEdit | None:
        """The edit of this type, unless it keeps everything."""
        return next((edit for edit in self.edits if edit.type == kind and not edit.keeps_all), None)


# -- what is done ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Part:
    """What can go. index: of its message, of which so many tokens go. call: the answer and the place in it whose input
    goes, too, of so many tokens. turn: of an answer's thinking.
    """

    index: int
    num_tokens: int
    call: tuple[int, int] | None = None
    num_input: int = 0
    turn: int | None = None

    @property
    def first(self) -> int:
        """The message where the prompt changes."""
        return self.index if self.call is None else self.call[0]

    @property
    def num_cleared(self) -> int:
        return self.num_tokens + self.num_input


def cleared(
    messages: Sequence[Message], wanted: ContextManagement, template: ChatTemplate, tokenizer: Any, facts: Facts,
    is_session: bool = False,
) -> tuple[dict[int, Message], list[AppliedEdit]]:  # fmt: skip
    """The messages that change, by their index, and what was done. wanted: was checked.

    template: for the prompt's tools. is_session: these are the messages of its window, with all their thinking, and
    what its next turn adds. Results that no answer has seen yet stay.
    """
    kinds = [kind for kind in (TOOL_USES, THINKING) if wanted.of(kind) is not None]
    if not kinds or not any(one.get("reasoning_content") or one["role"] == "tool" for one in messages):
        return {}, []

    def count(texts: Sequence[str]) -> list[int]:
        return [len(one) for one in tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    history = _History(messages, wanted, template, facts, count, is_session)
    for end in range(1, len(messages) + 1):
        is_last = end == len(messages)
        if history.grow(end) != "assistant" and (is_last or messages[end]["role"] == "assistant"):
            history.step(end, may_take=is_last or not is_session)
    return history.changed(), history.applied()


class _History:
    """A history while it grows. taken: what was cleared by now.

    Its tokens are counted message by message, which is near enough, and says the same of a message in every history.
    """

    def __init__(
        self, messages: Sequence[Message], wanted: ContextManagement, template: ChatTemplate, facts: Facts,
        count: Callable[[Sequence[str]], list[int]], is_session: bool,
    ) -> None:  # fmt: skip
        self.taken = list[_Part]()
        self._messages, self._facts, self._reuse = messages, facts, wanted.reuse
        self._on_uses, self._on_thinking = wanted.of(TOOL_USES), wanted.of(THINKING)
        self._answered = self._asked = -1  # the last message of the assistant, of the user
        self._num_loaded = 0  # by the prompts since the last step, of what could go
        self._uses, self._thinking = list[_Part](), list[_Part]()  # what has not been cleared
        self._used, self._thought = list[int](), list[int]()  # where results are; turns with thinking
        self._calls: dict[str, tuple[int, int, int, str]] = {}  # by id: answer, place, tokens of the input, tool
        system = [message for message in messages[:1] if message["role"] == "system"]
        self._num_head = len(template.head_ids(system) or ())
        self._is_session = is_session
        self._shows_thoughts = is_session or not template.hidden_thinking(_THOUGHT)
        num_around, num_use = _template_tokens(template, messages)
        placeholder, no_input, *counts = count(
            [CLEARED, NO_INPUT, *(text for message in messages for text in parts_of(message))]
        )
        left, self._num_placeholder, self._num_no_input = iter(counts), placeholder, no_input
        self._counts = [[next(left) for _ in parts_of(message)] for message in messages]
        self._sizes = [
            sum(inputs) + content + (num_use if message["role"] == "tool" else num_around)
            for message, (content, _, *inputs) in zip(messages, self._counts, strict=True)
        ]
        self._thoughts = [thought for _, thought, *_ in self._counts]

    def grow(self, end: int) -> str:
        """Take in the last of the first `end` messages. Returns its role."""
        index, message = end - 1, self._messages[end - 1]
        content, thought, *inputs = self._counts[index]
        if message["role"] == "user":
            self._asked = index
        elif message["role"] == "assistant":
            self._answered = index
            for place, call in enumerate(message.get("tool_calls") or ()):
                self._calls[call["id"]] = index, place, inputs[place] - self._num_no_input, call["function"]["name"]
            if thought and self._shows_thoughts:
                turn = self._asked + 1  # what is said after one message of the user is one turn
                self._thinking.append(_Part(index, thought, turn=turn))
                self._thought += [turn] if self._thought[-1:] != [turn] else []
        elif message["role"] == "tool":
            self._used.append(index)
            use = self._use(index, content - self._num_placeholder, self._calls.get(message.get("tool_call_id", "")))
            self._uses += [use] if use.num_cleared > 0 else []
        return str(message["role"])

    def _use(self, index: int, num_tokens: int, called: tuple[int, int, int, str] | None) -> _Part:
        edit = self._on_uses or ContextEdit(TOOL_USES)
        answer, place, num_input, name = called or (index, 0, 0, "")
        if name in (edit.exclude_tools or ()):
            return _Part(index, 0)
        inputs = edit.clear_tool_inputs
        if called is not None and num_input > 0 and (inputs is True or (isinstance(inputs, list) and name in inputs)):
            return _Part(index, num_tokens, (answer, place), num_input)
        return _Part(index, num_tokens)

    def step(self, end: int, may_take: bool) -> None:
        """Clear what is ripe in the prompt of the first `end` messages, if that pays or the window is full."""
        first_thought = 0 if self._shows_thoughts else self._asked + 1
        total = self._num_head + sum(self._sizes[:end]) + sum(self._thoughts[first_thought:end])
        window = self._facts.max_request_tokens
        is_full = total > window - window // ANSWER_SHARE
        parts = [*self._ripe_uses(total, is_full), *self._ripe_thinking()]
        if not parts:
            return
        num_cleared, first = sum(part.num_cleared for part in parts), min(part.first for part in parts)
        # Where a session re-encodes, it computes up to the last change only.
        last = max(part.index for part in parts) if self._reuse == "reencode" else self._answered
        num_computed, num_copied = (
            sum(self._sizes[start:stop]) + sum(self._thoughts[max(start, first_thought) : stop])
            for start, stop in ((first, last + 1), (last + 1, self._answered + 1))
        )
        self._num_loaded += num_cleared
        pays = self._facts.clearing_pays(self._num_loaded, num_computed - num_cleared, num_copied)
        if may_take and (is_full or pays):
            self._take_parts(parts)
            self._num_loaded = 0

    def _ripe_uses(self, total: int, is_full: bool) -> list[_Part]:
        edit = self._on_uses
        if edit is None or len(self._used) <= edit.num_kept:
            return []
        trigger = edit.trigger or EditAmount("input_tokens", min(DEFAULT_TRIGGER, self._facts.max_request_tokens // 2))
        if not is_full and (total if trigger.type == "input_tokens" else len(self._uses)) <= trigger.value:
            return []
        end = min(self._used[len(self._used) - edit.num_kept] if edit.num_kept else self._answered, self._answered)
        ripe = [part for part in self._uses if part.index < end]
        least = 0 if edit.clear_at_least is None else edit.clear_at_least.value
        return ripe if sum(part.num_cleared for part in ripe) >= least else []

    def _ripe_thinking(self) -> list[_Part]:
        edit = self._on_thinking
        if edit is None or len(self._thought) <= edit.num_kept:
            return []
        first_kept = self._thought[-edit.num_kept]
        return [part for part in self._thinking if (part.turn or 0) < first_kept]

    def _take_parts(self, parts: Sequence[_Part]) -> None:
        self.taken += parts
        gone = set(parts)
        self._uses = [part for part in self._uses if part not in gone]
        self._thinking = [part for part in self._thinking if part not in gone]
        for part in parts:
            if part.turn is not None:
                self._thoughts[part.index] = 0
                continue
            self._sizes[part.index] -= part.num_tokens
            if part.call is not None:
                self._sizes[part.call[0]] -= part.num_input

    def changed(self) -> dict[int, Message]:
        found = dict[int, Message]()
        for part in sorted(self.taken, key=lambda part: part.index):
            message = found.get(part.index, self._messages[part.index])
            if part.turn is not None:
                found[part.index] = {key: value for key, value in message.items() if key != "reasoning_content"}
                # A history of another name, as its ids are others: what is known of the whole one has the thinking.
                found[part.index] |= {} if self._is_session else {"reasoning_content": ""}
                continue
            found[part.index] = {**message, "content": CLEARED}
            if part.call is not None:
                index, place = part.call
                answer = found.get(index, self._messages[index])
                calls = list(answer["tool_calls"])
                calls[place] = {**calls[place], "function": {**calls[place]["function"], "arguments": NO_INPUT}}
                found[index] = {**answer, "tool_calls": calls}
        return found

    def applied(self) -> list[AppliedEdit]:
        thoughts = [part for part in self.taken if part.turn is not None]
        uses = [part for part in self.taken if part.turn is None]
        done = list[AppliedEdit]()
        if uses:
            done.append(AppliedEdit(TOOL_USES, sum(part.num_cleared for part in uses), cleared_tool_uses=len(uses)))
        if thoughts:
            num_turns = len({part.turn for part in thoughts})
            num_tokens = sum(part.num_cleared for part in thoughts)
            done.append(AppliedEdit(THINKING, num_tokens, cleared_thinking_turns=num_turns))
        return done


_ANSWER: Message = {"role": "assistant", "content": "kvstoreanswer"}
_THOUGHT: list[Message] = [
    {"role": "user", "content": "kvstoreuser"}, _ANSWER | {"reasoning_content": "kvstorethought"},
    {"role": "user", "content": "kvstoreuser"},
]  # fmt: skip


def _template_tokens(template: ChatTemplate, messages: Sequence[Message]) -> tuple[int, int]:
    """How many tokens the template adds to a question or an answer, and to a call with its result; 0 if unknown."""
    question: Message = {"role": "user", "content": ""}
    found = (message["tool_calls"] for message in messages if message.get("tool_calls"))
    calls: list[dict[str, Any]] = next(found, [])[:1]
    used = [{"role": "tool", "content": "", "tool_call_id": call["id"]} for call in calls]
    bare = [{**call, "function": {**call["function"], "arguments": NO_INPUT}} for call in calls]
    before = [*_THOUGHT[:1], _ANSWER]
    around = len(template.following_ids([], before, [question]) or ())
    answered = [question, {"role": "assistant", "content": "", "tool_calls": bare}, *used]
    return around // 2, max(0, len(template.following_ids([], before, answered) or ()) - around - around // 2)
