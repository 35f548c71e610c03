"""Torn and stale blocks: the real scheduler and store over queues that really run at once, with pools too small for it.

Every token's keys and values follow from the tokens before it, and whatever the computation reads is compared, in the
queue that reads it. The same run with one wait left out must see wrong values: a test that cannot fail proves nothing.
"""

from __future__ import annotations

import os
import random
import threading
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
import torch

from kvstore.blocks.ids import Lineage, lineage_root
from kvstore.blocks.pool import BlockPool
from kvstore.blocks.records import TransferPlan, Transferred
from kvstore.config import CacheTiers
from kvstore.connector import KVConnector
from kvstore.engine.config import SchedulerConfig
from kvstore.engine.core.kv_cache_manager import KVCacheManager
from kvstore.engine.core.request import Request
from kvstore.engine.core.scheduler import Scheduler, SchedulerOutput
from kvstore.engine.core.step_loop import StepResult, Steps, StepTimes
from kvstore.engine.sampling_params import SamplingParams
from kvstore.memory.device_transfer import DeviceTransfer, Pace
from kvstore.memory.layout import KVLayout, OwnPart
from kvstore.memory.streams import CudaStreams, Queue, Streams
from kvstore.memory.transfer import Arena
from kvstore.store import assembly
from tests.kvstore.memory.test_device_transfer import Tape
from tests.support.arenas import alike
from tests.support.simulated_streams import Broken, SimulatedStreams

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 3, 2, 8, 4
HBM_BLOCKS, ARENA_BLOCKS, NUM_SEQS, BUDGET, WINDOW = 26, 30, 3, 24, 48
VOCABULARY = 50
HEADS = slice(0, NUM_KV_HEADS)
FIRST_HEAD, SECOND_HEAD = OwnPart((0, NUM_LAYERS), (0, 1)), OwnPart((0, NUM_LAYERS), (1, 2))
PACE = Pace(layers_ahead=1)  # of three layers some are launched in the forward
MOST_DELAY_S = 0.0004  # of a piece of work
STEPS_AHEAD = 4  # that the host may have given to the device and not seen the end of


def keys_of(token_ids: list[int]) -> list[int]:
    """One number per token, of its whole history, that a float32 holds with three bits to spare."""
    key, keys = 0, []
    for token in token_ids:
        key = (key * 1_000_003 + token + 1) % (2**61 - 1)
        keys.append(key % 2**20)
    return keys


class People:
    """Requests of a few conversations. runs_ahead: answers are longer, and end sooner than they may."""

    def __init__(self, rng: random.Random, lineage: Lineage, runs_ahead: bool) -> None:
        self._rng, self._lineage, self._runs_ahead = rng, lineage, runs_ahead
        self._talks: list[list[int]] = [[talk] * 6 for talk in range(6)]
        self._talk_of: dict[str, int] = {}  # by request
        self._num_requests = self._last = 0

    def request(self) -> Request:
        talk = self._last if self._rng.random() < 0.5 else self._rng.randrange(len(self._talks))
        history = self._talks[talk]
        if len(history) > WINDOW - 16 or self._rng.random() < 0.05:
            history[6:] = []  # begins anew, on the first block of old
        prompt = [*history, *(self._rng.randrange(VOCABULARY) for _ in range(self._rng.randrange(1, 7)))]
        params = SamplingParams(max_tokens=4, temperature=0, stop_token_ids=(0, 1, 2) if self._runs_ahead else ())
        most = self._rng.randrange(1, 12 if self._runs_ahead else 5)
        request = Request(f"r{self._num_requests}", prompt, params, most, self._lineage, BLOCK_SIZE, seed=0)
        self._num_requests += 1
        self._talk_of[request.request_id] = talk
        return request

    def end(self, request: Request) -> None:
        self._last = self._talk_of.pop(request.request_id)
        self._talks[self._last] = list(request.token_ids)


