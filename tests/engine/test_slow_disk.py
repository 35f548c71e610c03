"""A prompt's head is computed while its tail is read from a slow disk: tokens, usage and counts stay right.

Real engines on a small random model in float32. Reads end when the test lets them; rates are given, not measured.
"""

import threading

import pytest

from kvstore import CacheTiers, Engine
from kvstore.blocks.records import ReadResult
from kvstore.tiers.port import ReadDone
from tests.support.by_hand import by_hand
from tests.support.engines import ask, cached, counters, greedy, open_engine, settle, tokens
from tests.support.faults import before_each_load
from tests.support.waiting import wait_until

MODEL = {"max_position_embeddings": 1024}
SIZE, NUM_BLOCKS = 16, 40
PROMPT = tokens(1, NUM_BLOCKS * SIZE + 5)


class Gate:
    """Reads of a disk tier that wait until they are let through. failing: ids whose reads fail."""

    def __init__(self, disk) -> None:
        self._read, self._free, self.failing, self.is_open = disk.read, threading.Semaphore(0), set(), False
        disk.read = self.read

    def read(self, expected, into):
        if not self.is_open:
            self._free.acquire()
        return ReadResult.FAILED if expected.block_id in self.failing else self._read(expected, into)

    def open(self) -> None:
        self.is_open = True
        self.let(1000)

    def let(self, count: int) -> None:
        self._free.release(count)


class Slow:
    """An engine whose disk is as fast as computing, by what its planner believes, with PROMPT on disk alone."""

    def __init__(self, model, path, cpu, block_s: float = 0.01) -> None:
        tiers = CacheTiers(hbm="2MiB", cpu=cpu, disk="32MiB", path=path)
        self.engine = by_hand(Engine(model, tiers, device="cpu", load="auto"))
        planner = self.planner = self.engine.connector.parts.store.planner
        ask(self.engine, PROMPT)
        settle(self.engine)
        self.forget()
        self.believe(block_s, block_s)
        for measured in ("loaded", "read", "computed"):
            setattr(planner, measured, lambda *_: None)
        self.gate = Gate(self.engine.connector.parts.disk)
        self.num_computed = self._num_landed = 0
        io = self.engine.connector.parts.io
        completed = io.completed

        def landed():
            done = completed()
            self._num_landed += sum(isinstance(one, ReadDone) for one in done)
            return done

        io.completed = landed
        launch = self.engine.loop.runner.launch

        def counted(output):
            self.num_computed += sum(s.num_tokens for s in output.scheduled if s.num_tokens > 1)
            return launch(output)

        self.engine.loop.runner.launch = counted

    def believe(self, read_s: float, compute_s: float) -> None:
        planner, cls = self.planner, type(self.planner)
        for _ in range(20):
            cls.computed(planner, 1600, 100 * compute_s)
            cls.loaded(planner, planner.block_bytes, 1e-6)
        for _ in range(200):
            cls.read(planner, planner.block_bytes, read_s)

    def never_stalls(self) -> None:
        """How long a read stands at the gate is this machine's pace, and no sign of a disk that has stalled."""
        choose = self.planner.choose
        self.planner.choose = lambda num, unread, ahead, stalled_s, *more: choose(num, unread, ahead, 0.0, *more)

    def forget(self) -> None:
        with self.engine.connector.parts.lock:
            self.engine.loop.pool.evict_all()
            self.engine.connector.parts.cpu.pool.evict_all()

    def submit(self, count: int = 6):
        return self.engine.submit(list(PROMPT), greedy(count))

    def num_ended(self) -> int:
        """Reads that the store has seen end, or has cancelled."""
        self.engine.connector.wait_for_progress(0.001)
        return self._num_landed + counters(self.engine)["cancelled_reads"]

    def finish(self, handle) -> None:
        """Reads come a few at a time, between the steps."""
        while not handle.done:
            num_ended = self.num_ended() + min(4, self.engine.stats()["disk"]["reads_in_flight"])
            self.gate.let(4)
            wait_until(lambda: self.num_ended() >= num_ended)  # noqa: B023
            self.engine.step()
            if not handle.done:
                self.engine.check_integrity()
        self.gate.open()

    def request(self):
        (request,) = self.engine.loop.scheduler.roster.tenants.running()
        return request


@pytest.fixture(params=["2MiB", 0], ids=["cpu", "staging"])
def slow(model, store, request):
    made = Slow(model, store, request.param)
    with made.engine:
        yield made
        made.gate.open()
        settle(made.engine)


def check_usage(slow: Slow, output) -> None:
    """Every token of the prompt was computed or came from a tier, and none counts for both."""
    assert sum(cached(output)) + slow.num_computed == len(PROMPT)


