"""A process that has loaded torch and the product, and forks itself for each program that `forked` asks for.

A fork is a child of the process that asks, as what `subprocess` starts is, and has nothing of that one's state. Each
has a forker of its own in turn, for what it starts itself.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import platform
import runpy
import signal
import socket
import sys
import warnings
from typing import Any

from tests.support import forked

LOADED = (
    "kvstore.engine.client.local", "kvstore.engine.ranks.follower", "kvstore.service.command.cli",
    "kvstore.service.server",
)  # fmt: skip
CLONE_PARENT = 0x8000
OURS = 300  # descriptors from here on are no program's


def load() -> None:
    for name in LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def clone() -> int:
    """`os.fork`, but the child's parent is this process's. There must be no other thread."""
    python = ctypes.pythonapi  # keeps the interpreter's lock
    python.PyOS_BeforeFork()
    flags = CLONE_PARENT | signal.SIGCHLD
    pid = ctypes.PyDLL(None).syscall(forked.CLONE[platform.machine()], flags, 0, 0, 0, 0)
    (python.PyOS_AfterFork_Parent if pid else python.PyOS_AfterFork_Child)()
    return pid


def keep(end: socket.socket, files: dict[int, int]) -> socket.socket:
    """Close all but these files, which get these numbers, and this socket, which is returned anew."""
    high = {number: fcntl.fcntl(file, fcntl.F_DUPFD, OURS) for number, file in files.items()}
    kept = fcntl.fcntl(end.detach(), fcntl.F_DUPFD_CLOEXEC, OURS)
    os.closerange(3, OURS)
    for number, file in high.items():
        os.dup2(file, number)
        os.close(file)
    return socket.socket(fileno=kept)


def become(asked: dict[str, Any]) -> None:
    """Be this program until its end."""
    if asked["new_session"]:
        os.setsid()
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    signal.pthread_sigmask(signal.SIG_SETMASK, asked["blocked"])
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    name, *sys.argv[1:] = asked["program"]
    if name.endswith(".py"):
        sys.path.insert(0, os.path.dirname(name))
        runpy.run_path(name, run_name="__main__")
    else:
        sys.modules.pop(name, None)  # it is loaded a second time, as by `python -m`
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def main(number: int) -> None:
    end, is_loaded = socket.socket(fileno=number), False
    while True:
        message, files, _, _ = socket.recv_fds(end, forked.MOST_BYTES, forked.MOST_FILES)
        if not message:  # who asks has ended
            os._exit(0)
        asked = json.loads(message)
        if not is_loaded:
            load()
            is_loaded = True
        if pid := clone():
            end.send(str(pid).encode())
            for file in files:
                os.close(file)
            continue
        end.detach()
        mine, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        if os.fork() == 0:  # the fork's own forker
            mine.detach()
            end = keep(theirs, {})
            continue
        theirs.detach()
        forked.ask(keep(mine, dict(zip(asked["files"], files, strict=True))))
        break
    become(asked)


if __name__ == "__main__":
    main(int(sys.argv[1]))
