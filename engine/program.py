"""The program of a process that computes for another one: of an engine, or of another rank of a model. Run as `python
-m kvstore.engine.program NAME`, whose stdin is the channel to that one.

An engine's process shares the store's lock with the front, so nobody else can open the store before both have ended.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import msgspec

from kvstore.disk.directory import StoreDirectory
from kvstore.engine.client.messages import (
    Answered,
    Called,
    CallsTool,
    Close,
    Core,
    Opened,
    Starting,
    Submit,
    Updates,
    decode_inbound,
    encode,
)
from kvstore.engine.config import EngineConfig
from kvstore.engine.core.request import Ended, Update
from kvstore.engine.process.channel import Channel, Failed, Start
from kvstore.engine.process.child import Heart, be_child, own_channel
from kvstore.engine.progress import told_to
from kvstore.errors import EngineClosedError, KVStoreError, RequestError

TERM_GRACE_S = 10  # how long to wait for the front after SIGTERM before ending
POLL_MS = 1000  # how often to check whether the engine has ended by itself
MAX_CALLS = 32  # that run at once; others wait for their turn
NOTHING = msgspec.Raw(encode(None))


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
            if poller.poll(POLL_MS):
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


@contextmanager
def nothing_collected() -> Iterator[None]:
    """While modules are loaded: to look for garbage among what stays takes a fifth of the time."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def serve(start: Start, heart: Heart, channel: Channel) -> int:
    """Load the model, report to the front, and serve until closed."""
    with nothing_collected():
        from kvstore.engine.client.local import LocalCore  # loads torch

    try:
        directory = None
        if start.store is not None:
            path, *descriptors = start.store
            directory = StoreDirectory.inherited(path, (descriptors[0], descriptors[1]))
        with told_to(lambda stage: channel.send_all(encode(Starting(stage)))):
            core = LocalCore(EngineConfig.of(start.arguments), directory, heart, start.silence_s)
    except Exception as error:
        channel.send_all(encode(Failed(error)))
        return 1
    server = CoreServer(core, channel, heart)
    # A supervisor signals the whole group. The front then lets running requests finish, and closes this process.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(TERM_GRACE_S))
    signal.signal(signal.SIGALRM, server.stop)
    gc.collect()
    gc.freeze()  # a full collection would spend a quarter of a second on the loaded objects, which stay
    channel.send_all(encode(Opened(core.facts)))
    server.run()
    loss = core.loss  # before the ranks end in order
    core.close()
    if loss is not None:
        print(f"kvstore: {loss}", file=sys.stderr, flush=True)
        return 1
    return 0


def compute(start: Start, heart: Heart, channel: Channel) -> int:
    """Be the engine, or another rank of its model. Returns the exit code."""
    if start.rank == 0:
        return serve(start, heart, channel)
    with nothing_collected():
        from kvstore.engine.ranks.follower import follow  # loads torch

    assert start.arena is not None
    os.set_inheritable(start.arena, False)
    return follow(start, heart, channel)


def main() -> None:
    """Ends the process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the front decides
        signal.signal(number, signal.SIG_IGN)
    be_child(own_channel(), compute)


if __name__ == "__main__":
    main()
