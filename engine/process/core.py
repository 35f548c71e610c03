"""Serves a core through a channel: token ids in and out, and calls. Knows no text, template or session."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec

from kvstore.engine.core.output_processor import Handle
from kvstore.engine.core.step_loop import StepLoop
from kvstore.engine.outputs import CachedTokensDetails, Timings
from kvstore.engine.process import wire
from kvstore.engine.process.channel import Channel
from kvstore.engine.process.pulse import Heart
from kvstore.engine.sessions.core import Core
from kvstore.errors import EngineClosedError, KVStoreError

POLL_MS = 1000  # how often to check whether the engine has ended by itself
MAX_CALLS = 32  # that run at once; others wait for their turn
NOTHING = msgspec.Raw(wire.encode(None))


class CoreServer:
    """The main thread puts the front's requests into the engine's inbox; the stepping thread sends the results."""

    def __init__(self, core: Core, loop: StepLoop, channel: Channel, heart: Heart) -> None:
        self._core = core
        self._loop = loop
        self._channel = channel
        self._heart = heart
        self._lock = threading.Lock()  # guards the ids and sending
        self._calls = ThreadPoolExecutor(MAX_CALLS, "core-call")  # as each may wait for the disk
        self._running: dict[str, Handle] = {}  # by the front's request ids
        self._ids: dict[str, str] = {}  # the front's request ids by the engine's
        self._told: Exception | None = None  # the error that was last reported on stderr
        self._over = False
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

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
        while not self._over and not self._core.closed:
            if poller.poll(POLL_MS):
                self.take_in()

    # -- what comes in -----------------------------------------------------------------------------------------------
    def take_in(self) -> None:
        for message in map(wire.decode_inbound, self._channel.receive()):
            if isinstance(message, wire.Submit):
                self._submit(message)
            elif isinstance(message, wire.Call):
                self._calls.submit(self._answer, message)
            elif isinstance(message, wire.Close):
                self._over = True
            else:
                self._end(message)

    def _answer(self, call: wire.Call) -> None:
        try:
            answered = wire.Answered(call.number, msgspec.Raw(wire.encode(carry_out(self._core, call))))
        except Exception as error:
            failure = wire.failure_of(error)
            if failure.kind == "KVStoreError":
                print(f"kvstore: {call.verb} failed: {failure.message}", file=sys.stderr, flush=True)
            answered = wire.Answered(call.number, NOTHING, failure)
        self._send(wire.encode(answered))

    def _submit(self, message: wire.Submit) -> None:
        tenant, salt, ids = wire.owner_of(message.tenant), wire.owner_of(message.cache_salt), message.token_ids
        try:
            params = wire.params_of(message.params)
            with self._lock:  # no update may be sent before its ids are known
                [handle] = self._core.submit_all(
                    [(ids, params)], tenant, salt, message.priority, message.spliced, self._publish, message.turn_starts
                )
                self._running[message.request_id] = handle
                self._ids[handle.request_id] = message.request_id
        except Exception as error:
            ended = wire.Ended(CachedTokensDetails(), (), None, Timings(), wire.failure_of(error))
            self._send(wire.encode(wire.Updates([wire.Update(message.request_id, [], ended)])))

    def _end(self, message: wire.End) -> None:
        handle, loop = self._running.get(message.request_id), self._loop
        if handle is not None:  # else the request has already ended
            with suppress(EngineClosedError):
                loop.inbox.put(loop.abort, handle, message.index, message.reason)  # not waited for

    def _send(self, message: bytes) -> None:
        with self._lock:
            self._channel.send_all(message)

    # -- what goes out, from the thread that steps -------------------------------------------------------------------
    def _publish(self, handles: Sequence[Handle]) -> None:
        updates: list[wire.Update] = []
        with self._lock:
            for handle in handles:
                request_id = self._ids[handle.request_id]
                done = handle.done
                updates.append(update_of(request_id, handle))
                if done:
                    del self._ids[handle.request_id], self._running[request_id]
                    self._tell(handle.error)
            self._heart.rest()  # the front may be slow
            self._channel.send_all(wire.encode(wire.Updates(updates)))
            self._heart.begin()

    def _tell(self, error: Exception | None) -> None:
        """Report an error on stderr, once for all requests that it has ended."""
        if error is not None and error is not self._told:
            print(f"kvstore: a step of the engine failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        self._told = error


def carry_out(core: Core, call: wire.Call) -> object:
    """Call a verb and return its result. Raises KVStoreError for a verb that is not in the table."""
    signature = wire.SIGNATURES.get(call.verb)
    if signature is None:
        raise KVStoreError(f"unknown call {call.verb!r}")
    arguments = signature.decode_arguments(call.arguments)
    core.check_open()
    return getattr(core, call.verb)(*arguments)


def update_of(request_id: str, handle: Handle) -> wire.Update:
    """A request's news since the last update: tokens and its end."""
    choices, said = handle.output.choices, []
    while handle.pieces:
        piece = handle.pieces.popleft()
        reason = choices[piece.index].stop_reason if piece.finish_reason is not None else None
        assert reason is None or isinstance(reason, int), "the engine's process looks for no stop strings"
        token_id = piece.token_ids[0] if piece.token_ids else None
        logprob = piece.logprobs[0] if piece.logprobs else None
        said.append(wire.Said(piece.index, token_id, piece.finish_reason, reason, logprob))
    ended = None
    if handle.done:
        failure = None if handle.error is None else wire.failure_of(handle.error)
        output = handle.output
        ended = wire.Ended(output.usage.cached_tokens_details, handle.chain, handle.lineage, output.timings, failure)
    return wire.Update(request_id, said, ended)
