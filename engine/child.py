"""What a process does that computes for another one, whatever that is: it becomes what its first message says, and ends
with the other end of its channel.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import msgspec

from kvstore.engine.process import SLOW_FACTOR, Channel, Heart, Start
from kvstore.engine.progress import tell_in_lines

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
_decode_start = msgspec.msgpack.Decoder(Start).decode


def be_child(channel: Channel, compute: Callable[[Start, Heart, Channel], int]) -> NoReturn:
    """Be what the first message says until the process ends, with the other end of the channel. compute: returns the
    exit code; called once threads beat and watch.
    """
    while not (messages := channel.receive()):
        if channel.ended:
            os._exit(1)
        channel.poll(-1)
    (message,) = messages  # nothing more is said before this process has loaded
    start = _decode_start(message)
    tell_in_lines()
    if start.parent is not None:
        die_with_parent(start.parent, b"kvstore-rank" if start.rank else b"kvstore-core")
    threading.Thread(target=_watch_parent, args=(channel, start), name="core-parent", daemon=True).start()
    try:
        code = compute(start, Heart(channel.beat, SLOW_FACTOR * start.silence_s), channel)
    except Exception as error:
        print(f"kvstore: {start.name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = 1
    sys.stderr.flush()
    os._exit(code)  # all durable work is done, so do not wait for threads in calls


def die_with_parent(parent: int, name: bytes) -> None:
    """Have the kernel send SIGKILL when the parent ends (on Linux), or at once if it has ended."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(PR_SET_NAME, name, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _watch_parent(channel: Channel, start: Start) -> None:
    """End with the other end of the channel, also while this one computes, or waits for another rank."""
    poller = select.poll()
    poller.register(channel, select.POLLRDHUP)
    poller.poll()
    if start.parent is None:
        print(f"kvstore: {start.name} ends, because the first rank has ended", file=sys.stderr, flush=True)
    os._exit(1)


def own_channel() -> Channel:
    """The channel of a process that was started by `kvstore.engine.process.spawned`."""
    end = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # processes that this one starts must not hold it
    return Channel(end)
