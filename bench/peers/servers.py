"""Servers with /v1/completions, as sides of a comparison: ours, vLLM, and vLLM with several stores for its KV.

Each runs in processes of its own and takes prompts as token ids. The ids of an answer are read from its text, which
consists of words of the tokenizer that bench.common makes.
"""

from __future__ import annotations

import asyncio
import ctypes.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import aiohttp

from bench.peers.embedded import ROOT
from bench.peers.load import Answer, PeerError
from bench.serving import free_port
from bench.serving_load import new_session
from kvstore.service.command.vllm_config import transfer_config

START_S, STOP_S, READY_WAIT_S = 1200.0, 60.0, 0.1  # a vLLM that compiles beside others takes ten minutes
MODEL_NAME, WINDOW = "bench", 4096
BLOCK_TOKENS = 32  # of vLLM's blocks and of LMCache's chunks
KV_GIB = 2  # of vLLM's pool, and of LMCache's memory
DISK_GIB = 8
OUR_TIERS = ("--hbm", f"{KV_GIB}GiB", "--cpu", f"{KV_GIB}GiB", "--disk", f"{DISK_GIB}GiB")


@dataclass(frozen=True, slots=True)
class Tiers:
    """vLLM's tiers."""

    kind: str  # "kvstore" or "fs" below its memory tier; or only that tier with "lru", "arc" or our "return" as policy
    cpu_bytes: int = KV_GIB << 30
    disk_bytes: int = DISK_GIB << 30
    pool_blocks: int | None = None  # of vLLM's own pool; None: as many as KV_GIB holds


