"""The worker of a tier: batches, the order of writes and deletions, reads, tasks, the end."""

import threading
import time

import pytest

from kvstore.blocks.records import BlockRecord, ReadResult
from kvstore.tiers.port import (
    AS_HINT,
    AT_ONCE,
    Asked,
    Keeps,
    ReadDone,
    ReadJob,
    Stored,
    WriteBatch,
    WriteDone,
    WriteJob,
    Written,
    rank_of_request,
)
from kvstore.tiers.queues import Task
from kvstore.tiers.worker import TierWorker, WorkerLimits
from tests.kvstore.remote.chains import make_chain
from tests.support.store.memory_shared import MemoryShared
from tests.support.waiting import TIMEOUT_S, wait_until


def record(number: int) -> BlockRecord:
    return BlockRecord(bytes([number]) * 32, b"p" * 32, b"t" * 64, b"f" * 32)


class FakeDisk:
    """Blocks in a dict. `gate`: closed, it holds every transaction and read."""

    keeps, most_read_bytes = Keeps.EXACT, 1

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.batches: list[tuple[list[bytes], list[bytes]]] = []
        self.touched: dict[bytes, float] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.error: str | None = None
        self.num_reads = 0

    def session(self):
        return self

    def close(self) -> None:
        """There is nothing to end."""

    def write(self, batch: WriteBatch) -> Written:
        self.gate.wait()
        self.batches.append(([job.record.block_id for job in batch.jobs], list(batch.deletes)))
        if self.error is not None:
            return Written((), self.error)
        self.blocks |= {job.record.block_id: bytes(job.fetch()) for job in batch.jobs}
        for block_id in batch.deletes:
            self.blocks.pop(block_id, None)
        self.touched |= batch.touched
        return Written([Stored(job.record.block_id, None, job.num_bytes) for job in batch.jobs])

    def read(self, jobs):
        return [self.read_one(job.record, job.view) for job in jobs]

    def read_one(self, expected, into):
        self.num_reads += 1
        self.gate.wait()
        if expected.block_id not in self.blocks:
            return ReadResult.MISSING
        into[:] = self.blocks[expected.block_id]
        return ReadResult.OK


def block(number: int) -> memoryview:
    return memoryview(bytearray([number] * 100))


def written(number: int) -> WriteJob:
    return WriteJob(number, record(number), 100, lambda: block(number))


@pytest.fixture
def made():
    disk, woken = FakeDisk(), threading.Semaphore(0)
    queue = TierWorker("disk", disk, woken.release, WorkerLimits(gather_s=0.01, batch_bytes=300))
    yield disk, queue, woken
    disk.gate.set()
    assert queue.close(TIMEOUT_S)


def collect(queue: TierWorker, woken: threading.Semaphore, count: int) -> list:
    done = []
    while len(done) < count:
        assert woken.acquire(timeout=TIMEOUT_S)
        done += queue.completed()
    return done


def test_writes_are_batched_by_bytes_and_all_arrive(made):
    disk, queue, _ = made
    disk.gate.clear()
    for number in range(8):
        queue.submit_writes([written(number)])
    disk.gate.set()
    done = []
    wait_until(lambda: done.extend(queue.completed()) or queue.is_idle)
    assert max(len(puts) for puts, _ in disk.batches) <= 3
    assert disk.blocks == {record(n).block_id: bytes(block(n)) for n in range(8)}
    assert sorted(job.handle for d in done if isinstance(d, WriteDone) for job in d.batch.jobs) == list(range(8))


def test_a_delete_does_not_overtake_the_write_of_its_block(made):
    disk, queue, _ = made
    disk.gate.clear()
    for number in range(5):
        queue.submit_writes([written(number)])
    queue.submit_deletes([record(4).block_id])
    disk.gate.set()
    wait_until(lambda: (queue.completed(), queue.is_idle)[1])
    assert set(disk.blocks) == {record(n).block_id for n in range(4)}


