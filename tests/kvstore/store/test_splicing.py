"""Splices: which tokens land where, what is held meanwhile, and how one is given up."""

from array import array

import pytest
from msgspec.structs import replace

from kvstore.blocks.ids import Lineage, SpliceRun, child_block_id, extend_chain
from kvstore.memory.tier import ArenaBlockState
from kvstore.store.splicing import CHUNK_BLOCKS, Splicer, plan_chain
from tests.support.store.prefetch_bench import SIZE, Bench

SECRET = b"s" * 32


class TaskIo:
    """Tasks wait until the test runs them."""

    def __init__(self) -> None:
        self.tasks = []

    def submit_read(self, task):
        self.tasks.append(task)


class SpliceBench(Bench):
    """An arena of token ids, in which pieces are copied for real. What is on disk comes when its read is ended."""

    def __init__(self, num_arena_blocks: int) -> None:
        self.erased = []  # arena blocks
        super().__init__(num_arena_blocks, erase=self.erased.extend)
        self.arena = [[-1] * SIZE for _ in range(num_arena_blocks)]
        self.tasks = TaskIo()
        self.splicer = Splicer(self.cpu, self.tasks, self.stored, self.reads, self.copy, self.stats)

    def copy(self, pieces, states) -> None:
        for source, source_offset, arena_block, offset, length in pieces:
            run = self.arena[source][source_offset : source_offset + length]
            self.arena[arena_block][offset : offset + length] = run

    def talk(self, num_blocks: int, in_cpu: int | None = None):
        """A chain whose first blocks are in the CPU tier, and whose others are on disk."""
        old = self.request(num_blocks, stored=False)
        in_cpu = num_blocks if in_cpu is None else in_cpu
        for index in range(in_cpu):
            arena_block = self.cpu.reserve()
            assert self.cpu.announce(arena_block, self.stored.record(old, index))
            self.landed(arena_block)
            self.cpu.release(arena_block)
        self.disk.stored |= set(old.chain[in_cpu:])
        return old

    def landed(self, arena_block: int) -> None:
        self.arena[arena_block] = self.tokens_of(arena_block)
        self.cpu.publish(arena_block)

    def tokens_of(self, arena_block: int) -> list[int]:
        return memoryview(self.cpu.record(arena_block).tokens).cast("I").tolist()

    def begin(self, old, spans):
        planned = plan_chain(old, spans, self.stored, SECRET)
        return planned, self.splicer.start(planned.blocks, None)

    def run_tasks(self, succeeded: bool = True) -> list[int]:
        self.splicer.poll()
        ready = []
        while self.tasks.tasks:
            task = self.tasks.tasks.pop(0)
            task.run()
            ready += self.splicer.task_done(task.key, succeeded)
        return ready

    def end_reads(self) -> None:
        while self.io.queued:
            arena_block = self.next_read()
            self.arena[arena_block] = self.tokens_of(arena_block)
            self.end_read(arena_block)

    def check(self, block_ids) -> None:
        """Each is READY, and holds the tokens that its record says."""
        for arena_block in map(self.cpu.arena_block_of, block_ids):
            assert self.cpu.state(arena_block) is ArenaBlockState.READY
            assert self.arena[arena_block] == self.tokens_of(arena_block)

    def check_nothing_is_left(self, num_cached: int) -> None:
        assert not self.splicer.jobs and self.cpu.pool.num_cached == num_cached
        self.check_idle()


@pytest.fixture
def made():
    return SpliceBench(16)


@pytest.mark.parametrize("spans", [
    [(0, 5), (9, 17)],  # the head ends within a block
    [(0, 8), (11, 20)],
    [(3, 20)],  # nothing stays where it was
    [(1, 4), (6, 9), (10, 20)],
])  # fmt: skip
def test_new_blocks_hold_the_kept_tokens_in_order(made, spans):
    old = made.talk(5)
    planned, has_begun = made.begin(old, spans)
    num_exact = planned.lineage.splice_index
    assert has_begun and planned.chain[:num_exact] == old.chain[:num_exact]
    for arena_block in made.run_tasks():
        made.cpu.release(arena_block)
    new = planned.chain[num_exact:]
    made.check(new)
    kept = [made.tokens_of(made.cpu.arena_block_of(one)) for one in planned.chain]
    tokens = memoryview(bytes(old.tokens)).cast("I").tolist()
    wanted = [token for start, end in spans for token in tokens[start:end]]
    assert [token for block in kept for token in block] == wanted[: len(planned.chain) * SIZE]
    assert made.stats.spliced == len(new) and not set(new) & set(old.chain)
    made.check_nothing_is_left(5 + len(new))