class KnownModel:
    """A model whose KV is known: counts the values that it reads and that are others. heads: those that it has."""

    def __init__(
        self, streams: Streams, device: torch.device, connector: KVConnector | OtherRank, heads: slice = HEADS
    ) -> None:
        self._streams, self._device, self._connector = streams, device, connector
        num_heads, self._of_heads = heads.stop - heads.start, heads.start / 16
        shape = (HBM_BLOCKS, BLOCK_SIZE, num_heads, HEAD_DIM)
        self._caches = [(self._zeros(shape), self._zeros(shape)) for _ in range(NUM_LAYERS)]
        connector.register_kv_caches(self._caches)
        step = (BUDGET, num_heads, HEAD_DIM)
        self._static = [(self._zeros(step), self._zeros(step)) for _ in range(NUM_LAYERS)]
        self._fence = None
        self._wrong = self._zeros((1,))

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, device=self._device)

    def forward(self, slots: list[int], keys: list[int], readings: list[tuple[list[int], list[int]]], is_static: bool):
        """Tokens go to these slots with these keys. readings: HBM slots of a request's context, and its keys.
        is_static: the step's tensors are those of the last such step, as in a CUDA graph.
        """
        if is_static and self._fence is not None:
            self._fence.order()
        places = torch.tensor(slots).to(self._device)
        new = torch.tensor(keys, dtype=torch.float32).to(self._device)
        seen = [(torch.tensor(t).to(self._device), torch.tensor(k).to(self._device)) for t, k in readings]
        for layer in range(NUM_LAYERS):
            key, value = (one[: len(keys)] for one in self._static[layer])
            if not is_static:
                key, value = torch.empty_like(key), torch.empty_like(value)
            self._compute(layer, key, value, places, new, seen)
        fence = self._connector.wait_for_save()
        self._fence = fence if is_static else self._fence

    def _compute(self, layer: int, key, value, places, new, seen) -> None:
        """One layer: keys and values exist, are saved, are written to HBM; then the whole context is read."""
        launch, offset = self._streams.launch, layer / 8 + self._of_heads
        key_cache, value_cache = (cache.flatten(0, 1) for cache in self._caches[layer])

        def make() -> None:
            key.copy_((new + offset)[:, None, None].expand_as(key))
            value.copy_(-key)

        def write() -> None:
            key_cache.index_copy_(0, places, key)
            value_cache.index_copy_(0, places, value)

        def read() -> None:
            for table, story in seen:
                expected = (story + offset)[:, None, None]
                self._wrong += (key_cache[table] != expected).sum() + (value_cache[table] != -expected).sum()

        launch(Queue.COMPUTE, make)
        self._connector.save_kv_layer(layer, key, value)
        self._connector.wait_for_layer_load(layer)
        launch(Queue.COMPUTE, write)
        launch(Queue.COMPUTE, read)

    @property
    def num_wrong(self) -> int:
        """When all that was given to the device has been computed."""
        self._streams.record(Queue.COMPUTE).synchronize()
        return int(self._wrong)


class OtherRank:
    """An `OtherRanks` of one, in this process: the second half of the heads, in queues of its own. It computes each
    step before the first rank does, and its transfers end when they end.
    """

    num_others, loss = 1, None

    def __init__(self, streams: Streams) -> None:
        self.streams, self.arena_descriptor = streams, os.memfd_create("test")
        self._told: list[Transferred] = []
        self._has_told = threading.Condition()
        self._step: tuple[TransferPlan, list[int]] | None = None

    def open(self, layout: KVLayout, device: torch.device) -> None:
        arena = Arena(replace(layout, own=SECOND_HEAD), ARENA_BLOCKS, device.type == "cuda", self.arena_descriptor)
        self.transfer = DeviceTransfer(arena, self.streams, self._tell, PACE)
        self.register_kv_caches, self.save_kv_layer = self.transfer.register, self.transfer.save_kv_layer
        self.wait_for_layer_load = self.transfer.wait_for_layer_load
        self.model = KnownModel(self.streams, device, self, slice(1, 2))

    def compute(self, slots: list[int], keys: list[int], readings: list[tuple[list[int], list[int]]]) -> None:
        step, self._step = self._step, None
        if step is not None:
            self.transfer.begin(*step)
        self.model.forward(slots, keys, readings, is_static=False)

    def wait_for_save(self) -> None:
        self.transfer.end()
        self._tell()

    def _tell(self) -> None:
        with self._has_told:
            self._told += self.transfer.completed()
            self._has_told.notify_all()

    # -- what the first rank's store asks ----------------------------------------------------------------------------
    def use(self, blocks: object) -> None:
        pass

    def begin_transfers(self, plan: TransferPlan, row_starts: list[int]) -> None:
        self._step = plan, row_starts

    def end_transfers(self) -> bool:
        return self._step is None

    def transferred(self) -> list[Transferred]:
        with self._has_told:
            told, self._told = self._told, []
            return told

    def wait(self, timeout_s: float) -> None:
        with self._has_told:
            self._has_told.wait_for(lambda: self._told, timeout_s)

    def close(self) -> None:
        self.transfer.close()
        os.close(self.arena_descriptor)


