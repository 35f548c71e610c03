"""Another rank of a model: a part of the weights and of the KV heads, without scheduler, store and text. Run as
`python -m kvstore.engine.rank_process`, or on another machine than the first rank by `kvstore serve`.

Started by `kvstore.engine.ranks.process`, or by torchrun, and ends with the first rank.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from typing import NoReturn

from kvstore.engine.config import EngineConfig
from kvstore.engine.core_process import TERM_GRACE_S, die_with_parent, watch_parent
from kvstore.engine.process.channel import Channel
from kvstore.engine.process.pulse import SLOW_FACTOR, Heart
from kvstore.engine.ranks.door import CHANNEL, PULSE
from kvstore.engine.ranks.torchrun import RankPlace, connected
from kvstore.engine.ranks.wire import decode_start, decode_start_here


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the first rank decides
        signal.signal(number, signal.SIG_IGN)
    here = decode_start_here(sys.stdin.buffer.readline())
    start = here.start
    assert start.arena is not None
    for descriptor in (here.channel, start.arena):
        os.set_inheritable(descriptor, False)
    die_with_parent(here.parent, b"kvstore-rank")
    threading.Thread(target=watch_parent, name="rank-parent", daemon=True).start()
    heart = Heart(here.pulse, SLOW_FACTOR * start.silence_s)
    config = EngineConfig.of(start.arguments)
    from kvstore.engine.ranks.follower import follow  # loads torch

    return follow(start, config, heart, Channel(socket.socket(fileno=here.channel)))


def run_far_rank(place: RankPlace, key: bytes, timeout_s: float) -> NoReturn:
    """Be this rank, and never return: the process ends with the first rank. The exit code is 0 if that has ended in
    order. Raises as `connected`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank decides, which gets it, too
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(TERM_GRACE_S))
    connections = connected(place, key, timeout_s)
    pulse, channel = connections[PULSE], Channel(connections[CHANNEL])
    name = f"rank {place.rank} of {place.size}"
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
    try:
        while pulse.recv(1):
            pass
    except OSError:
        pass
    _end(1, f"{name}: the first rank has ended")


def _end(code: int, why: str | None) -> NoReturn:
    if why is not None:
        print(f"kvstore: {why}", file=sys.stderr, flush=True)
    os._exit(code)  # without waiting for threads in calls


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
