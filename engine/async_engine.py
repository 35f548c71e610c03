"""asyncio over an Engine: it steps in a thread of its own or in the loop, each request has one asyncio queue.

The only place beside `service` that knows asyncio.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from engine.chat import ChatSession, Turn
from engine.chat_template import Message
from engine.output_processor import Handle
from engine.outputs import Piece, RequestOutput
from engine.prompts import prompt_ids
from engine.sampling_params import SamplingParams
from kvstore.block import BlockId, Lineage
from kvstore.errors import EngineClosedError, KVStoreError
from kvstore.session_store import TurnRecord

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.remote import RemoteEngine

P = ParamSpec("P")
T = TypeVar("T")
MAX_IDS_AT_ONCE = 4096  # of a prompt that is looked at in the loop: well under a millisecond
MAX_CALLS = 32  # blocking calls at once: turns that wait for the disk, templates, administration
MAX_LONG_TEXTS = 2  # tokenized at once: each takes two hundred times its size meanwhile, and a processor
LONG_TEXT_CHARS = 2**16


@dataclass(slots=True)
class _Waiter:
    """Where pieces of a request go; the queue is read in `loop` only."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Piece | None]  # None: the request has ended
    trace: TracebackType | None = None  # of the error that ended it, before anybody raised that


class Answer:
    """One request's answer as it comes: an asynchronous iterator of pieces, and a context manager that ends it.

    output: complete once the iteration has ended. turn: of a session, the stored turn; it is durable before the last
    piece is handed out. Used by one task. Iterating raises what ended the request, and StoreError when a turn could not
    be stored.
    """

    def __init__(self, engine: AsyncEngine, handle: Handle, waiter: _Waiter, chat: ChatSession | None = None) -> None:
        self.turn: TurnRecord | None = None
        self._engine = engine
        self._handle = handle
        self._waiter = waiter
        self._chat = chat
        self._running: Turn | None = None  # of the chat, until it has ended
        self._ended = False

    @property
    def output(self) -> RequestOutput:
        return self._handle.output

    @property
    def chain(self) -> Sequence[BlockId]:
        """Ids of the first choice's full blocks, once it has ended."""
        return self._handle.chain

    @property
    def lineage(self) -> Lineage | None:
        """What that chain is built on, once it has ended."""
        return self._handle.lineage

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Piece:
        if self._ended:
            raise StopAsyncIteration
        piece = await self._waiter.queue.get()
        self._ended = self._ended or piece is None
        if self._running is not None and (piece is None or piece.finish_reason is not None):
            await self._finish()  # a turn has one choice, so this was its last piece
        if piece is None:
            if self._handle.error is not None:  # others may share it: raised as it was, not as the last one left it
                raise self._handle.error.with_traceback(self._waiter.trace)
            raise StopAsyncIteration
        return piece

    async def _finish(self, keep: bool = True) -> None:
        """Store the turn, whatever becomes of the task that waits for it."""
        assert self._chat is not None and self._running is not None
        running, self._running = self._running, None
        self.turn = await _unbroken(self._engine.call(self._chat.end, running, keep))

    async def stop(self) -> None:
        """End it now and keep what was said: the iteration goes on to a last piece with finish_reason "abort"."""
        await self._engine.call(self._engine.engine.abort, self._handle)

    async def aclose(self) -> None:
        """End it early: its blocks are given back, and a turn that has not ended is not stored. Else does nothing."""
        self._ended = True
        self._engine.leave(self._handle)
        try:
            if not self._handle.done:
                await _unbroken(self._engine.call(self._engine.engine.abort, self._handle))
        finally:  # also when it was cancelled meanwhile: else the session would stay busy
            if self._running is not None:
                await self._finish(keep=False)

    async def __aenter__(self) -> Answer:
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
        """The transcript, whole."""
        return self.session.messages

    @property
    def num_turns(self) -> int:
        """How many are stored."""
        return self.session.num_turns

    @property
    def last(self) -> RequestOutput | None:
        """The last turn's output."""
        return self.session.last

    async def start(self, text: str, params: SamplingParams | None = None) -> Answer:
        """Queue a turn, for who wants to end it by hand: `stop` keeps what was said, `aclose` does not."""
        said = [{"role": "user", "content": text}]
        starting = asyncio.ensure_future(self._engine.start_turn(self.session, said, params))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:  # raised once the session is free again
            await _unbroken(_given_back(starting))
            raise

    async def send(self, text: str, params: SamplingParams | None = None) -> RequestOutput:
        """One turn, durable on return; when it is cancelled it is not stored. Raises as `ChatSession.send`."""
        async with await self.start(text, params) as answer:
            async for _ in answer:
                pass
        return answer.output

    async def stream(self, text: str, params: SamplingParams | None = None) -> AsyncIterator[Piece]:
        """`send`, piece by piece. Closing it early ends the answer there and keeps it.

        Python closes a generator that was left by `break` some time later: `contextlib.aclosing` does it at once.
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
    """Serves requests of an asyncio program from one Engine, which only its thread, or the loop, steps from now on.

    Requests may come from several event loops; other threads may go on to use the engine itself, its conversations for
    instance. A cancelled or abandoned `stream` aborts its request. An asynchronous context manager, which closes the
    engine, too.

    in_loop: the running event loop takes in what a RemoteEngine's process says, without a thread in between: nothing
    that waits for the engine may be called in that loop then, and it has to go on until `close` has returned.
    """

    def __init__(self, engine: Engine | RemoteEngine, in_loop: bool = False) -> None:
        self.engine = cast("Engine", engine)  # both have the same verbs
        self._waiters: dict[str, tuple[Handle, _Waiter]] = {}
        self._closing = False
        self._workers = ThreadPoolExecutor(MAX_CALLS, "engine-call")
        self._long_texts = ThreadPoolExecutor(MAX_LONG_TEXTS, "engine-text")
        self._loop: asyncio.AbstractEventLoop | None = None
        if in_loop:
            self._loop = asyncio.get_running_loop()
            self._descriptor = cast("RemoteEngine", engine).fileno()
            engine.drive(threading.current_thread())
            self._loop.add_reader(self._descriptor, self._step)
            return
        self._thread = threading.Thread(target=self._run, name="kvstore-engine", daemon=True)
        engine.drive(self._thread)
        self._thread.start()
        atexit.register(self._stop)  # a thread in the middle of a step must not meet the interpreter's end

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run something that blocks off the event loop: tokenizing, templates, sessions, administration.

        At most MAX_CALLS at a time. When the caller is cancelled the function goes on, its result unseen.
        """
        return await asyncio.get_running_loop().run_in_executor(self._workers, partial(function, *args, **kwargs))

    async def call_with_text(
        self, num_chars: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """As `call`, for what tokenizes so many characters, or makes text of so many tokens.

        Long ones go MAX_LONG_TEXTS at a time, and keep nobody waiting who has a short one.
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

    async def stats(self) -> dict[str, object]:
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
    ) -> Answer:
        """Queue a prompt; texts are tokenized elsewhere. Raises as `Engine.generate`. spliced: see `Engine.submit`."""
        waiter = self._new_waiter()
        chosen = params or SamplingParams()

        def submit() -> Answer:
            engine = self.engine
            token_ids = prompt_ids(prompt, engine.tokenizer, engine.vocab_size, engine.max_request_tokens)
            announce = partial(self._announce, waiter)
            handle = self.engine.submit(token_ids, chosen, tenant, cache_salt, priority, spliced, announce)
            return Answer(self, handle, waiter)

        is_short = isinstance(prompt, list) and len(prompt) <= MAX_IDS_AT_ONCE
        if is_short and waiter.loop is self._loop:  # nothing in it waits: a thread would cost more than it does
            return submit()
        return await self._begin(submit, len(prompt) if isinstance(prompt, str) else 0)

    async def start_turn(
        self,
        chat: ChatSession,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        idempotency_key: str | None = None,
    ) -> Answer:
        """Queue a turn of a session. Raises as `ChatSession.begin`."""
        waiter = self._new_waiter()

        def begin() -> Answer:
            checked = params or SamplingParams()
            said = chat.check(messages, checked)
            submit = partial(self.engine.submit, announce=partial(self._announce, waiter))
            turn = chat.begin(said, checked, idempotency_key, submit)
            answer = Answer(self, turn.handle, waiter, chat)
            answer._running = turn
            return answer

        rendered = [*messages, *([] if chat.token_ids else chat.messages)]
        return await self._begin(begin, sum(len(message["content"]) for message in rendered))

    async def close(self) -> None:
        """Close the engine; running requests end as aborted."""
        if self._loop is None:
            await asyncio.to_thread(self._stop)
            return
        self._closing = True
        self._loop.remove_reader(self._descriptor)
        await asyncio.to_thread(self.engine.close)
        self._deliver_all()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def leave(self, handle: Handle) -> None:
        """Nobody reads the pieces of this request any more."""
        self._waiters.pop(handle.request_id, None)

    @staticmethod
    def _new_waiter() -> _Waiter:
        return _Waiter(asyncio.get_running_loop(), asyncio.Queue())

    async def _begin(self, submit: Callable[[], Answer], num_chars: int) -> Answer:
        is_wanted = True

        def begin() -> Answer:
            if not is_wanted:  # it has waited for a thread, longer than its caller did
                raise EngineClosedError("nobody waits for this request any more")
            return submit()

        submitting = asyncio.ensure_future(self.call_with_text(num_chars, begin))
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:  # a thread that has begun goes on: what it submits has no reader
            is_wanted = False
            submitting.add_done_callback(_abandon)
            raise

    def _announce(self, waiter: _Waiter, handle: Handle) -> None:
        """Called before any step can see the request: no piece comes before its waiter is known."""
        if self._closing:
            raise EngineClosedError("the engine is closed")
        self._waiters[handle.request_id] = (handle, waiter)

    # -- steps -----------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self.engine.warm_up()
            while True:
                self.engine.wait_for_work(self._is_over)
                if self._is_over():
                    return
                self._step()
        finally:  # whatever ended this thread, nobody may wait for it
            self._closing = True
            try:
                self.engine.close()
            finally:
                self._deliver_all()

    def _is_over(self) -> bool:
        return self._closing or self.engine.closed

    def _step(self) -> None:
        try:
            touched = self.engine.step()
        except Exception:  # it has ended every request with this error; each caller gets it from its handle
            self._deliver_all()
        else:
            self._deliver(touched)

    def _deliver_all(self) -> None:
        self._deliver([handle for handle, _ in list(self._waiters.values())])

    def _deliver(self, handles: Sequence[Handle]) -> None:
        """Hand new pieces to their loops, one call each: waking a loop costs more than the pieces."""
        parcels: dict[asyncio.AbstractEventLoop, list[tuple[_Waiter, list[Piece | None]]]] = {}
        for handle in handles:
            entry = self._waiters.get(handle.request_id)
            if entry is None:
                continue
            pieces: list[Piece | None] = []
            done = handle.done  # read before the pieces: none can follow once it is set
            while handle.pieces:
                pieces.append(handle.pieces.popleft())
            if done:
                pieces.append(None)
                entry[1].trace = None if handle.error is None else handle.error.__traceback__
                self._waiters.pop(handle.request_id, None)
            parcels.setdefault(entry[1].loop, []).append((entry[1], pieces))
        if self._loop in parcels:
            _put_all(parcels.pop(self._loop))
        for loop, parcel in parcels.items():
            try:
                loop.call_soon_threadsafe(_put_all, parcel)
            except RuntimeError:  # the loop was closed without cancelling: nobody will read this
                self._abort_all_of(loop)

    def _abort_all_of(self, loop: asyncio.AbstractEventLoop) -> None:
        for handle, waiter in list(self._waiters.values()):
            if waiter.loop is loop:
                self.leave(handle)
                self.engine.abort(handle)

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        self._closing = True
        self.engine.wake()
        self._thread.join()


def _put_all(parcel: list[tuple[_Waiter, list[Piece | None]]]) -> None:
    for waiter, pieces in parcel:
        for piece in pieces:
            waiter.queue.put_nowait(piece)


async def _given_back(starting: asyncio.Future[Answer]) -> None:
    with suppress(KVStoreError):
        await (await starting).aclose()


def _abandon(submitting: asyncio.Future[Answer]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        task = submitting.get_loop().create_task(submitting.result().aclose())
        _closing_tasks.add(task)
        task.add_done_callback(_closing_tasks.discard)


_closing_tasks: set[asyncio.Task[None]] = set()  # a loop refers to its tasks weakly


async def _unbroken(awaitable: Coroutine[Any, Any, T]) -> T:
    """Wait for its end even when the waiting task is cancelled, however often; the cancellation follows then."""
    task = asyncio.ensure_future(awaitable)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        task.exception()  # seen: nobody else will look
        raise cancelled
    return task.result()
