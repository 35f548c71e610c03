"""Another rank on another machine, as the first rank sees it: who has started it ends it, here are its connections."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from kvstore.engine.process.channel import Channel
from kvstore.engine.process.pulse import Pulse
from kvstore.engine.ranks.door import CHANNEL, PULSE
from kvstore.engine.ranks.line import RankLine
from kvstore.engine.ranks.wire import Leave, StartRank, encode, encode_start

END_S = 10.0  # how long a rank may take to end in order


class FarRank:
    """It ends when its connections do. start: the first message. connections: see `kvstore.engine.ranks.door`."""

    def __init__(self, start: StartRank, connections: Mapping[int, socket.socket]) -> None:
        self.rank = start.rank
        self._connections = connections
        self._has_ended = threading.Event()
        self._ended: Callable[[], object] = lambda: None
        pulse = os.dup(connections[PULSE].fileno())
        self.line = RankLine(Channel(socket.socket(fileno=os.dup(connections[CHANNEL].fileno()))))
        self.pulse = Pulse(start.silence_s, self._end_hung, reader=pulse, ended=self._end)
        self.pulse.listen()
        self.line.send(encode_start(start))

    def _end(self, how: str = "its connection has ended") -> None:
        self.line.how = self.line.how or how
        self._has_ended.set()
        self._ended()

    def _end_hung(self) -> None:
        self.kill(f"no sign of life for {self.pulse.silent_s:g} s")

    def when_ended(self, call: Callable[[], object]) -> None:
        """Call this, in any thread, when the rank has ended. Its process may be there still, with its connections to
        others.
        """
        self._ended = call
        if self._has_ended.is_set():
            call()

    def show(self) -> None:
        """A signal does not reach it."""

    def kill(self, why: str = "") -> None:
        """End the connections, at which the process ends."""
        if why:
            self._end(why)
        for connection in self._connections.values():
            with suppress(OSError):  # they have ended already
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let the process end in order, for a while."""
        if not self.pulse.is_loading:
            self.line.send(encode(Leave()))
            self._has_ended.wait(END_S)
        self.kill()
        self._has_ended.wait()
        self.line.close()
        for connection in self._connections.values():
            connection.close()
