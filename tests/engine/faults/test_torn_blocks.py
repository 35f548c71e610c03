"""Torn and stale blocks: the real scheduler and store over queues that really run at once, with pools too small for it.

Every token's keys and values follow from the tokens before it, and whatever the computation reads is compared, in the
queue that reads it. The same run with one wait left out must see wrong values: a test that cannot fail proves nothing.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from kvstore.blocks.ids import Lineage
from kvstore.blocks.pool import BlockPool
from kvstore.config import CacheTiers
from kvstore.engine.config import SchedulerConfig
from kvstore.engine.core.kv_cache_manager import KVCacheManager
from kvstore.engine.core.request import Request
from kvstore.engine.core.scheduler import Scheduler, SchedulerOutput
from kvstore.engine.core.steps import StepResult, Steps, StepTimes
from kvstore.engine.sampling_params import SamplingParams
from kvstore.memory.device_transfer import DeviceTransfer
from kvstore.memory.layout import KVLayout
from kvstore.memory.streams import CudaStreams, Queue, Streams
from kvstore.store import assembly
from tests.support.simulated_streams import Broken, SimulatedStreams

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 3, 2, 8, 4
HBM_BLOCKS, CPU_SLOTS, NUM_SEQS, BUDGET, WINDOW = 26, 30, 3, 24, 48
VOCABULARY = 50
STEPS_AHEAD = 4  # that the host may have given to the device and not seen the end of


def keys_of(token_ids: list[int]) -> list[int]:
    """One number per token, of its whole history, that a float32 holds with three bits to spare."""
    key, keys = 0, []
    for token in token_ids:
        key = (key * 1_000_003 + token + 1) % (2**61 - 1)
        keys.append(key % 2**20)
    return keys


class Engine:
    """Requests of a few conversations over a model whose KV is known. `num_wrong`: values read that were others.

    runs_ahead: nobody waits, and answers are longer and end sooner than they may, so that many steps are launched
    before the last one is read.
    """

    def __init__(self, streams: Streams, device: torch.device, seed: int, runs_ahead: bool = False) -> None:
        self.streams, self.device, self.rng = streams, device, random.Random(seed)
        layout = KVLayout(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, torch.float32, (None,) * NUM_LAYERS)
        tiers = CacheTiers(cpu=CPU_SLOTS * layout.block_bytes, disk=0)
        self.connector = assembly.open_tiered(
            tiers, layout, "model", lambda _: "ab" * 32, device, "always", 1, HBM_BLOCKS, "lru", None
        )
        self.pool = BlockPool(HBM_BLOCKS, self.connector.hbm_order)
        limits = SchedulerConfig(WINDOW, BLOCK_SIZE, NUM_SEQS, BUDGET)
        self.scheduler = Scheduler(limits, KVCacheManager(self.pool, BLOCK_SIZE), self.connector)
        shape = (HBM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        self.caches = [(self._zeros(shape), self._zeros(shape)) for _ in range(NUM_LAYERS)]
        self.connector.register_kv_caches(self.caches)
        step = (BUDGET, NUM_KV_HEADS, HEAD_DIM)
        self.static = [(self._zeros(step), self._zeros(step)) for _ in range(NUM_LAYERS)]
        self.fence = None
        self.wrong = self._zeros((1,))
        self.talks: list[list[int]] = [[talk] * 6 for talk in range(6)]
        self.talk_of: dict[str, int] = {}
        self.num_requests = self.last = self.num_ahead = 0
        self.runs_ahead = runs_ahead
        self.steps = Steps(self.scheduler, self, runs_ahead)
        self.times = StepTimes()
        self.unread: dict[str, int] = {}  # tokens of the last step
        self.launched: list[list[int]] | None = None

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, device=self.device)

    def _evict_some(self) -> None:
        """So that what was just saved is loaded. A free slot may be written to at once, as a read from disk does."""
        if self.rng.random() < 0.3:
            self.pool.evict_all()
        if self.rng.random() < 0.2:
            with self.connector.parts.lock:
                cpu = self.connector.parts.cpu.pool
                cpu.evict_all()
                for slot in range(CPU_SLOTS):
                    if cpu.is_free(slot) and cpu.block_id(slot) is None:
                        self.connector.parts.arena.tensor[slot] = -1.0

    # -- requests ----------------------------------------------------------------------------------------------------
    def submit(self) -> None:
        talk = self.last if self.rng.random() < 0.5 else self.rng.randrange(len(self.talks))
        history = self.talks[talk]
        if len(history) > WINDOW - 16 or self.rng.random() < 0.05:
            history[6:] = []  # begins anew, on the first block of old
        prompt = [*history, *(self.rng.randrange(VOCABULARY) for _ in range(self.rng.randrange(1, 7)))]
        params = SamplingParams(max_tokens=4, temperature=0, stop_token_ids=(0, 1, 2) if self.runs_ahead else ())
        request = Request(
            f"r{self.num_requests}", prompt, params, self.rng.randrange(1, 12 if self.runs_ahead else 5),
            Lineage(self.connector.lineage_root("", "")), BLOCK_SIZE, seed=0,
        )  # fmt: skip
        self.num_requests += 1
        self.talk_of[request.request_id] = talk
        self.scheduler.roster.add(request)

    def step(self) -> None:
        while len(self.scheduler.roster.requests) < (NUM_SEQS if self.runs_ahead else 5):
            self.submit()
        if self.rng.random() < 0.05:
            self.scheduler.roster.finish(self.rng.choice(list(self.scheduler.roster.requests)), "abort")
        self._evict_some()
        has_computed = self.steps.step(self._take_in)
        if not has_computed:
            self.connector.wait_for_progress(0.02)

    def _take_in(self, output: SchedulerOutput, result: StepResult) -> None:
        for progress in self.scheduler.update(output, result.token_ids, self.connector.get_finished()):
            if progress.request.finish_reason is not None:
                self.last = self.talk_of.pop(progress.request.request_id)
                self.talks[self.last] = list(progress.request.token_ids)

    # -- the model ---------------------------------------------------------------------------------------------------
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
        readings: list[tuple[list[int], list[int]]] = []  # HBM slots of a request's context, and its keys
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
        is_static = self.rng.random() < 0.7
        if is_static and self.fence is not None:
            self.fence.order()
        places = torch.tensor(slots).to(self.device)
        new = torch.tensor(keys, dtype=torch.float32).to(self.device)
        seen = [(torch.tensor(t).to(self.device), torch.tensor(k).to(self.device)) for t, k in readings]
        for layer in range(NUM_LAYERS):
            key, value = (one[: len(keys)] for one in self.static[layer])
            if not is_static:
                key, value = torch.empty_like(key), torch.empty_like(value)
            self._compute(layer, key, value, places, new, seen)
        fence = self.connector.wait_for_save()
        self.fence = fence if is_static else self.fence
        return sampled

    def _compute(self, layer: int, key, value, places, new, seen) -> None:
        """One layer: keys and values exist, are saved, are written to HBM; then the whole context is read."""
        launch, offset = self.streams.launch, layer / 8
        key_cache, value_cache = (cache.view(-1, NUM_KV_HEADS, HEAD_DIM) for cache in self.caches[layer])

        def make() -> None:
            key.copy_((new + offset)[:, None, None].expand_as(key))
            value.copy_(-key)

        def write() -> None:
            key_cache.index_copy_(0, places, key)
            value_cache.index_copy_(0, places, value)

        def read() -> None:
            for table, story in seen:
                expected = (story + offset)[:, None, None]
                self.wrong += (key_cache[table] != expected).sum() + (value_cache[table] != -expected).sum()

        launch(Queue.COMPUTE, make)
        self.connector.save_kv_layer(layer, key, value)
        self.connector.wait_for_layer_load(layer)
        launch(Queue.COMPUTE, write)
        launch(Queue.COMPUTE, read)

    @property
    def num_wrong(self) -> int:
        """When all that was given to the device has been computed."""
        self.streams.record(Queue.COMPUTE).synchronize()
        return int(self.wrong)


def run(
    streams: Streams, device: torch.device, seed: int, num_steps: int, runs_ahead: bool = False
) -> tuple[int, dict]:
    """Until something wrong is read, at most so many steps. Returns how much was wrong, and the store's counters."""
    engine = Engine(streams, device, seed, runs_ahead)
    try:
        for number in range(num_steps):
            engine.step()
            if (engine.rng.random() < 0.4 or number % STEPS_AHEAD == 0) and engine.num_wrong:
                break
        num_wrong = engine.num_wrong
        for request_id in list(engine.scheduler.roster.requests):
            engine.scheduler.roster.finish(request_id, "abort")
        if not num_wrong:
            engine.connector.upkeep.check_integrity(idle=True)
        assert not runs_ahead or num_wrong or engine.num_ahead > num_steps / 5
        return num_wrong, engine.connector.stats()
    finally:
        engine.connector.close()


