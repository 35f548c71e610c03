"""Signs of life of the engine's process: a byte now and then through a pipe, and what follows when none comes.

Both ends are here. Knows no request.
"""

from __future__ import annotations

import faulthandler
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from kvstore.engine.core.step_loop import Watch

BEAT_S = 0.5
SLOW_FACTOR = 10  # loading without a sign, and one step, may take so many times the silence that is allowed


class Heart(Watch):
    """Beats in a thread of the engine's process, unless one round of its loop takes longer than limit_s.

    The thread needs the interpreter's lock, so what keeps that for long is noticed as well. Time in which the thread
    itself did not run does not count.
    """

    def __init__(self, descriptor: int, limit_s: float) -> None:
        os.set_inheritable(descriptor, False)
        self._descriptor = descriptor
        self._limit_s = limit_s
        self._round = 0
        self._rests = True
        threading.Thread(target=self._beat, name="core-pulse", daemon=True).start()

    def begin(self) -> None:
        """A round begins: this, or `rest`, has to be called again within the limit."""
        self._round += 1
        self._rests = False

    def rest(self) -> None:
        """What follows is waiting for others, which may take any time."""
        self._rests = True

    def _beat(self) -> None:
        last, busy_s = 0, 0.0
        with suppress(OSError):  # nobody listens any more
            while busy_s < self._limit_s:
                os.write(self._descriptor, b".")
                time.sleep(BEAT_S)
                is_same = self._round == last and not self._rests
                last, busy_s = self._round, busy_s + BEAT_S if is_same else 0.0
            print(
                f"kvstore: a step of the engine has taken {busy_s:g} s; if that is usual here, give a longer "
                "--engine-timeout or a smaller --max-num-batched-tokens", file=sys.stderr, flush=True,
            )  # fmt: skip
            faulthandler.dump_traceback()  # where its threads are: it will be killed


class Pulse:
    """The front's end. hung: called once when no byte came for silence_s, while loading SLOW_FACTOR times that.

    silent_s: since the last one. Only time in which this thread ran itself counts, so that neither a process that was
    stopped together with the engine's nor a machine that slept takes the engine for hung.
    """

    def __init__(self, silence_s: float, hung: Callable[[], None]) -> None:
        self.is_loading = True
        self.silent_s = 0.0
        self._silence_s = silence_s
        self._hung = hung
        self._reader, self.writer = os.pipe()
        self._ended = threading.Event()

    def listen(self) -> None:
        """The writer's end is the other process' now."""
        os.close(self.writer)
        threading.Thread(target=self._listen, name="kvstore-core-pulse", daemon=True).start()

    def _listen(self) -> None:
        poller = select.poll()
        poller.register(self._reader, select.POLLIN)
        try:
            while not self._ended.is_set():
                if not poller.poll(int(BEAT_S * 1000)):
                    self.silent_s += BEAT_S
                elif os.read(self._reader, 4096):
                    self.silent_s = 0.0
                else:
                    return  # it has ended
                if self.silent_s >= self._silence_s * (SLOW_FACTOR if self.is_loading else 1):
                    self._hung()
                    return
        finally:
            os.close(self._reader)

    def end(self) -> None:
        """The process has ended."""
        self._ended.set()

    def close(self) -> None:
        """Instead of `listen`: there is no process."""
        os.close(self._reader)
        os.close(self.writer)
