"""The links to several engines' processes, watched and read as one."""

from __future__ import annotations

import selectors
import weakref
from collections.abc import Sequence

from kvstore.engine.process.link import Link, State

ORDER: tuple[State, ...] = ("running", "starting", "restarting", "failed", "closed")  # the best state is that of all


class EngineLinks:
    """Has of a `Link` what an event loop and a server need. pid: None, as there are several; see `pids`."""

    pid = None

    def __init__(self, links: Sequence[Link]) -> None:
        self.all = tuple(links)
        self._selector = selectors.DefaultSelector()
        for link in links:
            self._selector.register(link, selectors.EVENT_READ)
        weakref.finalize(self, self._selector.close)

    def fileno(self) -> int:
        """See `Link.fileno`."""
        return self._selector.fileno()

    def read_here(self) -> None:
        for link in self.all:
            link.read_here()

    def receive(self) -> None:
        for link in self.all:
            link.receive()

    @property
    def state(self) -> State:
        """That of the engine that is best off."""
        return min((link.state for link in self.all), key=ORDER.index)

    @property
    def silent_s(self) -> float:
        """For how long none of the running processes has given a sign of life."""
        return min((link.silent_s for link in self.all if link.state == "running"), default=0.0)
