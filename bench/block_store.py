"""How fast is a `BlockStore`, as another engine uses it, beside a plain file?

Blocks of the sizes that hosts use are written until they are durable, and read back, checked, from a warm page cache.
One process, alternating, medians. Also the time of a lookup.

`--part growth`: what small blocks cost while a store grows, each size in a store and in processes of its own: writes a
second, from the first to the last fifth; memory of the process a block, without the file's pages; opening, a lookup,
and a block evicted from the index.
"""

import argparse
import multiprocessing
import os
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.common import Report, alternate, arguments, median, run, spread
from kvstore import BlockStore

SIZES = {"128 KiB": 128 << 10, "2 MiB": 2 << 20}
CAPACITY = "4GiB"
NUM_LOOKUPS = 20_000


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def keys_of(count: int) -> list[bytes]:
    return [os.urandom(36) for _ in range(count)]


def collect(store: BlockStore, num_tickets: int) -> None:
    while num_tickets:
        done = store.poll()
        if not all(one.ok for one in done):
            raise RuntimeError(f"the store did not do it: {next(one for one in done if not one.ok)}")
        num_tickets -= len(done)
        if not done:
            time.sleep(0.0005)


def write_all(store: BlockStore, keys: list[bytes], blocks: list[memoryview]) -> None:
    parents = [None, *keys]
    for index, (key, parent, block) in enumerate(zip(keys, parents, blocks, strict=False)):
        if store.write(key, parent, 16 * index, block) is None:
            raise RuntimeError("the store refused a block; give fewer --megabytes")
    store.flush()
    collect(store, len(keys))


def read_all(store: BlockStore, keys: list[bytes], into: list[memoryview]) -> None:
    for key, view in zip(keys, into, strict=True):
        store.read_into(key, view)
    collect(store, len(keys))


def write_plain(file: Path, blocks: list[memoryview]) -> None:
    file.unlink(missing_ok=True)
    with file.open("wb", buffering=0) as out:
        for block in blocks:
            out.write(block)
        os.fsync(out.fileno())


def read_plain(file: Path, into: list[memoryview]) -> None:
    with file.open("rb", buffering=0) as source:
        for view in into:
            source.readinto(view)


def compare(report: Report, repeats: int, state: str, num_bytes: int, measures: dict[str, Callable[[], float]]) -> None:
    """A row for each measure. The last one is the plain one."""
    times = alternate(measures, repeats)
    plain = median(times[list(measures)[-1]])
    for name, seconds in times.items():
        speed, ratio = num_bytes / median(seconds) / 1e9, plain / median(seconds)
        report.add(measure=name, state=state, value=speed, unit="GB/s", ratio=ratio, spread=spread(seconds))


