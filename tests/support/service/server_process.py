"""`kvstore serve` as a process of its own on a free port, to be killed, ended and started again on the same store."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.service.serving import ADMIN, ADMIN_KEY, KEY, Reply, Serving
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
COMMAND = (sys.executable, "-m", "kvstore.service.command.cli")
SIZES = ("--hbm", "4MiB", "--cpu", "8MiB", "--disk", "64MiB")
FLAGS = ("--port", "0", "--device", "cpu", "--load", "always", "--log-format", "json", "--api-key", KEY,
         "--admin-key", ADMIN_KEY)  # fmt: skip
START_S = 300.0  # importing torch beside other tests


@dataclass
class ServerProcess:
    """A server that runs, or did. log: what it wrote to stderr. hosts: as `Serving` has them, and so its requests."""

    process: subprocess.Popen
    log: Path
    hosts: tuple[str, int]
    key: str = KEY

    request, get, post, connect = Serving.request, Serving.get, Serving.post, Serving.connect

    @property
    def cores(self) -> list[psutil.Process]:
        """The engines' processes that run."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if child.name() == "kvstore-core"]

    @property
    def core(self) -> psutil.Process | None:
        return next(iter(self.cores), None)

    @property
    def with_torch(self) -> list[bool]:
        """Whether torch is loaded: in the server's process, then in those of its engines."""
        pids = [self.process.pid, *(core.pid for core in self.cores)]
        return ["libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in pids]

    def admin(self, method: str, path: str) -> Reply:
        return self.request(method, path, {} if method == "POST" else None, ADMIN)

    def flush(self) -> None:
        reply = self.admin("POST", "/admin/flush")
        assert reply.status == 200, reply.body

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def launch(
    store: Path, *flags: str, environment: Mapping[str, str] | None = None, within: Sequence[str] = ()
) -> ServerProcess:
    """A server on this store, ready. Its log is beside the store, one file for all. environment: beside ours. within: a
    command that becomes the server's.
    """
    log = store.with_suffix(".log")
    known = log.stat().st_size if log.exists() else 0
    with log.open("ab") as stderr:
        process = subprocess.Popen(
            [*within, *COMMAND, "serve", "--store", str(store), *SIZES, *FLAGS, *flags], cwd=store.parent,
            env={**ENVIRONMENT, **(environment or {})}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=stderr, start_new_session=True,
        )  # fmt: skip
    found: list[str] = []

    def is_up() -> bool:
        said = log.read_bytes()[known:].decode()
        assert process.poll() is None, f"the server ended with {process.returncode}: {said}"
        found[:] = re.findall(r'"ready", "address": "http://127\.0\.0\.1:(\d+)"', said)
        return bool(found)

    with ExitStack() as unless_ready:
        unless_ready.callback(process.wait)
        unless_ready.callback(process.kill)
        wait_until(is_up, "the server is ready", START_S)
        server = ServerProcess(process, log, ("127.0.0.1", int(found[0])))
        assert server.get("/ready").status == 200
        unless_ready.pop_all()
    return server


@contextmanager
def launched(store: Path, *flags: str, **more: Any) -> Iterator[ServerProcess]:
    """`launch`; killed at the end, if it still runs. A test that fails shows what the server said."""
    server = launch(store, *flags, **more)
    try:
        yield server
    except Exception:
        print("\n".join(line for line in server.log.read_text().splitlines() if '"status": 2' not in line)[-6000:])
        raise
    finally:
        server.kill()


def run_command(*arguments: object, input: str | None = None, **environment: str) -> subprocess.CompletedProcess:
    """A command of `kvstore` that ends by itself."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], env=ENVIRONMENT | environment, cwd="/", input=input, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip


def verify(store: Path) -> None:
    """`kvstore verify` finds nothing wrong."""
    found = run_command("verify", "--store", store, "--json")
    assert found.returncode == 0, found
    report = json.loads(found.stdout)
    assert report["is_complete"] and not report["sessions"]["problems"], report


def without_progress(err: str) -> str:
    """stderr but for the lines that tell how far something is, on a busy machine."""
    return re.sub(r"(?m)^kvstore: [a-z ]+ since \d+ s(, \d+% done)?\n", "", err)
