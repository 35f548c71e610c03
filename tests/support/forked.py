"""Has `subprocess` fork our programs from one that has loaded torch and them: a tenth of what a start takes.

What a program is told and given is the same: arguments, environment, files, parent.
"""

from __future__ import annotations

import inspect
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
OURS = ("kvstore", "tests", "bench")
CLONE = {"x86_64": 56, "aarch64": 220}  # the system call's number
READ_AT_START = ("OMP_NUM_THREADS", "TRITON_INTERPRET", "PYTHONOPTIMIZE")
MOST_BYTES, MOST_FILES = 1 << 17, 64  # of what is asked
Popen = subprocess.Popen
STARTED = inspect.signature(Popen._execute_child)


class Forked(Popen):
    """`subprocess.Popen`; what is a module or a file of ours is forked. forker: who is asked; None: all is started."""

    forker: socket.socket | None = None
    lock = threading.Lock()

    def _execute_child(self, *arguments: Any) -> None:
        given = SimpleNamespace(**STARTED.bind(self, *arguments).arguments)
        environment = dict(os.environ if given.env is None else given.env)
        program = program_of(given.args, environment)
        if self.forker is None or program is None or given.preexec_fn is not None:
            super()._execute_child(*arguments)
            return
        files = {number: number for number in given.pass_fds}
        for number, pipe in enumerate((given.p2cread, given.c2pwrite, given.errwrite)):
            files[number] = number if pipe == -1 else pipe
        asked = {
            "program": program, "files": list(files), "new_session": given.start_new_session,
            "folder": os.fspath(given.cwd or os.getcwd()), "environment": environment,
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        }  # fmt: skip
        with self.lock:
            socket.send_fds(self.forker, [json.dumps(asked).encode()], list(files.values()))
            self.pid = int(self.forker.recv(MOST_BYTES))
        self._child_created = True
        self._close_pipe_fds(
            given.p2cread, given.p2cwrite, given.c2pread, given.c2pwrite, given.errread, given.errwrite
        )


def program_of(command: Any, environment: dict[str, str]) -> list[str] | None:
    """The module or file of a Python command, and its arguments, if it is one of ours and finds what we do."""
    if isinstance(command, str) or command[0] != sys.executable:
        return None
    known = {"", str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    if not known.issuperset(environment.get("PYTHONPATH", "").split(os.pathsep)):
        return None
    if any(environment.get(name) != os.environ.get(name) for name in READ_AT_START):
        return None
    rest = [os.fspath(one) for one in command[1:] if one != "-P"]
    if rest[0] == "-m":
        return rest[1:] if rest[1].split(".")[0] in OURS else None
    return rest if rest[0].endswith(".py") and Path(rest[0]).is_relative_to(ROOT) else None


def ask(forker: socket.socket) -> None:
    """From now on who holds this socket's other end is asked for programs."""
    Forked.forker = forker
    subprocess.Popen = Forked


@contextmanager
def anew() -> Iterator[None]:
    """What is started in here is started as for a user, not forked."""
    forker, Forked.forker = Forked.forker, None
    try:
        yield
    finally:
        Forked.forker = forker


def start_forker() -> None:
    """Call it in the main thread: what is forked is to end with the thread that has started the forker."""
    if sys.platform != "linux" or platform.machine() not in CLONE:
        return
    mine, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # no thread goes on in a fork
    with theirs:
        os.set_inheritable(theirs.fileno(), True)
        command = [sys.executable, "-m", "tests.support.forker", str(theirs.fileno())]
        os.posix_spawn(sys.executable, command, environment)
    ask(mine)


def end_forker() -> None:
    subprocess.Popen = Popen
    if Forked.forker is not None:
        Forked.forker.close()
