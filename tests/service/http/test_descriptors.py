"""Few descriptors, with the kernel's own limits: raised where that is possible, refused in one line where it is not."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.service.server_process import COMMAND, ENVIRONMENT
from tests.support.waiting import wait_until

NEEDED = 1024 + 192
LISTENING = """
import asyncio
from kvstore.service.http.logs import set_up_logging
from kvstore.service.settings.serve_options import ServeOptions
from kvstore.service.server import Server

async def listen():
    server = Server(ServeOptions(port=0))
    set_up_logging("text")
    await server.listen()
    print(server.port, flush=True)
    await asyncio.sleep(600)

asyncio.run(listen())
"""


def limited(soft: int, hard: int):
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def serve(tmp_path: Path, soft: int, hard: int, *flags: str) -> subprocess.Popen:
    command = [*COMMAND, "serve", "--port", "0", "--store", str(tmp_path / "store"), "--device", "cpu", *flags]
    return subprocess.Popen(
        command, env=ENVIRONMENT, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=limited(soft, hard)
    )


def test_the_soft_limit_is_raised_to_what_is_needed(tmp_path):
    with serve(tmp_path, 64, 4096) as server:
        assert "loading the model" in server.stderr.readline()
        assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (NEEDED, 4096)
        server.kill()


@pytest.mark.parametrize(("hard", "flags", "remedy"), [
    (128, (), "Docker)"),
    (1024, (), "or give --max-connections 832 or fewer"),
    (1024, ("--max-connections", "900"), "or give --max-connections 832 or fewer"),
])  # fmt: skip
def test_a_hard_limit_that_is_too_low_is_told_before_anything_is_opened(tmp_path, hard, flags, remedy):
    with serve(tmp_path, 64, hard, *flags) as server:
        _, said = server.communicate(timeout=400)
    assert server.returncode == 1 and said.count("\n") == 1 and said.rstrip().endswith(remedy), said
    assert f"open files, but this process may have {hard}" in said and not (tmp_path / "store").exists()


def test_connections_that_cannot_be_accepted_are_told_in_a_line_and_served_later(tmp_path):
    log = tmp_path / "log"
    with ExitStack() as opened:
        said = opened.enter_context(log.open("w"))
        server = opened.enter_context(subprocess.Popen(
            [sys.executable, "-c", LISTENING], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=said, text=True
        ))  # fmt: skip
        opened.callback(server.send_signal, signal.SIGKILL)
        port = int(server.stdout.readline())
        held = len(os.listdir(f"/proc/{server.pid}/fd"))
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (held + 3, 4096))
        connections = [opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(20)]
        wait_until(lambda: "cannot be accepted" in log.read_text(), "it says so")
        time.sleep(2.0)  # two more rounds of trying
        assert log.read_text().count("\n") == 1 and "Too many open files" in log.read_text()
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (held + 100, 4096))
        for connection in connections:
            connection.settimeout(60)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 503")
