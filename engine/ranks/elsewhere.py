"""Another rank on another machine than the first: it computes what the first one sends, and ends with it."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import NoReturn

from kvstore.engine.config import EngineConfig
from kvstore.engine.process.channel import Channel
from kvstore.engine.process.pulse import SLOW_FACTOR, Heart
from kvstore.engine.ranks.door import CHANNEL, PULSE
from kvstore.engine.ranks.wire import decode_start


def run(name: str, connections: Mapping[int, socket.socket]) -> NoReturn:
    """Be this rank until the process ends, with the first rank. The exit code is 0 if that has ended in order."""
    pulse, channel = connections[PULSE], Channel(connections[CHANNEL])
    while not (messages := channel.receive()):
        if channel.ended:
            _end(1, f"{name}: the first rank has ended")
        channel.poll(-1)
    assert len(messages) == 1, "the first rank says nothing more before this one has loaded"
    start = decode_start(messages[0])
    threading.Thread(target=_watch_first, args=(pulse, name), name="rank-first", daemon=True).start()
    heart = Heart(pulse.fileno(), SLOW_FACTOR * start.silence_s)
    config = EngineConfig.of(start.arguments)
    from kvstore.engine.ranks.follower import follow  # loads torch

    code = follow(start, config, heart, channel, pulse.getsockname()[0])
    _end(code, None if code == 0 else f"{name} ends, because the first rank or a step has ended")


def _watch_first(pulse: socket.socket, name: str) -> None:
    """The first rank sends nothing here; its end may come while this one waits for another rank."""
    with suppress(OSError):
        while pulse.recv(1):
            pass
    _end(1, f"{name}: the first rank has ended")


def _end(code: int, why: str | None) -> NoReturn:
    if why is not None:
        print(f"kvstore: {why}", file=sys.stderr, flush=True)
    os._exit(code)  # without waiting for threads in calls