def test_a_block_that_is_written_again_is_not_deleted(made):
    disk, queue, _ = made
    disk.gate.clear()
    queue.submit_writes([written(0)])
    queue.submit_deletes([record(1).block_id])
    queue.submit_writes([written(1)])
    disk.gate.set()
    wait_until(lambda: (queue.completed(), queue.is_idle)[1])
    assert record(1).block_id in disk.blocks


def test_close_writes_what_is_queued_and_a_stuck_disk_is_reported():
    disk = FakeDisk()
    queue = TierWorker("disk", disk, lambda: None, WorkerLimits(1, 60.0))
    queue.submit_writes([written(0)])
    assert queue.close(TIMEOUT_S) and len(disk.blocks) == 1
    disk.gate.clear()
    stuck = TierWorker("disk", disk, lambda: None, WorkerLimits(1, 0.0))
    stuck.submit_writes([written(1)])
    assert not stuck.close(0.2)
    disk.gate.set()
    assert stuck.close(TIMEOUT_S)


def held(queue: TierWorker, disk: FakeDisk, arena_blocks: list[int]) -> None:
    """The readers are busy with these."""
    disk.gate.clear()
    for arena_block in arena_blocks:
        queue.submit_read(ReadJob(arena_block, record(arena_block), block(0)))
    wait_until(lambda: disk.num_reads == len(arena_blocks), "all are reading")


def test_reads_go_by_rank_and_then_in_their_order():
    disk = FakeDisk()
    queue = TierWorker("disk", disk, lambda: None, WorkerLimits(1))
    held(queue, disk, [101])
    order: list[int] = []
    read = disk.read_one
    disk.read_one = lambda expected, into: (order.append(expected.block_id[0]), read(expected, into))[1]
    for arena_block, rank in ((1, AS_HINT), (2, rank_of_request((0, 7))), (3, rank_of_request((0, 2))), (4, AS_HINT)):
        queue.submit_read(ReadJob(arena_block, record(arena_block), block(0)), rank)
    queue.submit_read(ReadJob(5, record(5), block(0)), rank_of_request((0, 2)))
    queue.change_rank(4, AT_ONCE)
    queue.change_rank(99, AT_ONCE)  # it has ended
    disk.gate.set()
    wait_until(lambda: (queue.completed(), queue.is_idle)[1])
    assert order == [4, 3, 5, 2, 1]
    assert queue.close(TIMEOUT_S)


def test_a_read_that_is_queued_can_be_cancelled_and_one_that_runs_cannot(made):
    disk, queue, woken = made
    held(queue, disk, [101, 102])
    queue.submit_read(ReadJob(1, record(1), block(0)))
    queue.submit_read(ReadJob(2, record(2), block(0)))
    assert queue.cancel(1) and not queue.cancel(1) and not queue.cancel(101)
    assert queue.stalled_s > 0
    disk.gate.set()
    assert {done.job.handle for done in collect(queue, woken, 3)} == {2, 101, 102}
    assert queue.is_idle and queue.stalled_s == 0


def test_who_waits_is_woken_when_the_last_read_of_its_rank_has_ended(made):
    disk, queue, woken = made
    held(queue, disk, [101, 102])
    queue.submit_read(ReadJob(1, record(1), block(0)), AS_HINT)
    hint_gate = threading.Event()
    read = disk.read_one
    disk.read_one = lambda expected, into: (expected.block_id[0] == 1 and hint_gate.wait(), read(expected, into))[1]
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
        def write(self, batch):
            raise KeyError("unforeseen")

        def read(self, jobs):
            raise ValueError("unforeseen")

    def task():
        raise NotImplementedError

    queue, done = TierWorker("disk", Raising(), lambda: None, WorkerLimits(1, 0.0)), []
    for _ in range(2):  # the threads are still there the second time
        queue.submit_writes([written(0)])
        queue.submit_read(ReadJob(1, record(1), block(1)))
        queue.submit_read(Task(2, task))
        wait_until(lambda: done.extend(queue.completed()) or queue.is_idle)
    assert sorted(type(one).__name__ for one in done) == sorted(2 * ["ReadDone", "TaskDone", "WriteDone"])
    assert {getattr(one, "error", None) for one in done} == {None, "KeyError: 'unforeseen'"}
    assert {getattr(one, "result", ReadResult.FAILED) for one in done} == {ReadResult.FAILED}
    assert not any(getattr(one, "succeeded", False) for one in done)
    assert queue.close(TIMEOUT_S)


