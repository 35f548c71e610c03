"""A Ray cluster: its nodes are processes of this machine. It ends with all of its processes."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.redis_server import free_port
from tests.support.waiting import wait_until

END_S = 120.0
OBJECT_BYTES = 100 * 2**20
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}


@contextmanager
def ray_cluster(
    num_nodes: int, cpus_each: int, logs: Path, environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[str, list[psutil.Process]]]:
    """Yields its address, and for each node the process that all of its others come from."""
    folder = tempfile.mkdtemp(prefix="ray")  # Ray has sockets there, and their names may not be long
    address, nodes = f"127.0.0.1:{free_port()}", list[psutil.Process]()
    try:
        for number in range(num_nodes):
            log = logs / f"node-{number}"
            nodes.append(_node(address, number, cpus_each, Path(folder), log, environment))
        yield address, nodes
    finally:
        all_of_it = [one for node in nodes for one in (node, *node.children(recursive=True))]
        for node in reversed(nodes):
            node.terminate()
            node.wait(END_S)
        for one in psutil.wait_procs(all_of_it, 10)[1]:
            one.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _node(
    address: str, number: int, num_cpus: int, folder: Path, log: Path, environment: Mapping[str, str]
) -> psutil.Process:
    port = address.partition(":")[2]
    where = ("--head", "--temp-dir", folder, "--port", port) if number == 0 else ("--address", address)
    own = ("--dashboard-agent-listen-port", "--metrics-export-port")
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *where, "--block", "--num-cpus", str(num_cpus),
               "--ray-client-server-port", str(free_port()), "--object-store-memory", str(OBJECT_BYTES),
               "--min-worker-port", "0", "--max-worker-port", "0",  # by default a range in which ours may be
               *(text for name in own for text in (name, str(free_port())))]  # fmt: skip
    with log.open("wb") as out:
        node = psutil.Popen(command, env={**environment, **QUIET}, stdout=out, stderr=out, cwd=folder)
    wait_until(lambda: "Ray runtime started" in log.read_text(), "Ray is there", END_S)
    return node