def test_ids_are_those_of_the_cut_and_of_the_store(made):
    old = made.talk(5)
    first, second = (plan_chain(old, spans, made.stored, SECRET) for spans in ([(4, 17)], [(4, 9), (9, 17)]))
    assert first.chain == second.chain
    third = plan_chain(old, [(4, 17)], made.stored, b"t" * 32)
    assert not set(first.chain) & set(third.chain)


def test_another_head_stands_before_the_spans(made):
    """Its blocks have the ids that they are computed under; behind it, all is copied, also what was a head before."""
    old, head = made.talk(5), list(range(900, 900 + 2 * SIZE))
    computed = []
    extend_chain(computed, old.lineage.root, head, SIZE)
    behind = (computed, Lineage(old.lineage.root, (SpliceRun(0, b"p" * 32, 1),)))
    planned = plan_chain(old, [(0, 5), (9, 17)], made.stored, SECRET, behind)
    assert planned.chain[:2] == computed and planned.lineage.splices[0] == (0, b"p" * 32, 1)
    assert planned.lineage.splices[1][::2] == (2, 5) and planned.lineage.splice_end == 5
    parents = [one.records[0].parent_id for one in planned.blocks]
    assert parents == [planned.lineage.parent(planned.chain, index) for index in (2, 3, 4)]
    assert made.splicer.start(planned.blocks, None)
    for arena_block in made.run_tasks():
        made.cpu.release(arena_block)
    made.check(planned.chain[2:])
    tokens = memoryview(bytes(old.tokens)).cast("I").tolist()
    copied = [token for one in planned.chain[2:] for token in made.tokens_of(made.cpu.arena_block_of(one))]
    assert copied == (tokens[:5] + tokens[9:17])[: 3 * SIZE]
    other = plan_chain(old, [(0, 5), (9, 17)], made.stored, SECRET, (computed[:1], old.lineage))
    assert not set(other.chain[1:]) & set(planned.chain)


def test_what_goes_on_after_a_splice_is_computed_on_top_of_it(made):
    """Its own blocks exist only as it made them; each has the id of its tokens after the block before it."""
    old = made.talk(5)
    planned = plan_chain(old, [(0, 8), (11, 20)], made.stored, SECRET)
    lineage = planned.lineage
    assert (lineage.splice_index, lineage.splice_end) == (2, 4) == (2, len(planned.chain))
    tokens = memoryview(bytes(old.tokens)).cast("I").tolist()
    kept = tokens[:8] + tokens[11:20]
    for index in (2, 3):
        text = array("I", kept[SIZE * index : SIZE * (index + 1)]).tobytes()
        assert planned.chain[index] == child_block_id(lineage.parent(planned.chain, index), text)


def test_a_source_with_other_content_under_its_id_is_none(made):
    old = made.talk(3, in_cpu=1)
    arena_block = made.cpu.reserve()
    made.cpu.announce(arena_block, replace(made.stored.record(old, 1), tokens=b"another"))
    made.cpu.publish(arena_block)
    made.cpu.release(arena_block)
    assert not made.begin(old, [(2, 12)])[1]
    made.check_nothing_is_left(2)


def test_blocks_are_found_at_once_and_can_be_loaded_when_they_are_copied(made):
    planned, _ = made.begin(made.talk(3), [(4, 12)])
    assert {made.cpu.state(made.cpu.arena_block_of(one)) for one in planned.chain} == {ArenaBlockState.PENDING}
    assert made.splicer.jobs
    assert len(made.run_tasks()) == 2


def test_sources_on_disk_are_read_first(made):
    old = made.talk(3, in_cpu=1)
    planned, has_begun = made.begin(old, [(2, 12)])
    assert has_begun
    assert made.run_tasks() == [], "they are on their way"
    made.end_reads()
    for arena_block in made.run_tasks():
        made.cpu.release(arena_block)
    made.check(planned.chain)
    made.check_nothing_is_left(3 + 2)


