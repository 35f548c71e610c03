"""Lines in the log when what /health tells changes, without anybody asking: real faults of servers that run."""

import asyncio
import json
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.service.api import health
from tests.support.service.server_process import launched
from tests.support.service.serving import serving
from tests.support.service.talking import SHORT
from tests.support.waiting import wait_until

ON_A_TMPFS = ("unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size=16m none "$0" && exec "$@"')


def told(log: list[str]) -> list[tuple[str, ...]]:
    """Level, reason, status and cause of each line about health."""
    lines = [json.loads(line) for line in log if "health has got" in line]
    return [tuple(one[name] for name in ("level", "reason", "status", "cause") if name in one) for one in lines]


def test_redis_goes_and_comes_back(redis, lines, monkeypatch):
    monkeypatch.setattr(health, "WATCH_S", 0.05)
    with serving(engine={"cache_tiers": {"hbm": "4MiB", "cpu": "8MiB", "remote": redis.url}}) as server:
        watching = asyncio.run_coroutine_threadsafe(health.watch(server.context), server.loop)
        redis.kill()
        assert server.post("/chat", {"message": "Hello, is anybody there?", **SHORT}).status == 200
        server.wait_until(lambda: told(lines["json"]), "it is told")
        ((*head, cause),) = told(lines["json"])
        assert head == ["WARNING", "remote_degraded", "degraded"] and f"127.0.0.1:{redis.port}" in cause
        redis.start()
        server.wait_until(lambda: len(told(lines["json"])) > 1, "it is told, too")
        assert told(lines["json"])[1:] == [("INFO", "remote_degraded", "ok")]
        watching.cancel()


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

        def now() -> list[tuple[str, ...]]:
            return told(server.log.read_text().splitlines())

        def is_told() -> bool:
            server.post("/chat", said)
            return {"disk_degraded", "sessions_failing"} <= {line[1] for line in now()}

        wait_until(is_told, "it is told")
        assert ("WARNING", "disk_degraded", "degraded", "no space") in now()
        head, cause = next((line[:3], line[3]) for line in now() if line[1] == "sessions_failing")
        assert head == ("WARNING", "sessions_failing", "degraded")
        assert cause == "the disk is full (16.0 MiB of 16.0 MiB)"
        reply = server.post("/chat", said)
        why = "this was not stored: the disk is full (16.0 MiB of 16.0 MiB); free some space and try again"
        assert (reply.status, reply.error["code"], reply.error["message"]) == (503, "store_degraded", why)
        filler.unlink()
        wait_until(lambda: ("INFO", "disk_degraded") in [line[:2] for line in now()], "it is told, too")
        assert server.post("/chat", said).status == 200