def bench_size(report: Report, repeats: int, folder: Path, name: str, size: int, num_bytes: int) -> None:
    blocks = [memoryview(bytearray(os.urandom(size))) for _ in range(num_bytes // size)]
    into = [memoryview(bytearray(size)) for _ in blocks]
    file, num_bytes = folder / "plain", len(blocks) * size

    def write() -> float:
        with TemporaryDirectory(dir=folder) as place, BlockStore(place, namespace=b"b", capacity=CAPACITY) as store:
            return timed(lambda: write_all(store, keys_of(len(blocks)), blocks))

    plain_write, plain_read = partial(write_plain, file, blocks), partial(read_plain, file, into)
    writes = {"write, durable": write, "plain file, synced at its end": lambda: timed(plain_write)}
    compare(report, repeats, name, num_bytes, writes)
    with BlockStore(folder / name, namespace=b"b", capacity=CAPACITY) as store:
        keys = keys_of(len(blocks))
        write_all(store, keys, blocks)
        checked = partial(read_all, store, keys, into)
        reads = {"read_into, checked": lambda: timed(checked), "plain file": lambda: timed(plain_read)}
        compare(report, repeats, f"{name}, page cache warm", num_bytes, reads)
        asked = (keys * (NUM_LOOKUPS // len(keys) + 1))[:NUM_LOOKUPS]
        seconds = timed(lambda: store.lookup(asked))
        report.add(measure="lookup of a key", state=name, value=1e6 * seconds / NUM_LOOKUPS, unit="us")


# -- while a store grows ---------------------------------------------------------------------------------------------
SMALL_BYTES, CONVERSATION, EVICTED = 4096, 50, 10_000
PARTS = 5


def memory_bytes() -> int:
    """Of this process alone: without the pages of files."""
    found = re.search(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, "Linux says what a process takes"
    return int(found[1]) << 10


def small_key(number: int) -> bytes:
    return number.to_bytes(36, "big")


def open_small(folder: Path, num_blocks: int) -> BlockStore:
    return BlockStore(folder, namespace=b"b", capacity=max(1 << 28, 4 * SMALL_BYTES * num_blocks))


def write_small(store: BlockStore, first: int, end: int, block: memoryview) -> None:
    for number in range(first, end):
        place = number % CONVERSATION
        parent, name = small_key(number - 1) if place else None, str(number // CONVERSATION)
        while store.write(small_key(number), parent, 16 * place, block, conversation=name) is None:
            store.poll()  # too much waits
            time.sleep(0.001)
    store.flush()
    store.poll()


def fill(folder: Path, num_blocks: int) -> dict[str, float]:
    """Write the blocks. What is measured, by its name."""
    block, before, found = memoryview(os.urandom(SMALL_BYTES)), memory_bytes(), dict[str, float]()
    with open_small(folder, num_blocks) as store:
        borders = [num_blocks * part // PARTS for part in range(PARTS + 1)]
        for part, (first, end) in enumerate(pairwise(borders), start=1):
            seconds = timed(partial(write_small, store, first, end, block))
            found[f"writes/s, fifth {part}"] = (end - first) / seconds
        found["bytes a block, writing"] = (memory_bytes() - before) / num_blocks
    return found


def open_again(folder: Path, num_blocks: int) -> dict[str, float]:
    """Open what `fill` has written, look blocks up, and evict some."""
    before, started, used = memory_bytes(), time.perf_counter(), os.times()
    with open_small(folder, num_blocks) as store:
        opened, now = time.perf_counter() - started, os.times()
        cpu = sum(now[:4]) - sum(used[:4])  # with the process that checks the file
        memory = memory_bytes() - before
        asked = [small_key(random.randrange(num_blocks)) for _ in range(NUM_LOOKUPS)]
        lookup = timed(lambda: store.lookup(asked))
        index = store._store.disk.contents.index
        size = index.bytes.total * min(EVICTED, num_blocks // 2) // num_blocks
        started = time.perf_counter()
        num_evicted = len(index.take_victims(size))
        evict = time.perf_counter() - started
    return {
        "open, us a block": 1e6 * opened / num_blocks,
        "open, us of CPU a block": 1e6 * cpu / num_blocks,
        "bytes a block, opened": memory / num_blocks,
        "lookup, us": 1e6 * lookup / NUM_LOOKUPS,
        "evict, us a block": 1e6 * evict / num_evicted,
    }


def bench_growth(report: Report, folder: Path, num_blocks: int) -> None:
    place = folder / str(num_blocks)
    for work in (fill, open_again):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            for name, value in process.submit(work, place, num_blocks).result().items():
                report.add(measure=name, state=f"{num_blocks:,} blocks", value=value)
    shutil.rmtree(place)


def body(parsed: argparse.Namespace, report: Report) -> None:
    repeats, num_bytes = parsed.repeats, parsed.megabytes << 20
    if parsed.part == "growth":
        with TemporaryDirectory(prefix="kvstore-bench-", dir=parsed.dir) as folder:
            for num_blocks in (2000,) if parsed.quick else parsed.blocks:
                bench_growth(report, Path(folder), num_blocks)
        return
    if parsed.quick:
        repeats, num_bytes = min(repeats, 3), min(num_bytes, 16 << 20)
    with TemporaryDirectory(prefix="kvstore-bench-", dir=parsed.dir) as folder:
        for name, size in SIZES.items():
            bench_size(report, repeats, Path(folder), name, size, num_bytes)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("block_store", __doc__.split("\n")[0], uses_torch=False)
    parser.add_argument("--part", choices=("speed", "growth"), default="speed", help="what is asked (default: speed)")
    sizes = [100_000, 400_000, 1_000_000]
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=sizes, metavar="N", help="of growing stores (default: %(default)s)"
    )
    parser.add_argument("--megabytes", type=int, default=192, metavar="N", help="that are moved (default: 192)")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each kind (default: 7)")
    parser.add_argument("--dir", metavar="DIR", help="where files are made (default: the temporary directory)")
    return run(body, parser.parse_args(argv), "A store by itself")


if __name__ == "__main__":
    sys.exit(main())
