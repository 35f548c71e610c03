"""The engine's own process: the core, and nothing that knows text or sessions. Run as `python -m
kvstore.engine.core_process`.

Started by `kvstore.engine.process.life`, whose end it does not outlive. The store's lock is shared with the front, so
nobody else can have the store before both have ended.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any

from kvstore.config import CacheTiers
from kvstore.disk.directory import StoreDirectory
from kvstore.engine.config import EngineConfig
from kvstore.engine.process.channel import Channel
from kvstore.engine.process.core import CoreServer
from kvstore.engine.process.pulse import SLOW_FACTOR, Heart
from kvstore.engine.process.wire import Hello, NotStarted, Start, decode_start, encode, failure_of

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
TERM_GRACE_S = 10  # from SIGTERM to the end, when the front says nothing


def die_with_parent(parent: int) -> None:
    """From now on SIGKILL when the parent ends (on Linux), however it does; at once when it has ended already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(PR_SET_NAME, b"kvstore-core", 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def watch_parent() -> None:
    """The parent holds the other end of stdin and writes nothing more: its end is the parent's."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def config_of(arguments: Mapping[str, Any]) -> EngineConfig:
    """From the arguments of `Engine`. Raises ConfigError."""
    options = dict(arguments)
    return EngineConfig(tiers=CacheTiers.of(options.pop("cache_tiers")), **options)


def serve(start: Start, heart: Heart) -> int:
    """Load the model, tell the front, and work until it is closed."""
    from kvstore.engine.local_core import LocalCore  # torch comes with it

    os.set_inheritable(start.channel, False)
    channel = Channel(socket.socket(fileno=start.channel))
    try:
        directory = None
        if start.store is not None:
            path, *descriptors = start.store
            directory = StoreDirectory.inherited(path, (descriptors[0], descriptors[1]))
        core = LocalCore(config_of(start.arguments), directory)
    except Exception as error:
        channel.send_all(encode(NotStarted(failure_of(error))))
        return 1
    server = CoreServer(core, core.loop, channel, heart)
    # A supervisor tells the whole group to end: the front then lets running requests finish, and says when.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(TERM_GRACE_S))
    signal.signal(signal.SIGALRM, server.stop)
    gc.collect()
    gc.freeze()  # what was loaded stays: a whole collection would look at it for a quarter of a second
    core.loop.watch = heart
    channel.send_all(encode(Hello(core.facts)))
    server.run()
    return 0


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front decides
    start = decode_start(sys.stdin.buffer.readline())
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
    os._exit(code)  # what is durable is durable; threads that wait for calls are not waited for
