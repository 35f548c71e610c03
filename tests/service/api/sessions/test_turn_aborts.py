"""A turn whose reader leaves at any of its awaits: over a core that is simulated, in an event loop that a seed replays.

For every k the reader is cancelled where it waits for the k-th time; a stop and a deletion come at every k-th round of
the loop. Afterwards nothing is held, the transcript has the turn whole or not at all, and the session goes on.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import ExitStack
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvstore import AsyncEngine, Engine, SamplingParams
from kvstore.blocks.ids import Lineage
from kvstore.engine.builtin import MODEL_DIR
from kvstore.engine.client.messages import Forget, ReadStats
from kvstore.engine.core.request import Ended, Said, Update
from kvstore.engine.outputs import Facts
from kvstore.engine.sessions.recall import Recall
from kvstore.errors import KVStoreError
from kvstore.service.api.exchange import Context, Exchange
from kvstore.service.api.openai.stateless import StatelessRequest, open_stateless
from kvstore.service.api.sessions.turns import TurnRequest, delete, open_turn
from kvstore.service.http.access import Access
from kvstore.service.http.errors import ApiError
from kvstore.service.http.limits import Limits
from kvstore.service.http.telling import Metrics
from kvstore.service.settings.serve_options import ServeOptions
from kvstore.sessions.record import SessionKey
from tests.support.waiting import wait_in_loop

KEY = SessionKey("", "one")
TOKENIZER = AutoTokenizer.from_pretrained(MODEL_DIR)
NUM_TOKENS = 4


class SeededLoop(asyncio.SelectorEventLoop):
    """What goes to a thread is done by the loop itself, some rounds later: the seed says how many."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future:
        done = self.create_future()

        def work(rounds: int) -> None:
            if rounds:
                self.call_soon(work, rounds - 1)
                return
            try:
                result = function(*args)
            except Exception as error:
                if not done.cancelled():
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(result)

        self.call_soon(work, self.rng.randrange(4))
        return done

    async def rounds(self, count: int) -> None:
        """Let others go on for so many rounds."""
        over = self.create_future()

        def pass_one(left: int) -> None:
            if left:
                self.call_soon(pass_one, left - 1)
            else:
                over.set_result(None)

        pass_one(count)
        await over


class SimulatedCore:
    """A `Core` in the loop: a token for each request now and then, `NUM_TOKENS` in all."""

    facts = Facts("simulated", 1024, 1024, 16, 1, 8192, b"f" * 32, b"s" * 32, {}, 64)
    life, state, pid, silent_s, is_reader = 0, "running", None, 0.0, True

    def __init__(self, loop: SeededLoop) -> None:
        self.loop = loop
        self.running: dict[str, int] = {}  # tokens said, by request
        self.news: deque[Update] = deque()
        self.on_news: Callable[[], None] = lambda: None

    def check_open(self) -> None:
        """It is open."""

    def submit(self, prompts: Any) -> None:
        for prompt in prompts:
            self.running[prompt.request_id] = 0
            self.loop.call_soon(self._step, prompt.request_id)

    def end(self, request_id: str, index: int | None = None, stop_string: str | None = None) -> None:
        if self.running.pop(request_id, None) is not None:
            self._say(Update(request_id, [Said(0, None, "abort")], Ended(lineage=Lineage(b"r" * 32))))

    def call(self, verb: Any) -> Any:
        if isinstance(verb, ReadStats):
            return {"hbm": {"blocks": 1, "block_bytes": 1}}
        return isinstance(verb, Forget) or None

    def take_news(self) -> list[Update]:
        news = list(self.news)
        self.news.clear()
        return news

    def read_here(self) -> bool:
        return False

    def close(self) -> None:
        for request_id in list(self.running):
            self.end(request_id)

    def _step(self, request_id: str) -> None:
        if request_id not in self.running:
            return
        if self.loop.rng.random() < 0.5:
            self.running[request_id] += 1
            token_id = self.loop.rng.randrange(100, 200)
            if self.running[request_id] < NUM_TOKENS:
                self._say(Update(request_id, [Said(0, token_id)]))
            else:
                del self.running[request_id]
                self._say(Update(request_id, [Said(0, token_id, "length")], Ended(lineage=Lineage(b"r" * 32))))
        self.loop.call_soon(self._step, request_id)

    def _say(self, update: Update) -> None:
        self.news.append(update)
        self.on_news()