@contextmanager
def simulated(seed: int, broken: Broken | None = None, slow: Queue | None = None):
    streams = SimulatedStreams(seed, broken=broken, slow=slow)
    with (
        mock.patch(
            "kvstore.memory.device_transfer.LAYERS_AHEAD", 1
        ),  # of three layers: some are launched in the forward
        mock.patch.object(
            assembly, "make_transfer", lambda device, arena, wake: DeviceTransfer(arena, streams, wake)
        ),
    ):
        yield streams
    streams.close()


SPEEDS = [None, *Queue]  # which queue is the slowest


@pytest.mark.parametrize("slow", SPEEDS)
def test_nothing_is_torn_or_stale(slow):
    with simulated(1, slow=slow) as streams:
        num_wrong, stats = run(streams, torch.device("cpu"), 1, 400)
    assert num_wrong == 0
    assert stats["store"]["loaded"] > 150 and stats["store"]["saved"] > 150 and stats["cpu"]["evicted_blocks"] > 50
    assert stats["store"]["housekeeping_errors"] == 0


@pytest.mark.parametrize("slow", SPEEDS)
def test_nothing_is_torn_where_steps_run_ahead(slow):
    """Blocks of who has ended are given away while a step that writes to them is in flight, and saves end before the
    blocks in which they stand have names."""
    with simulated(1, slow=slow) as streams:
        num_wrong, stats = run(streams, torch.device("cpu"), 1, 400, runs_ahead=True)
    assert num_wrong == 0
    assert stats["store"]["loaded"] > 5 and stats["store"]["saved"] > 50
    assert stats["store"]["housekeeping_errors"] == 0