def test_a_source_whose_read_fails_gives_the_splice_up(made):
    planned, _ = made.begin(made.talk(3, in_cpu=1), [(2, 12)])
    made.end_read(made.next_read(), succeeded=False)
    assert made.run_tasks() == []
    assert all(made.cpu.arena_block_of(one) is None for one in planned.chain) and made.stats.given_up_splices == 1
    made.read()
    assert not made.splicer.jobs
    made.check_idle()


def test_what_stands_before_a_source_that_no_tier_has_is_made(made):
    old = made.talk(5, in_cpu=1)
    whole = plan_chain(old, [(0, 3), (9, 20)], made.stored, SECRET)
    made.disk.stored.remove(old.chain[1])  # nothing of it is kept
    assert plan_chain(old, [(0, 3), (9, 20)], made.stored, SECRET).chain == whole.chain
    made.disk.stored.remove(old.chain[3])
    planned, has_begun = made.begin(old, [(0, 3), (9, 20)])
    assert has_begun and (planned.lineage.splice_index, planned.lineage.splice_end) == (0, len(planned.chain)) == (0, 1)
    assert not set(planned.chain) & set(whole.chain)
    made.end_reads()
    for arena_block in made.run_tasks():
        made.cpu.release(arena_block)
    made.check(planned.chain)
    made.check_nothing_is_left(2 + 1)
    made.disk.stored.remove(old.chain[2])
    made.cpu.forget(old.chain[2])
    assert plan_chain(old, [(0, 2), (9, 20)], made.stored, SECRET) is None


def test_a_span_is_made_as_a_whole_or_not_at_all(made):
    old, head = made.talk(5), list[bytes]()
    extend_chain(head, b"o" * 32, list(range(SIZE)), SIZE)
    asked = (old, [(1, 17)], made.stored, SECRET, (head, Lineage(b"o" * 32)))
    assert len(plan_chain(*asked).chain) == 5
    made.cpu.forget(old.chain[4])
    assert plan_chain(*asked) is None


def test_without_an_arena_block_nothing_is_begun():
    made = SpliceBench(6)
    planned, has_begun = made.begin(made.talk(5), [(2, 20)])
    assert not has_begun and not made.splicer.jobs
    assert all(made.cpu.arena_block_of(one) is None for one in planned.chain)
    made.check_idle()


def test_a_copy_that_fails_is_given_up(made):
    planned, _ = made.begin(made.talk(3), [(2, 12)])
    assert made.run_tasks(succeeded=False) == []
    assert all(made.cpu.arena_block_of(one) is None for one in planned.chain)
    made.check_nothing_is_left(3)


@pytest.mark.parametrize("is_running", [False, True])
def test_what_is_copied_from_a_deleted_block_is_not_found(made, is_running):
    old = made.talk(3)
    planned, _ = made.begin(old, [(2, 12)])
    if is_running:
        made.splicer.poll()
    arena_blocks = {made.cpu.arena_block_of(one) for one in planned.chain}
    made.cpu.forget(old.chain[1])
    assert made.run_tasks() == []
    assert arena_blocks <= set(made.erased) or not is_running
    assert all(made.cpu.arena_block_of(one) is None for one in planned.chain)
    made.check_nothing_is_left(1)


def test_a_new_block_that_is_deleted_meanwhile_is_not_published(made):
    planned, _ = made.begin(made.talk(3), [(2, 12)])
    made.splicer.poll()
    made.cpu.forget(planned.chain[1])
    (ready,) = made.run_tasks()
    assert made.cpu.arena_block_of(planned.chain[0]) == ready and made.cpu.arena_block_of(planned.chain[1]) is None
    made.cpu.release(ready)
    made.check_nothing_is_left(4)


def test_what_is_spliced_already_needs_nothing(made):
    old = made.talk(3)
    for arena_block in (made.begin(old, [(2, 12)]), made.run_tasks())[1]:
        made.cpu.release(arena_block)
    made.cpu.forget(old.chain[1])
    _, has_begun = made.begin(old, [(2, 12)])
    assert has_begun and not made.splicer.jobs


def test_a_long_splice_is_copied_in_parts():
    num = CHUNK_BLOCKS + 3
    made = SpliceBench(2 * num + 2)
    planned, _ = made.begin(made.talk(num + 1), [(1, (num + 1) * SIZE)])
    made.splicer.poll()
    assert len(made.tasks.tasks) == 2
    for arena_block in made.run_tasks():
        made.cpu.release(arena_block)
    assert len(planned.chain) == num
    made.check(planned.chain)
