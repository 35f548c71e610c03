"""Blocks whose bytes follow from their number, and a process that writes them until it is killed."""

import os
import random
import sys
from pathlib import Path

from kvstore.blocks.ids import child_block_id, token_bytes
from kvstore.blocks.records import BlockRecord
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.tier import DiskTier

PAYLOAD_BYTES = 6000
CHAIN = 8  # blocks of one conversation
FINGERPRINT = b"f" * 32
MIB = 1 << 20


def record(number: int, fingerprint: bytes = FINGERPRINT) -> BlockRecord:
    """Block `number`: of conversation number // CHAIN, whose blocks build on each other."""
    parent, first = b"%032d" % (number // CHAIN), number - number % CHAIN
    for i in range(first, number):
        parent = child_block_id(parent, token_bytes([i] * 16))
    tokens = token_bytes([number] * 16)
    return BlockRecord(
        child_block_id(parent, tokens), parent, tokens, fingerprint, "tenant", f"model {number % 3}", 1.0
    )


def payload(number: int, size: int = PAYLOAD_BYTES) -> bytes:
    """Half noise, half text that compresses."""
    return random.Random(number).randbytes(size // 2) + (b"%08d" % number * size)[: size - size // 2]


def put(number: int, size: int = PAYLOAD_BYTES) -> tuple[BlockRecord, memoryview]:
    return record(number), memoryview(payload(number, size))


def write_until_killed(store: str, log: Path, capacity_bytes: int, seed: int, first: int) -> None:
    """Batches of puts and deletes; each is logged before it is begun, and when it is acknowledged."""
    rng = random.Random(seed)
    tier = DiskTier(StoreDirectory.open(store), capacity_bytes, codec=rng.choice(("raw", "zstd", "split-zstd")))
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    number, live = first, []
    while True:
        added = list(range(number, number + rng.randrange(1, 24)))
        number = added[-1] + 1
        gone = [live.pop(rng.randrange(len(live))) for _ in range(rng.randrange(8)) if live]
        if len(live) > 1500:
            gone, live = gone + live[:750], live[750:]
        for state in ("begin", "done"):
            os.write(fd, f"{state} {' '.join(map(str, added))} - {' '.join(map(str, gone))}\n".encode())
            if state == "begin":
                outcome = tier.write([put(i) for i in added], [record(i).block_id for i in gone])
                assert outcome.error is None, outcome
        live += added
        if rng.random() < 0.05:
            tier.compact()


if __name__ == "__main__":
    write_until_killed(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