@dataclass(frozen=True, slots=True)
class Launch:
    """How a process is started."""

    command: list[str]
    environment: Mapping[str, str]
    ready: str  # address that answers 200 once the process serves

    def start(self, log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            return subprocess.Popen(
                self.command, stdout=out, stderr=out, start_new_session=True, env={**os.environ, **self.environment}
            )


@dataclass(slots=True)
class Server:
    """A side over HTTP: one process, or several that start in this order and end in reverse order."""

    name: str
    url: str
    launches: Sequence[Launch]
    log: Path
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def settings(self) -> list[list[str]]:
        """The settings in the environment, and the command, of each process."""
        return [
            [*(f"{name}={value}" for name, value in launch.environment.items()), *launch.command]
            for launch in self.launches
        ]

    def start(self) -> None:
        for launch in self.launches:
            process = launch.start(self.log)
            self._running.append(process)
            self._wait_until_ready(process, launch.ready)

    def _wait_until_ready(self, process: subprocess.Popen[bytes], address: str) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and process.poll() is None:
            try:
                with urlopen(address, timeout=5):
                    return
            except (URLError, OSError):
                time.sleep(READY_WAIT_S)
        raise PeerError(f"{self.name} did not start; its log: {self.log}")

    def stop(self) -> None:
        while self._running:
            process = self._running.pop()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def kill(self) -> None:
        """End all processes at once, with SIGKILL."""
        while self._running:
            process = self._running.pop()
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def leave(self, talk: str, keep: bool) -> None:
        """Nothing to do: a server evicts by itself."""

    def ask(self, prompts: Sequence[list[int]], max_tokens: int, talk: str = "") -> list[Answer]:
        try:
            return asyncio.run(self._ask(prompts, max_tokens))
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            raise PeerError(f"{self.name}: {type(error).__name__}: {error}; its log: {self.log}") from error

    async def _ask(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Answer]:
        async with new_session() as session:
            return await asyncio.gather(*(self._stream(session, prompt, max_tokens) for prompt in prompts))

    async def _stream(self, session: aiohttp.ClientSession, prompt: list[int], max_tokens: int) -> Answer:
        body = {
            "model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        text, usage = "", None
        started = first = last = time.perf_counter()
        async with session.post(f"{self.url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                raise PeerError(f"{self.name} answered {reply.status}: {(await reply.text())[:200]}")
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise PeerError(f"{self.name}: {str(event['error'])[:200]}; its log: {self.log}")
                usage = event.get("usage") or usage
                if event["choices"] and event["choices"][0]["text"]:
                    last = time.perf_counter()
                    first = first if text else last
                    text += event["choices"][0]["text"]
        return self._answer(text, usage, max_tokens, first - started, last - started)

    def _answer(self, text: str, usage: dict[str, Any] | None, max_tokens: int, ttft_s: float, end_s: float) -> Answer:
        if usage is None or usage["completion_tokens"] != max_tokens:
            raise PeerError(f"{self.name} was to answer with {max_tokens} tokens; its usage is {usage}")
        ids = [int(number) for number in re.findall(r"w(\d+)", text)]
        ids += [0] * (max_tokens - len(ids))  # the unknown word has no text
        details = usage.get("prompt_tokens_details") or {}
        return Answer(ttft_s, end_s, ids, details.get("cached_tokens"))


def ours(model: Path, folder: Path, threads: int, log: Path) -> Server:
    """`kvstore serve` with all tiers."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "kvstore", "serve", str(model), "--port", str(port), "--dtype", "bfloat16",
        "--served-model-name", MODEL_NAME, "--store", str(folder / "store"), *OUR_TIERS,
    ]  # fmt: skip
    return Server("ours", url, [Launch(command, {"OMP_NUM_THREADS": str(threads)}, f"{url}/ready")], log)


def vllm(
    python: Path, model: Path, folder: Path, threads: int, log: Path, lmcache: str | None, tiers: Tiers | None = None
) -> Server:  # fmt: skip
    """vLLM with its prefix cache. lmcache: "default" or "shm", beside an LMCache server that writes to disk."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "bfloat16",
        "--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port),
        "--max-model-len", str(WINDOW), "--enable-prefix-caching", "--block-size", str(BLOCK_TOKENS),
        "--enable-prompt-tokens-details",
    ]  # fmt: skip
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": ":".join(preloads(python)),
    }  # fmt: skip
    launches, name = [], "vLLM"
    if lmcache:
        launches, name = [_lmcache(python, folder, cache_port := free_port(), lmcache == "shm")], "vLLM with LMCache"
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": cache_port}
        transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        command += ["--kv-transfer-config", json.dumps(transfer)]
    if tiers:
        name = f"vLLM with {tiers.kind}"
        environment["PYTHONPATH"] = str(ROOT)
        command += ["--prefix-caching-hash-algo", "sha256_cbor"]
        command += ["--kv-transfer-config", json.dumps(_transfer(folder, tiers))]
        if tiers.pool_blocks is not None:
            command += ["--num-gpu-blocks-override", str(tiers.pool_blocks)]
    launches.append(Launch(command, environment, f"{url}/health"))
    return Server(name, url, launches, log)


def _transfer(folder: Path, tiers: Tiers) -> dict[str, Any]:
    """The configuration that `kvstore vllm-config --on-cpu` prints, changed for vLLM's own policies and tier."""
    transfer = transfer_config(str(folder / "store"), tiers.cpu_bytes, tiers.disk_bytes, on_cpu=True)
    extra = transfer["kv_connector_extra_config"]
    if tiers.kind != "kvstore":
        fs = {"type": "fs", "root_dir": str(folder / "files")}
        extra["secondary_tiers"] = [fs] if tiers.kind == "fs" else []
    if tiers.kind not in ("kvstore", "return"):
        del extra["cache_policy_module_path"]
        extra["eviction_policy"] = "arc" if tiers.kind == "arc" else "lru"
    return transfer


def _lmcache(python: Path, folder: Path, port: int, shares_memory: bool) -> Launch:
    """LMCache's server, with so much memory, and files for everything."""
    (folder / "lmcache").mkdir()
    http_port = free_port()
    command = [
        str(python.parent / "lmcache"), "server", "--host", "127.0.0.1", "--port", str(port),
        "--http-host", "127.0.0.1", "--http-port", str(http_port), "--supported-transfer-mode", "engine_driven",
        "--l2-adapter", json.dumps({"type": "fs", "base_path": str(folder / "lmcache")}),
        "--chunk-size", str(BLOCK_TOKENS), "--l1-size-gb", str(KV_GIB), "--eviction-policy", "LRU",
        "--disable-observability",
    ]  # fmt: skip
    if shares_memory:
        command += ["--shm-name", f"kvstore-bench-{os.getpid()}"]
    environment = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
    return Launch(command, environment, f"http://127.0.0.1:{http_port}/healthcheck")


def preloads(python: Path) -> list[str]:
    """The libraries that vLLM's documents recommend on a CPU, if installed: tcmalloc, and Intel's OpenMP."""
    found = [ctypes.util.find_library("tcmalloc_minimal"), str(python.parent.parent / "lib" / "libiomp5.so")]
    return [one for one in found if one and ("/" not in one or Path(one).exists())]
