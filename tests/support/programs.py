"""Python programs beside a test: by themselves, on a small file system of their own, and one that holds a file up."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.waiting import TIMEOUT_S

ROOT = Path(__file__).parents[2]


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs to its end. It finds the tests, and warnings are its errors."""
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)


def may_mount() -> bool:
    """Whether a file system can be mounted here, in a namespace of its own."""
    command = ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def python_on_a_tmpfs(options: str, code: str, folder: Path) -> str:
    """What it prints. Its argument is a folder of which it alone sees that a tmpfs is mounted there; skips where that
    is not allowed.
    """
    if not may_mount():
        pytest.skip("no tmpfs can be mounted here")
    mount = f'mount -t tmpfs -o {options} none "$0" && exec "$@"'
    command = ["unshare", "-Urm", "sh", "-c", mount, str(folder), sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


HOLD = "import lmdb, sys; e = lmdb.open(sys.argv[1]); t = e.begin(write=True); print('held', flush=True); input()"


@contextmanager
def writer_held_up(environment: Path) -> Iterator[Callable[[], object]]:
    """In here another process has a transaction open in this LMDB environment, until this is called."""
    command = [sys.executable, "-c", HOLD, str(environment)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        yield lambda: other.communicate("\n")
