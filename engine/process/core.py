"""The engine in a process of its own: token ids in and out, and blocking calls. Run as `python -m
kvstore.engine.process.core`.

Started by `kvstore.engine.process.life`, whose end it does not outlive. Knows no text, no template and no HTTP.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kvstore.engine.core.output_processor import Handle
from kvstore.engine.lifetime import open_waiting_for_lock
from kvstore.engine.outputs import CachedTokensDetails, Timings
from kvstore.engine.process.calls import CallServer
from kvstore.engine.process.channel import Channel
from kvstore.engine.process.pulse import SLOW_FACTOR, Heart
from kvstore.engine.process.wire import (
    Close,
    End,
    Ended,
    Hello,
    NotStarted,
    Said,
    Start,
    Submit,
    Update,
    Updates,
    decode_inbound,
    decode_start,
    encode,
    failure_of,
    owner_of,
    params_of,
)
from kvstore.errors import EngineClosedError

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
POLL_MS = 1000  # between two looks whether the engine has ended by itself
TERM_GRACE_S = 10  # from SIGTERM to the end, when the front says nothing


def die_with_parent(parent: int) -> None:
    """From now on SIGKILL when the parent ends (on Linux), however it does; at once when it has ended already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(PR_SET_NAME, b"kvstore-core", 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def watch_parent() -> None:
    """The parent holds the other end of stdin and writes nothing more: its end is the parent's."""
    while os.read(0, 4096):
        pass
    os._exit(1)


class Core:
    """The main thread puts what the front wants into the engine's inbox; the one that steps says what it brought."""

    def __init__(self, engine: Any, channel: Channel, heart: Heart) -> None:
        self._engine = engine
        self._channel = channel
        self._heart = heart
        self._lock = threading.Lock()  # of the ids and of sending
        self._running: dict[str, Handle] = {}  # by the front's ids
        self._ids: dict[str, str] = {}  # the front's, by the engine's
        self._told: Exception | None = None  # what has ended requests
        self._over = False
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def stop(self, *_: object) -> None:
        """For a signal handler."""
        self._over = True
        with suppress(BlockingIOError):
            os.write(self._wake, b"\0")

    def run(self) -> None:
        """Returns when the front or a signal says so; running requests have been told their end."""
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        poller.register(self._woken, select.POLLIN)
        while not self._over and not self._engine.closed:
            if poller.poll(POLL_MS):
                self.take_in()
        self._engine.close()

    # -- what comes in -----------------------------------------------------------------------------------------------
    def take_in(self) -> None:
        for message in map(decode_inbound, self._channel.receive()):
            if isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Close):
                self._over = True
            else:
                self._end(message)

    def _submit(self, message: Submit) -> None:
        tenant, salt, ids = owner_of(message.tenant), owner_of(message.cache_salt), message.token_ids
        try:
            params = params_of(message.params)
            with self._lock:  # nothing of it is told before its ids are known
                handle = self._engine.submit(
                    ids, params, tenant, salt, message.priority, message.spliced, self._publish
                )
                self._running[message.request_id] = handle
                self._ids[handle.request_id] = message.request_id
        except Exception as error:
            ended = Ended(CachedTokensDetails(), (), None, Timings(), failure_of(error))
            with self._lock:
                self._channel.send_all(encode(Updates([Update(message.request_id, [], ended)])))

    def _end(self, message: End) -> None:
        handle, loop = self._running.get(message.request_id), self._engine.loop
        if handle is not None:  # else it has ended by itself
            with suppress(EngineClosedError):
                loop.inbox.put(loop.abort, handle, message.index, message.reason)  # not waited for

    # -- what goes out, from the thread that steps -------------------------------------------------------------------
    def _publish(self, handles: Sequence[Handle]) -> None:
        updates: list[Update] = []
        with self._lock:
            for handle in handles:
                request_id = self._ids[handle.request_id]
                done = handle.done
                updates.append(update_of(request_id, handle))
                if done:
                    del self._ids[handle.request_id], self._running[request_id]
                    self._tell(handle.error)
            self._heart.rest()  # the front may be slow
            self._channel.send_all(encode(Updates(updates)))
            self._heart.begin()

    def _tell(self, error: Exception | None) -> None:
        """On stderr, once for all requests that a step has ended."""
        if error is not None and error is not self._told:
            print(f"kvstore: a step of the engine failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        self._told = error


def update_of(request_id: str, handle: Handle) -> Update:
    """What a request has said since the last update, and its end."""
    choices, said = handle.output.choices, []
    while handle.pieces:
        piece = handle.pieces.popleft()
        reason = choices[piece.index].stop_reason if piece.finish_reason is not None else None
        assert reason is None or isinstance(reason, int), "the engine's process looks for no stop strings"
        token_id = piece.token_ids[0] if piece.token_ids else None
        logprob = piece.logprobs[0] if piece.logprobs else None
        said.append(Said(piece.index, token_id, piece.finish_reason, reason, logprob))
    ended = None
    if handle.done:
        failure = None if handle.error is None else failure_of(handle.error)
        output = handle.output
        ended = Ended(output.usage.cached_tokens_details, handle.chain, handle.lineage, output.timings, failure)
    return Update(request_id, said, ended)


def serve(start: Start, heart: Heart) -> int:
    """Load the engine, tell the front, and work until it is closed."""
    from kvstore.engine.engine import Engine  # torch comes with it

    def endpoint(name: str) -> str:
        return f"ipc://{start.folder}/{start.life}-{name}"

    os.set_inheritable(start.channel, False)
    channel = Channel(socket.socket(fileno=start.channel))
    try:
        engine = open_waiting_for_lock(lambda: Engine(**start.arguments))
    except Exception as error:
        channel.send_all(encode(NotStarted(failure_of(error))))
        return 1
    engine.admin.expires = False  # the front knows which sessions are in the middle of a turn
    core = Core(engine, channel, heart)
    # A supervisor tells the whole group to end: the front then lets running requests finish, and says when.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(TERM_GRACE_S))
    signal.signal(signal.SIGALRM, core.stop)
    CallServer(engine, lambda number: endpoint(f"call-{number}"))
    hello = Hello(
        os.getpid(), engine.model_name, engine.max_model_len, engine.max_request_tokens, engine.block_size,
        engine.block_bytes, engine.vocab_size, engine.fingerprint, engine.sampling_defaults,
    )  # fmt: skip
    gc.collect()
    gc.freeze()  # what was loaded stays: a whole collection would look at it for a quarter of a second
    engine.loop.watch = heart
    channel.send_all(encode(hello))
    core.run()
    return 0


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front decides
    start = decode_start(sys.stdin.buffer.readline())
    die_with_parent(start.parent)
    threading.Thread(target=watch_parent, name="core-parent", daemon=True).start()
    try:
        return serve(start, Heart(start.pulse, SLOW_FACTOR * start.silence_s))
    except Exception as error:
        print(f"kvstore: the engine's process failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # what is durable is durable; threads that wait for calls are not waited for
