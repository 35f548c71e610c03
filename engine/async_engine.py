"""asyncio over an Engine: the stepping thread wakes each event loop once for all of its requests.

Only this module, `turns` and `service` know asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from kvstore.engine.client.messages import Spliced
from kvstore.engine.client.requests import Handle
from kvstore.engine.engine import Engine
from kvstore.engine.outputs import NO_EARLIER, Earlier, EditResult, Piece, RequestOutput
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.sessions.chat import ChatSession, Recalled
from kvstore.engine.sessions.edits import Directive
from kvstore.engine.sessions.window import OneTurn
from kvstore.engine.stats import EngineStats
from kvstore.engine.text.chat_template import Message
from kvstore.engine.text.language import NewParser, no_parser
from kvstore.engine.text.prompts import (
    NO_OPTIONS,
    AnswerOptions,
    ToolsGiven,
    messages_of,
    num_chars_of,
    options_of,
    prompt_ids,
)
from kvstore.engine.turns import Hold, Port, Script, Turn, held
from kvstore.sessions.record import TurnRecord

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
MAX_IDS_AT_ONCE = 4096  # the event loop checks prompts up to this length itself, well under a millisecond
MAX_CALLS = 32  # blocking calls that run at once: turns that wait for the disk, templates, administration
MAX_WAITING = 32  # calls that wait longer
MAX_LONG_TEXTS = 2  # tokenized at once; each takes two hundred times its size in memory, and a processor
LONG_TEXT_CHARS = 2**16


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

    async def start(
        self, said: str | Sequence[Message], params: SamplingParams | None = None, tools: ToolsGiven = (),
        thinking: str | None = None,
    ) -> Turn[TurnRecord | None]:  # fmt: skip
        """Queue a turn for a caller that may end it: `stop` keeps what was said, `aclose` does not. Its result is the
        stored turn; None if nothing was said. said, tools, thinking: see `ChatSession.send`.
        """
        engine, messages, options = self._engine, messages_of(said), options_of(tools, thinking)

        async def script(turn: Turn[TurnRecord | None]) -> TurnRecord | None:
            async with held(engine.engine.chats.claims, self.session.key, None, turn) as hold:
                return await engine.computed(
                    turn, hold, lambda: self.session, messages, params or SamplingParams(),
                    lambda _, record, __: record, options=options,
                )  # fmt: skip

        return await engine.turn(script).begun()

    async def send(
        self, said: str | Sequence[Message], params: SamplingParams | None = None, tools: ToolsGiven = (),
        thinking: str | None = None,
    ) -> RequestOutput:  # fmt: skip
        """Send one turn, which is durable on return. A cancelled turn is not stored. Raises as `ChatSession.send`."""
        async with await self.start(said, params, tools, thinking) as answer:
            async for _ in answer:
                pass
        return answer.output

    async def stream(
        self, said: str | Sequence[Message], params: SamplingParams | None = None, tools: ToolsGiven = (),
        thinking: str | None = None,
    ) -> AsyncIterator[Piece]:  # fmt: skip
        """`send`, piece by piece. Closing it early ends the answer there and keeps it.

        After a `break`, Python closes a generator only some time later; `contextlib.aclosing` closes it at once.
        """
        async with await self.start(said, params, tools, thinking) as answer:
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

    async def edit(
        self, edits: Sequence[Directive | Mapping[str, Any]], reuse: str = "exact", expected_turn: int | None = None
    ) -> EditResult:
        """See `ChatSession.edit`."""
        return await self._engine.call_that_waits(self.session.edit, edits, reuse, expected_turn)

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

    reads: the running event loop reads what the core's own process says, without a thread in between. Then no call in
    that loop may wait for the engine, and the loop must run until `close` has returned.
    """

    def __init__(self, engine: Engine, reads: bool = False) -> None:
        self.engine = engine
        self._ports: dict[asyncio.AbstractEventLoop, Port] = {}
        self._turns: set[asyncio.Task[None]] = set()  # an event loop refers to its tasks only weakly
        self._workers = ThreadPoolExecutor(MAX_CALLS, "engine-call")
        self._waiting = ThreadPoolExecutor(MAX_WAITING, "engine-wait")
        self._long_texts = ThreadPoolExecutor(MAX_LONG_TEXTS, "engine-text")
        self._reads = reads and engine.core.read_here()
        if self._reads:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(engine.core.fileno(), engine.client.receive)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run something that blocks off the event loop: tokenizing, templates, sessions, administration.

        At most MAX_CALLS at a time. When the caller is cancelled, the function goes on and its result is dropped.
        """
        return await asyncio.get_running_loop().run_in_executor(self._workers, partial(function, *args, **kwargs))

    async def call_that_waits(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Like `call`, for a function that waits for what is computed, or for the disk. At most MAX_WAITING at a time;
        others do not wait for them.
        """
        return await asyncio.get_running_loop().run_in_executor(self._waiting, partial(function, *args, **kwargs))

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
        await self.call_that_waits(self.engine.flush)

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
    ) -> Turn[Handle]:
        """Queue a prompt; texts are tokenized elsewhere. Raises as `Engine.generate`."""

        async def script(turn: Turn[Handle]) -> Handle:
            handle = await self.submit(turn, prompt, params, tenant, cache_salt, priority)
            await turn.computed(handle)
            handle.raise_error()
            return handle

        return await self.turn(script).begun()

    async def computed(
        self, turn: Turn[Any], hold: Hold, opened: Callable[[], ChatSession], messages: Sequence[Message],
        params: SamplingParams, ended: Callable[[ChatSession, TurnRecord | None, RequestOutput], T],
        after_turn: int | None = None, options: AnswerOptions = NO_OPTIONS, recall: Recalled | None = None,
        num_chars: int = 0,
    ) -> T:  # fmt: skip
        """The holder's turn of a session, for the script of this turn. after_turn, recall: see `ChatSession.begin`.

        opened: gives the session; it has this number of characters to tokenize. ended: gets the stored turn, if any.
        Both may wait.
        """
        port, chat = self.port, None

        def begin() -> OneTurn | int:
            """The turn; or the number of characters that it has to encode, where they are many."""
            nonlocal chat
            turn.check_wanted()
            is_opened = chat is not None
            chat = chat or opened()
            num_chars = num_chars_of([*messages, *([] if chat.token_ids else chat.messages)])
            if num_chars > LONG_TEXT_CHARS and not is_opened:
                return num_chars
            return chat.begin(hold, chat.check(messages, params), params, port, after_turn, options, recall)

        def end() -> T:
            assert chat is not None and not isinstance(begun, int)
            record = chat.end(hold, keep=not turn.is_abandoned)
            begun.handle.raise_error()
            return ended(chat, record, begun.handle.output)

        if any("reuse" in message for message in messages):
            begun = await self.call_that_waits(begin)
        else:
            begun = await self.call_with_text(num_chars, begin)
        if isinstance(begun, int):
            begun = await self.call_with_text(begun, begin)
        assert chat is not None and not isinstance(begun, int)
        turn.session_id, turn.number = chat.session_id, chat.num_turns + 1 + (begun.cleared is not None)
        try:
            await turn.computed(begun.handle)
        finally:
            result = await self.call(end)
        return result

    def turn(self, script: Script[R]) -> Turn[R]:
        """Run this script as an answer of the running event loop."""
        turn = Turn(self.port, script)
        self._turns.add(turn.task)
        turn.task.add_done_callback(self._turns.discard)
        return turn

    async def submit(
        self,
        turn: Turn[Any],
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
        spliced: Spliced | None = None,
        turn_starts: Sequence[int] = (),
        parser: NewParser = no_parser,
        earlier: Earlier = NO_EARLIER,
    ) -> Handle:
        """Queue a prompt for the script of this turn. See `start`, and `CoreClient.submit`."""
        port, chosen = self.port, params or SamplingParams()

        def submit() -> Handle:
            turn.check_wanted()
            engine, facts = self.engine, self.engine.facts
            token_ids = prompt_ids(prompt, engine.tokenizer, facts.vocab_size, facts.max_request_tokens)
            return engine.submit(
                token_ids, chosen, tenant, cache_salt, priority, spliced, port, turn_starts, (), parser, earlier
            )

        if isinstance(prompt, list) and len(prompt) <= MAX_IDS_AT_ONCE:
            return submit()  # never waits, and a thread would cost more than the call
        return await self.call_with_text(len(prompt) if isinstance(prompt, str) else 0, submit)

    async def close(self) -> None:
        """Close the engine; running requests end as aborted."""
        await asyncio.to_thread(self.engine.close)  # the loop reads on: a thread that is awaited may want an answer
        if self._reads:
            self._loop.remove_reader(self.engine.core.fileno())
            self.engine.client.receive()  # which notifies of their ends
        mine = [task for task in self._turns if task.get_loop() is asyncio.get_running_loop()]
        if mine:
            await asyncio.wait(mine)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def port(self) -> Port:
        """The listener of the running event loop."""
        loop = asyncio.get_running_loop()
        port = self._ports.get(loop)
        if port is None:
            port = Port(loop, self.engine.client.end)
            others = {known: other for known, other in self._ports.items() if not known.is_closed()}
            self._ports = {**others, loop: port}
        return port
