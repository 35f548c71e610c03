"""Another rank on another machine than the first: it computes what the first one sends, and ends with it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NoReturn

from kvstore.engine.config import EngineConfig
from kvstore.engine.process.channel import Channel
from kvstore.engine.process.parent import TERM_GRACE_S, die_with_parent
from kvstore.engine.process.pulse import SLOW_FACTOR, Heart
from kvstore.engine.ranks.door import CHANNEL, PULSE
from kvstore.engine.ranks.torchrun import RankPlace, connected
from kvstore.engine.ranks.wire import decode_start

GUARD_S = 5.0  # for a rank to end by itself


def run_by_torchrun(place: RankPlace, key: bytes, timeout_s: float) -> NoReturn:
    """Be this rank. Raises as `connected`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank decides, which gets it, too
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(TERM_GRACE_S))
    connections = connected(place, key, timeout_s)
    _guard(connections[PULSE])
    run(f"rank {place.rank} of {place.size}", connections)


def _guard(pulse: socket.socket) -> None:
    """Start a process that kills this one if the first rank has ended and this one does not: it is stopped, or hangs.
    Then torchrun on this machine would wait for it for ever, and the first rank for the next one.
    """
    rank = os.getpid()
    if os.fork() == 0:
        die_with_parent(rank, b"kvstore-guard")
        with suppress(OSError):
            while pulse.recv(1):  # the first rank sends nothing here
                pass
        time.sleep(GUARD_S)
        os.kill(rank, signal.SIGKILL)
        os._exit(0)


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
