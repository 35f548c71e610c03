"""The one client of the core: every running request with its handle, its text, its stop strings and its usage.

Whoever takes the core's news makes the text: the thread that steps, right after its step, or whoever reads the messages
of the core's process. Knows no session.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from kvstore.blocks.ids import BlockId, Lineage
from kvstore.blocks.records import Loss
from kvstore.engine.client.messages import Call, Core, Forget, Spliced, Submit, Unused
from kvstore.engine.core.request import Ended, Said, Update
from kvstore.engine.outputs import (
    NO_EARLIER,
    CachedTokensDetails,
    Choice,
    Earlier,
    Facts,
    Piece,
    RequestOutput,
    Timings,
    ToolCallEvent,
    Usage,
)
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.text.language import ChoiceText, NewParser, no_parser
from kvstore.engine.text.prompts import check_fits, check_ids, check_ids_of, check_owner, check_params, check_width
from kvstore.errors import EngineClosedError, EngineDiedError, StoreError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

R = TypeVar("R")
LOGGER = logging.getLogger("kvstore.engine")
FORGET_S = 2.0  # to wait for unneeded blocks to be deleted; otherwise they age out


@dataclass(slots=True)
class Handle:
    """A caller's end of one prompt: pieces of the stream in order, and the output, complete when `done`.

    The thread that takes the core's news appends pieces, and the caller takes them.
    """

    request_id: str
    output: RequestOutput
    listener: Listener  # notified of new pieces and of the end
    pieces: deque[Piece] = field(default_factory=deque)
    done: bool = False
    error: Exception | None = None  # why it ended without an output
    trace: TracebackType | None = None  # of the error when it was raised first
    chain: Sequence[BlockId] = ()  # ids of the first choice's full blocks, once it has ended
    lineage: Lineage | None = None  # what the chain is built on
    earlier: Earlier = NO_EARLIER
    loss: tuple[int, Loss] | None = None  # see `Ended`

    def num_lost(self, block_size: int) -> int:
        """How many of the first tokens it has computed although an earlier request had them, in whole blocks."""
        num_had = min(self.earlier.num_tokens, len(self.output.prompt_token_ids) - 1) // block_size * block_size
        return max(0, num_had - self.output.usage.cached_tokens)

    def own_blocks(self, block_size: int, first: int = 0) -> Sequence[BlockId]:
        """The blocks of its chain that it has computed, once it has ended, from the `first` on; see `with_sources`."""
        chain = self.chain if self.lineage is None else self.lineage.with_sources(self.chain)
        return chain[max(first, self.output.usage.cached_tokens // block_size) :]

    def has_missed(self, block_size: int) -> bool:
        """Whether `kvstore.engine.sessions.misses` has something to explain."""
        is_computed = self.output.ttft_s is not None
        return is_computed and (self.earlier.miss is not None or self.num_lost(block_size) > 0)

    def raise_error(self) -> None:
        """Raise its error, if it ended with one. Others may share it."""
        if self.error is not None:
            raise self.error.with_traceback(self.trace)


# Called with those of its handles that have new pieces or have ended. It must not wait.
Listener: TypeAlias = Callable[[Sequence[Handle]], None]


class Bell:
    """A listener that wakes one thread. only_ends: only when a request has ended, not for every piece."""

    def __init__(self, only_ends: bool = False) -> None:
        self._only_ends = only_ends
        self._rung = threading.Event()

    def __call__(self, handles: Sequence[Handle]) -> None:
        if not self._only_ends or any(handle.done for handle in handles):
            self._rung.set()

    def wait(self, is_so: Callable[[], object]) -> None:
        """Wait until the condition holds, which is checked whenever the bell rings."""
        while not is_so():
            self._rung.wait()
            self._rung.clear()


def _notify(handles: Iterable[Handle]) -> None:
    """Notify their listeners, each once."""
    by_listener: dict[Listener, list[Handle]] = {}
    for handle in handles:
        by_listener.setdefault(handle.listener, []).append(handle)
    for listener, mine in by_listener.items():
        listener(mine)


class _Running:
    """A request that has not ended. block_size: of its chain."""

    def __init__(
        self, handle: Handle, params: SamplingParams, tokenizer: Tokenizer | None, block_size: int, parser: NewParser
    ) -> None:
        self.handle = handle
        self._texts = [ChoiceText(handle.output, index, params, tokenizer, parser()) for index in range(params.n)]
        self._arrival_s = handle.earlier.begun_s or time.monotonic()
        self._block_size = block_size
        # By choice: the last piece of a choice that a stop string has ended here, until the core has ended it, too.
        self._held: dict[int, Piece] = {}
        self.calling: list[int] = []  # choices that have begun to call a tool, until the core is told

    def apply(self, update: Update) -> Sequence[tuple[int, str]]:
        """Returns the choices that a stop string has just ended, and the string: the core is to be told."""
        stopped: list[tuple[int, str]] = []
        for said in update.said:
            stop_string = self._add_token(said)
            if stop_string is not None:
                stopped.append((said.index, stop_string))
        if update.ended is not None:
            self._end(update.ended)
        return stopped

    def _add_token(self, said: Said) -> str | None:
        """Returns the stop string that has ended this choice here, if the core does not know of an end."""
        handle, text = self.handle, self._texts[said.index]
        if said.index in self._held:  # this token came after the stop string
            if said.finish_reason is not None:
                handle.pieces.append(self._held.pop(said.index))
            return None
        if said.token_id is None:
            piece = text.end(said.finish_reason or "abort")
        else:
            if handle.output.ttft_s is None:
                handle.output.ttft_s = time.monotonic() - self._arrival_s
            piece = text.add_token(said.token_id, said.logprob, said.finish_reason)
            for event in piece.events or ():
                if isinstance(event, ToolCallEvent) and event.state == "begun":
                    self.calling.append(said.index)
        if piece.finish_reason is not None:
            text.choice.finish_reason = piece.finish_reason
            text.choice.stop_reason = said.stop_reason if text.stop_string is None else text.stop_string
            if said.finish_reason is None:
                self._held[said.index] = piece
                return text.stop_string
        handle.pieces.append(piece)
        return None

    def _end(self, ended: Ended) -> None:
        """Set usage, chain and times, as far as the request got; `done` is set last."""
        handle, output = self.handle, self.handle.output
        for index, text in enumerate(self._texts):  # if the core is gone, it has not ended them
            if index in self._held:
                handle.pieces.append(self._held.pop(index))
            elif text.choice.finish_reason is None:
                handle.pieces.append(text.end("abort"))
                text.choice.finish_reason = "abort"
        num_prompt, spoken = len(output.prompt_token_ids), [len(choice.token_ids) for choice in output.choices]
        # What was lost on its way, and computed again, was counted twice.
        num_written = min(ended.num_saved_tokens, num_prompt - ended.cached.total)
        output.usage = replace(
            output.usage, completion_tokens=sum(spoken), cached_tokens_details=ended.cached,
            cache_write_tokens=num_written, reasoning_tokens=sum(choice.reasoning_tokens for choice in output.choices),
        )  # fmt: skip
        # The core may have computed blocks beyond a stop string; they are built on those that are named.
        handle.chain = tuple(ended.chain[: (num_prompt + spoken[0]) // self._block_size])
        handle.lineage, handle.loss = ended.lineage, ended.loss
        output.timings, output.arrival_s = self._timings(ended.timings), self._arrival_s
        handle.error, handle.trace = ended.error, None if ended.error is None else ended.error.__traceback__
        handle.done = True

    def _timings(self, timings: Timings) -> Timings:
        """Count the time to the core and back as time in the queue."""
        ttft_s = self.handle.output.ttft_s
        if timings.queue_s is None or timings.ttft_s is None or ttft_s is None:
            return timings
        queue_s = timings.queue_s + max(0.0, ttft_s - timings.ttft_s)
        decode_s = time.monotonic() - self._arrival_s - ttft_s
        return replace(timings, queue_s=queue_s, ttft_s=ttft_s, decode_s=decode_s)


class CoreClient:
    """What sessions and programs ask of a core. Any thread may use it. tokenizer: decodes ids; None: answers have no
    text.
    """

    def __init__(self, core: Core, tokenizer: Tokenizer | None) -> None:
        self.core = core
        self.check_open = core.check_open
        self.unreferenced: Callable[[set[BlockId]], set[BlockId]] = lambda block_ids: block_ids  # by no session
        self._tokenizer = tokenizer
        self._numbers = itertools.count()
        self._running: dict[str, _Running] = {}
        self._taking = threading.Lock()
        self._ended = threading.Condition()
        core.on_news = self.receive

    @property
    def facts(self) -> Facts:
        return self.core.facts

    @property
    def life(self) -> int:
        return self.core.life

    @property
    def closed(self) -> bool:
        return self.core.state in ("closed", "failed")

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._running)

    def call(self, verb: Call[R]) -> R:
        """See `Core.call`."""
        return self.core.call(verb)

    def forget(self, block_ids: Sequence[BlockId]) -> set[BlockId]:
        """Delete those of these blocks to which no turn of a session refers, stored or running, unless the core is
        gone: others may have the same. Returns those that only running ones have.
        """
        unstored = set[BlockId]()
        if block_ids and not self.closed:
            with suppress(StoreError, EngineClosedError, EngineDiedError):
                unstored = self.unreferenced(set(block_ids))
                unused = self.call(Unused(list(unstored)))
                unstored.difference_update(unused)
                self.call(Forget(unused, FORGET_S))
        return unstored

    def submit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
        spliced: Spliced | None = None,
        listener: Listener | None = None,
        turn_starts: Sequence[int] = (),
        shared_ends: Sequence[int] = (),
        parser: NewParser = no_parser,
        earlier: Earlier = NO_EARLIER,
    ) -> Handle:
        """Queue one prompt of token ids; never waits. Raises as `Engine.generate`.

        spliced: the chain of its first blocks, if these hold reused KV, and that chain's lineage. listener: is notified
        of its pieces; without one, `stream` yields them. turn_starts: where in the prompt each turn begins, as far as
        known: others may go on from there in another way. shared_ends: of the latest turns, where other sessions do, or
        may: their states stay. parser: makes the parser of one answer. earlier: what an
        earlier request had of the prompt. Raises EngineOverloadedError if the engine's process has too many requests,
        EngineDiedError if it has ended.
        """
        prompts = [(token_ids, params)]
        (handle,) = self.submit_all(
            prompts, tenant, cache_salt, priority, [spliced], listener, turn_starts, shared_ends, parser, earlier
        )
        return handle

    def submit_all(
        self, prompts: Sequence[tuple[list[int], SamplingParams]], tenant: str = "", cache_salt: str = "",
        priority: int = 0, spliced: Sequence[Spliced | None] = (), listener: Listener | None = None,
        turn_starts: Sequence[int] = (), shared_ends: Sequence[int] = (), parser: NewParser = no_parser,
        earlier: Earlier = NO_EARLIER,
    ) -> list[Handle]:  # fmt: skip
        """`submit` for prompts that share a step if there is room. None is queued when one is wrong. spliced: of each;
        none if none has one.
        """
        self.check_open()
        check_owner(tenant, cache_salt, priority)
        facts = self.facts
        bare = ((), Lineage(facts.root(tenant, cache_salt)))
        longest = [_checked(token_ids, params, facts) for token_ids, params in prompts]
        asked, running = list[Submit](), dict[str, _Running]()
        known = [one or bare for one in spliced or [None] * len(prompts)]
        for (token_ids, params), max_tokens, (chain, lineage) in zip(prompts, longest, known, strict=True):
            request_id = f"request-{next(self._numbers)}"
            handle = _new_handle(request_id, token_ids, params, max_tokens, listener or Bell())
            handle.earlier = earlier
            running[request_id] = _Running(handle, params, self._tokenizer, facts.block_size, parser)
            silent = replace(params, stop=()) if params.stop else params
            asked.append(
                Submit(
                    request_id, token_ids, silent, max_tokens, tenant, priority, chain, lineage, turn_starts,
                    shared_ends, earlier.num_tokens, earlier.ended_s, earlier.conversation,
                )
            )  # fmt: skip
        self._running |= running
        try:
            self.core.submit(asked)
        except Exception:
            for request_id in running:
                self._running.pop(request_id, None)
                with suppress(EngineClosedError):
                    self.core.end(request_id)
            raise
        return [one.handle for one in running.values()]

    def stream(self, handle: Handle) -> Iterator[Piece]:
        """Pieces of a submitted request as they come; leaving the loop early aborts it."""
        bell = handle.listener
        assert isinstance(bell, Bell), "somebody else listens to this request"
        try:
            while not handle.done or handle.pieces:
                if handle.pieces:
                    yield handle.pieces.popleft()
                else:
                    bell.wait(lambda: handle.done or handle.pieces)
            handle.raise_error()
        finally:
            self.abort(handle)

    def abort(self, handle: Handle) -> None:
        """End a request. Returns when the core has confirmed it and released its blocks; the thread that takes its news
        does not wait.
        """
        if handle.done:
            return
        self.end(handle)
        if not self.core.is_reader:  # the collector may close a stream in any thread
            with self._ended:
                self._ended.wait_for(lambda: handle.done)

    def end(self, handle: Handle, index: int | None = None, stop_string: str | None = None) -> None:
        """See `Core.end`. A core that closes ends it anyway."""
        with suppress(EngineClosedError):
            self.core.end(handle.request_id, index, stop_string)

    def receive(self) -> None:
        """Take what is new, and notify listeners; never waits for the core. One thread at a time."""
        touched, has_ended = list[Handle](), False
        with self._taking:
            for update in self.core.take_news():
                running = self._running.get(update.request_id)
                if running is not None:
                    self._apply(running, update)
                    touched.append(running.handle)
                    has_ended = has_ended or running.handle.done
        if has_ended:
            with self._ended:
                self._ended.notify_all()
        _notify(touched)

    def _apply(self, running: _Running, update: Update) -> None:
        handle = running.handle
        try:
            stopped = running.apply(update)
        except Exception as error:  # our bug: it ends this request, not others
            LOGGER.exception("an update could not be taken in")
            handle.error, handle.trace, handle.done, stopped = error, error.__traceback__, True, ()
            self.end(handle)
        if handle.done:
            self._running.pop(handle.request_id, None)
        while running.calling:
            with suppress(EngineClosedError):
                self.core.note_call(handle.request_id, running.calling.pop())
        for index, stop_string in stopped:
            self.end(handle, index, stop_string)


def _checked(token_ids: list[int], params: SamplingParams, facts: Facts) -> int:
    """Check a request. Returns the number of tokens that its answer may have. Raises RequestError, and
    ContextLengthError if the prompt leaves no room for an answer.
    """
    check_params(params)
    check_ids(token_ids, facts.vocab_size)
    check_ids_of(params, facts.vocab_size)
    check_width(params, facts.max_num_seqs)
    return check_fits(len(token_ids), params, facts.max_model_len, facts.max_request_tokens)


def _new_handle(
    request_id: str, prompt_token_ids: list[int], params: SamplingParams, max_tokens: int, listener: Listener
) -> Handle:
    """max_tokens: of an answer, what `params.max_tokens` comes to."""
    capped = None if params.max_tokens in (None, max_tokens) else max_tokens
    choices = [Choice(logprobs=None if params.logprobs is None else []) for _ in range(params.n)]
    usage = Usage(len(prompt_token_ids), 0, CachedTokensDetails(), capped)
    return Handle(request_id, RequestOutput(request_id, prompt_token_ids, choices, usage, ttft_s=None), listener)
