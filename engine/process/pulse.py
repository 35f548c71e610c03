"""Signs of life of the engine's process: bytes through a pipe, and what follows when none come.

Holds both ends. Knows no request.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from kvstore.engine.core.step_loop import Watch

BEAT_S = 0.5
SLOW_FACTOR = 10  # loading, and one step, may take this many times the allowed silence without a sign
SHOW = signal.SIGUSR2  # at which a process shows where its threads are, also if one holds the interpreter
SHOW_S = 1.0  # that it has for that before it is killed


class Heart(Watch):
    """Beats in a thread of the engine's process, unless one round of its loop takes longer than limit_s. Then it shows
    where the threads are, and calls `stuck` with what has happened.

    The thread needs the interpreter's lock, so code that holds the lock too long is noticed as well. Time in which the
    thread did not run does not count. descriptor: where it beats; None: nobody listens, as in a program's own process.
    """

    def __init__(self, descriptor: int | None, limit_s: float, beat_s: float = BEAT_S) -> None:
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
            faulthandler.register(SHOW)
        self.stuck: Callable[[str], object] = lambda why: None
        self._closed = threading.Event()
        self._descriptor = descriptor
        self._limit_s, self._beat_s = limit_s, beat_s
        self._round = 0
        self._rests = True
        threading.Thread(target=self._beat, name="core-pulse", daemon=True).start()

    def begin(self) -> None:
        """A round begins: this, or `rest`, must be called again within the limit."""
        self._round += 1
        self._rests = False

    def rest(self) -> None:
        """The loop waits for others now, which may take any time."""
        self._rests = True

    def _beat(self) -> None:
        last, busy_s = 0, 0.0
        with suppress(OSError):  # the other end is gone
            while busy_s < self._limit_s:
                if self._descriptor is not None:
                    os.write(self._descriptor, b".")
                if self._closed.wait(self._beat_s):
                    return
                is_same = self._round == last and not self._rests
                last, busy_s = self._round, busy_s + self._beat_s if is_same else 0.0
            why = f"a step of the engine has taken {busy_s:g} s"
            remedy = "" if self._descriptor is None else "a longer --engine-timeout or "
            print(
                f"kvstore: {why}; if that is usual here, give {remedy}a smaller --max-num-batched-tokens",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            faulthandler.dump_traceback(2)  # not sys.stderr, which may be a notebook's
            self.stuck(why)

    def close(self) -> None:
        """Stop it, if nobody listens who could end."""
        self._closed.set()


class Pulse:
    """The front's end. hung: called once, when no byte has come for silence_s (while loading: SLOW_FACTOR times that).
    reader: where the bytes come from, if not through a pipe of its own; this object closes it. ended: called when the
    other end is gone.

    Only time in which this thread itself ran counts, so the engine does not seem hung after both processes were stopped
    or the machine slept.
    """

    def __init__(
        self, silence_s: float, hung: Callable[[], None], beat_s: float = BEAT_S, reader: int | None = None,
        ended: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.is_loading = True
        self.silent_s = 0.0  # seconds since the last byte
        self._silence_s, self._beat_s = silence_s, beat_s
        self._hung, self._ended_there = hung, ended
        self._reader, self.writer = os.pipe() if reader is None else (reader, -1)
        self._ended = threading.Event()

    def listen(self) -> None:
        """Start to listen. The writer's end now belongs to the other process."""
        if self.writer >= 0:
            os.close(self.writer)
        threading.Thread(target=self._listen, name="kvstore-core-pulse", daemon=True).start()

    def _listen(self) -> None:
        poller = select.poll()
        poller.register(self._reader, select.POLLIN)
        try:
            while not self._ended.is_set():
                if not poller.poll(int(self._beat_s * 1000)):
                    self.silent_s += self._beat_s
                elif _read(self._reader):
                    self.silent_s = 0.0
                else:
                    if self._ended_there is not None:
                        self._ended_there()
                    return
                if self.silent_s >= self._silence_s * (SLOW_FACTOR if self.is_loading else 1):
                    self._hung()
                    return
        finally:
            os.close(self._reader)

    def end(self) -> None:
        """Stop listening, because the process has ended."""
        self._ended.set()

    def close(self) -> None:
        """Close both ends. For a process that could not be started."""
        os.close(self._reader)
        os.close(self.writer)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except ConnectionError:  # of a socket: as its end
        return b""
