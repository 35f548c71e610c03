"""A core in a process of its own, at both ends: starts, watches, restarts and closes it; serves it in that process.

So tokenizing, templates, the text of answers and HTTP do not share an interpreter with the engine's steps.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import selectors
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec

from kvstore.engine.client.messages import (
    Answered,
    Call,
    Called,
    CallsTool,
    Close,
    Core,
    End,
    Opened,
    ReadStats,
    Starting,
    State,
    Submit,
    Updates,
    decode_inbound,
    decode_outbound,
    decode_result,
)
from kvstore.engine.core.request import Ended, Update
from kvstore.engine.outputs import Facts
from kvstore.engine.process import Channel, Child, Failed, Heart, encode
from kvstore.engine.progress import begin
from kvstore.errors import EngineClosedError, EngineDiedError, EngineOverloadedError, KVStoreError, RequestError

R = TypeVar("R")
MAX_REQUESTS = 16384
POLL_S = 1.0
SILENT_S = 10.0  # without a sign of life: it gets no new request, and nobody waits for it who need not
LOOK_S = 0.25  # how often to look whether it still gives signs
WINDOW_S = 3600.0  # the limit of restarts counts the ends of this span
MAX_DELAY_S = 60.0
SEND_LIMIT = 1 << 16  # unsent messages; a front's limit on requests keeps it far below
LOGGER = logging.getLogger("kvstore.engine")
WATCH, READ = "kvstore-core-watch", "kvstore-core-read"
LOOK_MS = 1000  # how often the process looks whether its core has ended by itself
MAX_CALLS = 32  # that run at once in the process; others wait for their turn
NOTHING = msgspec.Raw(encode(None))


@dataclass(slots=True)
class Restarts:
    """The first restart comes at once, the next after a second; then the delay doubles up to MAX_DELAY_S."""

    limit: int  # ends within WINDOW_S; after one more the process stays down
    clock: Callable[[], float] = time.monotonic
    num_restarts: int = 0  # counted by whoever starts the process, also when the start fails
    why: str = ""  # how the last process ended
    delay_s: float = 0.0  # to wait before the next start
    _ends_s: deque[float] = field(default_factory=deque)  # when processes, and attempts to start one, ended

    def note_end(self, how: str) -> bool:
        """Count an end. Returns whether the process is to be started again."""
        now = self.clock()
        self._ends_s.append(now)
        while now - self._ends_s[0] > WINDOW_S:
            self._ends_s.popleft()
        num_ends = len(self._ends_s)
        self.why, self.delay_s = how, min(2.0 ** (num_ends - 2), MAX_DELAY_S) if num_ends > 1 else 0.0
        if goes_on := num_ends <= self.limit:
            following = f"it is started again in {self.delay_s:g} s, {num_ends} of {self.limit} an hour"
        else:
            following = f"it is not started again: the limit of restarts an hour is {self.limit}"
        LOGGER.error("the engine's process ended (%s); %s", how, following)
        return goes_on


class Readiness:
    """What a reader waits for: channels that are registered with `selector`, or a call of `wake` in any thread."""

    def __init__(self) -> None:
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._alarm, selectors.EVENT_READ)
        weakref.finalize(self, _close, self.selector, self._alarm)

    def fileno(self) -> int:
        """A descriptor, always the same, that is readable when there is something to read."""
        return self.selector.fileno()

    def wait(self, timeout_s: float) -> None:
        self.selector.select(timeout_s)

    def wake(self) -> None:
        os.eventfd_write(self._alarm, 1)

    def drain(self) -> None:
        """Forget the calls of `wake` so far. Call it before reading what they announced."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._alarm)


def _close(selector: selectors.BaseSelector, alarm: int) -> None:
    selector.close()
    os.close(alarm)


