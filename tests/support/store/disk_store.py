"""Blocks whose bytes follow from their number; a disk tier that is opened again and again; operations that fail."""

import random
from contextlib import ExitStack
from pathlib import Path

import lmdb

from kvstore.blocks.ids import child_block_id, token_bytes
from kvstore.blocks.records import BlockRecord, ReadResult
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.tier import DiskTier

PAYLOAD_BYTES = 6000
CHAIN = 8  # blocks of one conversation
FINGERPRINT = b"f" * 32
MIB = 1 << 20
CAPACITY = 16 * MIB


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
    """Half noise of eight exponents of bfloat16, half text, which zstd makes smaller."""
    half = size // 2
    noise = random.Random(number).getrandbits(8 * half) & int.from_bytes(b"\x83\xff" * half) >> 8 * half
    noise |= int.from_bytes(b"\x3c\0" * half) >> 8 * half
    return noise.to_bytes(half, "little") + (b"%08d" % number * size)[: size - half]


def put(number: int, size: int = PAYLOAD_BYTES) -> tuple[BlockRecord, memoryview]:
    return record(number), memoryview(payload(number, size))


class Store:
    """A tier with its directory, opened again and again at one path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened: list[tuple[StoreDirectory, DiskTier]] = []

    def open(self, capacity: int = CAPACITY, codec: str = "raw", clock=lambda: 5.0) -> DiskTier:
        with ExitStack() as undo:
            directory = undo.enter_context(StoreDirectory.open(self.path))
            tier = DiskTier(directory, capacity, codec, clock=clock)
            undo.pop_all()
        self.opened.append((directory, tier))
        return tier

    def close(self) -> None:
        while self.opened:
            directory, tier = self.opened.pop()
            tier.close()
            directory.close()


def read(tier: DiskTier, number: int, size: int = PAYLOAD_BYTES) -> ReadResult:
    """Reads, and asserts that what is served is right."""
    into = bytearray(size)
    result = tier.read(record(number), memoryview(into))
    assert result is not ReadResult.OK or into == payload(number, size), f"block {number} is another one"
    return result


def write(tier: DiskTier, numbers, deletes=()) -> None:
    outcome = tier.write([put(i) for i in numbers], [record(i).block_id for i in deletes])
    assert outcome.error is None and len(outcome.stored) == len(numbers)


def present(tier: DiskTier, numbers) -> list[int]:
    """Which are there; all others must be missing in every respect."""
    there = [i for i in numbers if read(tier, i) is ReadResult.OK]
    assert [i for i in numbers if tier.contains(record(i).block_id)] == there
    return there


class FaultyTransaction:
    def __init__(self, txn, step) -> None:
        self._txn, self._step = txn, step

    def __getattr__(self, name):
        self._step(name)
        return getattr(self._txn, name)

    def __enter__(self):
        self._txn.__enter__()
        return self

    def __exit__(self, kind, *rest):
        if kind is None:
            try:
                self._step("commit")
            except Exception:
                self._txn.abort()
                raise
        return self._txn.__exit__(kind, *rest)

    def cursor(self, db):
        self._step("cursor")
        return self._txn.cursor(db)


class faults:
    """The nth operation in the environment of a tier fails; `fired` says whether it came to that."""

    def __init__(self, tier: DiskTier, nth: int, error: Exception) -> None:
        self.tier, self.left, self.error, self.fired = tier, nth, error, False

    def step(self, name: str) -> None:
        self.left -= 1
        if self.left == 0:
            self.fired = True
            raise self.error

    def begin(self, write: bool = False, buffers: bool = False):
        self.step("begin")
        return FaultyTransaction(self.original(write=write, buffers=buffers), self.step)

    def __enter__(self):
        with self.tier.file as tables:
            self.env = tables.env
        self.original = self.env.begin
        self.env.begin = self.begin
        return self

    def __exit__(self, *exception):
        del self.env.begin


def lmdb_error(code: int) -> lmdb.Error:
    error = lmdb.Error("injected")
    error.code = code  # as LMDB's own have it
    return error