class Engine:
    """The scheduler and the store over a known model. Also the `Runner` of its steps.

    runs_ahead: nobody waits, so that many steps are launched before the last one is read. other: has half of the heads.
    """

    def __init__(
        self, streams: Streams, device: torch.device, seed: int, runs_ahead: bool = False,
        other: OtherRank | None = None,
    ) -> None:  # fmt: skip
        self.rng, self.runs_ahead, self.other = random.Random(seed), runs_ahead, other
        heads = HEADS if other is None else slice(0, 1)
        shapes = alike(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM)
        own = None if other is None else FIRST_HEAD
        layout = KVLayout(shapes, BLOCK_SIZE, torch.float32, (None,) * NUM_LAYERS, own)
        tiers = CacheTiers(cpu=ARENA_BLOCKS * layout.block_bytes, disk=0)
        self.connector = assembly.open_tiered(
            tiers, layout, "model", lambda _: "ab" * 32, device, "always", 1, HBM_BLOCKS, "lru", None, others=other
        )
        if other is not None:
            other.open(layout, device)
        pool = BlockPool(HBM_BLOCKS, self.connector.hbm_order)
        limits = SchedulerConfig(WINDOW, BLOCK_SIZE, NUM_SEQS, BUDGET)
        self.scheduler = Scheduler(limits, KVCacheManager(pool, BLOCK_SIZE), self.connector)
        self.model = KnownModel(streams, device, self.connector, heads)
        self.people = People(
            self.rng, Lineage(lineage_root(self.connector.root_secret, self.connector.fingerprint.hex())), runs_ahead
        )
        self.steps = Steps(self.scheduler, self, runs_ahead)
        self.times = StepTimes()
        self.num_ahead = 0
        self.unread: dict[str, int] = {}  # tokens of the last step
        self.launched: list[list[int]] | None = None

    @property
    def num_wrong(self) -> int:
        return self.model.num_wrong + (0 if self.other is None else self.other.model.num_wrong)

    def _evict_some(self) -> None:
        """So that what was just saved is loaded. A free one may be written to at once, as by a read from disk."""
        if self.rng.random() < 0.3:
            self.scheduler.manager.pool.evict_all()
        if self.rng.random() < 0.2:
            with self.connector.parts.lock:
                cpu = self.connector.parts.cpu.pool
                cpu.evict_all()
                for arena_block in range(ARENA_BLOCKS):
                    if cpu.is_free(arena_block) and cpu.block_id(arena_block) is None:
                        self.connector.parts.arena.tensor[arena_block] = -1.0

    def step(self) -> None:
        roster = self.scheduler.roster
        while len(roster.requests) < (NUM_SEQS if self.runs_ahead else 5):
            roster.add(self.people.request())
        if self.rng.random() < 0.05:
            roster.finish(self.rng.choice(list(roster.requests)), "abort")
        self._evict_some()
        has_computed = self.steps.step(self._take_in)
        if not has_computed:
            self.connector.wait_for_progress(0.02)

    def _take_in(self, output: SchedulerOutput, result: StepResult) -> None:
        for progress in self.scheduler.update(output, result.token_ids, self.connector.get_finished()):
            if progress.request.finish_reason is not None:
                self.people.end(progress.request)

    # -- the runner --------------------------------------------------------------------------------------------------
    def launch(self, output: SchedulerOutput) -> list[list[int]]:
        self.num_ahead += bool(self.unread)
        sampled = self._execute(output) if output.scheduled else []
        self.unread = {one.request_id: ids[0] for one, ids in zip(output.scheduled, sampled, strict=True)}
        self.launched = sampled
        return sampled

    def read(self, sampled: list[list[int]]) -> StepResult:
        if sampled is self.launched:
            self.unread = {}
        return StepResult(sampled, {})

    def _execute(self, output: SchedulerOutput) -> list[list[int]]:
        slots, keys, starts = [], [], []
        sampled: list[list[int]] = []
        readings: list[tuple[list[int], list[int]]] = []
        for one in output.scheduled:
            request, end = self.scheduler.roster.requests[one.request_id], one.num_computed_tokens + one.num_tokens
            assert one.allocation.copy is None
            table = [request.block_numbers[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(end)]
            unread = [] if end <= len(request.token_ids) else [self.unread[one.request_id]]
            story = keys_of([*request.token_ids, *unread][:end])
            sampled.append([story[-1] % VOCABULARY])
            starts.append(len(slots))
            slots += table[one.num_computed_tokens :]
            keys += story[one.num_computed_tokens :]
            readings.append((table, story))
        if output.plan is not None:
            self.connector.start_load_kv(output.plan, starts)
        if self.other is not None:
            self.other.compute(slots, keys, readings)
        self.model.forward(slots, keys, readings, is_static=self.rng.random() < 0.7)
        return sampled


def run(
    streams: Streams, device: torch.device, seed: int, num_steps: int, least: tuple[int, int, int] = (0, 0, 0),
    runs_ahead: bool = False, other: OtherRank | None = None,
) -> tuple[int, dict]:  # fmt: skip
    """Until something wrong is read, so many steps, and on until at least so many blocks were loaded, saved and evicted
    from the CPU tier: how many that takes depends on the machine. Returns how much was wrong, and the store's counters.
    """
    engine = Engine(streams, device, seed, runs_ahead, other)
    try:
        for number in range(10 * num_steps):
            runs_enough = not runs_ahead or engine.num_ahead > num_steps / 5
            if number >= num_steps and runs_enough and has_moved(engine.connector.upkeep.stats(), least):
                break
            engine.step()
            if (engine.rng.random() < 0.4 or number % STEPS_AHEAD == 0) and engine.num_wrong:
                break
        num_wrong = engine.num_wrong
        for request_id in list(engine.scheduler.roster.requests):
            engine.scheduler.roster.finish(request_id, "abort")
        if not num_wrong:
            engine.connector.upkeep.check_integrity(idle=True)
        assert not runs_ahead or num_wrong or engine.num_ahead > num_steps / 5
        return num_wrong, engine.connector.upkeep.stats()
    finally:
        engine.connector.close()


def has_moved(stats: dict, least: tuple[int, int, int]) -> bool:
    found = (stats["store"]["loaded"], stats["store"]["saved"], stats["cpu"]["evicted_blocks"])
    return all(one >= other for one, other in zip(found, least, strict=True))


@contextmanager
def simulated(seed: int, broken: Broken | None = None, slow: Queue | None = None):
    streams = SimulatedStreams(seed, MOST_DELAY_S, broken, slow)
    with transfers_in(streams):
        yield streams
    streams.close()


def transfers_in(streams: Streams):
    """Stores that are opened in here move KV in these queues."""
    make = lambda device, arena, wake: DeviceTransfer(arena, streams, wake, PACE)  # noqa: E731
    return mock.patch.object(assembly, "make_transfer", make)


SPEEDS = [None, *Queue]  # which queue is the slowest
TRIES = list(product(range(1, 6), SPEEDS[::-1]))  # seeds and speeds: a race need not show at each, nor each time
# Steps at least; and blocks loaded, saved and evicted at least.
MUCH, SOME, BROKEN = (120, (100, 100, 30)), (150, (5, 50, 0)), (400, (0, 0, 0))


def run_one(slow: Queue | None, broken: Broken | None = None, seed: int = 1) -> tuple[int, dict]:
    with simulated(seed, broken, slow) as streams:
        return run(streams, torch.device("cpu"), seed, *(BROKEN if broken else MUCH))


def run_ahead(slow: Queue | None) -> tuple[int, dict]:
    """Blocks of who has ended are given away while a step that writes to them is in flight, and saves end before the
    blocks in which they stand have names.
    """
    with simulated(1, slow=slow) as streams:
        return run(streams, torch.device("cpu"), 1, *SOME, runs_ahead=True)


def run_two(slow: Queue | None, broken: Broken | None = None, seed: int = 1) -> tuple[int, dict]:
    """Two ranks, each with a device of its own. slow, broken: queues of the other rank. This one does all at once, so
    that it waits for the other alone.
    """
    other, streams = OtherRank(SimulatedStreams(seed + 1, MOST_DELAY_S, broken, slow)), Tape()
    try:
        with transfers_in(streams):
            return run(streams, torch.device("cpu"), seed, *(BROKEN if broken else MUCH), other=other)
    finally:
        other.close()
        other.streams.close()


@pytest.mark.parametrize("slow", SPEEDS)
@pytest.mark.parametrize("runs", [run_one, run_ahead, run_two])
def test_nothing_is_torn_or_stale(runs, slow):
    num_wrong, stats = runs(slow)
    assert num_wrong == 0
    assert has_moved(stats, (SOME if runs is run_ahead else MUCH)[1])
    assert stats["store"]["housekeeping_errors"] == 0


def without(waiting: Queue, awaited: Queue) -> Broken:
    return Broken(waits=frozenset([(waiting, awaited)]))


BREAKS = {
    "a load does not wait for those who read its HBM blocks": without(Queue.LOAD, Queue.COMPUTE),
    "a layer does not wait for its load": without(Queue.COMPUTE, Queue.LOAD),
    "a save does not wait for the keys": without(Queue.SAVE, Queue.COMPUTE),
    "static buffers are written before their save has ended": without(Queue.COMPUTE, Queue.SAVE),
    "arena blocks are given back before their load has ended": Broken(reached=frozenset([Queue.LOAD])),
    "arena blocks are loaded before their save has ended": Broken(reached=frozenset([Queue.SAVE])),
}


@pytest.mark.parametrize(
    ("runs", "what"),
    [*product([run_one], BREAKS), *product([run_two], [what for what in BREAKS if "static" not in what])],
)
def test_these_runs_would_see_it(runs, what):
    broken = BREAKS[what]
    awaited = {*broken.reached, *(queue for _, queue in broken.waits)}  # if this queue is slow, it shows sooner
    tries = sorted(TRIES, key=lambda one: one[1] not in awaited)
    found = any(runs(slow, broken, seed)[0] for seed, slow in tries)
    assert found, f"nobody notices when {what}"


# -- on a GPU ----------------------------------------------------------------------------------------------------------
class SleepyStreams(CudaStreams):
    """Every queue is slow at times, so that what nobody waits for is late."""

    def __init__(self, device: torch.device, seed: int, dropped: tuple[Queue, Queue] | None = None) -> None:
        super().__init__(device)
        self._rng, self._dropped = random.Random(seed), dropped
        self._places: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def launch(self, queue: Queue, work: Callable[[], object]) -> None:
        cycles = self._rng.choice((0, 0, 20_000, 2_000_000))  # the last is about a millisecond
        super().launch(queue, lambda: (torch.cuda._sleep(cycles), work()))

    def record(self, queue: Queue):
        event = super().record(queue)
        self._places[event.event] = queue
        return event

    def wait(self, queue: Queue, event) -> None:
        if (queue, self._places[event.event]) != self._dropped:
            super().wait(queue, event)


def run_on_gpu(seed: int, num_steps: int, dropped: tuple[Queue, Queue] | None = None) -> tuple[int, dict]:
    device = torch.device("cuda")
    streams = SleepyStreams(device, seed, dropped)
    with transfers_in(streams), torch.inference_mode():
        return run(streams, device, seed, num_steps)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_torn_or_stale_on_a_gpu(seed):
    num_wrong, stats = run_on_gpu(seed, 400)
    assert num_wrong == 0 and stats["store"]["loaded"] > 200


@pytest.mark.gpu
@pytest.mark.parametrize("what", [what for what, broken in BREAKS.items() if broken.waits])
def test_the_run_on_a_gpu_would_see_it(what):
    (dropped,) = BREAKS[what].waits
    assert any(run_on_gpu(seed, 400, dropped)[0] for seed in range(12)), f"nobody notices when {what}"
