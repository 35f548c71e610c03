"""Conversations that return to a vLLM server with memory for few of them: how much of their prompts it finds.

A tiny model, one arm after the other, one request after the other, without pauses: this counts shares of tokens, and
measures no time. The first quarter of the requests only fills.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.common import say
from bench.host_policies import traffic
from bench.peers.load import Side
from bench.peers.servers import BLOCK_TOKENS, Server, Tiers, vllm

BLOCK_OF_TRAFFIC, REPLY_TOKENS = 16, 8  # tokens
POLICIES = ("lru", "arc", "return")  # of vLLM's memory tier; the last one is ours
DISKS = ("fs", "kvstore")
POOL_BLOCKS = 160  # of vLLM's own pool: little more than one request needs
DISK_SHARE = 0.4  # of the bytes that all need, if the disk is to be full


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests of all conversations, and sizes of the model."""

    requests: list[tuple[int, int]]  # conversation, and its tokens after the answer
    vocab: int
    chunk_bytes: int  # of BLOCK_TOKENS tokens

    @property
    def needed_bytes(self) -> int:
        """The bytes that all conversations need at their ends."""
        ends = dict(self.requests)
        return sum(tokens // BLOCK_TOKENS for tokens in ends.values()) * self.chunk_bytes


def make(kind: str, num_talks: int, seed: int, vocab: int, chunk_bytes: int) -> Traffic:
    found = [(talk, BLOCK_OF_TRAFFIC * size) for _, talk, size in traffic(kind, num_talks, seed)]
    return Traffic(found, vocab, chunk_bytes)


def found_share(side: Side, traffic: Traffic) -> float:
    """The share of tokens that was found, of all prompts but the first quarter."""
    histories: dict[int, list[int]] = {}
    found = asked = 0
    for number, (talk, num_tokens) in enumerate(traffic.requests):
        history = histories.setdefault(talk, [])
        rng = random.Random(f"{talk}-{len(history)}")
        new = num_tokens - REPLY_TOKENS - len(history)
        history += [rng.randrange(1, traffic.vocab) for _ in range(new)]
        [answer] = side.ask([history], REPLY_TOKENS)
        if 4 * number >= len(traffic.requests):
            found, asked = found + (answer.cached_tokens or 0), asked + len(history)
        history += answer.ids
    return found / asked


def by_policy(parsed: argparse.Namespace, model: Path, logs: Path, traffic: Traffic) -> dict[str, float]:
    """vLLM with memory for a tenth of the conversations, and nothing below it."""
    memory = traffic.needed_bytes // 10
    return _shares(parsed, model, logs, traffic, {one: Tiers(one, memory, 0, POOL_BLOCKS) for one in POLICIES})


def by_full_disk(parsed: argparse.Namespace, model: Path, logs: Path, traffic: Traffic) -> dict[str, float]:
    """vLLM with memory for a tenth, and a disk that is too small for all: a tmpfs that only the server sees."""
    memory, disk = traffic.needed_bytes // 10, int(DISK_SHARE * traffic.needed_bytes)
    return _shares(parsed, model, logs, traffic, {one: Tiers(one, memory, disk, POOL_BLOCKS) for one in DISKS}, disk)


def _shares(
    parsed: argparse.Namespace, model: Path, logs: Path, traffic: Traffic, arms: dict[str, Tiers], disk: int = 0
) -> dict[str, float]:
    found = {}
    for name, tiers in arms.items():
        with TemporaryDirectory(prefix="kvstore-bench-") as folder:
            server = vllm(parsed.peer_python, model, Path(folder), parsed.threads, logs / f"{name}.log", None, tiers)
            server.launches[-1].command.append("--enforce-eager")
            if disk:
                _on_small_disk(server, Path(folder), disk)
            say(f"{len(traffic.requests):,} requests to {server.name}")
            try:
                server.start()
                found[name] = found_share(server, traffic)
            finally:
                server.stop()
    return found


def _on_small_disk(server: Server, folder: Path, num_bytes: int) -> None:
    mount = 'mount -t tmpfs -o size="$0" none "$1" && shift && exec "$@"'
    server.launches[-1].command[:0] = ["unshare", "-Urm", "sh", "-c", mount, str(num_bytes), str(folder)]
