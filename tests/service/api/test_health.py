"""Lines in the log when what /health tells changes, without anybody asking: real faults of servers that run."""

import json
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.redis_server import RedisServer
from tests.support.service.server_process import ServerProcess, launched
from tests.support.service.talking import SHORT
from tests.support.waiting import wait_until

ON_A_TMPFS = ("unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size=16m none "$0" && exec "$@"')


def told(server: ServerProcess) -> list[tuple[str, ...]]:
    """Level, reason, status and cause of each line about health."""
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if "health has got" in line]
    return [tuple(one[name] for name in ("level", "reason", "status", "cause") if name in one) for one in lines]


def test_redis_goes_and_comes_back(tmp_path):
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("the secret of this fleet, 32 characters")
    redis = RedisServer(tmp_path)
    try:
        with launched(tmp_path / "store", "--remote", redis.url, "--fleet-secret-file", str(secret)) as server:
            redis.kill()
            assert server.post("/chat", {"message": "Hello, is anybody there?", **SHORT}).status == 200
            wait_until(lambda: told(server), "it is told")
            ((*head, cause),) = told(server)
            assert head == ["WARNING", "remote_degraded", "degraded"] and f"127.0.0.1:{redis.port}" in cause
            redis.start()
            wait_until(lambda: len(told(server)) > 1, "it is told, too")
            assert told(server)[1:] == [("INFO", "remote_degraded", "ok")]
    finally:
        redis.kill()


def test_the_disk_is_full_and_has_space_again(tmp_path):
    within = (*ON_A_TMPFS, str(tmp_path))
    if subprocess.run([*within, "true"], capture_output=True).returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    with launched(tmp_path / "store", within=within) as server:
        log = server.log.read_text()
        assert f'"store": "{tmp_path / "store"}"' in log
        assert f"disk is 64.0 MiB, but the whole file system of {tmp_path}/store/blocks has 16.0 MiB" in log
        filler = Path(f"/proc/{server.process.pid}/root{tmp_path}/filler")
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        said = {"message": "word " * 100, **SHORT}

        def is_told() -> bool:
            server.post("/chat", said)
            return {"disk_degraded", "sessions_failing"} <= {line[1] for line in told(server)}

        wait_until(is_told, "it is told")
        assert ("WARNING", "disk_degraded", "degraded", "no space") in told(server)
        head, cause = next((line[:3], line[3]) for line in told(server) if line[1] == "sessions_failing")
        assert (
            head == ("WARNING", "sessions_failing", "degraded") and cause == "the disk is full (16.0 MiB of 16.0 MiB)"
        )
        reply = server.post("/chat", said)
        why = "this was not stored: the disk is full (16.0 MiB of 16.0 MiB); free some space and try again"
        assert (reply.status, reply.error["code"], reply.error["message"]) == (503, "store_degraded", why)
        filler.unlink()
        wait_until(lambda: ("INFO", "disk_degraded") in [line[:2] for line in told(server)], "it is told, too")
        assert server.post("/chat", said).status == 200
