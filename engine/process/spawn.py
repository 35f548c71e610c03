"""Starts a process that runs one of our programs. Knows neither what it computes nor what is said to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path

SPIN_COUNT = "10000"  # tens of microseconds, longer than the gaps between a step's operations


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """Limit how long a compute thread without work spins before it sleeps.

    Call it before torch is loaded. GCC's OpenMP spins for milliseconds. Where another process needs the same core, a
    step then waits for spinning threads: 50 times slower beside one busy process (bench/LOG.md, 2026-11-22). The user's
    own setting wins.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def spawned(
    module: str, start: bytes, descriptors: Sequence[int], settings: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that runs this module and reads `start` as its first line.

    The configuration goes through a pipe, so the list of processes does not show it. settings: environment variables.
    """
    home = str(Path(__file__).parents[3])  # the folder of the package kvstore
    path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **(settings or {})}
    spin_briefly(environment)
    for_front = {signal.SIGINT, signal.SIGHUP}  # of the terminal; what is blocked is inherited
    before = signal.pthread_sigmask(signal.SIG_BLOCK, for_front)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=descriptors,
            env=environment,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended: whoever waits for its greeting will see
        process.stdin.write(start + b"\n")
        process.stdin.flush()
    return process
