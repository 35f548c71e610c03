"""Serves a core through a channel: token ids in and out, and calls. Knows no text, template or session."""

from __future__ import annotations

import os
import select
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec

from kvstore.engine.client.core import Core
from kvstore.engine.client.messages import Answered, Called, Close, Submit, Updates, decode_inbound, encode
from kvstore.engine.core.news import Ended, Update
from kvstore.engine.process.channel import Channel
from kvstore.engine.process.pulse import Heart
from kvstore.errors import EngineClosedError, KVStoreError, RequestError

POLL_MS = 1000  # how often to check whether the engine has ended by itself
MAX_CALLS = 32  # that run at once; others wait for their turn
NOTHING = msgspec.Raw(encode(None))


class CoreServer:
    """The main thread puts the front's requests into the engine's inbox; the stepping thread sends the results."""

    def __init__(self, core: Core, channel: Channel, heart: Heart) -> None:
        self._core = core
        self._channel = channel
        self._heart = heart
        self._sending = threading.Lock()
        self._calls = ThreadPoolExecutor(MAX_CALLS, "core-call")  # as each may wait for the disk
        self._told: Exception | None = None  # the error that was last reported on stderr
        self._over = False
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        core.on_news = self._publish

    def stop(self, *_: object) -> None:
        """For a signal handler."""
        self._over = True
        with suppress(BlockingIOError):
            os.write(self._wake, b"\0")

    def run(self) -> None:
        """Serve until the front or a signal ends it, or the core has ended. The core is then to be closed, which tells
        the front that running requests have ended.
        """
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        poller.register(self._woken, select.POLLIN)
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
                    self._core.end(message.request_id, message.index, message.stop_string)

    def _submit(self, prompt: Submit) -> None:
        try:
            self._core.submit([prompt])
        except Exception as error:
            self._send(encode(Updates([Update(prompt.request_id, [], Ended(error=error))])))

    def _answer(self, asked: Called) -> None:
        try:
            answered = Answered(asked.number, msgspec.Raw(encode(self._core.call(asked.verb))))
        except Exception as error:
            if not isinstance(error, KVStoreError):
                print(f"kvstore: {type(asked.verb).__name__} failed: {error}", file=sys.stderr, flush=True)
            answered = Answered(asked.number, NOTHING, error)
        self._send(encode(answered))

    def _send(self, message: bytes) -> None:
        with self._sending:
            self._channel.send_all(message)

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
        self._send(encode(Updates(updates)))
        self._heart.begin()
