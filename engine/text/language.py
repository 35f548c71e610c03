"""How a model speaks: its template for a request, the parser of its answers, and their text, token by token.

Text is released in whole characters only, and without what may belong to a stop string. Knows no session, no core and
no thread.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from kvstore.engine.outputs import (
    AnswerEvent,
    AppliedEdit,
    Choice,
    Facts,
    Piece,
    RequestOutput,
    TokenLogprob,
    ToolCallEvent,
)
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.text.answer_parser import AnswerParser
from kvstore.engine.text.call_arguments import with_tools
from kvstore.engine.text.chat_template import ChatTemplate, Message
from kvstore.engine.text.clearing import cleared
from kvstore.engine.text.prompts import NO_OPTIONS, AnswerOptions
from kvstore.engine.text.response_template import ResponseTemplate
from kvstore.errors import RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes, so an unfinished one has at most 3; decoders show it as one U+FFFD
# (byte-level) or as one per byte (byte fallback).
MAX_UNFINISHED = 3
# Tokens in the window before an unfinished character is taken as final.
MAX_WINDOW_TOKENS = 16
CALL_ID_BYTES = 12  # of a call's id, which nobody may guess
# Prompt tokens that give the first token its context.
NUM_PROMPT_TOKENS = 8

# A real U+FFFD in a byte-fallback vocabulary: complete, although it looks like an unfinished character.
_REPLACEMENT_TOKENS = ["<0xEF>", "<0xBF>", "<0xBD>"]
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# How byte-level vocabularies write bytes: printable ones as themselves, the others in their order from U+0100 on.
_SHOWN_BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _SHOWN_BYTES}
_BYTES |= {chr(0x100 + i): byte for i, byte in enumerate(sorted({*range(0x100)}.difference(_SHOWN_BYTES)))}


# Makes the parser of one answer of a request; None: its text is its content.
NewParser: TypeAlias = Callable[[], AnswerParser | None]


def no_parser() -> AnswerParser | None:
    return None


def token_bytes(tokenizer: Tokenizer | None, token_id: int, text: str) -> bytes:
    """Also of a token that is part of a character, and decodes to U+FFFD. text: what it decodes to alone."""
    token = "" if tokenizer is None or REPLACEMENT not in text else tokenizer.id_to_token(token_id) or ""
    if _BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[1:-1], 16)])
    if token and _BYTES.keys() >= set(token):
        return bytes(_BYTES[char] for char in token)
    return text.encode()


@dataclass(frozen=True, slots=True)
class Language:
    """The tokenizer and the chat template of a model. template: None if there is none that works; why_no_chat is the
    reason. answers: how the model writes calls and reasoning; None if that is not known.
    """

    tokenizer: Any
    template: ChatTemplate | None
    why_no_chat: str
    answers: ResponseTemplate | None = None

    def chat_template(self, options: AnswerOptions = NO_OPTIONS, continues: bool = False) -> ChatTemplate:
        """continues: see `ChatTemplate.using`. Raises RequestError, also for tools that the model cannot be told of or
        whose calls nobody could read.
        """
        if self.template is None:
            raise RequestError(self.why_no_chat, param="messages")
        if not options.tools and not options.variables and not continues:
            return self.template
        if options.tools and not self.template.knows_tools:
            message = "this model's chat template knows no tools; give one that does as --chat-template (in Python, "
            raise RequestError(f"{message}chat_template=)", param="tools")
        if options.tools and (self.answers is None or "tool_calls" not in self.answers.spec["fields"]):
            message = "nothing is known of how this model writes calls; name its parser as --tool-call-parser (in "
            raise RequestError(f"{message}Python, tool_call_parser=)", param="tools")
        return self.template.using(options.shown_tools, options.variables, continues)

    def parser(self, options: AnswerOptions = NO_OPTIONS, begun: Message | None = None) -> NewParser:
        """`chat_template` has passed the options. begun: the answer that is continued."""
        tools = [] if options.tool_choice == "none" else options.tools
        is_thought = begun is not None and bool(begun.get("reasoning_content"))
        if self.answers is None or not (tools or is_thought or self._may_reason(options)):
            return no_parser
        template = self.chat_template(options, begun is not None)
        prefix = template.opening if begun is None else template.opening_with(begun)
        return partial(AnswerParser, self.answers, prefix, tools)

    def thought_in(self, token_ids: Sequence[int], answer: Message, opening: str) -> tuple[int, int] | None:
        """Where in these ids, which end with the answer, its reasoning is, with the texts around it; (0, 0) if it is
        not there. None if that cannot be told in whole tokens. opening: the text before the answer.
        """
        opener, closer = (None if self.answers is None else self.answers.reasoning) or ("", "")

        def text_of(count: int) -> str:
            ids = list(token_ids[:count])
            (text,) = self.tokenizer.backend_tokenizer.decode_batch([ids], skip_special_tokens=False)
            return str(text)

        def end_of(beginning: str) -> int | None:
            count = bisect_left(range(len(token_ids)), len(beginning), key=lambda count: len(text_of(count)))
            tried = range(count, min(count + MAX_UNFINISHED, len(token_ids)) + 1)  # within a character
            return next((count for count in tried if text_of(count) == beginning), None)

        whole = text_of(len(token_ids))
        is_cut = not answer["content"] and "tool_calls" not in answer  # it may have ended within its reasoning
        reasoning, closed = re.escape(answer["reasoning_content"]), re.escape(closer) + (r"|\Z" if is_cut else "")
        thought = re.compile(rf"\s*(?:{re.escape(opener)})?\s*{reasoning}\s*(?:{closed})\s*")
        start = whole.rfind(opening) + len(opening)
        found = thought.match(whole, start) if opening in whole else None
        if found is None:
            return None if thought.search(whole) else (0, 0)
        first, end = end_of(whole[:start]), end_of(whole[: found.end()])
        return None if first is None or end is None else (first, end)

    def cleared(
        self, messages: Sequence[Message], options: AnswerOptions, facts: Facts, is_session: bool = False
    ) -> tuple[dict[int, Message], list[AppliedEdit]]:
        """See `kvstore.engine.text.clearing`. Nothing is cleared where the options do not ask for it."""
        if options.context_management is None:
            return {}, []
        template = self.chat_template(options)
        return cleared(messages, options.context_management, template, self.tokenizer, facts, is_session)

    def constrained(self, params: SamplingParams, options: AnswerOptions = NO_OPTIONS) -> SamplingParams:
        """The parameters with a grammar for what the tools' use demands. Raises RequestError."""
        asked = params.structured_outputs
        if options.tools and options.tool_choice != "none":
            asked = with_tools(options, asked, self.answers)
        reasoning = None if asked is None else self._reasoning(options)
        if asked is not None and reasoning is not None:
            asked = replace(asked, reasoning=reasoning)
        return params if asked is params.structured_outputs else replace(params, structured_outputs=asked)

    def _may_reason(self, options: AnswerOptions) -> bool:
        """Whether an answer may begin with reasoning. If prompts open it when it is asked for, others have none."""
        if self.answers is None or self.answers.reasoning is None:
            return False
        opening = self.chat_template(options).opening
        if any(delimiter in opening for delimiter in self.answers.reasoning):
            return True
        asked = replace(options, reasoning_effort="high", chat_template_kwargs={})
        return self.answers.reasoning[0] not in self.chat_template(asked).opening

    def _reasoning(self, options: AnswerOptions) -> tuple[str, str] | None:
        """The texts around reasoning, which comes before what must match; the first is "" if the prompt has it."""
        if self.answers is None or self.answers.reasoning is None or not self._may_reason(options):
            return None
        opener, closer = self.answers.reasoning
        opening = self.chat_template(options).opening
        start, end = opening.rfind(opener), opening.rfind(closer)
        if end > start:
            return None  # the prompt has closed it
        return ("", closer) if start >= 0 else (opener, closer)


