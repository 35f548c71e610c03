"""Another rank of a model: a part of the weights and of the KV heads, without scheduler, store and text. Run as
`python -m kvstore.engine.rank_process`.

Started by `kvstore.engine.ranks.process`, and ends with the first rank.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

from kvstore.engine.config import EngineConfig
from kvstore.engine.process.channel import Channel
from kvstore.engine.process.lines import tell_in_lines
from kvstore.engine.process.parent import die_with_parent, watch_parent
from kvstore.engine.process.pulse import SLOW_FACTOR, Heart
from kvstore.engine.ranks.wire import decode_start_here


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the first rank decides
        signal.signal(number, signal.SIG_IGN)
    here = decode_start_here(sys.stdin.buffer.readline())
    start = here.start
    assert start.arena is not None
    for descriptor in (here.channel, start.arena):
        os.set_inheritable(descriptor, False)
    tell_in_lines()
    die_with_parent(here.parent, b"kvstore-rank")
    threading.Thread(target=watch_parent, name="rank-parent", daemon=True).start()
    heart = Heart(here.pulse, SLOW_FACTOR * start.silence_s)
    config = EngineConfig.of(start.arguments)
    from kvstore.engine.ranks.follower import follow  # loads torch

    return follow(start, config, heart, Channel(socket.socket(fileno=here.channel)))


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
