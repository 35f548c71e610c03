"""How a process ends with the one that has started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
TERM_GRACE_S = 10  # how long to wait for the parent after SIGTERM before ending


def die_with_parent(parent: int, name: bytes = b"kvstore-core") -> None:
    """Have the kernel send SIGKILL when the parent ends (on Linux), or at once if it has ended."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(PR_SET_NAME, name, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def watch_parent() -> None:
    """Notice the parent's end by the end of stdin, to which the parent writes nothing more."""
    while os.read(0, 4096):
        pass
    os._exit(1)