def test_times_of_last_use_alone_are_written_in_a_hurry_and_at_the_end():
    disk = FakeDisk()
    queue = TierWorker("disk", disk, lambda: None, WorkerLimits(0, 0.0, touched_wait_s=3600.0))
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
    queue = TierWorker("disk", disk, lambda: None, WorkerLimits(0, 0.0, touched_wait_s=0.05))
    queue.submit_touched({b"a": 1.0})
    wait_until(lambda: disk.touched == {b"a": 1.0})
    assert queue.close(TIMEOUT_S)


# -- a believed tier ---------------------------------------------------------------------------------------------------
@pytest.fixture
def believed():
    shared = MemoryShared()
    worker = TierWorker("remote", shared, lambda: None, WorkerLimits(1, gather_s=0.0))
    yield shared, worker
    shared.may_answer.set()
    assert worker.close(TIMEOUT_S)


def test_reads_of_one_rank_go_in_batches(believed):
    shared, worker = believed
    shared.most_read_bytes, batches, read = 250, [], shared.read
    shared.read = lambda jobs: (batches.append([job.handle for job in jobs]), read(jobs))[1]
    shared.may_answer.clear()
    reads = make_chain(12).reads(size=100)
    worker.submit_read(reads[0])
    wait_until(lambda: batches)
    for rank, some in ((AS_HINT, reads[1:5]), (rank_of_request((0, 1)), reads[5:9]), (AT_ONCE, reads[9:10])):
        for job in some:
            worker.submit_read(job, rank)
    assert worker.cancel(6) and not worker.cancel(0), "it runs"
    worker.change_rank(4, AT_ONCE)
    shared.may_answer.set()
    wait_until(lambda: (worker.completed(), worker.is_idle)[1])
    assert batches == [[0], [9, 4], [5, 7, 8], [1, 2, 3]]


def test_what_is_of_a_chain_is_a_batch_of_its_own_and_deletions_come_first_but_for_its_blocks(believed):
    shared, worker = believed
    first, second = make_chain(6), make_chain(3, seed=5)
    shared.blocks = dict.fromkeys(second.chain.ids, b"")
    shared.may_answer.clear()
    assert worker.ask(1, first.chain)
    worker.submit_writes(first.jobs(0, 2), first.chain)
    worker.submit_writes(first.jobs(2, 6), first.chain)
    worker.submit_deletes([*second.chain.ids, first.chain.ids[5]])
    shared.may_answer.set()
    done = []
    wait_until(lambda: done.extend(worker.completed()) or worker.is_idle)
    batches = [one.batch for one in done if isinstance(one, WriteDone)]
    assert shared.batches == [[0, 1], [2, 3, 4, 5]]
    assert not any(batch.jobs and batch.deletes for batch in batches)
    assert set(shared.blocks) == set(first.chain.ids[:5])
    assert [one.number for one in done if isinstance(one, Asked)] == [1]


def test_while_it_is_away_nothing_is_asked_of_it(believed):
    shared, worker = believed
    made = make_chain(2)
    shared.fails = "away"
    assert worker.ask(1, made.chain)
    wait_until(lambda: worker.is_away)
    calls, ping = [], shared.ping
    shared.ping = lambda: (calls.append(threading.current_thread().name), ping())[1]
    assert not worker.ask(2, made.chain) and worker.is_refusing
    worker.submit_read(made.reads()[0])
    worker.submit_writes(made.jobs(), made.chain)
    worker.submit_deletes(made.chain.ids)
    done = []
    wait_until(lambda: done.extend(worker.completed()) or worker.is_idle)
    assert {one.result for one in done if isinstance(one, ReadDone)} == {ReadResult.FAILED}
    assert {one.error for one in done if isinstance(one, WriteDone)} == {"away"}
    assert {name.rpartition("-")[2] for name in calls} <= {"ask"}, "only a probe"