def answer_ids(template: ChatTemplate, choice: Choice) -> Sequence[int]:
    """Ids of an answer without its end token, which the template adds, and without its stop string."""
    if choice.finish_reason not in ("stop", "tool_calls"):
        return list(choice.token_ids)
    if not isinstance(choice.stop_reason, str):
        return choice.token_ids[:-1]
    num_tokens, rest = choice.before_stop
    return choice.token_ids[:num_tokens] + template.encode_answer(rest)


# -- the text of an answer ---------------------------------------------------------------------------------------------
class ChoiceText:
    """Choice `index` of an output, which it fills; its text is cut before the stop string that is complete first.

    stop_string: the one that was met (among several that end at the same character, the longest); no more tokens are
    taken then. Without a tokenizer all text is "". Special tokens and ids without a token decode to "". The text of the
    first `min_tokens` tokens is released without a search for stop strings, as is that of a tool call.

    parser: of this choice alone; is fed with the text that is released, which then shows the special tokens that
    delimit its parts.
    """

    def __init__(
        self,
        output: RequestOutput,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        parser: AnswerParser | None = None,
    ) -> None:
        self.choice = output.choices[index]
        self.choice.parsed_content = None if parser is None else ""
        self.stop_string: str | None = None
        self._index, self._params, self._parser = index, params, parser
        known, shown = tokenizer if params.detokenize else None, parser.template.shown_tokens if parser else {}
        self._decoder = None if known is None else _Decoder(known, output.prompt_token_ids, shown)
        self._events: list[AnswerEvent] = []  # of released text
        self._held = ""  # whole characters that may begin a stop string
        # After how many tokens, and characters of their text, no character is unfinished; the first is released.
        self._ends = deque([(0, 0)])

    def add_token(self, token_id: int, logprob: TokenLogprob | None, finish_reason: str | None) -> Piece:
        """The piece for a new token. finish_reason: why the choice ends with it, unless a stop string ends it."""
        choice = self.choice
        choice.token_ids.append(token_id)
        if choice.logprobs is not None and logprob is not None:
            choice.logprobs.append(logprob)
        released = "" if finish_reason == "stop" else self._released(token_id)  # an end token has no text
        if finish_reason is not None:
            released += self._rest()
        if self.stop_string is not None:
            num_tokens, num_chars = self._ends[0]
            finish_reason, choice.before_stop = "stop", (num_tokens, choice.text[num_chars:])
        events = self._new_events(finish_reason)
        if finish_reason == "stop" and choice.tool_calls:
            finish_reason = "tool_calls"
        return Piece(self._index, released, (token_id,), finish_reason, None if logprob is None else (logprob,), events)

    def end(self, finish_reason: str) -> Piece:
        """Its last piece, if it ends without a token."""
        return Piece(self._index, self._rest(), (), finish_reason, events=self._new_events(finish_reason))

    def _released(self, token_id: int) -> str:
        """The text that a token releases."""
        if self._decoder is None:
            return ""
        piece = self._decoder.push(token_id)
        if self._decoder.is_whole:
            num_chars = len(self.choice.text) + len(self._held) + len(piece)
            self._ends.append((len(self.choice.token_ids), num_chars))
        return self._release(self._filter(piece))

    def _rest(self) -> str:
        """The rest of the text, with an unfinished character as U+FFFD. "" after a stop string."""
        if self._decoder is None or self.stop_string is not None:
            return ""
        released = self._filter(self._decoder.flush())
        self._parse(self._held)
        released += self._held
        self._held = ""
        return self._release(released)

    def _release(self, piece: str) -> str:
        self.choice.text += piece
        while len(self._ends) > 1 and self._ends[1][1] <= len(self.choice.text):
            self._ends.popleft()
        return piece

    def _filter(self, piece: str) -> str:
        """The part of `_held` and `piece` that can be released; sets stop_string when one is complete."""
        if not piece or not (self._params.stop or self._parser):
            return piece
        text, self._held = self._held + piece, ""
        end, stop = self._search(text)
        self._parse(text[:end])
        if self._parser is not None and self._parser.inside_call:
            self._parse(text[end:])
            return text
        self.stop_string = stop
        self._held = "" if stop else text[end:]
        return text[:end]

    def _search(self, text: str) -> tuple[int, str | None]:
        """How much of the text no stop string can begin in, and the stop string that is complete after that."""
        stops, num_tokens = self._params.stop, len(self.choice.token_ids)
        is_call = self._parser is not None and self._parser.inside_call
        if not stops or is_call or num_tokens < self._params.min_tokens:
            return len(text), None
        found = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
        if found:  # the one that ends first, however the text was split; among these the longest
            _, start, stop = min(found)
            return start, stop
        longest = max(len(stop) for stop in stops)
        for start in range(max(0, len(text) - longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in stops):
                return start, None
        return len(text), None

    def _parse(self, text: str) -> None:
        if self._parser is not None and text:
            self._events += self._parser.feed(text)

    def _new_events(self, finish_reason: str | None) -> tuple[AnswerEvent, ...] | None:
        """Add the events of released text to the choice; None without a parser."""
        if self._parser is None:
            return None
        events, self._events = self._events, []
        if finish_reason is not None:
            events += self._parser.finish(finish_reason)
        named = tuple(map(_with_id, events))
        for event in named:
            self.choice.add(event)
        return named


def _with_id(event: AnswerEvent) -> AnswerEvent:
    if isinstance(event, ToolCallEvent) and event.state == "whole":
        return replace(event, id=f"call_{secrets.token_hex(CALL_ID_BYTES)}")
    return event


class _Decoder:
    """Whole characters from token ids, by decoding a short window again with each token.

    The window is a context token and the tokens whose text is not complete: the prefix/read offset method of Hugging
    Face's text-generation-inference (`decode_token`) and vLLM. There are three differences. A character that never
    completes is not waited for: only the last MAX_UNFINISHED U+FFFD are held. The context is not a token `<0x..>`,
    because byte fallback decodes neighbouring bytes together and calls all of them wrong until the last character is
    whole. Tokens that decode to nothing do not stay in the window. (tokenizers' own DecodeStream, 0.23, waits for ever
    in the first case and raises in the second.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], shown: Mapping[int, str]) -> None:
        """shown: special tokens that have a text here."""
        self._tokenizer = tokenizer
        self._shown = shown
        self._window: list[int] = []
        self._decoded = ""  # text of the window
        self._num_released = 0  # characters of it
        prompt = [t for t in prompt_token_ids[-NUM_PROMPT_TOKENS:] if not self._is_silent(t)]
        if prompt:
            self._restart(self._context(prompt), 0)

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        if token_id in self._shown:
            piece = self.flush() + self._shown[token_id]
            self._restart(self._context(self._window), 0)
            return piece
        self._window.append(token_id)
        text = self._decode(self._window)
        if text == self._decoded and self._is_silent(token_id):
            self._window.pop()
            return ""
        self._decoded = text
        num_held = min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_UNFINISHED)
        if num_held and [self._tokenizer.id_to_token(t) for t in self._window[-3:]] == _REPLACEMENT_TOKENS:
            num_held = 0
        piece = self._release(len(text) - num_held)
        if num_held == 0:
            self._restart(self._context(self._window), 0)
        elif len(self._window) > MAX_WINDOW_TOKENS:
            # Any unfinished character lies in the last tokens. What they decode to before it may differ from before,
            # as they may begin within a character; that has been released.
            self._restart(self._window[-MAX_UNFINISHED - 1 :], len(text) - self._num_released)
        return piece

    @property
    def is_whole(self) -> bool:
        """Whether no character is unfinished."""
        return self._num_released == len(self._decoded)

    def flush(self) -> str:
        """The rest, as the tokenizer decodes it."""
        return self._release(len(self._decoded))

    def _release(self, end: int) -> str:
        piece = self._decoded[self._num_released : end]
        self._num_released = max(self._num_released, end)
        return piece

    def _restart(self, window: list[int], num_unreleased: int) -> None:
        self._window = window
        self._decoded = self._decode(window)
        self._num_released = max(0, len(self._decoded) - num_unreleased)

    def _context(self, token_ids: list[int]) -> list[int]:
        """A token that begins the next window, so that a leading space is neither lost nor added."""
        for token_id in reversed(token_ids):
            if not _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or ""):
                return [token_id]
        # Only bytes so far. Any token with text tells a byte-fallback decoder that this is not the beginning.
        return self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def _is_silent(self, token_id: int) -> bool:
        """Whether decoding leaves this token out: no such token, or a special one."""
        if self._tokenizer.id_to_token(token_id) is None:
            return True
        # A lone "▁" also decodes to "", but is not left out: it is the space that the decoder strips.
        return self._decode([token_id]) == "" and self._tokenizer.decode([token_id], False) != ""
