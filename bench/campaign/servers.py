"""`kvstore serve` and redis-server as processes that are killed, stopped, ended and started again; flipped bytes.

Knows no conversations. Whatever takes longer than PATIENCE_S is a failure: nothing hangs.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from bench.peers.embedded import ROOT
from bench.serving import free_port
from kvstore.disk.directory import read_lock_info

PATIENCE_S = 300.0  # of a busy machine
KEY, ADMIN_KEY = "key-of-the-campaign", "admin-key-of-the-campaign"
SECRET = "the secret of a campaign's fleet, 40 chars"
COMMAND = (sys.executable, "-m", "kvstore")
FLAGS = ("--port", "0", "--device", "cpu", "--dtype", "float32", "--load", "always", "--log-format", "json",
         "--api-key", KEY, "--admin-key", ADMIN_KEY)  # fmt: skip
BROKEN = (OSError, http.client.HTTPException)


class Failure(AssertionError):
    """Something that must be true is not."""


def expect(is_so: object, what: str) -> None:
    if not is_so:
        raise Failure(what)


def wait_until(is_so: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        expect(time.monotonic() < end, f"not within {PATIENCE_S:.0f} s: {what}")
        time.sleep(0.02)


def _environment() -> dict[str, str]:
    known = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **known, "KVSTORE_FLEET_SECRET": SECRET}


class Node:
    """A server, or none at the moment, on a store of its own. Its log is beside the store, one file for all."""

    def __init__(self, store: Path, model: str | None, flags: Sequence[str]) -> None:
        self.store, self.log = store, store.with_suffix(".log")
        self._command = [*COMMAND, "serve", *([model] if model else []), "--store", str(store), *FLAGS, *flags]
        self._process: subprocess.Popen[bytes] | None = None
        self._port = self._known = 0
        self.start_s = 10.0  # how long the last start took

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def process(self) -> psutil.Process:
        expect(self.is_running, f"the server of {self.store.name} has ended by itself; its log: {self.log}")
        assert self._process is not None
        return psutil.Process(self._process.pid)

    @property
    def cores(self) -> list[psutil.Process]:
        """Its engine's process; none while that is started."""
        found = list[psutil.Process]()
        for child in self.process.children():
            with suppress(psutil.NoSuchProcess):  # it was killed just now
                found += [child] if child.name() == "kvstore-core" else []
        return found

    # -- its life ----------------------------------------------------------------------------------------------------
    def launch(self) -> None:
        """Start it, and do not wait until it answers."""
        self._known = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self.store.parent, env=_environment(), stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip

    def start(self) -> None:
        began_s = time.monotonic()
        self.launch()
        wait_until(self._is_ready, f"the server of {self.store.name} is ready; its log: {self.log}")
        self.start_s = time.monotonic() - began_s

    def _is_ready(self) -> bool:
        expect(self.is_running, f"the server of {self.store.name} does not start; its log: {self.log}")
        for line in self.log.read_bytes()[self._known :].splitlines():
            if b'"message": "ready"' in line:
                self._port = int(json.loads(line)["address"].rsplit(":", 1)[1])
                return True
        return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def wait_until_released(self) -> None:
        """Until the last thread of a process that was killed has ended, which holds the store's lock."""
        wait_until(lambda: read_lock_info(self.store) is None, f"nobody owns {self.store}")

    def end(self) -> None:
        """As a supervisor does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise Failure(f"the server of {self.store.name} does not end; its log: {self.log}") from None
        expect(code == 0, f"the server of {self.store.name} ended with {code}; its log: {self.log}")

    def show_stacks(self) -> None:
        """Let all threads of a server that hangs write to its log where they are; this ends it."""
        if self.is_running:
            for process in (*self.cores, self.process):
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGABRT)
            assert self._process is not None
            self._process.wait()

    def limit_files(self, num_bytes: int) -> None:
        """No file of its processes may grow beyond this: what a full disk is to whoever writes."""
        for process in (self.process, *self.cores):
            process.rlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    # -- requests ----------------------------------------------------------------------------------------------------
    def _open(
        self, method: str, path: str, body: Any, key: str | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        bearer = ADMIN_KEY if path.startswith("/admin") else KEY
        sent = {"Content-Type": "application/json", "Authorization": f"Bearer {bearer}"}
        sent |= {} if key is None else {"Idempotency-Key": key}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), sent)
            return connection, connection.getresponse()
        except TimeoutError:
            connection.close()
            raise Failure(f"no answer of {self.store.name} to {method} {path} within {PATIENCE_S:.0f} s") from None
        except BaseException:
            connection.close()
            raise

    def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        """Status and JSON. key: the Idempotency-Key. Raises one of BROKEN when the server is gone."""
        connection, reply = self._open(method, path, body, key)
        try:
            return reply.status, json.loads(reply.read())
        except ValueError as error:
            raise http.client.HTTPException("cut off") from error
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """The JSON of an answer that must come."""
        status, found = self.ask("GET", path)
        expect(status == 200, f"{self.store.name}: GET {path} is {status}: {found}")
        return found

    def stream(self, path: str, body: Any, key: str | None) -> Generator[tuple[int, Any], None, None]:
        """Status and JSON of each event; of the whole answer if it is an error."""
        connection, reply = self._open("POST", path, {**body, "stream": True}, key)
        try:
            if reply.status != 200:
                yield reply.status, json.loads(reply.read())
                return
            while line := reply.readline():
                if line.startswith(b"data: {"):
                    yield 200, json.loads(line[6:])
        except TimeoutError:
            raise Failure(f"a stream of {self.store.name} stands still for {PATIENCE_S:.0f} s") from None
        finally:
            connection.close()


class RedisNode:
    """A redis-server on one port, which keeps what `options` say."""

    def __init__(self, folder: Path, *options: str) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise SystemExit("python -m bench.campaign: redis-server is not installed; leave out --arms shared")
        folder.mkdir(exist_ok=True)
        self._port = free_port()
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._command = [program, "--port", str(self._port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder),
                         *options]  # fmt: skip
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, start_new_session=True)
        wait_until(self._answers, "redis-server answers")

    def _answers(self) -> bool:
        expect(self.process.poll() is None, "redis-server has ended by itself")
        try:
            with socket.create_connection(("127.0.0.1", self._port), PATIENCE_S) as found:
                found.sendall(b"PING\r\n")
                return found.recv(5) == b"+PONG"
        except OSError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


# -- the command, on a store ----------------------------------------------------------------------------------------
def start_command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments], env=_environment(), cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_command(*arguments: str) -> tuple[int, Any]:
    """Exit code, and what a command with --json says."""
    with start_command(*arguments, "--json") as process:
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise Failure(f"kvstore {' '.join(arguments)} does not end") from None
    expect(process.returncode in (0, 4), f"kvstore {' '.join(arguments)} ended with {process.returncode}: {err}")
    return process.returncode, json.loads(out)


# -- flipped bytes ---------------------------------------------------------------------------------------------------
def value_pages(content: bytes) -> list[int]:
    """Where the pages of large values begin in an LMDB file, but for the header of each value: LMDB's own check looks
    at all else.
    """
    starts: list[int] = []
    number = 2
    while number < len(content) // 4096:
        own, flags, num_pages = struct.unpack_from("=Q2xHI", content, number * 4096)
        is_value = own == number and flags == 4 and number + num_pages <= len(content) // 4096
        if is_value and len(set(content[number * 4096 : (number + 1) * 4096])) > 100:  # else it is free, or never used
            starts += range(number * 4096, (number + num_pages) * 4096, 4096)
        number += num_pages if is_value else 1
    return starts


def flip(store: Path, rng: random.Random, count: int) -> int:
    """Flip a bit each in so many pages of stored KV, with no server there. Returns in how many."""
    data = store / "blocks" / "data.mdb"
    content = bytearray(data.read_bytes())
    starts = value_pages(bytes(content))
    chosen = rng.sample(starts, min(count, len(starts)))
    for start in chosen:
        content[start + 600 + rng.randrange(3000)] ^= 1 << rng.randrange(8)
    data.write_bytes(content)
    return len(chosen)
