"""Hit rates of returning conversations in vLLM's own memory tier, with vLLM's policies and with ours.

Runs vLLM's manager of that tier without a model, on a virtual clock, with memory for a part of the chunks, behind a
pool that answers first, as vLLM's does. Start it with the python that has vLLM. The first quarter of the requests only
fills the tier.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.common import Report, arguments, run
from bench.traffic import generate
from kvstore.planning.trace_formats import FORMATS, read_trace
from kvstore.planning.traces import ANSWER_TOKENS_PER_S, Trace

KINDS = ("people", "agents", "mixed")
OTHER_KINDS = ("documents",)  # of bench.traffic
ANSWER_S = 1.0  # from a request's lookup to its end
BLOCK_TOKENS, CHUNK_TOKENS, ANSWER_TOKENS = 16, 32, 8
SYSTEM_CHUNKS = 2
OURS = "ours"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. keys: of the chunks of its prompt, and those that the answer fills."""

    at_s: float
    keys: list[bytes]
    num_prompt: int
    answer_s: float = ANSWER_S


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


def keys_of(names: Iterable[object]) -> list[bytes]:
    return [hashlib.sha256(f"{name}".encode()).digest() + bytes(4) for name in names]


def of_talks(kind: str, num_talks: int, seed: int, num_systems: int) -> list[Asked]:
    found = []
    for at_s, talk, size in traffic(kind, num_talks, seed):
        system = [f"system {talk % num_systems} {i}" for i in range(SYSTEM_CHUNKS)] if num_systems else []
        num_tokens = BLOCK_TOKENS * size
        names = system + [f"talk {talk} {i}" for i in range((num_tokens - 1) // CHUNK_TOKENS)]
        found.append(Asked(at_s, keys_of(names), len(system) + (num_tokens - ANSWER_TOKENS) // CHUNK_TOKENS))
    return found


def of_trace(trace: Trace) -> list[Asked]:
    ends_s, found = array("d"), []
    for request in trace.requests:
        at_s = (ends_s[request.after] if request.after >= 0 else 0.0) + request.arrival_s
        answer_s = request.num_output_tokens / ANSWER_TOKENS_PER_S
        ends_s.append(at_s + answer_s)
        found.append(Asked(at_s, keys_of(request.chain), request.num_tokens // trace.block_size, answer_s))
    return found


class Pool:
    """vLLM's pool: so many chunks, the one used longest ago goes first, tails before heads."""

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def hits(self, keys: list[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))

    def use(self, keys: list[bytes]) -> None:
        for key in reversed(keys[: self._num_chunks]):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._num_chunks:
            self._keys.popitem(last=False)


class Tiers:
    """vLLM's pool, and its memory tier of so many chunks under one policy; one request after the other.

    make: the policy, of a capacity and a clock.
    """

    def __init__(
        self,
        make: Callable[[int, Callable[[], float]], Any],
        num_chunks: int,
        num_pool: int = 0,
        step: int = CHUNK_TOKENS,
    ) -> None:
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self.now_s = 0.0
        self._pool, self._step = Pool(num_pool), step
        self._manager = CPUOffloadingManager(num_chunks)
        self._manager._policy = make(num_chunks, lambda: self.now_s)
        self._num_asked = 0

    def request(self, asked: Asked) -> int:
        """Returns how many chunks of the prompt were found. The calls are those of vLLM's scheduler (0.32)."""
        from vllm.v1.kv_offload.base import LookupResult, ReqContext

        self.now_s = max(self.now_s, asked.at_s)
        self._num_asked += 1
        context, manager, prompt = ReqContext(str(self._num_asked)), self._manager, asked.keys[: asked.num_prompt]
        self._name(prompt, 0, context)
        manager.on_new_request(context)
        hits = start = self._pool.hits(prompt)
        while hits < len(prompt) and manager.lookup(prompt[hits], context) is LookupResult.HIT:
            hits += 1
        manager.prepare_load(prompt[start:hits], context)
        manager.complete_load(prompt[start:hits], context)
        self._store(prompt[hits if hits > start else 0 :], context)  # after a load nothing before its end is offered
        self.now_s += asked.answer_s
        self._name(asked.keys[asked.num_prompt :], asked.num_prompt, context)
        self._store(asked.keys[asked.num_prompt :], context)
        manager.on_request_finished(context)
        self._pool.use(asked.keys)
        return hits

    def _name(self, keys: list[bytes], start: int, context: Any) -> None:
        for i, key in enumerate(keys, start + 1):
            context.set_offload_key_position(key, self._step * i)

    def _store(self, keys: list[bytes], context: Any) -> None:
        stored = self._manager.prepare_store(keys, context) if keys else None
        if stored is not None:
            self._manager.complete_store(set(stored.keys_to_store), context)


def measure(parsed: argparse.Namespace, report: Report) -> None:
    from vllm.v1.kv_offload.cpu.policies.arc import ARCCachePolicy
    from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

    from kvstore.hosts.vllm_policy import KVStorePolicy

    policies: dict[str, Callable[[int, Callable[[], float]], Any]] = {
        "lru": lambda size, clock: LRUCachePolicy(size),
        "arc": lambda size, clock: ARCCachePolicy(size),
        OURS: KVStorePolicy,
    }
    leads: list[float] = []
    for name, requests in _all_requests(parsed):
        if parsed.no_pauses:
            requests = [replace(asked, at_s=0.0) for asked in requests]
        num_needed = len({key for asked in requests for key in asked.keys})
        for pool in (0.0, parsed.pool):
            row: dict[str, Any] = {"traffic": name, "pool": round(num_needed * pool)}
            for policy, make in policies.items():
                row |= _hit_rate(Tiers(make, round(num_needed * parsed.share), row["pool"]), requests, policy)
            leads.append(row[OURS] - max(row["lru"], row["arc"]))
            report.add(**row, lead=leads[-1], requests=len(requests))
    behind = sum(lead < 0 for lead in leads)
    report.add(traffic="all", lead=sum(leads) / len(leads), worst=min(leads), behind=behind, of=len(leads))


def _all_requests(parsed: argparse.Namespace) -> Iterator[tuple[str, list[Asked]]]:
    """What all are called, and their requests."""
    if parsed.trace is not None:
        trace = read_trace(parsed.trace, parsed.format, parsed.block_size)
        yield trace.name, of_trace(Trace(trace.name, trace.block_size, trace.requests[: parsed.requests]))
        return
    for seed in range(parsed.first_seed, parsed.first_seed + (1 if parsed.quick else parsed.seeds)):
        for kind in parsed.kinds.split(","):
            if kind in OTHER_KINDS:
                yield f"{kind}, seed {seed}", of_trace(generate(parsed.requests, seed, kind=kind))
                continue
            for num_systems in (0, 3):
                name = f"{kind}, {num_systems} system prompts, seed {seed}"
                yield name, of_talks(kind, parsed.talks, seed, num_systems)


def _hit_rate(tiers: Tiers, requests: list[Asked], name: str) -> dict[str, float]:
    hits = num_asked = 0
    started = time.perf_counter()
    for number, asked in enumerate(requests):
        found = tiers.request(asked)
        if 4 * number >= len(requests):
            hits, num_asked = hits + found, num_asked + asked.num_prompt
    return {name: hits / num_asked, f"{name}_ms": 1000 * (time.perf_counter() - started) / len(requests)}


def main() -> int:
    parser = arguments("host_policies", (__doc__ or "").split("\n")[0], uses_torch=False)
    known = ",".join((*KINDS, *OTHER_KINDS))
    parser.add_argument("--kinds", default=known, help=f"of traffic (default: {known})")
    parser.add_argument("--talks", type=int, default=200, help="conversations (default: 200)")
    parser.add_argument("--requests", type=int, default=2000, help="of documents, or of the trace (default: 2,000)")
    parser.add_argument("--seeds", type=int, default=3, help="of each kind of traffic (default: 3)")
    parser.add_argument("--first-seed", type=int, default=0, help="default: 0")
    parser.add_argument("--share", type=float, default=0.1, help="of what all need that fits (default: 0.1)")
    parser.add_argument("--pool", type=float, default=0.04, help="the same, in vLLM's own pool (default: 0.04)")
    parser.add_argument("--no-pauses", action="store_true", help="each comes when the one before it has its answer")
    parser.add_argument("--trace", type=Path, help="a file of requests in place of made-up ones")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="of the trace")
    parser.add_argument("--block-size", type=int, help="tokens of a chunk of the trace")
    return run(measure, parser.parse_args(), "Hit rates of vLLM's memory tier, by its policy")


if __name__ == "__main__":
    sys.exit(main())
