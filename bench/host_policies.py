"""What stays in vLLM's own memory tier by its policies and by ours: hit rates of conversations that come back.

Runs vLLM's manager of that tier without a model, on a clock of its own, with memory for a part of what the talks
need. Start it with the python that has vLLM. The first quarter of the requests only fills.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.common import Report, arguments, run

KINDS = ("people", "agents", "mixed")
ANSWER_S = 1.0  # from a request's lookup to its end
SYSTEM_BLOCKS = 4


def traffic(kind: str, num_talks: int, seed: int) -> list[tuple[float, int, int]]:
    """Requests in order: seconds, conversation, blocks of its prompt and answer. People leave for minutes, some for
    long; agents go on within seconds, with little that is new.
    """
    draw, found = random.Random(seed), []
    for talk in range(num_talks):
        at_s, size = draw.random() * 4 * 3600, draw.randrange(2, 12)
        is_agent = kind == "agents" or (kind == "mixed" and talk % 3 == 0)
        for _ in range(draw.randrange(8, 30) if is_agent else 1 + min(15, int(draw.expovariate(1 / 4)))):
            found.append((at_s, talk, size))
            size += draw.randrange(1, 4) if is_agent else draw.randrange(4, 14)
            at_s += 2 + draw.expovariate(1 / 8) if is_agent else 10 + draw.lognormvariate(5.5, 1.6)
    return sorted(found)


def keys_of(name: str, num_blocks: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {i}".encode()).digest() + bytes(4) for i in range(num_blocks)]


class Tier:
    """vLLM's memory tier of so many chunks under one policy. make: the policy, of a capacity and a clock."""

    def __init__(self, make: Callable[[int, Callable[[], float]], Any], num_chunks: int) -> None:
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self.now_s = 0.0
        self._manager = CPUOffloadingManager(num_chunks)
        self._manager._policy = make(num_chunks, lambda: self.now_s)
        self._num_asked = 0

    def request(self, at_s: float, keys: list[bytes]) -> int:
        """Returns how many of its blocks were there."""
        from vllm.v1.kv_offload.base import LookupResult, ReqContext

        self.now_s = at_s
        self._num_asked += 1
        context, manager, hits = ReqContext(str(self._num_asked)), self._manager, 0
        for i, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (i + 1))
        manager.on_new_request(context)
        while hits < len(keys) and manager.lookup(keys[hits], context) is LookupResult.HIT:
            hits += 1
        manager.prepare_load(keys[:hits], context)
        manager.complete_load(keys[:hits], context)
        stored = manager.prepare_store(keys[hits:], context)
        self.now_s += ANSWER_S
        if stored is not None:
            manager.complete_store(set(stored.keys_to_store), context)
        manager.on_request_finished(context)
        return hits


def measure(parsed: argparse.Namespace, report: Report) -> None:
    from vllm.v1.kv_offload.cpu.policies.arc import ARCCachePolicy
    from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

    from kvstore.hosts.vllm_policy import KVStorePolicy

    policies: dict[str, Callable[[int, Callable[[], float]], Any]] = {
        "lru": lambda size, clock: LRUCachePolicy(size),
        "arc": lambda size, clock: ARCCachePolicy(size),
        "ours": KVStorePolicy,
    }
    for kind in KINDS:
        for num_systems in (0, 3):
            for seed in range(1 if parsed.quick else parsed.seeds):
                requests = traffic(kind, parsed.talks, seed)
                needed = sum({talk: size for _, talk, size in requests}.values())
                row: dict[str, Any] = {"traffic": kind, "system_prompts": num_systems, "seed": seed}
                for name, make in policies.items():
                    row |= _hit_rate(Tier(make, round(needed * parsed.share)), requests, num_systems, name)
                report.add(**row, requests=len(requests))


def _hit_rate(tier: Tier, requests: list[tuple[float, int, int]], num_systems: int, name: str) -> dict[str, float]:
    hits = asked = 0
    started = time.perf_counter()
    for number, (at_s, talk, size) in enumerate(requests):
        keys = keys_of(f"system {talk % num_systems}", SYSTEM_BLOCKS) if num_systems else []
        keys += keys_of(f"talk {talk}", size)
        found = tier.request(at_s, keys)
        if 4 * number >= len(requests):
            hits, asked = hits + found, asked + len(keys)
    return {name: hits / asked, f"{name}_ms": 1000 * (time.perf_counter() - started) / len(requests)}


def main() -> int:
    parser = arguments("host_policies", (__doc__ or "").split("\n")[0], uses_torch=False)
    parser.add_argument("--talks", type=int, default=200, help="conversations (default: 200)")
    parser.add_argument("--seeds", type=int, default=3, help="of each kind of traffic (default: 3)")
    parser.add_argument("--share", type=float, default=0.1, help="of what they need that fits (default: 0.1)")
    return run(measure, parser.parse_args(), "Hit rates of vLLM's memory tier, by its policy")


if __name__ == "__main__":
    sys.exit(main())
