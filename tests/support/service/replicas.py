"""Servers behind Ray Serve, as processes of their own: a fleet with its Redis, ended so that nothing is left."""

import importlib.util
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.redis_server import RedisServer
from tests.support.service.server_process import ServerProcess, launch
from tests.support.shared_sessions import DURABLE

ACTOR = "ray::ServeReplica:kvstore:Replica"
END_S = 120.0

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray Serve")


class RayFleet:
    """Replicas over one Redis, which has sessions and KV. redis, store: also for others to look into."""

    def __init__(self, folder: Path) -> None:
        (folder / "redis").mkdir()
        (folder / "secret").touch(0o600)
        (folder / "secret").write_text("of a fleet of tests, long enough\n")
        (folder / "secret").chmod(0o600)
        self.store = folder / "store"
        self.redis = RedisServer(folder / "redis", *DURABLE)
        self.flags = (
            "--session-store", self.redis.url, "--remote", self.redis.url[:-1] + "1",
            "--fleet-secret-file", str(folder / "secret"),
        )  # fmt: skip
        self._ray = tempfile.mkdtemp(prefix="ray")  # Ray has sockets there, and their names may not be long
        self.environment = {"RAY_TMPDIR": self._ray, "HOME": str(folder), "RAY_memory_monitor_refresh_ms": "0"}

    def launch(self, *flags: str) -> ServerProcess:
        return launch(self.store, *self.flags, *flags, environment=self.environment)

    def close(self) -> None:
        self.redis.kill()
        shutil.rmtree(self._ray)


@contextmanager
def ray_fleet(folder: Path, *flags: str) -> Iterator[tuple[RayFleet, ServerProcess]]:
    fleet = RayFleet(folder)
    try:
        server = fleet.launch(*flags)
        try:
            yield fleet, server
        finally:
            end(server)
    finally:
        fleet.close()


def end(server: ServerProcess, number: int = signal.SIGTERM) -> int:
    """In order, by a signal; none of its processes is left. Returns its exit code."""
    if server.process.poll() is not None:
        return server.process.returncode
    all_of_it = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(number)
    try:
        code = server.process.wait(END_S)
        left = psutil.wait_procs(all_of_it, END_S)[1]
        assert left == [], f"processes are left: {left}"
        return code
    finally:
        server.kill()
        for one in psutil.wait_procs(all_of_it, 0)[1]:
            one.kill()


def replicas_of(server: ServerProcess) -> dict[str, psutil.Process]:
    """The processes of replicas that run, by their names."""
    found = {}
    for process in psutil.Process(server.process.pid).children(recursive=True):
        try:
            if process.cmdline()[:1] == [ACTOR]:
                places = [re.search(r"/(replica-\d+)\.lock$", file.path) for file in process.open_files()]
                found |= {place[1]: process for place in places if place is not None}
        except psutil.NoSuchProcess:
            continue
    return found


def chats_of(server: ServerProcess) -> dict[str, float]:
    """How many turns each replica has answered."""
    page = server.get("/metrics").body.decode()
    samples = re.findall(
        r'kvstore:http_requests_total\{replica="([^"]+)",method="POST",route="/chat",status="200"\} (\S+)', page
    )
    return {name: float(count) for name, count in samples}


class Whose:
    """Which replica has answered since the last question."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._before = chats_of(server)

    def answered(self) -> list[str]:
        now, before = chats_of(self._server), self._before
        self._before = now
        return sorted(name for name, count in now.items() if count > before.get(name, 0))