class AbortedAt:
    """Awaits a coroutine, and cancels it where it waits for the k-th time. was_aborted: it waited that often."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int | None) -> None:
        self.coroutine, self.at, self.was_aborted = coroutine, at, False

    def __await__(self) -> Generator[Any, None, Any]:
        num_waits, send = 0, lambda: self.coroutine.send(None)
        while True:
            try:
                waiting = send()
            except StopIteration as result:
                return result.value
            num_waits += 1
            send = lambda: self.coroutine.send(None)  # noqa: E731 (what comes next differs once)
            if num_waits == self.at:
                self.was_aborted = True
                send = lambda: self.coroutine.throw(asyncio.CancelledError())  # noqa: E731
                continue
            yield waiting


def opened(loop: SeededLoop) -> tuple[Context, SimulatedCore]:
    engine = Engine.__new__(Engine)
    engine.core = core = SimulatedCore(loop)
    engine.tokenizer = TOKENIZER
    engine._open_front(None, None, ExitStack())
    options = ServeOptions()
    context = Context(options, Access(options), Limits(options), Metrics(), 0)
    context.open(AsyncEngine(engine), Recall(engine.chats))
    return context, core


def wanted(text: str, is_new: bool = False) -> TurnRequest:
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    return TurnRequest("", KEY.session_id, is_new, None, [{"role": "user", "content": text}], params)


async def read(context: Context, request: TurnRequest) -> int | None:
    """The turn's number; None if it was not stored."""
    async with open_turn(context, Exchange("a", "/chat"), request) as (turn,):
        async for _ in turn:
            pass
        return (await turn.result()).number


async def idle(context: Context, core: SimulatedCore) -> None:
    await wait_in_loop(
        lambda: not core.running and context.claims.on(KEY) is None and not context.limits.num_admitted, "all is free"
    )


def texts(context: Context) -> list[str]:
    state = context.engine.engine.sessions.load(KEY)
    return [] if state is None else [message["content"] for message in state.messages if message["role"] == "user"]


@pytest.mark.parametrize("seed", range(5))
def test_a_reader_that_leaves_at_any_await_leaves_nothing_behind(seed, caplog):
    at, outcomes = 0, set()
    was_aborted = True
    while was_aborted:
        at += 1
        loop = SeededLoop(seed)

        async def scenario(at: int = at, loop: SeededLoop = loop) -> bool:
            context, core = opened(loop)
            assert await read(context, wanted("Hello", is_new=True)) == 1
            reader, number = AbortedAt(read(context, wanted("Again")), at), None
            try:
                number = await reader
            except asyncio.CancelledError:
                assert reader.was_aborted
            await idle(context, core)
            said = texts(context)
            assert said in (["Hello"], ["Hello", "Again"])
            if number is not None:
                assert said == ["Hello", "Again"]
            outcomes.add(len(said))
            assert await read(context, wanted("And more")) == len(said) + 1
            await idle(context, core)
            await context.engine.close()
            return reader.was_aborted

        with asyncio.Runner(loop_factory=lambda loop=loop: loop) as runner:
            was_aborted = runner.run(scenario())
    assert at > 5 and outcomes == {1, 2} and not caplog.messages


@pytest.mark.parametrize("stops", [True, False])
def test_a_reader_that_leaves_a_stateless_answer_is_no_failure_to_log(stops, caplog):
    """Nor is what a server that stops just then has ended."""
    history = StatelessRequest("", [{"role": "user", "content": "Hello"}], wanted("Hello").params)
    for seed in range(20):
        loop = SeededLoop(seed)

        async def scenario(loop: SeededLoop = loop) -> None:
            context, core = opened(loop)
            async with open_stateless(context, Exchange("a", "/v1/chat/completions"), history):
                await loop.rounds(loop.rng.randrange(4))
                if stops:
                    core.close()
                    await loop.rounds(loop.rng.randrange(4))
            await context.engine.close()

        with asyncio.Runner(loop_factory=lambda loop=loop: loop) as runner:
            runner.run(scenario())
    assert not caplog.messages


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("deed", ["stop", "delete"])
def test_a_stop_or_a_deletion_in_any_round_of_the_loop(seed, deed):
    outcomes = set()
    for at in range(1, 60):
        loop = SeededLoop(seed)

        async def scenario(at: int = at, loop: SeededLoop = loop) -> None:
            context, core = opened(loop)
            await read(context, wanted("Hello", is_new=True))
            reading = asyncio.ensure_future(read(context, wanted("Again")))
            await loop.rounds(at)
            if deed == "delete":
                await delete(context, KEY)
            elif (hold := context.claims.on(KEY)) is not None:
                await hold.owner.stop()
            try:
                number = await reading
            except (ApiError, KVStoreError):
                assert deed == "delete"
                number = None
            await idle(context, core)
            said = texts(context)
            outcomes.add((number, len(said)))
            assert said == [] if deed == "delete" else len(said) == (number or 1)
            await context.engine.close()

        with asyncio.Runner(loop_factory=lambda loop=loop: loop) as runner:
            runner.run(scenario())
    assert len(outcomes) == 2
