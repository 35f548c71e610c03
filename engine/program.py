"""The program of a process that computes for another one: of an engine, or of another rank of a model. Run as `python
-m kvstore.engine.program NAME`, whose stdin is the channel to that one.

An engine's process shares the store's lock with the front, so nobody else can open the store before both have ended.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.disk.directory import StoreDirectory
from kvstore.engine.child import be_child, own_channel
from kvstore.engine.client.messages import Opened, Starting
from kvstore.engine.client.remote import CoreServer
from kvstore.engine.config import EngineConfig
from kvstore.engine.process import Channel, Failed, Heart, Start, encode
from kvstore.engine.progress import told_to

TERM_GRACE_S = 10  # how long to wait for the front after SIGTERM before ending


@contextmanager
def nothing_collected() -> Iterator[None]:
    """While modules are loaded: to look for garbage among what stays takes a fifth of the time."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def serve(start: Start, heart: Heart, channel: Channel) -> int:
    """Load the model, report to the front, and serve until closed."""
    with nothing_collected():
        from kvstore.engine.client.local import LocalCore  # loads torch

    try:
        directory = None
        if start.store is not None:
            path, *descriptors = start.store
            directory = StoreDirectory.inherited(path, (descriptors[0], descriptors[1]))
        with told_to(lambda stage: channel.send_all(encode(Starting(stage)))):
            core = LocalCore(EngineConfig.of(start.arguments), directory, heart, start.silence_s)
    except Exception as error:
        channel.send_all(encode(Failed(error)))
        return 1
    server = CoreServer(core, channel, heart)
    # A supervisor signals the whole group. The front then lets running requests finish, and closes this process.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(TERM_GRACE_S))
    signal.signal(signal.SIGALRM, server.stop)
    gc.collect()
    gc.freeze()  # a full collection would spend a quarter of a second on the loaded objects, which stay
    channel.send_all(encode(Opened(core.facts)))
    server.run()
    loss = core.loss  # before the ranks end in order
    core.close()
    if loss is not None:
        print(f"kvstore: {loss}", file=sys.stderr, flush=True)
        return 1
    return 0


def compute(start: Start, heart: Heart, channel: Channel) -> int:
    """Be the engine, or another rank of its model. Returns the exit code."""
    if start.rank == 0:
        return serve(start, heart, channel)
    with nothing_collected():
        from kvstore.engine.ranks.follower import follow  # loads torch

    assert start.arena is not None
    os.set_inheritable(start.arena, False)
    return follow(start, heart, channel)


def main() -> None:
    """Ends the process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the front decides
        signal.signal(number, signal.SIG_IGN)
    be_child(own_channel(), compute)


if __name__ == "__main__":
    main()
