"""vLLM's CPU build as a process that serves a tiny model over our store."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from kvstore.service.command.vllm_config import transfer_config
from tests.support.redis_server import free_port

DISK_BYTES = 1 << 30
START_S = 1200.0  # where the machine has other work, too
MAKE_MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(int(sys.argv[2]))
sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes)).save_pretrained(sys.argv[1])
"""


class ServedVllm:
    """vLLM in a session of its own, so that it can be killed as a whole. store: None for vLLM alone. within: a command
    to start it by. num_ranks: of tensor parallelism.
    """

    def __init__(self, model: Path, store: Path | None, within: Sequence[str] = (), num_ranks: int = 1) -> None:
        self.model, self.store, self.port = model, store, free_port()
        self.within, self.num_ranks = list(within), num_ranks
        self.log = model.parent / f"{model.name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.launch()
        self.wait()

    def launch(self) -> None:
        command = [
            *self.within, sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model),
            "--port", str(self.port), "--host", "127.0.0.1", "--served-model-name", "tiny", "--dtype", "float32",
            "--skip-tokenizer-init", "--max-model-len", "1024", "--block-size", "32", "--enforce-eager",
            "--enable-prefix-caching", "--prefix-caching-hash-algo", "sha256_cbor", "--enable-prompt-tokens-details",
            "--tensor-parallel-size", str(self.num_ranks),
        ]  # fmt: skip
        if self.store is not None:
            transfer = transfer_config(str(self.store), 16 << 20, DISK_BYTES, on_cpu=True)
            command += ["--kv-transfer-config", json.dumps(transfer)]
        surroundings = {
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(["0-1"] * self.num_ranks),
        }  # fmt: skip
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, start_new_session=True, env={**os.environ, **surroundings}
            )

    def wait(self) -> None:
        """Until it serves."""
        assert self.process is not None
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3000:]
            try:
                urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            except (URLError, OSError):
                time.sleep(0.5)

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):  # all of it has ended by itself
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
            for left in Path("/dev/shm").glob("vllm_offload_*.mmap"):
                if left.stat().st_uid == os.getuid() and not _is_mapped(left):
                    left.unlink()

    def ask(self, prompt: list[int], **params: object) -> tuple[list[int], int]:
        """Token ids of the answer, and how many of the prompt came from a cache."""
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "detokenize": False, **params,
        }  # fmt: skip
        request = Request(
            f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with urlopen(request, timeout=START_S) as reply:
            found = json.load(reply)
        details = found["usage"].get("prompt_tokens_details") or {}
        return found["choices"][0]["token_ids"], details.get("cached_tokens") or 0

    def metric(self, name: str) -> float:
        """What vLLM's own /metrics has under this name."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=START_S) as reply:
            lines = [line for line in reply.read().decode().splitlines() if line.startswith(name + "{")]
        assert len(lines) == 1, f"{name}: {lines}"
        return float(lines[0].rpartition(" ")[2])

    def ask_all(self, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(self.ask, prompts))


def _is_mapped(path: Path) -> bool:
    """Whether a process that still runs has this file."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(path) in maps.read_text():
                return True
        except OSError:
            continue
    return False


def make_model(folder: Path, seed: int) -> Path:
    subprocess.run([sys.executable, "-c", MAKE_MODEL, str(folder), str(seed)], check=True, capture_output=True)
    return folder
