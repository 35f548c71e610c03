"""The text of one answer, token by token: only whole characters, without text that may belong to a stop string.

Knows a tokenizers.Tokenizer and outputs; must not know torch, requests or templates.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.engine.outputs import AnswerEvent, Piece, RequestOutput, TokenLogprob, ToolCallEvent
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.text.answer_parser import AnswerParser

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


class Detokenizer:
    """Incremental text of one choice; cut before the stop string that is complete first.

    text: everything released so far. stop_string: the stop string that was met (among several that end at the same
    character, the longest). num_tokens: tokens consumed, up to and with the one that completed the stop string.
    Without a tokenizer all text is "". Special tokens and ids without a token decode to "". The text of the first
    `min_tokens` tokens is released without a search for stop strings, as is that of a tool call.

    parser: is fed with the text that is released, which then shows the special tokens that delimit its parts. events:
    of that text; whoever takes them empties the list.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Sequence[str] = (),
        prompt_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
        parser: AnswerParser | None = None,
    ) -> None:
        self.text = ""
        self.events: list[AnswerEvent] = []
        self.stop_string: str | None = None
        self.num_tokens = 0
        self._parser = parser
        shown = parser.template.shown_tokens if parser else {}
        self._decoder = None if tokenizer is None else _Decoder(tokenizer, prompt_token_ids, shown)
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._held = ""  # whole characters that may begin a stop string

    def append(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns newly released text. Tokens after a stop string are not consumed."""
        released = ""
        for token_id in token_ids:
            if self.stop_string is not None:
                break
            self.num_tokens += 1
            if self._decoder is not None:
                released += self._filter(self._decoder.push(token_id))
        self.text += released
        return released

    def finish(self) -> str:
        """The rest of the text, with an unfinished character as U+FFFD. "" after a stop string."""
        if self._decoder is None or self.stop_string is not None:
            return ""
        released = self._filter(self._decoder.flush())
        self._parse(self._held)
        released += self._held
        self._held = ""
        self.text += released
        return released

    def _filter(self, piece: str) -> str:
        """The part of `_held` and `piece` that can be released; sets stop_string when one is complete."""
        if not piece or not (self._stop or self._parser):
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
        is_call = self._parser is not None and self._parser.inside_call
        if not self._stop or is_call or self.num_tokens < self._min_tokens:
            return len(text), None
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:  # the one that ends first, however the text was split; among these the longest
            _, start, stop = min(found)
            return start, stop
        longest = max(len(stop) for stop in self._stop)
        for start in range(max(0, len(text) - longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stop):
                return start, None
        return len(text), None

    def _parse(self, text: str) -> None:
        if self._parser is not None and text:
            self.events += self._parser.feed(text)


class ChoiceText:
    """Choice `index` of an output, which it fills. Without a tokenizer all text is "". parser: of this choice alone."""

    def __init__(
        self,
        output: RequestOutput,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        parser: AnswerParser | None = None,
    ) -> None:
        self.choice = output.choices[index]
        self._index = index
        known = tokenizer if params.detokenize else None
        self._parser = parser
        self.choice.parsed_content = None if parser is None else ""
        self._text = Detokenizer(known, params.stop, output.prompt_token_ids, params.min_tokens, parser)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it."""
        return self._text.stop_string

    def add_token(self, token_id: int, logprob: TokenLogprob | None, finish_reason: str | None) -> Piece:
        """The piece for a new token. finish_reason: why the choice ends with it, unless a stop string ends it."""
        choice = self.choice
        choice.token_ids.append(token_id)
        if choice.logprobs is not None and logprob is not None:
            choice.logprobs.append(logprob)
        released = "" if finish_reason == "stop" else self._text.append((token_id,))  # an end token has no text
        if finish_reason is not None:
            released += self._text.finish()
        if self.stop_string is not None:
            finish_reason = "stop"
        events = self._take_in(released, finish_reason)
        if finish_reason == "stop" and choice.tool_calls:
            finish_reason = "tool_calls"
        return Piece(self._index, released, (token_id,), finish_reason, None if logprob is None else (logprob,), events)

    def end(self, finish_reason: str) -> Piece:
        """Its last piece, if it ends without a token."""
        released = self._text.finish()
        return Piece(self._index, released, (), finish_reason, events=self._take_in(released, finish_reason))

    def _take_in(self, released: str, finish_reason: str | None) -> tuple[AnswerEvent, ...] | None:
        """Add released text to the choice; returns its events, None without a parser."""
        self.choice.text += released
        if self._parser is None:
            return None
        events, self._text.events = self._text.events, []
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
