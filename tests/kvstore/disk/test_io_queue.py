"""The threads between CPU and disk: batches, order of writes and deletes, reads, tasks, the end."""

import threading
import time
from dataclasses import dataclass

import pytest

from kvstore.blocks.records import BlockRecord, ReadResult
from kvstore.disk.io_queue import (
    AS_HINT,
    AT_ONCE,
    IoQueue,
    Read,
    Task,
    Write,
    WriteDone,
    rank_of_request,
)
from tests.support.waiting import TIMEOUT_S, wait_until


def record(number: int) -> BlockRecord:
    return BlockRecord(bytes([number]) * 32, b"p" * 32, b"t" * 64, b"f" * 32)


@dataclass(frozen=True)
class Outcome:
    stored_bytes: tuple[int, ...]
    error: str | None = None


class FakeDisk:
    """Blocks in a dict. `gate`: closed, it holds every transaction and read."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.batches: list[tuple[list[bytes], list[bytes]]] = []
        self.touched: dict[bytes, float] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.error: str | None = None
        self.num_reads = 0

    def write(self, puts, deletes, touched):
        self.gate.wait()
        self.batches.append(([r.block_id for r, _ in puts], list(deletes)))
        if self.error is not None:
            return Outcome((), self.error)
        self.blocks |= {r.block_id: bytes(view) for r, view in puts}
        for block_id in deletes:
            self.blocks.pop(block_id, None)
        self.touched |= touched
        return Outcome(tuple(view.nbytes for _, view in puts))

    def read(self, expected, into):
        self.num_reads += 1
        self.gate.wait()
        if expected.block_id not in self.blocks:
            return ReadResult.MISSING
        into[:] = self.blocks[expected.block_id]
        return ReadResult.OK


def block(number: int) -> memoryview:
    return memoryview(bytearray([number] * 100))


@pytest.fixture
def made():
    disk, woken = FakeDisk(), threading.Semaphore(0)
    queue = IoQueue(disk, woken.release, num_readers=2, batch_wait_s=0.01, batch_bytes=300)
    yield disk, queue, woken
    disk.gate.set()
    assert queue.close(TIMEOUT_S)


def collect(queue: IoQueue, woken: threading.Semaphore, count: int) -> list:
    done = []
    while len(done) < count:
        assert woken.acquire(timeout=TIMEOUT_S)
        done += queue.completed()
    return done


def test_writes_are_batched_by_bytes_and_all_arrive(made):
    disk, queue, _ = made
    disk.gate.clear()
    for number in range(8):
        queue.submit_write(Write(number, record(number), block(number)))
    disk.gate.set()
    done = []
    wait_until(lambda: done.extend(queue.completed()) or queue.is_idle)
    assert max(len(puts) for puts, _ in disk.batches) <= 3
    assert disk.blocks == {record(n).block_id: bytes(block(n)) for n in range(8)}
    assert sorted(w.arena_block for d in done if isinstance(d, WriteDone) for w in d.writes) == list(range(8))


def test_a_delete_does_not_overtake_the_write_of_its_block(made):
    disk, queue, _ = made
    disk.gate.clear()
    for number in range(5):
        queue.submit_write(Write(number, record(number), block(number)))
    queue.submit_deletes([record(4).block_id])
    disk.gate.set()
    wait_until(lambda: (queue.completed(), queue.is_idle)[1])
    assert set(disk.blocks) == {record(n).block_id for n in range(4)}


def test_a_block_that_is_written_again_is_not_deleted(made):
    disk, queue, _ = made
    disk.gate.clear()
    queue.submit_write(Write(0, record(0), block(0)))
    queue.submit_deletes([record(1).block_id])
    queue.submit_write(Write(1, record(1), block(1)))
    disk.gate.set()
    wait_until(lambda: (queue.completed(), queue.is_idle)[1])
    assert record(1).block_id in disk.blocks


def test_close_writes_what_is_queued_and_a_stuck_disk_is_reported():
    disk = FakeDisk()
    queue = IoQueue(disk, lambda: None, num_readers=1, batch_wait_s=60.0)
    queue.submit_write(Write(0, record(0), block(0)))
    assert queue.close(TIMEOUT_S) and len(disk.blocks) == 1
    disk.gate.clear()
    stuck = IoQueue(disk, lambda: None, num_readers=1, batch_wait_s=0.0)
    stuck.submit_write(Write(1, record(1), block(1)))
    assert not stuck.close(0.2)
    disk.gate.set()
    assert stuck.close(TIMEOUT_S)


def held(queue: IoQueue, disk: FakeDisk, arena_blocks: list[int]) -> None:
    """The readers are busy with these."""
    disk.gate.clear()
    for arena_block in arena_blocks:
        queue.submit_read(Read(arena_block, record(arena_block), block(0)))
    wait_until(lambda: disk.num_reads == len(arena_blocks), "all are reading")


def test_reads_go_by_rank_and_then_in_their_order():
    disk = FakeDisk()
    queue = IoQueue(disk, lambda: None, num_readers=1)
    held(queue, disk, [101])
    order: list[int] = []
    read = disk.read
    disk.read = lambda expected, into: (order.append(expected.block_id[0]), read(expected, into))[1]
    for arena_block, rank in ((1, AS_HINT), (2, rank_of_request((0, 7))), (3, rank_of_request((0, 2))), (4, AS_HINT)):
        queue.submit_read(Read(arena_block, record(arena_block), block(0)), rank)
    queue.submit_read(Read(5, record(5), block(0)), rank_of_request((0, 2)))
    queue.rank_read(4, AT_ONCE)
    queue.rank_read(99, AT_ONCE)  # it has ended
    disk.gate.set()
    wait_until(lambda: (queue.completed(), queue.is_idle)[1])
    assert order == [4, 3, 5, 2, 1]
    assert queue.close(TIMEOUT_S)


def test_a_read_that_is_queued_can_be_cancelled_and_one_that_runs_cannot(made):
    disk, queue, woken = made
    held(queue, disk, [101, 102])
    queue.submit_read(Read(1, record(1), block(0)))
    queue.submit_read(Read(2, record(2), block(0)))
    assert queue.cancel_read(1) and not queue.cancel_read(1) and not queue.cancel_read(101)
    assert queue.stalled_s > 0
    disk.gate.set()
    assert {done.read.arena_block for done in collect(queue, woken, 3)} == {2, 101, 102}
    assert queue.is_idle and queue.stalled_s == 0


def test_who_waits_is_woken_when_the_last_read_of_its_rank_has_ended(made):
    disk, queue, woken = made
    held(queue, disk, [101, 102])
    queue.submit_read(Read(1, record(1), block(0)), AS_HINT)
    hint_gate = threading.Event()
    read = disk.read
    disk.read = lambda expected, into: (expected.block_id[0] == 1 and hint_gate.wait(), read(expected, into))[1]
    disk.gate.set()
    assert woken.acquire(timeout=TIMEOUT_S), "a hint is still to be read"
    hint_gate.set()
    while not queue.is_idle:
        queue.completed()


def test_how_many_readers_were_at_work_is_told(made):
    disk, queue, woken = made
    held(queue, disk, [1, 2])
    disk.gate.set()
    assert {1.0, 1.5, 2.0} >= {done.num_active for done in collect(queue, woken, 2)}


def test_whatever_the_disk_raises_is_an_outcome():
    class Raising(FakeDisk):
        def write(self, *_):
            raise KeyError("unforeseen")

        def read(self, *_):
            raise ValueError("unforeseen")

    def task():
        raise NotImplementedError

    queue, done = IoQueue(Raising(), lambda: None, num_readers=1, batch_wait_s=0.0), []
    for _ in range(2):  # the threads are still there the second time
        queue.submit_write(Write(0, record(0), block(0)))
        queue.submit_read(Read(1, record(1), block(1)))
        queue.submit_read(Task(2, task))
        wait_until(lambda: done.extend(queue.completed()) or queue.is_idle)
    assert sorted(type(one).__name__ for one in done) == sorted(2 * ["ReadDone", "TaskDone", "WriteDone"])
    assert {getattr(one, "error", None) for one in done} == {None, "KeyError: 'unforeseen'"}
    assert {getattr(one, "result", ReadResult.FAILED) for one in done} == {ReadResult.FAILED}
    assert not any(getattr(one, "succeeded", False) for one in done)
    assert queue.close(TIMEOUT_S)


def test_times_of_last_use_alone_are_written_in_a_hurry_and_at_the_end():
    disk = FakeDisk()
    queue = IoQueue(disk, lambda: None, num_readers=0, batch_wait_s=0.0, touched_wait_s=3600.0)
    queue.submit_touched({b"a": 1.0})
    time.sleep(0.1)
    assert not disk.touched
    queue.hurry()
    wait_until(lambda: disk.touched == {b"a": 1.0})
    disk.error = "none of it"
    queue.submit_touched({b"b": 2.0})
    queue.hurry()
    wait_until(lambda: len(disk.batches) == 2)  # what was touched is kept for the next time
    disk.error = None
    queue.submit_touched({b"c": 3.0})
    assert queue.close(TIMEOUT_S) and disk.touched == {b"a": 1.0, b"b": 2.0, b"c": 3.0} and not queue.completed()


def test_times_of_last_use_alone_are_written_after_a_while():
    disk = FakeDisk()
    queue = IoQueue(disk, lambda: None, num_readers=0, batch_wait_s=0.0, touched_wait_s=0.05)
    queue.submit_touched({b"a": 1.0})
    wait_until(lambda: disk.touched == {b"a": 1.0})
    assert queue.close(TIMEOUT_S)
