"""asyncio over an Engine: the engine steps in a thread of its own, each request has one asyncio queue.

The only place beside `service` that knows asyncio.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from engine.engine import Engine
from engine.output_processor import Handle
from engine.outputs import Piece, RequestOutput
from engine.prompts import prompt_ids
from engine.sampling_params import SamplingParams
from kvstore.errors import EngineClosedError


@dataclass(slots=True)
class _Waiter:
    """Where pieces of a request go; the queue is read in `loop` only."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Piece | None]  # None: the request has ended


class AsyncEngine:
    """Serves requests of an asyncio program from one Engine, which only its thread steps from now on.

    Requests may come from several event loops; other threads may go on to use the engine itself, its conversations for
    instance. A cancelled or abandoned `stream` aborts its request.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._waiters: dict[str, tuple[Handle, _Waiter]] = {}
        self._submitting = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvstore-engine", daemon=True)
        engine.drive(self._thread)
        self._thread.start()
        atexit.register(self._stop)  # a thread in the middle of a step must not meet the interpreter's end

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> RequestOutput:
        """The whole answer to one prompt. Raises as `Engine.generate`."""
        handle, waiter = await self._submit(prompt, params, tenant, cache_salt, priority)
        async with aclosing(self._pieces(handle, waiter)) as pieces:
            async for _ in pieces:
                pass
        return handle.output

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> AsyncIterator[Piece]:
        """The answer piece by piece."""
        handle, waiter = await self._submit(prompt, params, tenant, cache_salt, priority)
        async with aclosing(self._pieces(handle, waiter)) as pieces:
            async for piece in pieces:
                yield piece

    async def close(self) -> None:
        """Stop the thread and close the engine; running requests end as aborted."""
        await asyncio.to_thread(self._stop)

    async def _submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        tenant: str,
        cache_salt: str,
        priority: int,
    ) -> tuple[Handle, _Waiter]:
        """Tokenize and queue off the event loop: both may take a while, and a step holds the engine's lock."""
        waiter = _Waiter(asyncio.get_running_loop(), asyncio.Queue())
        arguments = (waiter, prompt, params or SamplingParams(), tenant, cache_salt, priority)
        submitting = waiter.loop.run_in_executor(None, self._submit_now, *arguments)
        try:
            return await asyncio.shield(submitting), waiter
        except asyncio.CancelledError:  # the thread goes on: what it submits has no reader
            submitting.add_done_callback(self._abandon)
            raise

    def _abandon(self, submitting: asyncio.Future[Handle]) -> None:
        if not submitting.cancelled() and submitting.exception() is None:
            handle = submitting.result()
            self._waiters.pop(handle.request_id, None)
            submitting.get_loop().run_in_executor(None, self.engine.abort, handle)

    def _submit_now(
        self,
        waiter: _Waiter,
        prompt: str | Sequence[int],
        params: SamplingParams,
        tenant: str,
        cache_salt: str,
        priority: int,
    ) -> Handle:
        token_ids = prompt_ids(prompt, self.engine.tokenizer, self.engine.spec.vocab_size)
        with self._submitting:  # the first piece must not come before its waiter is known
            if self._closing:
                raise EngineClosedError("the engine is closed")
            handle = self.engine.submit(token_ids, params, tenant, cache_salt, priority)
            self._waiters[handle.request_id] = (handle, waiter)
        return handle

    async def _pieces(self, handle: Handle, waiter: _Waiter) -> AsyncGenerator[Piece]:
        try:
            while (piece := await waiter.queue.get()) is not None:
                yield piece
            if handle.error is not None:
                raise handle.error
        finally:
            if not handle.done:
                self._waiters.pop(handle.request_id, None)
                await asyncio.shield(asyncio.to_thread(self.engine.abort, handle))

    # -- the engine's thread -----------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while True:
                self.engine.wait_for_work(self._is_over)
                if self._is_over():
                    return
                self._step()
        finally:  # whatever ended this thread, nobody may wait for it
            self._closing = True
            self.engine.close()
            self._deliver_all()

    def _is_over(self) -> bool:
        return self._closing or self.engine.closed

    def _step(self) -> None:
        try:
            touched = self.engine.step()
        except Exception:  # it has ended every request with this error; each caller gets it from its handle
            self._deliver_all()
        else:
            for handle in touched:
                self._deliver(handle)

    def _deliver_all(self) -> None:
        with self._submitting:
            handles = [handle for handle, _ in self._waiters.values()]
        for handle in handles:
            self._deliver(handle)

    def _deliver(self, handle: Handle) -> None:
        """Hand a request's new pieces to its loop, in one call."""
        with self._submitting:
            entry = self._waiters.get(handle.request_id)
        if entry is None:
            return
        waiter = entry[1]
        pieces: list[Piece | None] = []
        done = handle.done  # read before the pieces: none can follow once it is set
        while handle.pieces:
            pieces.append(handle.pieces.popleft())
        if done:
            pieces.append(None)
            self._waiters.pop(handle.request_id, None)
        try:
            waiter.loop.call_soon_threadsafe(_put_all, waiter.queue, pieces)
        except RuntimeError:  # its loop was closed without cancelling: nobody will read this
            self._waiters.pop(handle.request_id, None)
            self.engine.abort(handle)

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        self._closing = True
        self.engine.wake()
        self._thread.join()


def _put_all(queue: asyncio.Queue[Piece | None], pieces: list[Piece | None]) -> None:
    for piece in pieces:
        queue.put_nowait(piece)
