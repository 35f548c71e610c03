"""The process of another rank on this machine, as the first rank sees it: starts it, watches and ends it."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from kvstore.engine.process.channel import Channel
from kvstore.engine.process.pulse import SHOW, SHOW_S, Pulse
from kvstore.engine.process.spawn import spawned
from kvstore.engine.ranks.line import RankLine
from kvstore.engine.ranks.wire import StartHere, StartRank, encode_start

END_S = 5.0  # how long a process may take to end once its channel is closed


class RankProcess:
    """A thread of its own starts the process and waits for it: the process is to die with its parent, and Linux counts
    the thread that started a process as its parent. settings: environment variables.
    """

    def __init__(self, start: StartRank, settings: Mapping[str, str]) -> None:
        self.rank = start.rank
        self._why = ""  # it was killed
        self._ended: Callable[[], object] = lambda: None
        self._process: subprocess.Popen[bytes]
        ours, theirs = socket.socketpair()
        self.line = RankLine(Channel(ours))
        self.pulse = Pulse(start.silence_s, self._end_hung)
        started: Future[None] = Future()
        here = StartHere(os.getpid(), theirs.fileno(), self.pulse.writer, start)
        arguments, name = (here, settings, theirs, started), f"kvstore-rank-{start.rank}"
        self._watcher = threading.Thread(target=self._watch, args=arguments, name=name, daemon=True)
        self._watcher.start()
        started.result()

    def _watch(
        self, here: StartHere, settings: Mapping[str, str], theirs: socket.socket, started: Future[None]
    ) -> None:
        assert here.start.arena is not None
        try:
            with theirs:
                descriptors = (here.channel, here.pulse, here.start.arena)
                self._process = spawned("kvstore.engine.rank_process", encode_start(here), descriptors, settings)
        except Exception as error:
            self.pulse.close()
            self.line.close()
            started.set_exception(error)
            return
        self.pulse.listen()
        started.set_result(None)
        code = self._process.wait()
        self.pulse.end()
        if self._why:
            self.line.how = f"killed: {self._why}"
        else:
            self.line.how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._ended()

    @property
    def pid(self) -> int:
        return self._process.pid

    def when_ended(self, call: Callable[[], object]) -> None:
        """Call this, in any thread, when the process has ended, perhaps twice."""
        self._ended = call
        if self.line.how is not None:
            call()

    def _end_hung(self) -> None:
        self.show()
        time.sleep(SHOW_S)
        self.kill(f"no sign of life for {self.pulse.silent_s:g} s")

    def show(self) -> None:
        """Let it show where its threads are."""
        self._process.send_signal(SHOW)

    def kill(self, why: str = "") -> None:
        """Kill the process without waiting; `line.how` is set a little later."""
        self._why = self._why or why
        self._process.kill()

    def close(self) -> None:
        """Close the channel, at which the process ends. Kill it if it does not, or at once if it is still loading."""
        self.line.close()
        if self.pulse.is_loading:
            self.kill()
        self._watcher.join(END_S)
        if self.line.how is None:
            self.kill()
            self._watcher.join()
        if self._process.stdin is not None:
            self._process.stdin.close()
