"""A process that writes blocks until it is killed."""

import os
import random
import sys
from pathlib import Path

from kvstore.disk.directory import StoreDirectory
from kvstore.disk.tier import DiskTier
from tests.support.store.disk_store import put, record


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
