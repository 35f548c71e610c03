"""asyncio over an Engine: the stepping thread wakes each event loop once for all of its requests.

Only this module and `service` know asyncio.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

from kvstore.blocks.ids import BlockId, Lineage
from kvstore.engine.core.output_processor import Handle
from kvstore.engine.front import Front
from kvstore.engine.outputs import Piece, RequestOutput
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.sessions.chat import ChatSession
from kvstore.engine.sessions.one_turn import OneTurn
from kvstore.engine.stats import EngineStats
from kvstore.engine.text.chat_template import Message
from kvstore.engine.text.prompts import prompt_ids
from kvstore.errors import EngineClosedError, KVStoreError
from kvstore.sessions.record import TurnRecord

P = ParamSpec("P")
T = TypeVar("T")
MAX_IDS_AT_ONCE = 4096  # the event loop checks prompts up to this length itself, well under a millisecond
MAX_CALLS = 32  # blocking calls that run at once: turns that wait for the disk, templates, administration
MAX_LONG_TEXTS = 2  # tokenized at once; each takes two hundred times its size in memory, and a processor
LONG_TEXT_CHARS = 2**16


class Reading(Protocol):
    """A source of updates that an event loop can watch without a thread: `RemoteEngine.link`."""

    def fileno(self) -> int: ...

    def read_here(self) -> None: ...

    def receive(self) -> None: ...


class _Port:
    """The listener to all requests of one event loop; only that loop waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, abort: Callable[[Handle], None]) -> None:
        self.loop = loop
        self.waiting: dict[str, asyncio.Future[None]] = {}  # by request
        self._abort = abort
        self._thread = threading.get_ident()

    def __call__(self, handles: Sequence[Handle]) -> None:
        named = [handle.request_id for handle in handles]
        if threading.get_ident() == self._thread:  # the loop itself reads the engine's messages
            self._wake(named)
            return
        try:
            self.loop.call_soon_threadsafe(self._wake, named)
        except RuntimeError:  # the loop was closed without cancelling its tasks, so nobody reads this
            for handle in handles:
                self._abort(handle)

    def _wake(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            waiter = self.waiting.pop(request_id, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    async def next_piece(self, handle: Handle) -> Piece | None:
        """The next piece, None at the end. A request has one reader at a time."""
        while True:
            done = handle.done  # read before the pieces, as none follow once it is set
            if handle.pieces:
                return handle.pieces.popleft()
            if done:
                return None
            waiter = self.waiting[handle.request_id] = self.loop.create_future()
            try:
                await waiter
            finally:
                self.waiting.pop(handle.request_id, None)


class StreamedAnswer:
    """One request's answer as it comes: an asynchronous iterator of pieces, and a context manager that ends it.

    output: complete once the iteration has ended. gaps_s: seconds between its tokens as they were read. turn: the
    stored turn of a session, durable before the last piece is handed out. Only one task may use it. Iterating raises
    the error that ended the request, and StoreError if a turn could not be stored.
    """

    def __init__(self, engine: AsyncEngine, handle: Handle, port: _Port, chat: ChatSession | None = None) -> None:
        self.turn: TurnRecord | None = None
        self.gaps_s: list[float] = []
        self._last_s: float | None = None
        self._engine = engine
        self._handle = handle
        self._port = port
        self._chat = chat
        self._running: OneTurn | None = None  # of the chat, until it has ended
        self._ended = False

    @property
    def output(self) -> RequestOutput:
        return self._handle.output

    @property
    def chain(self) -> Sequence[BlockId]:
        """Ids of the first choice's full blocks, once it has ended."""
        return self._handle.chain

    def __aiter__(self) -> StreamedAnswer:
        return self

    async def __anext__(self) -> Piece:
        if self._ended:
            raise StopAsyncIteration
        piece = await self._port.next_piece(self._handle)
        self._ended = self._ended or piece is None
        if self._running is not None and (piece is None or piece.finish_reason is not None):
            await self._finish()  # a turn has one choice, so this is its last piece
        if piece is None:
            self._handle.raise_error()
            raise StopAsyncIteration
        if piece.token_ids:
            before_s, self._last_s = self._last_s, time.perf_counter()
            if before_s is not None:
                self.gaps_s.append(self._last_s - before_s)
        return piece

    async def _finish(self, keep: bool = True) -> None:
        """Store the turn, whatever happens to the task that waits for it."""
        assert self._chat is not None and self._running is not None
        running, self._running = self._running, None
        self.turn = await _unbroken(self._engine.call(self._chat.end, running, keep))

    async def stop(self) -> None:
        """End the answer now and keep what was said: the iteration ends with a piece whose finish_reason is "abort"."""
        await self._engine.call(self._engine.engine.abort, self._handle)

    async def aclose(self) -> None:
        """End the answer early: its blocks are released, and an unfinished turn is not stored. Does nothing after its
        end.
        """
        self._ended = True
        try:
            if not self._handle.done:
                await _unbroken(self._engine.call(self._engine.engine.abort, self._handle))
        finally:  # also after a cancellation, else the session would stay busy
            if self._running is not None:
                await self._finish(keep=False)

    async def __aenter__(self) -> StreamedAnswer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncChat:
    """A session of an AsyncEngine, made by its `chat`: what `ChatSession` is to an Engine. One turn at a time.

    session: the session itself, for what it knows without waiting.
    """

    def __init__(self, engine: AsyncEngine, session: ChatSession) -> None:
        self.session = session
        self._engine = engine

    @property
    def session_id(self) -> str:
        return self.session.session_id

    @property
    def messages(self) -> list[Message]:
        """The whole transcript."""
        return self.session.messages

    @property
    def num_turns(self) -> int:
        """The number of stored turns."""
        return self.session.num_turns

    @property
    def last(self) -> RequestOutput | None:
        """The last turn's output."""
        return self.session.last

    async def start(self, text: str, params: SamplingParams | None = None) -> StreamedAnswer:
        """Queue a turn for a caller that may end it: `stop` keeps what was said, `aclose` does not."""
        said = [{"role": "user", "content": text}]
        starting = asyncio.ensure_future(self._engine.start_turn(self.session, said, params))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:  # raised once the session is free again
            await _unbroken(_given_back(starting))
            raise

    async def send(self, text: str, params: SamplingParams | None = None) -> RequestOutput:
        """Send one turn, which is durable on return. A cancelled turn is not stored. Raises as `ChatSession.send`."""
        async with await self.start(text, params) as answer:
            async for _ in answer:
                pass
        return answer.output

    async def stream(self, text: str, params: SamplingParams | None = None) -> AsyncIterator[Piece]:
        """`send`, piece by piece. Closing it early ends the answer there and keeps it.

        After a `break`, Python closes a generator only some time later; `contextlib.aclosing` closes it at once.
        """
        async with await self.start(text, params) as answer:
            try:
                async for piece in answer:
                    yield piece
            except GeneratorExit:
                await answer.stop()
                async for _ in answer:
                    pass
                raise

    async def fork(self, session_id: str, turn: int | None = None) -> AsyncChat:
        """See `ChatSession.fork`."""
        return AsyncChat(self._engine, await self._engine.call(self.session.fork, session_id, turn))

    async def keep_last(self, num_turns: int) -> TurnRecord | None:
        """See `ChatSession.keep_last`."""
        return await self._engine.call(self.session.keep_last, num_turns)

    async def set_ttl(self, ttl_s: float | None) -> None:
        """See `ChatSession.set_ttl`."""
        await self._engine.call(self.session.set_ttl, ttl_s)

    async def prefetch(self) -> None:
        """A hint that this session's person is typing."""
        await self._engine.prefetch(self.session_id, self.session.tenant)


class AsyncEngine:
    """Serves requests of an asyncio program from one Engine.

    Requests may come from several event loops. Other threads may still use the engine itself, for example its
    conversations. A cancelled or abandoned `stream` aborts its request. This is an asynchronous context manager, which
    also closes the engine.

    link: that of a RemoteEngine, if the running event loop is to read from its process without a thread in between.
    Then no call in that loop may wait for the engine, and the loop must run until `close` has returned.
    """

    def __init__(self, engine: Front, link: Reading | None = None) -> None:
        self.engine = engine
        self._ports: dict[asyncio.AbstractEventLoop, _Port] = {}
        self._workers = ThreadPoolExecutor(MAX_CALLS, "engine-call")
        self._long_texts = ThreadPoolExecutor(MAX_LONG_TEXTS, "engine-text")
        self._read = link
        if link is not None:
            link.read_here()
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(link.fileno(), link.receive)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run something that blocks off the event loop: tokenizing, templates, sessions, administration.

        At most MAX_CALLS at a time. When the caller is cancelled, the function goes on and its result is dropped.
        """
        return await asyncio.get_running_loop().run_in_executor(self._workers, partial(function, *args, **kwargs))

    async def call_with_text(self, num_chars: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Like `call`, for a function that tokenizes this many characters or decodes this many tokens.

        At most MAX_LONG_TEXTS long ones run at a time, and short ones do not wait for them.
        """
        workers = self._workers if num_chars <= LONG_TEXT_CHARS else self._long_texts
        return await asyncio.get_running_loop().run_in_executor(workers, partial(function, *args, **kwargs))

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> RequestOutput:
        """The whole answer to one prompt. Raises as `Engine.generate`."""
        async with await self.start(prompt, params, tenant, cache_salt, priority) as answer:
            async for _ in answer:
                pass
        return answer.output

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> AsyncIterator[Piece]:
        """The answer piece by piece."""
        async with await self.start(prompt, params, tenant, cache_salt, priority) as answer:
            async for piece in answer:
                yield piece

    async def chat(
        self,
        session_id: str,
        tenant: str = "",
        system: str | None = None,
        truncation: str | None = None,
        truncation_reuse: str | None = None,
    ) -> AsyncChat:
        """The session of this id, created when unknown, else resumed. See `Engine.chat`."""
        named = (session_id, tenant, system, truncation, truncation_reuse)
        return AsyncChat(self, await self.call(self.engine.chat, *named))

    async def prefetch(self, session_id: str, tenant: str = "") -> None:
        """A hint that this session's person is typing. Raises RequestError when there is no such session."""
        await self.call(self.engine.prefetch, session_id, tenant)

    async def flush(self) -> None:
        """Returns when every finished block is synced on disk. Raises DegradedError when the disk cannot write."""
        await self.call(self.engine.flush)

    async def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return await self.call(self.engine.stats)

    async def start(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
        spliced: tuple[Sequence[BlockId], Lineage] | None = None,
        turn_starts: Sequence[int] = (),
    ) -> StreamedAnswer:
        """Queue a prompt; texts are tokenized elsewhere. Raises as `Engine.generate`. spliced, turn_starts: see
        `Engine.submit`.
        """
        port = self._port()
        chosen = params or SamplingParams()

        def submit() -> StreamedAnswer:
            engine, facts = self.engine, self.engine.facts
            token_ids = prompt_ids(prompt, engine.tokenizer, facts.vocab_size, facts.max_request_tokens)
            handle = engine.submit(token_ids, chosen, tenant, cache_salt, priority, spliced, port, turn_starts)
            return StreamedAnswer(self, handle, port)

        if isinstance(prompt, list) and len(prompt) <= MAX_IDS_AT_ONCE:
            return submit()  # never waits, and a thread would cost more than the call
        return await self._begin(submit, len(prompt) if isinstance(prompt, str) else 0)

    async def start_turn(
        self,
        chat: ChatSession,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        idempotency_key: str | None = None,
    ) -> StreamedAnswer:
        """Queue a turn of a session. Raises as `ChatSession.begin`."""
        port = self._port()

        def begin() -> StreamedAnswer:
            checked = params or SamplingParams()
            said = chat.check(messages, checked)
            turn = chat.begin(said, checked, idempotency_key, port)
            answer = StreamedAnswer(self, turn.handle, port, chat)
            answer._running = turn
            return answer

        rendered = [*messages, *([] if chat.token_ids else chat.messages)]
        return await self._begin(begin, sum(len(message["content"]) for message in rendered))

    async def close(self) -> None:
        """Close the engine; running requests end as aborted."""
        await asyncio.to_thread(self.engine.close)  # the loop reads on: a thread that is awaited may want an answer
        if self._read is not None:
            self._loop.remove_reader(self._read.fileno())
            self._read.receive()  # which notifies of their ends

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _port(self) -> _Port:
        """The port of the running event loop."""
        loop = asyncio.get_running_loop()
        port = self._ports.get(loop)
        if port is None:
            port = _Port(loop, self.engine.abort)
            others = {known: other for known, other in self._ports.items() if not known.is_closed()}
            self._ports = {**others, loop: port}
        return port

    async def _begin(self, submit: Callable[[], StreamedAnswer], num_chars: int) -> StreamedAnswer:
        is_wanted = True

        def begin() -> StreamedAnswer:
            if not is_wanted:  # its caller left while it waited for a thread
                raise EngineClosedError("nobody waits for this request any more")
            return submit()

        submitting = asyncio.ensure_future(self.call_with_text(num_chars, begin))
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:  # the thread goes on, and its request has no reader
            is_wanted = False
            submitting.add_done_callback(_abandon)
            raise


async def _given_back(starting: asyncio.Future[StreamedAnswer]) -> None:
    with suppress(KVStoreError):
        await (await starting).aclose()


def _abandon(submitting: asyncio.Future[StreamedAnswer]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        task = submitting.get_loop().create_task(submitting.result().aclose())
        _closing_tasks.add(task)
        task.add_done_callback(_closing_tasks.discard)


_closing_tasks: set[asyncio.Task[None]] = set()  # an event loop holds only weak references to its tasks


async def _unbroken(awaitable: Coroutine[Any, Any, T]) -> T:
    """Wait for a task's end, however often the waiting task is cancelled. Raise the cancellation afterwards."""
    task = asyncio.ensure_future(awaitable)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        task.exception()  # retrieve it, as nobody else does
        raise cancelled
    return task.result()