class RemoteCore:
    """A `Core`. Nobody waits for the process while holding the lock of `changed`, under which all is sent and received.

    start: starts a process. max_restarts: how often, within an hour. shutdown_s: how long `close` waits before it kills
    the process. max_requests: in the process at once; this bounds what is queued between the two processes. facts: of
    the process that runs, or ran last. started: done when it is ready; has the error if it could not be opened.
    """

    def __init__(self, start: Callable[[], Child], max_restarts: int, shutdown_s: float) -> None:
        self._start, self._shutdown_s = start, shutdown_s
        self.max_requests = MAX_REQUESTS
        self.changed = threading.Condition()  # the state has changed
        self.state: State = "starting"
        self.restarts = Restarts(max_restarts)
        self.facts: Facts
        self.on_news: Callable[[], None] = lambda: None
        self._running = set[str]()  # ids of requests
        self._lost = list[Update]()  # the ends of those that ended with their process
        self._calls: dict[int, Future[msgspec.Raw]] = {}  # by number, until they are answered
        self._numbers = itertools.count()
        self._child: Child | None = None
        self._owner = os.getpid()
        self.readiness = Readiness()
        self.reader: threading.Thread | None = None  # the thread that reads the process' messages
        self.started: Future[None] = Future()
        self._watcher = threading.Thread(target=self._watch, name=WATCH, daemon=True)
        self._watcher.start()

    @property
    def life(self) -> int:
        return self.restarts.num_restarts

    @property
    def num_requests(self) -> int:
        return len(self._running)

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    @property
    def answers(self) -> bool:
        """Whether it runs and gives signs of life."""
        return self.is_running and self.silent_s < SILENT_S

    @property
    def is_over(self) -> bool:
        """Whether no process runs any more, and none is started again."""
        return self.state in ("closed", "failed")

    # -- the process -------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        """Start and watch one process after the other."""
        try:
            child: Child | None = self._begin()
        except Exception as error:
            self.started.set_exception(error)
            return
        self.started.set_result(None)
        while child is not None:
            how = child.wait()
            with self.changed:
                if not self.is_over:
                    self._let_go(EngineDiedError(f"the engine's process ended ({how})"))
                    self._note_end(how)  # behind that, or the reader could end before it has told them
                    child.channel.close()
            self.readiness.wake()  # the reader tells whoever waits for these requests
            child = self._begun_again()

    def _begun_again(self) -> Child | None:
        """Start the next process; None when the engine is closed or has failed."""
        while True:
            with self.changed:
                if self.changed.wait_for(lambda: self.is_over, self.restarts.delay_s):
                    return None
            self.restarts.num_restarts += 1
            try:
                return self._begin()
            except Exception as error:  # also when memory or descriptors are lacking
                why = str(error) if isinstance(error, KVStoreError) else f"{type(error).__name__}: {error}"
                with self.changed:
                    if not self.is_over:
                        self._note_end(f"it could not be started: {why}")
                self.readiness.wake()

    def _begin(self) -> Child:
        child = self._start()
        try:
            facts = self._greeting(child)
            with self.changed:
                if self.is_over:
                    raise EngineClosedError("the engine is closed")
                child.on_unread, child.is_loading = self.readiness.wake, False
                self._child, self.facts, self.state = child, facts, "running"
                self._look_at(child)
                self.changed.notify_all()
        except Exception:
            child.end(encode(Close()), 0.0)
            raise
        return child

    def _greeting(self, child: Child) -> Facts:
        """Wait until the process is ready. Raises what prevented that, or EngineDiedError."""

        def check() -> None:
            if self.is_over:
                raise EngineDiedError("the engine was closed while it was loading")

        for said in map(decode_outbound, child.first_messages(check)):
            if isinstance(said, Opened):
                return said.facts
            if isinstance(said, Failed):
                raise said.error
            begin(cast(Starting, said).stage)
        raise AssertionError("unreachable")

    def _let_go(self, error: Exception | None) -> Child | None:
        """Nothing more is said to the process, or heard of it: its requests have ended, aborted or with this error.
        Returns it. Call it with the lock.
        """
        child, self._child = self._child, None
        if child is not None:
            self._look_at(child)
        self._lost += [Update(request_id, [], Ended(error=error)) for request_id in self._running]
        self._running.clear()
        for answer in self._calls.values():
            answer.set_exception(EngineDiedError("the engine's process ended in a call: it is not known to be done"))
        self._calls.clear()
        return child

    def _note_end(self, how: str) -> None:
        """A process has ended, or could not be started. Call it with the lock."""
        self.state = "restarting" if self.restarts.note_end(how) else "failed"
        self.changed.notify_all()

    def close(self) -> None:
        """End running requests as aborted, close the engine in order and end its process. Nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        with self.changed:
            child = self._let_go(None)
            if not self.is_over:
                self.state = "closed"
            self.changed.notify_all()
        self.readiness.wake()
        if child is not None:
            child.end(encode(Close()), self._shutdown_s)
        for thread in (self._watcher, self.reader):
            if thread is not None and thread.name in (WATCH, READ) and thread is not threading.current_thread():
                thread.join()

    @property
    def pid(self) -> int | None:
        return None if (child := self._child) is None else child.pid

    @property
    def silent_s(self) -> float:
        """Seconds since the process gave a sign of life."""
        return 0.0 if (child := self._child) is None else child.silent_s

    # -- what is said to it ------------------------------------------------------------------------------------------
    def check_open(self) -> None:
        with self.changed:
            self._running_child()

    def _running_child(self) -> Child:
        """The process. Raises EngineClosedError or EngineDiedError. Call it with the lock."""
        if self.state == "closed":
            raise EngineClosedError("the engine is closed")
        if self._child is None:
            again = "and is being started again; try again"
            following = again if self.state == "restarting" else "too often and stays down; restart the server"
            raise EngineDiedError(f"the engine's process ended ({self.restarts.why}) {following}")
        return self._child

    def _send(self, child: Child, message: bytes) -> None:
        """Send a message; never waits. Raises EngineOverloadedError. Call it with the lock."""
        if child.channel.num_unsent >= SEND_LIMIT:
            raise EngineOverloadedError("the engine's process takes nothing more; try again")
        child.send(message)
        self._look_at(child)

    def _look_at(self, child: Child) -> None:
        """Let the reader know of messages, and of room while something is unsent. Call it with the lock."""
        channel, selector = child.channel, self.readiness.selector
        key, events = selector.get_map().get(channel), 0
        if child is self._child and not channel.ended:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.num_unsent else 0)
        if key is not None and key.events != events:
            selector.unregister(channel)
        if events and (key is None or key.events != events):
            selector.register(channel, events)

    def submit(self, prompts: Sequence[Submit]) -> None:
        messages = [encode(prompt) for prompt in prompts]
        with self.changed:
            child = self._running_child()
            if len(self._running) + len(prompts) > self.max_requests:
                raise EngineOverloadedError(f"{self.max_requests} requests run or wait; try again")
            self.read()
            for prompt, message in zip(prompts, messages, strict=True):
                self._send(child, message)
                self._running.add(prompt.request_id)

    def end(self, request_id: str, index: int | None = None, stop_string: str | None = None) -> None:
        self._tell(request_id, End(request_id, index, stop_string))

    def note_call(self, request_id: str, index: int) -> None:
        self._tell(request_id, CallsTool(request_id, index))

    def _tell(self, request_id: str, message: End | CallsTool) -> None:
        """A process that does not accept this is stuck, and killed."""
        with self.changed:
            if (child := self._child) is None or request_id not in self._running:
                return
            try:
                self._send(child, encode(message))
            except EngineOverloadedError:
                child.kill()

    def call(self, verb: Call[R], briefly: bool = False) -> R:
        """briefly: wait as long as the process gives signs of life. Raises EngineDiedError where it gives none."""
        number, answer = next(self._numbers), Future[msgspec.Raw]()
        message = encode(Called(number, verb))  # type: ignore[arg-type]
        with self.changed:
            child = self._running_child()
            self.read()
            self._send(child, message)
            self._calls[number] = answer
        while not answer.done() and (self.is_reader or briefly):
            if briefly and not self.answers:
                raise EngineDiedError("the engine's process does not answer")
            if self.is_reader:  # nobody else would read it
                self.readiness.wait(LOOK_S)
                self.on_news()
            else:
                wait((answer,), LOOK_S)
        result = decode_result(verb, answer.result())
        return cast(R, {**cast(Any, result), "process": self.process}) if isinstance(verb, ReadStats) else result

    @property
    def process(self) -> dict[str, object]:
        """The counters of its process."""
        return {"state": self.state, "pid": self.pid, "restarts": self.life, "requests": self.num_requests}

    # -- what comes from it ------------------------------------------------------------------------------------------
    def read(self) -> None:
        """Start a reading thread unless somebody reads. Call it with the lock, before a first request or call."""
        if self.reader is None:
            self.reader = threading.Thread(target=self._read, name=READ, daemon=True)
            self.reader.start()

    def fileno(self) -> int:
        return self.readiness.fileno()

    def read_here(self) -> bool:
        with self.changed:
            before, self.reader = self.reader, threading.current_thread()
        if before is not None and before.name == READ:
            self.readiness.wake()
            before.join()
        return True

    @property
    def is_reader(self) -> bool:
        return self.reader is threading.current_thread()

    def _read(self) -> None:
        while self.is_reader and (not self.is_over or self._lost):
            self.readiness.wait(POLL_S)
            self.on_news()

    def take_news(self) -> list[Update]:
        """A process whose messages cannot be decoded is killed, with what runs there."""
        self.readiness.drain()
        with self.changed:
            updates, self._lost = self._lost, []
            if (child := self._child) is not None:
                try:
                    for said in map(decode_outbound, child.receive()):
                        if isinstance(said, Updates):
                            updates += said.updates
                        else:
                            self._answer(said)
                except Exception:
                    LOGGER.exception("the engine's process cannot be understood; it is ended")
                    child.kill()
                if child.channel.num_unsent or child.channel.ended:
                    child.channel.flush()
                    self._look_at(child)
            self._running.difference_update(update.request_id for update in updates if update.ended is not None)
        return updates

    def _answer(self, said: Answered) -> None:
        answer = self._calls.pop(said.number)
        if said.error is None:
            answer.set_result(said.result)
        else:
            answer.set_exception(said.error)


# -- in its process --------------------------------------------------------------------------------------------------
class CoreServer:
    """Serves a core through a channel. The main thread puts the front's requests into the engine's inbox; the stepping
    thread sends the results.
    """

    def __init__(self, core: Core, channel: Channel, heart: Heart) -> None:
        self._core = core
        self._channel = channel
        self._heart = heart
        self._calls = ThreadPoolExecutor(MAX_CALLS, "core-call")  # as each may wait for the disk
        self._told: Exception | None = None  # the error that was last reported on stderr
        self._over = False
        core.on_news = self._publish

    def stop(self, *_: object) -> None:
        """For a signal handler."""
        self._over = True

    def run(self) -> None:
        """Serve until the front or a signal ends it, or the core has ended. The core is then to be closed, which tells
        the front that running requests have ended.
        """
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        while not self._over and self._core.state == "running":
            if poller.poll(LOOK_MS):
                self.take_in()

    # -- what comes in -----------------------------------------------------------------------------------------------
    def take_in(self) -> None:
        for message in map(decode_inbound, self._channel.receive()):
            if isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Called):
                self._calls.submit(self._answer, message)
            elif isinstance(message, Close):
                self._over = True
            else:
                with suppress(EngineClosedError):
                    if isinstance(message, CallsTool):
                        self._core.note_call(message.request_id, message.index)
                    else:
                        self._core.end(message.request_id, message.index, message.stop_string)

    def _submit(self, prompt: Submit) -> None:
        try:
            self._core.submit([prompt])
        except Exception as error:
            self._channel.send_all(encode(Updates([Update(prompt.request_id, [], Ended(error=error))])))

    def _answer(self, asked: Called) -> None:
        try:
            answered = Answered(asked.number, msgspec.Raw(encode(self._core.call(asked.verb))))
        except Exception as error:
            if not isinstance(error, KVStoreError):
                print(f"kvstore: {type(asked.verb).__name__} failed: {error}", file=sys.stderr, flush=True)
            answered = Answered(asked.number, NOTHING, error)
        self._channel.send_all(encode(answered))

    # -- what goes out, from the thread that steps -------------------------------------------------------------------
    def _publish(self) -> None:
        updates = self._core.take_news()
        for update in updates:
            if update.ended is not None and update.ended.error is not self._told:
                self._told = error = update.ended.error
                # Once for all requests that it has ended. What is wrong with one request is its caller's.
                if error is not None and not isinstance(error, RequestError):
                    why = f"{type(error).__name__}: {error}"
                    print(f"kvstore: a step of the engine failed: {why}", file=sys.stderr, flush=True)
        self._heart.rest()  # the front may be slow
        self._channel.send_all(encode(Updates(updates)))
        self._heart.begin()
