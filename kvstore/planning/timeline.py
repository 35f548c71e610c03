"""When the requests of a trace arrive: at a given time, or some time after the request before them has ended.

Knows no server.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.errors import ConfigError
from kvstore.planning.traces import Trace
from kvstore.planning.virtual_io import VirtualClock

PROGRESS_EVERY = 256  # requests


class Timeline:
    """arrive: called with a request's index and its number in order of arrival. progress: called now and then with the
    number of requests that have ended. The server calls `ended`.
    """

    def __init__(
        self, trace: Trace, clock: VirtualClock, arrive: Callable[[int, int], None],
        progress: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        self._requests, self._clock, self._arrive, self._progress = trace.requests, clock, arrive, progress
        self._followers: dict[int, list[int]] = {}
        self._num_arrived = self._num_ended = 0
        self._next_open = 0  # the next request whose arrival is known

    def run(self) -> None:
        """Run until all requests have been served. Raises ConfigError for an impossible trace."""
        for index, request in enumerate(self._requests):
            if request.after >= 0:
                if request.after >= index:
                    raise ConfigError(f"request {index} of the trace follows {request.after}, which is not before it")
                self._followers.setdefault(request.after, []).append(index)
        self._plan_next()
        self._clock.run()
        assert self._num_ended == len(self._requests), "requests were left over"

    def _plan_next(self) -> None:
        while self._next_open < len(self._requests) and self._requests[self._next_open].after >= 0:
            self._next_open += 1
        if self._next_open < len(self._requests):
            self._clock.at(self._requests[self._next_open].arrival_s, self._come_open, self._next_open)
            self._next_open += 1

    def _come_open(self, index: int) -> None:
        self._plan_next()
        self._come(index)

    def _come(self, index: int) -> None:
        number = self._num_arrived
        self._num_arrived += 1
        self._arrive(index, number)

    def ended(self, index: int) -> None:
        now_s = self._clock.now_s
        for follower in self._followers.pop(index, ()):
            self._clock.at(now_s + self._requests[follower].arrival_s, self._come, follower)
        self._num_ended += 1
        if self._progress is not None and self._num_ended % PROGRESS_EVERY == 0:
            self._progress(self._num_ended)
