"""What the first rank hears from another one, and tells it, wherever that is."""

from __future__ import annotations

import select
import threading

from kvstore.engine.process.channel import Channel
from kvstore.engine.process.wire import Failure
from kvstore.engine.ranks.wire import Failed, FromRank, decode_from_rank

ROOM_S = 0.1  # while a rank reads nothing: how often to check whether it has ended


class RankLine:
    """One thread at a time sends; any may receive."""

    def __init__(self, channel: Channel) -> None:
        self.how: str | None = None  # how the rank ended; set by whoever watches it
        self.failure: Failure | None = None  # why, if it has told
        self._channel = channel
        self._reading = threading.Lock()
        self._received: list[FromRank] = []

    def send(self, message: bytes) -> None:
        """Send a message, waiting for room. If the rank has ended, the message is dropped."""
        self._channel.send(message)
        while self._channel.num_unsent and self.how is None:
            self._channel.poll(int(ROOM_S * 1000))
            self.look()  # it may itself wait for room

    def receive(self) -> list[FromRank]:
        """The messages that have come; never waits. Keeps the reason of a failure in `failure`."""
        self.look()
        with self._reading:
            messages, self._received = self._received, []
        return messages

    def look(self) -> None:
        """Take in what has come, for `receive`; never waits."""
        with self._reading:
            messages = [decode_from_rank(message) for message in self._channel.receive()]
            self._received += messages
            for message in messages:
                if isinstance(message, Failed):
                    self.failure = message.failure

    def watch_with(self, poller: select.poll) -> None:
        """Register the channel with this poller, unless it has ended."""
        if not self._channel.ended:
            poller.register(self._channel, select.POLLIN)

    def close(self) -> None:
        self._channel.close()
