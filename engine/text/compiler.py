"""Compiles grammars over the bytes of a model's tokens, in a thread of its own, and keeps the last ones.

Knows no scheduler: a request waits elsewhere until its matchers are made.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvstore.engine.core.request import Request
from kvstore.engine.sampling_params import StructuredOutputsParams
from kvstore.engine.text.grammar import grammar_of, json_grammar, place_of
from kvstore.errors import EngineClosedError, RequestError

MAX_KEPT = 128  # compiled grammars
STACK_BYTES = 2**28  # the compiler follows references of a schema recursively: 64 KiB of them need some 40 MiB
MAX_FAULT_CHARS = 400
NICENESS = 4  # more than the steps' thread; with 10, a grammar takes five times as long beside busy processors
# Work of the compiler, about 0.1 s at most, and of one mask, some milliseconds, for which the step's other rows wait.
LIMITS = LLParserLimits(initial_lexer_fuel=120_000, step_lexer_fuel=50_000, verbose_errors=False)

Then = Callable[[Request, Exception | None], None]


class GrammarCompiler:
    """tokenizer: the model's, None if it has none. vocab_size: of the model, which may know more ids. kept: the last
    grammars, the oldest first.
    """

    def __init__(
        self, tokenizer: Any, eos_token_ids: Collection[int], vocab_size: int, max_kept: int = MAX_KEPT
    ) -> None:
        self.kept = OrderedDict[StructuredOutputsParams, LLMatcher]()
        self._max_kept = max_kept
        self._special_token_ids: dict[str, int] = {}
        before = threading.stack_size(STACK_BYTES)
        self._thread = ThreadPoolExecutor(1, "kvstore-grammar", _be_nice)
        self._table = self._thread.submit(self._make_table, tokenizer, sorted(eos_token_ids), vocab_size)
        threading.stack_size(before)

    def _make_table(self, tokenizer: Any, eos_token_ids: list[int], vocab_size: int) -> LLTokenizer:
        """Holds the interpreter's lock all the while: 2.5 s for 131,000 tokens."""
        if tokenizer is None:
            raise RequestError("structured_outputs needs a tokenizer, and this model has none", "structured_outputs")
        if not eos_token_ids:
            raise RequestError("structured_outputs needs an end token, and this model has none", "structured_outputs")
        added = tokenizer.added_tokens_decoder.items()
        self._special_token_ids = {str(token): token_id for token_id, token in added if token.special}
        try:
            return LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=vocab_size, eos_token=eos_token_ids)
        except ValueError as error:
            why = f"structured_outputs cannot be used with this model's tokenizer: {error}"
            raise RequestError(why, "structured_outputs") from None

    def wait_for_table(self) -> None:
        """Wait until the tokenizer's table is made, whether or not it can be."""
        self._table.exception()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def prepare(self, first: Request, then: Then) -> None:
        """Give a prompt's choices their matchers, and call `then` from the compiling thread: with None, or with why
        there are none.
        """
        self._thread.submit(self._prepare, first, then)

    def _prepare(self, first: Request, then: Then) -> None:
        fault: Exception | None = None
        try:
            assert first.params.structured_outputs is not None
            matcher = self._matcher(first.params.structured_outputs)
            for choice in (first, *first.children):
                choice.matcher = matcher.deep_copy()
        except Exception as error:
            fault = error
        with suppress(EngineClosedError):
            then(first, fault)

    def _matcher(self, wanted: StructuredOutputsParams) -> LLMatcher:
        table = self._table.result()
        matcher = self.kept.pop(wanted, None) or self._compiled(wanted, table)
        self.kept[wanted] = matcher
        if len(self.kept) > self._max_kept:
            self.kept.popitem(last=False)
        return matcher

    def _compiled(self, wanted: StructuredOutputsParams, table: LLTokenizer) -> LLMatcher:
        try:
            grammar = grammar_of(wanted, self._special_token_ids)
        except RecursionError:
            raise _refusal(wanted, "it is nested too deep") from None
        except Exception as error:  # of the conversion of GBNF, which has no class of its own
            raise _refusal(wanted, str(error)) from None
        matcher = LLMatcher(table, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # only then is it seen that nothing matches; it also makes the first step quick
            if matcher.is_error():
                fault = in_one_line(matcher.get_error())
                raise _refusal(wanted, f"no answer can match it, or it is too complex ({fault})")
            return matcher
        fault, schema, after = matcher.get_error(), wanted.json, ""

        def fault_in(part: str) -> str:
            return "".join(LLMatcher.validate_grammar_with_warnings(part, table, limits=LIMITS)[1])

        if lines := re.findall(r"^ *\d+ \| tag_(\d+):", fault, re.MULTILINE):  # of Lark, the last one is wrong
            tag = wanted.tags[int(lines[-1])]
            if isinstance(tag.json, str):
                schema, after = tag.json, f", after {tag.begin!r}"
                fault = fault_in(json_grammar(schema)) or fault
        place = place_of(schema, fault, fault_in) if isinstance(schema, str) else ""
        raise _refusal(wanted, in_one_line(fault) + (f", at {place}" if place else "") + after)


def _be_nice() -> None:
    """Where processors are short, steps come before the calling thread's work."""
    if sys.platform == "linux":  # elsewhere it would concern the whole process
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


def in_one_line(fault: str) -> str:
    """Why a matcher has failed, without its state."""
    return " ".join(fault.removesuffix("<non-verbose/>").split())[:MAX_FAULT_CHARS]


def _refusal(wanted: StructuredOutputsParams, why: str) -> RequestError:
    return RequestError(f"{wanted.param} cannot be compiled: {why[:MAX_FAULT_CHARS]}", wanted.param)
