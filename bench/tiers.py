"""How fast is each step of a block's way between tiers, beside a plain operation of the same size and state?

CPU -> HBM and HBM -> CPU beside memcpy; disk -> CPU and CPU -> disk beside a plain file; lookups. Blocks have
the shape of Qwen 2.5 0.5B in bf16. One process, alternating, medians. With --part bytes: what conversations take;
states: what bfloat16 changes in them.
"""

import argparse
import gc
import math
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from bench.common import Report, alternate, arguments, drop_from_page_cache, median, run, say, spread
from bench.sizes import bench_bytes, bench_states, bench_windows
from kvstore.blocks.ids import BlockId, extend_chain, token_bytes
from kvstore.blocks.records import BlockRecord, ReadResult
from kvstore.disk.check import DATA_FILE
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.index import DiskIndex
from kvstore.disk.tier import DiskTier
from kvstore.kernels.kv import BlockLoad, save_layers
from kvstore.memory.layout import KVLayout, LayerShape
from kvstore.memory.transfer import Arena
from kvstore.rope.rotary import Rotation, Style
from kvstore.tiers.port import ReadDone, ReadJob
from kvstore.tiers.worker import BATCH_BYTES, USUAL, TierWorker

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_HEADS = 24, 2, 64, 16, 14
WINDOW, STEP_TOKENS = 32768, 2048
GOAL = 0.7
DISK_BYTES = 8 << 30
SMALL_VALUE_BYTES = 64
NUM_LOOKUPS = 20_000
WRITE_BATCH = 20_000
FINGERPRINT = b"f" * 32


def layout() -> KVLayout:
    angles = torch.arange(WINDOW)[:, None] * 10000.0 ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    rotation = Rotation(angles.cos().bfloat16(), angles.sin().bfloat16(), Style.HALF)
    shapes = (LayerShape(NUM_KV_HEADS, HEAD_DIM, HEAD_DIM),) * NUM_LAYERS
    return KVLayout(shapes, BLOCK_SIZE, torch.bfloat16, (rotation,) * NUM_LAYERS)


