"""vLLM's CPU build serving a tiny model over our store: equal answers, kill -9 in the middle, other weights. Slow.

Needs vLLM; --long kills it fifty times.
"""

import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from kvstore.service.command.vllm_config import transfer_config

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]
START_S, NUM_TALKS, NUM_TOKENS = 600.0, 8, 200
MAKE_MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(int(sys.argv[2]))
sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes)).save_pretrained(sys.argv[1])
"""


class ServedVllm:
    """vLLM in a session of its own, so that it can be killed as a whole."""

    def __init__(self, model: Path, store: Path, port: int) -> None:
        self.model, self.store, self.port = model, store, port
        self.log = store.parent / "vllm.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        transfer = json.dumps(transfer_config(str(self.store), 16 << 20, 64 << 20, on_cpu=True))
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model), "--port",
            str(self.port), "--host", "127.0.0.1", "--served-model-name", "tiny", "--dtype", "float32",
            "--skip-tokenizer-init", "--max-model-len", "1024", "--block-size", "32", "--enforce-eager",
            "--enable-prefix-caching", "--prefix-caching-hash-algo", "sha256_cbor", "--enable-prompt-tokens-details",
            "--kv-transfer-config", transfer,
        ]  # fmt: skip
        surroundings = {
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        }  # fmt: skip
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, start_new_session=True, env={**os.environ, **surroundings}
            )
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
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
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


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def make_model(folder: Path, seed: int) -> Path:
    subprocess.run([sys.executable, "-c", MAKE_MODEL, str(folder), str(seed)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    one = ServedVllm(make_model(folder / "model", 0), folder / "store", free_port())
    yield one
    one.kill()


def prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 512) for _ in range(NUM_TOKENS + 10 * i)] for i in range(NUM_TALKS)]


def settle(server: ServedVllm) -> None:
    """Until what was computed is on disk: the tier writes within a second."""
    time.sleep(2)


def test_answers_are_equal_and_hits_return_after_kills_and_other_weights_find_none(server, request, tmp_path):
    server.start()
    asked = prompts(0)
    computed = [server.ask(prompt) for prompt in asked]
    assert [cached for _, cached in computed] == [0] * NUM_TALKS
    salted = server.ask(asked[0], cache_salt="another tenant")
    assert salted == computed[0], "another salt hits nothing, and changes no answer"
    settle(server)
    server.kill()

    draw = random.Random(1)
    for round_number in range(50 if request.config.getoption("--long") else 3):
        server.start()
        again = server.ask_all(asked)
        assert [ids for ids, _ in again] == [ids for ids, _ in computed], f"round {round_number}"
        assert all(cached >= NUM_TOKENS - 64 for _, cached in again), f"round {round_number}: {again}"
        with ThreadPoolExecutor(NUM_TALKS) as threads:  # new ones, in the middle of which it is killed
            for prompt in prompts(100 + round_number):
                threads.submit(server.ask, prompt)
            time.sleep(draw.random())
            server.kill()

    server.start()
    one_by_one = [server.ask(prompt) for prompt in asked]
    assert [ids for ids, _ in one_by_one] == [ids for ids, _ in computed]
    server.kill()

    weights = server.model / "model.safetensors"
    shutil.copy(make_model(tmp_path / "other", 1) / weights.name, weights)
    server.start()
    others = [server.ask(prompt) for prompt in asked[:3]]
    assert [cached for _, cached in others] == [0] * 3
    assert [ids for ids, _ in others] != [ids for ids, _ in computed[:3]]