def without(waiting: Queue, awaited: Queue) -> Broken:
    return Broken(waits=frozenset([(waiting, awaited)]))


BREAKS = {
    "a load does not wait for those who read its HBM blocks": without(Queue.LOAD, Queue.COMPUTE),
    "a layer does not wait for its load": without(Queue.COMPUTE, Queue.LOAD),
    "a save does not wait for the keys": without(Queue.SAVE, Queue.COMPUTE),
    "static buffers are written before their save has ended": without(Queue.COMPUTE, Queue.SAVE),
    "slots are given back before their load has ended": Broken(reached=frozenset([Queue.LOAD])),
    "slots are loaded before their save has ended": Broken(reached=frozenset([Queue.SAVE])),
}


@pytest.mark.parametrize("what", BREAKS)
def test_the_run_above_would_see_it(what):
    """A race need not show at every speed."""
    for slow in SPEEDS[::-1]:
        with simulated(1, BREAKS[what], slow) as streams:
            num_wrong, _ = run(streams, torch.device("cpu"), 1, 400)
        if num_wrong:
            return
    pytest.fail(f"nobody notices when {what}")


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
    with (
        mock.patch("kvstore.memory.device_transfer.LAYERS_AHEAD", 1),
        mock.patch.object(assembly, "CudaStreams", lambda _: streams),
        torch.inference_mode(),
    ):
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
