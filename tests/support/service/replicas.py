"""Servers behind Ray Serve, on a cluster of one node: a fleet with its Redis, ended so that nothing is left."""

import importlib.util
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.ray_cluster import ray_cluster
from tests.support.redis_server import RedisServer, free_port
from tests.support.service.server_process import ENVIRONMENT, ServerProcess, launch
from tests.support.shared_sessions import DURABLE, secret_file
from tests.support.waiting import wait_until

ACTOR = "ray::ServeReplica:kvstore:Replica"
END_S = 120.0

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray Serve")


@dataclass
class FleetServer(ServerProcess):
    """What answers for all replicas. node: the process of Ray that theirs come from."""

    node: psutil.Process = None  # type: ignore[assignment]


class RayFleet:
    """Replicas over one Redis, which has sessions and KV. redis, store: also for others to look into."""

    def __init__(self, folder: Path, address: str, node: psutil.Process) -> None:
        (folder / "redis").mkdir()
        self.store, self.node = folder / "store", node
        self.redis = RedisServer(folder / "redis", *DURABLE)
        self.flags = (
            "--session-store", self.redis.url, "--remote", self.redis.url[:-1] + "1",
            "--fleet-secret-file", secret_file(folder),
        )  # fmt: skip
        self.environment = {"RAY_ADDRESS": address, "HOME": str(folder)}

    def launch(self, *flags: str) -> FleetServer:
        port = ("--port", str(free_port()))
        server = launch(self.store, *self.flags, *port, *flags, environment=self.environment)
        return FleetServer(**vars(server), node=self.node)


@contextmanager
def ray_fleet(folder: Path) -> Iterator[RayFleet]:
    with ray_cluster(1, max(2, os.cpu_count() or 1), folder, {**ENVIRONMENT, "HOME": str(folder)}) as (address, nodes):
        fleet = RayFleet(folder, address, nodes[0])
        try:
            yield fleet
        finally:
            fleet.redis.kill()


def end(server: FleetServer, number: int = signal.SIGTERM) -> int:
    """In order, by a signal; no replica is left. Returns its exit code."""
    try:
        server.process.send_signal(number)
        code = server.process.wait(END_S)
        wait_until(lambda: not replicas_of(server), "all replicas have ended")
        return code
    finally:
        server.kill()


def replicas_of(server: FleetServer) -> dict[str, psutil.Process]:
    """The processes of replicas that run, by their names."""
    found = {}
    for process in server.node.children(recursive=True):
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
