"""How tests wait for what another thread or process does: until it is so, never for a time alone."""

import asyncio
import inspect
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TIMEOUT_S = 120.0  # of a busy machine


def wait_until(is_so: Callable[[], object], what: str = "", timeout_s: float = TIMEOUT_S) -> None:
    """Ask until it is so."""
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end, f"it did not become so in {timeout_s:.0f} s: {what or is_so}"
        time.sleep(0.005)


async def wait_in_loop(is_so: Callable[[], object], what: str = "", timeout_s: float = TIMEOUT_S) -> None:
    """The same in an event loop, which goes on meanwhile; is_so may be a coroutine's function."""
    end = time.monotonic() + timeout_s
    while not (await found if inspect.isawaitable(found := is_so()) else found):
        assert time.monotonic() < end, f"it did not become so in {timeout_s:.0f} s: {what or is_so}"
        await asyncio.sleep(0.005)


def wait_for_work(process: subprocess.Popen, log: Path, size: int) -> None:
    """Until the process has made its log longer than this, or has ended."""
    wait_until(lambda: process.poll() is not None or (log.exists() and log.stat().st_size > size))


def together(*works: Callable[[], object]) -> list:
    """Call all of these at once, each in a thread of its own; what they return, or what the first of them raises."""
    with ThreadPoolExecutor(len(works)) as threads:
        return [one.result() for one in [threads.submit(work) for work in works]]