def filled_arena(num_arena_blocks: int) -> Arena:
    arena = Arena(layout(), num_arena_blocks, pin=False)
    for arena_block in range(num_arena_blocks):
        arena.tensor[arena_block] = torch.randn(arena.layout.block_numbers).bfloat16()
    return arena


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@dataclass(slots=True)
class Bench:
    report: Report
    repeats: int
    num_blocks: int
    folder: Path

    def compare(self, measures: dict[str, Callable[[], float]], num_bytes: int, plain: str, state: str = "-") -> None:
        """A row for each measure, with its speed relative to the one called `plain`."""
        times = alternate(measures, self.repeats)
        for name, seconds in times.items():
            self.report.add(
                measure=name,
                state=state,
                value=num_bytes / median(seconds) / 1e9,
                unit="GB/s",
                ratio=None if name == plain else median(times[plain]) / median(seconds),
                goal="-" if name == plain else f">= {GOAL}",
                spread=spread(seconds),
                repeats=len(seconds),
            )

    # -- memory ------------------------------------------------------------------------------------------------------
    def load(self) -> None:
        """CPU -> HBM: all layers of all blocks, as in a step."""
        count, arena = self.num_blocks, filled_arena(self.num_blocks)
        shape = (2 * count, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        caches = [(torch.zeros(shape).bfloat16(), torch.zeros(shape).bfloat16()) for _ in range(NUM_LAYERS)]
        generator = torch.Generator().manual_seed(0)
        runs = (torch.arange(count), torch.arange(count, 2 * count))
        scattered = (torch.randperm(count, generator=generator), torch.randperm(2 * count, generator=generator)[:count])
        source = torch.randn(NUM_LAYERS, 2, count, *shape[1:]).bfloat16()
        target = torch.zeros_like(source)

        def ours(places: tuple[torch.Tensor, torch.Tensor], rotated: bool) -> float:
            rotations = arena.layout.rotations if rotated else (None,) * NUM_LAYERS
            started = time.perf_counter()
            blocks = BlockLoad(arena.layers, *places, torch.arange(count) * BLOCK_SIZE, rotations)
            for layer, (key_cache, value_cache) in enumerate(caches):
                blocks.load_layer(layer, key_cache, value_cache)
            return time.perf_counter() - started

        def plain() -> float:
            return timed(lambda: [target[layer].copy_(source[layer]) for layer in range(NUM_LAYERS)])

        measures = {
            "CPU -> HBM, rotated": lambda: ours(runs, True),
            "CPU -> HBM, rotated, scattered blocks": lambda: ours(scattered, True),
            "CPU -> HBM, not rotated": lambda: ours(runs, False),
            "CPU -> HBM, not rotated, scattered blocks": lambda: ours(scattered, False),
            "memcpy, layer by layer": plain,
        }
        self.compare(measures, count * arena.layout.block_bytes, "memcpy, layer by layer")

    def save(self) -> None:
        """HBM -> CPU, from a step's activations: keys and values are parts of one product of all projections."""
        tokens = min(STEP_TOKENS, self.num_blocks * BLOCK_SIZE)
        arena, width = filled_arena(tokens // BLOCK_SIZE), NUM_KV_HEADS * HEAD_DIM
        step = [torch.randn(tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM).bfloat16() for _ in range(NUM_LAYERS)]
        pairs = [(one[:, -2 * width : -width], one[:, -width:]) for one in step]
        layers = [
            (layer, *(part.view(tokens, NUM_KV_HEADS, HEAD_DIM) for part in pair)) for layer, pair in enumerate(pairs)
        ]
        numbers = torch.randperm(tokens // BLOCK_SIZE, generator=torch.Generator().manual_seed(0))
        places = (numbers[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
        source = torch.randn(NUM_LAYERS, 2, tokens, width).bfloat16()
        target = torch.zeros_like(source)
        measures = {
            f"HBM -> CPU, {tokens:,} tokens": lambda: timed(lambda: save_layers(arena.layers, layers, None, places)),
            "memcpy, layer by layer": lambda: timed(lambda: [target[i].copy_(source[i]) for i in range(NUM_LAYERS)]),
        }
        self.compare(measures, source.nbytes, "memcpy, layer by layer")

    # -- disk --------------------------------------------------------------------------------------------------------
    def read(self) -> None:
        """Disk -> CPU through the I/O threads, checked, beside a plain file read in such pieces by as many threads."""
        count, arena = self.num_blocks, filled_arena(self.num_blocks)
        size, records = arena.layout.block_bytes, records_of(count, seed=1)
        file, store = self.folder / "plain", self.folder / "read"
        with disk_tier(store) as tier:
            write_all(tier, records, arena)
        with file.open("wb") as out:
            for arena_block in range(count):
                out.write(arena.view(arena_block))
        memory = mmap.mmap(-1, count * size)
        memory.write(bytes(count * size))  # so that its pages exist, as the arena's do

        data = store / "blocks" / DATA_FILE

        def ours(drop: bool) -> float:
            if drop and drop_from_page_cache(data, size) is None:
                return math.nan
            with disk_tier(store) as tier, reading(tier, arena) as read:
                if drop and drop_from_page_cache(data, count * size // 20) is None:  # drops what opening has read
                    return math.nan
                return timed(lambda: read(records))

        def plain(drop: bool) -> float:
            if drop and drop_from_page_cache(file, size) is None:
                return math.nan
            with file.open("rb", buffering=0) as source, ThreadPoolExecutor(USUAL.num_readers) as pool:
                list(pool.map(time.sleep, [0.001] * USUAL.num_readers))  # so that the threads exist
                return timed(lambda: read_plain(source.fileno(), memoryview(memory), size, pool))

        names = ("disk -> CPU", "plain file")
        with disk_tier(store) as tier, reading(tier, arena) as read:
            held = {names[0]: lambda: timed(lambda: read(records)), names[1]: lambda: plain(False)}
            self.compare(held, count * size, names[1], "page cache warm, store open")
        fresh = {names[0]: lambda: ours(False), names[1]: lambda: plain(False)}
        self.compare(fresh, count * size, names[1], "page cache warm, store just opened")
        if math.isnan(plain(True) + ours(True)):
            self.report.add(measure=names[0], state="page cache cold: this machine drops no caches")
            return
        cold = {names[0]: lambda: ours(True), names[1]: lambda: plain(True)}
        self.compare(cold, count * size, names[1], "page cache cold (fadvise), store just opened")

    def write(self) -> None:
        """CPU -> disk in the writer's batches, each durable, beside a plain file: first new files, then old pages."""
        count, arena, file = self.num_blocks, filled_arena(self.num_blocks), self.folder / "plain"
        size, parts = arena.layout.block_bytes, [arena.view(arena_block) for arena_block in range(count)]

        def fresh() -> float:
            with TemporaryDirectory(dir=self.folder) as store, disk_tier(Path(store)) as tier:
                records = records_of(count, seed=time.monotonic_ns())
                return timed(lambda: write_all(tier, records, arena))

        def plain(new: bool, sync_each: int) -> float:
            if new:
                file.unlink(missing_ok=True)
            return timed(lambda: write_plain(file, parts, sync_each))

        each = -(-BATCH_BYTES // size)
        measures = {
            "CPU -> disk": fresh,
            "plain file, synced at its end": lambda: plain(True, count),
            "plain file, synced as often": lambda: plain(True, each),
        }
        self.compare(measures, count * size, "plain file, synced at its end", "new file")
        with disk_tier(self.folder / "reused") as tier:
            held = [records_of(count, seed=time.monotonic_ns())]
            write_all(tier, held[0], arena)

            def reused() -> float:
                tier.write([], [record.block_id for record in held.pop()])
                tier.write([], [bytes(32)])  # freed pages can be used again two transactions later
                held.append(records_of(count, seed=time.monotonic_ns()))
                return timed(lambda: write_all(tier, held[0], arena))

            measures = {
                "CPU -> disk": reused,
                "plain file, synced at its end": lambda: plain(False, count),
                "plain file, synced as often": lambda: plain(False, each),
            }
            self.compare(measures, count * size, "plain file, synced at its end", "pages used before")


def records_of(count: int, seed: int) -> list[BlockRecord]:
    """Records of one long chain."""
    rng = random.Random(seed)
    tokens = [rng.randrange(1, 150_000) for _ in range(count * BLOCK_SIZE)]
    chain: list[BlockId] = []
    root = rng.randbytes(32)
    extend_chain(chain, root, tokens, BLOCK_SIZE)
    parts = (token_bytes(tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]) for i in range(count))
    parents = [root, *chain]
    return [
        BlockRecord(block_id, parent, part, FINGERPRINT, "", "bench", 0.0)
        for block_id, parent, part in zip(chain, parents, parts, strict=False)
    ]


@contextmanager
def disk_tier(path: Path, name: str = "raw") -> Iterator[DiskTier]:
    with StoreDirectory.open(path) as directory:
        tier = DiskTier(directory, DISK_BYTES, codec=name)
        try:
            yield tier
        finally:
            tier.close()


def write_all(tier: DiskTier, records: Sequence[BlockRecord], arena: Arena) -> None:
    each = -(-BATCH_BYTES // arena.layout.block_bytes)
    for first in range(0, len(records), each):
        part = range(first, min(first + each, len(records)))
        outcome = tier.write([(records[arena_block], arena.view(arena_block)) for arena_block in part])
        if outcome.error is not None:
            raise RuntimeError(f"the disk tier did not write: {outcome.error}")


@contextmanager
def reading(tier: DiskTier, arena: Arena) -> Iterator[Callable[[Sequence[BlockRecord]], None]]:
    """Read records into the arena blocks of the same number. All are queued at once, like those of a request."""
    woken = threading.Event()
    worker = TierWorker("disk", tier, woken.set)

    def read(records: Sequence[BlockRecord]) -> None:
        for arena_block, record in enumerate(records):
            worker.submit_read(ReadJob(arena_block, record, arena.view(arena_block)))
        num_done = 0
        while num_done < len(records):
            woken.wait()
            woken.clear()
            for done in worker.completed():
                if not isinstance(done, ReadDone) or done.result is not ReadResult.OK:
                    raise RuntimeError(f"a block was not read: {done}")
                num_done += 1

    try:
        yield read
    finally:
        worker.close(10.0)


def read_plain(fd: int, memory: memoryview, size: int, pool: ThreadPoolExecutor) -> None:
    def read(start: int) -> None:
        done = 0
        while done < size:
            done += os.preadv(fd, [memory[start + done : start + size]], start + done)

    for _ in pool.map(read, range(0, len(memory), size)):
        pass


def write_plain(file: Path, parts: Sequence[memoryview], sync_each: int) -> None:
    """Write the file from its beginning. Sync it after so many parts, and at the end."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        for number, part in enumerate(parts, start=1):
            done = 0
            while done < part.nbytes:
                done += os.write(fd, part[done:])
            if number % sync_each == 0 or number == len(parts):
                os.fsync(fd)
    finally:
        os.close(fd)


# -- lookups ---------------------------------------------------------------------------------------------------------
def bench_index(report: Report, num_blocks: int, folder: Path) -> None:
    """Lookups in LMDB itself, and loading of the policy index. Values are small, because only the index counts."""
    import psutil

    process = psutil.Process()
    with disk_tier(folder / "index") as tier:
        say(f"writing {num_blocks:,} small blocks")
        write_s, ids = write_small(tier, num_blocks)
        row = {"state": f"{num_blocks:,} blocks, small values"}
        report.add(measure="writing them (not a measurement)", **row, value=write_s, unit="s")
        for what, asked in (
            ("there", random.Random(1).sample(ids, min(NUM_LOOKUPS, num_blocks))),
            ("not there", [random.Random(i).randbytes(32) for i in range(NUM_LOOKUPS)]),
        ):
            seconds = [timed(lambda asked=asked: [tier.contains(i) for i in asked]) for _ in range(3)]  # type: ignore[misc]
            value = median(seconds) / len(asked) * 1e6
            report.add(measure=f"lookup before the index is loaded, {what}", **row, value=value, unit="us a block")
        del ids, asked
        gc.collect()
        before = process.memory_info().rss - resident_file_bytes(process)
        started = time.perf_counter()
        index = DiskIndex.build(tier.scan())
        load_s = time.perf_counter() - started
        taken = process.memory_info().rss - resident_file_bytes(process) - before
        assert len(index) == num_blocks
        report.add(measure="policy index: load", **row, value=load_s, unit="s")
        report.add(measure="policy index: memory", **row, value=taken / num_blocks, unit="bytes a block")


def resident_file_bytes(process: Any) -> int:
    """Pages of mapped files count as memory of the process, but the system may take them back."""
    found = process.memory_info()
    return int(getattr(found, "shared", 0))


def write_small(tier: DiskTier, num_blocks: int) -> tuple[float, list[BlockId]]:
    """Write conversations of 64 blocks, with a few bytes instead of KV. Returns the seconds, and the ids."""
    payload, ids = memoryview(np.random.default_rng(0).bytes(SMALL_VALUE_BYTES)), []
    started = time.perf_counter()
    for first in range(0, num_blocks, WRITE_BATCH):
        count = min(WRITE_BATCH, num_blocks - first)
        records = [one for i in range(-(-count // 64)) for one in records_of(64, seed=first + i)][:count]
        outcome = tier.write([(record, payload) for record in records])
        if outcome.error is not None:
            raise RuntimeError(f"the disk tier did not write: {outcome.error}")
        ids += [record.block_id for record in records]
    return time.perf_counter() - started, ids


def body(parsed: argparse.Namespace, report: Report) -> None:
    if parsed.part == "bytes":
        bench_bytes(report)
        return
    if parsed.part == "windows":
        bench_windows(report, 4096 if parsed.quick else 32768)
        return
    if parsed.part == "states":
        bench_states(report, (256,) if parsed.quick else (256, 512, 1024))
        return
    repeats, num_blocks, num_small = parsed.repeats, parsed.data_blocks, parsed.blocks
    if parsed.quick:
        repeats, num_blocks, num_small = min(repeats, 3), min(num_blocks, 96), min(num_small, 50_000)
    with TemporaryDirectory(prefix="kvstore-bench-", dir=parsed.dir) as name, torch.inference_mode():
        bench = Bench(report, repeats, num_blocks, Path(name))
        bench.load()
        bench.save()
        bench.read()
        bench.write()
        bench_index(report, num_small, Path(name))


def main() -> int:
    parser = arguments("tiers", __doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=1_000_000, metavar="N", help="of the index (default: a million)")
    parser.add_argument("--data-blocks", type=int, default=512, metavar="N", help="that are moved (default: 512)")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each kind (default: 9)")
    parser.add_argument(
        "--part",
        choices=("way", "bytes", "windows", "states"),
        default="way",
        help="bytes: of conversations, computed only; windows: of small models with windows, measured; states: what "
        "storing them in bfloat16 changes in the next tokens",
    )
    parser.add_argument("--dir", metavar="DIR", help="where files are made (default: the temporary directory)")
    title = "The data path, step by step, beside the plain operation (CPU); medians"
    return run(body, parser.parse_args(), title)


if __name__ == "__main__":
    sys.exit(main())