def test_invariant_1_the_head_is_computed_while_the_tail_is_read(slow, plain):
    slow.never_stalls()
    handle = slow.submit()
    slow.engine.step()
    assert 0 < slow.request().num_computed_tokens < len(PROMPT) // 2 and slow.request().ask_at is not None
    slow.finish(handle)
    assert handle.output.token_ids == plain(PROMPT, 6)
    hbm, cpu, disk, _ = cached(handle.output)
    assert (hbm, cpu) == (0, 0) and disk > 0
    check_usage(slow, handle.output)
    assert counters(slow.engine)["split_prefills"] == 1


def test_what_others_compute_meanwhile_leaves_it_less_of_the_head(slow):
    slow.never_stalls()
    beside = slow.engine.submit(tokens(2, 200), greedy(1))
    handle = slow.submit()
    slow.engine.step()
    request = slow.engine.loop.scheduler.roster.requests[handle.request_id]
    assert request.ask_at == 160, "240 with nobody beside it: now a block is computed while two are read"
    slow.finish(handle)
    assert beside.done and slow.planner.num_prompts == 0


def test_others_run_while_it_waits_for_the_tail(slow, plain):
    handle = slow.submit()
    slow.engine.step()
    other = ask(slow.engine, tokens(2, 50), 5)
    assert other.token_ids == plain(tokens(2, 50), 5)
    slow.finish(handle)
    assert handle.output.token_ids == plain(PROMPT, 6)


def test_when_no_read_ever_ends_everything_is_computed(slow, plain):
    handle = slow.submit()
    while not handle.done:
        slow.engine.step()
    assert handle.output.token_ids == plain(PROMPT, 6) and sum(cached(handle.output)) == 0
    check_usage(slow, handle.output)


def test_invariant_1_a_read_in_the_middle_of_the_tail_fails(slow, plain):
    slow.never_stalls()
    chain = slow.submit(1)
    while not chain.done:
        slow.gate.let(4)
        slow.engine.step()
    slow.forget()
    slow.num_computed = 0
    slow.gate.failing.add(chain.chain[NUM_BLOCKS - 5])
    handle = slow.submit()
    slow.finish(handle)
    assert handle.output.token_ids == plain(PROMPT, 6)
    check_usage(slow, handle.output)
    assert counters(slow.engine)["read_failures"] == {"failed": 1}


def test_invariant_1_the_load_in_the_middle_of_a_prefill_fails(slow, plain):
    slow.never_stalls()
    failures = []

    def fault(this, tear):
        if this == 1 and not failures:
            failures.append(this)
            tear()
            raise RuntimeError("injected")

    with before_each_load(fault):
        handle = slow.submit()
        slow.finish(handle)
    assert failures and handle.output.token_ids == plain(PROMPT, 6)
    assert sum(cached(handle.output)) == 0, "what it computed itself and found again is not cached"
    assert slow.engine.loop.scheduler.roster.num_failed_loads == 1


def test_invariant_1_preempted_in_the_middle(slow, plain):
    handle = slow.submit()
    slow.engine.step()
    num_before = slow.request().num_computed_tokens
    slow.engine.loop.scheduler.roster.preempt(slow.request())
    slow.engine.check_integrity()
    slow.finish(handle)
    assert handle.output.token_ids == plain(PROMPT, 6)
    check_usage(slow, handle.output)
    assert sum(cached(handle.output)) <= len(PROMPT) - num_before


def test_all_who_wait_are_not_looked_at_for_each_of_many_that_come_before_a_step(model, store):
    slow = Slow(model, store, "2MiB")
    with slow.engine:
        looked, look_ahead = [], slow.engine.connector.parts.store.prefetcher.waiting
        to_prefetch = look_ahead.to_prefetch
        look_ahead.to_prefetch = lambda: looked.append(len(look_ahead)) or to_prefetch()
        handles = [slow.submit(2) for _ in range(400)]
        assert 0 < sum(looked) < 16 * len(handles)
        for handle in handles:
            slow.engine.abort(handle)
        slow.gate.open()
        settle(slow.engine)


def test_a_clock_that_is_set_back_lets_writes_wait_no_longer(saved_model, tmp_path):
    """While the disk is full of what is in use."""
    now_s, asked = 1e9, list[float]()

    def clock() -> float:
        asked.append(now_s)
        return now_s

    with open_engine(saved_model("Llama"), tmp_path / "s") as engine:
        disk = engine.connector.parts.store.disk
        disk._clock, disk.make_room = clock, lambda *_: False
        ask(engine, tokens(2, 40))
        wait_until(lambda: disk.dirty and asked)
        now_s -= 3600
        ask(engine, tokens(3, 5))
        wait_until(lambda: not disk.dirty)
