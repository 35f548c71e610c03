"""The program of the engine's own process: the core, without text and sessions. Run as `python -m
kvstore.engine.core_process`.

Started by `kvstore.engine.client.life`, and ends with it. It shares the store's lock with the front, so nobody else
can open the store before both have ended.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading

from kvstore.disk.directory import StoreDirectory
from kvstore.engine.client.messages import Hello, NotStarted, Start, Starting, decode_start, encode
from kvstore.engine.client.server import CoreServer
from kvstore.engine.config import EngineConfig
from kvstore.engine.process.channel import Channel
from kvstore.engine.process.lines import tell_in_lines
from kvstore.engine.process.parent import TERM_GRACE_S, die_with_parent, watch_parent
from kvstore.engine.process.pulse import SLOW_FACTOR, Heart
from kvstore.engine.progress import told_to


def serve(start: Start, heart: Heart) -> int:
    """Load the model, report to the front, and serve until closed."""
    from kvstore.engine.client.local import LocalCore  # loads torch

    os.set_inheritable(start.channel, False)
    channel = Channel(socket.socket(fileno=start.channel))
    try:
        directory = None
        if start.store is not None:
            path, *descriptors = start.store
            directory = StoreDirectory.inherited(path, (descriptors[0], descriptors[1]))
        with told_to(lambda stage: channel.send_all(encode(Starting(stage)))):
            core = LocalCore(EngineConfig.of(start.arguments), directory, heart, start.silence_s)
    except Exception as error:
        channel.send_all(encode(NotStarted(error)))
        return 1
    server = CoreServer(core, channel, heart)
    # A supervisor signals the whole group. The front then lets running requests finish, and closes this process.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(TERM_GRACE_S))
    signal.signal(signal.SIGALRM, server.stop)
    gc.collect()
    gc.freeze()  # a full collection would spend a quarter of a second on the loaded objects, which stay
    channel.send_all(encode(Hello(core.facts)))
    server.run()
    loss = core.loss  # before the ranks end in order
    core.close()
    if loss is not None:
        print(f"kvstore: {loss}", file=sys.stderr, flush=True)
        return 1
    return 0


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front decides
    start = decode_start(sys.stdin.buffer.readline())
    tell_in_lines()
    die_with_parent(start.parent)
    threading.Thread(target=watch_parent, name="core-parent", daemon=True).start()
    try:
        return serve(start, Heart(start.pulse, SLOW_FACTOR * start.silence_s))
    except Exception as error:
        print(f"kvstore: the engine's process failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # all durable work is done, so do not wait for threads in calls
