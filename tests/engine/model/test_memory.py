"""The size of the block pool, given or found; and which device each of several processes computes on."""

import warnings
from collections import Counter
from dataclasses import replace

import psutil
import pytest
import torch

from kvstore.config import MAX_SAVE_BYTES
from kvstore.engine.config import EngineConfig, SchedulerConfig
from kvstore.engine.model.devices import (
    CPU_FRACTION,
    CPU_WINDOWS,
    CUDA_WINDOWS,
    _maximal_step,
    num_hbm_blocks,
    own_device,
)
from kvstore.engine.model.probe import intercept
from kvstore.engine.model.step.graphs import GRAPH_BYTES, PREFILL_SIZES, StepGraphs, bytes_for_graphs, graph_sizes
from kvstore.engine.model.step.tensors import Form
from kvstore.errors import ConfigError
from tests.support import fake_cuda
from tests.support.models import make_model

CONFIG = SchedulerConfig(max_model_len=256, block_size=16, max_num_seqs=4)
CROWD = SchedulerConfig(max_model_len=256, block_size=16, max_num_seqs=1 << 20)  # could use any device's memory
FOUR = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def model():
    return intercept(make_model(), 256)


def test_a_given_size_is_kept_to(model):
    block_bytes = 16 * model.spec.kv_bytes_per_token
    assert model.spec.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4
    assert num_hbm_blocks(model, CONFIG, 40 * block_bytes + block_bytes - 1)[0] == 40


def test_a_pool_below_the_window_warns_and_one_below_a_block_is_refused(model):
    block_bytes = 16 * model.spec.kv_bytes_per_token
    with pytest.warns(UserWarning, match="holds 48 tokens, fewer than max_model_len 256"):
        assert num_hbm_blocks(model, CONFIG, 3 * block_bytes)[0] == 3
    with pytest.raises(ConfigError, match="one block of this model needs"):
        num_hbm_blocks(model, CONFIG, block_bytes - 1)


def test_auto_is_bounded_by_memory_and_by_use(model, monkeypatch):
    full = CPU_WINDOWS * 4 * 256 // 16
    assert num_hbm_blocks(model, CONFIG, "auto")[0] == full
    available = 100 * 16 * model.spec.kv_bytes_per_token

    class Memory:
        def __init__(self) -> None:
            self.available = available

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert num_hbm_blocks(model, CONFIG, "auto")[0] == int(100 * CPU_FRACTION)
        available *= 4
        assert num_hbm_blocks(model, CONFIG, "auto", num_processes=4)[0] == int(100 * CPU_FRACTION)


@pytest.mark.parametrize(("max_tokens", "max_seqs"), [(100, 4), (700, 64), (8, 64), (255, 1)])
def test_the_maximal_step_has_all_the_tokens_and_samples_of_one(model, max_tokens, max_seqs):
    """What sizes the pool on CUDA, here for its shapes."""
    seen = {}
    forward = model.forward

    def spy(token_ids, positions, batch, caches, connector, samples):
        seen.update(tokens=len(token_ids), lens=batch.context_lens, samples=len(samples))
        return forward(token_ids, positions, batch, caches, connector, samples)

    model.forward = spy
    try:
        _maximal_step(model, SchedulerConfig(256, max_num_batched_tokens=max_tokens, max_num_seqs=max_seqs))
    finally:
        del model.forward
    assert seen["tokens"] == sum(seen["lens"]) == max_tokens and max(seen["lens"]) <= 255
    assert seen["samples"] == min(max_tokens, max_seqs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_auto_on_cuda_leaves_room_for_graphs_and_for_what_is_not_saved_yet(monkeypatch):
    crowd = replace(CROWD, max_num_batched_tokens=64)  # a step that is computed soon
    with fake_cuda.device(monkeypatch) as driver:
        model = intercept(make_model().to(fake_cuda.DEVICE), 256)
        driver.memory = (4 << 30, 4 << 30)
        ways = ((False, False), (True, False), (True, True))
        plain, graphs, saves = (num_hbm_blocks(model, crowd, "auto", *flags)[0] for flags in ways)
        graph_bytes = bytes_for_graphs(model, crowd)
    block_bytes = 16 * model.spec.kv_bytes_per_token
    assert (plain - graphs) * block_bytes == pytest.approx(graph_bytes, abs=block_bytes)
    assert (graphs - saves) * block_bytes == pytest.approx(MAX_SAVE_BYTES, abs=block_bytes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_auto_on_cuda_takes_no_more_than_a_small_model_can_use(monkeypatch):
    """A card of 140 GB would hold ten million blocks of the built-in model, and Python keeps books on each."""
    config = SchedulerConfig(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64)
    with fake_cuda.device(monkeypatch) as driver:
        model = intercept(make_model().to(fake_cuda.DEVICE), 256)
        driver.memory = (139 << 30, 140 << 30)
        assert num_hbm_blocks(model, config, "auto")[0] == CUDA_WINDOWS * 4 * 256 // 16
        driver.memory = (3 << 20, 7 << 20)
        assert num_hbm_blocks(model, config, "auto")[0] < CUDA_WINDOWS * 4 * 256 // 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_what_graphs_take_is_found_by_the_largest_of_each_kind(monkeypatch):
    run_once, seen = StepGraphs.run_once, Counter()
    monkeypatch.setattr(StepGraphs, "run_once", lambda graphs, form: seen.update([form]) or run_once(graphs, form))
    with fake_cuda.device(monkeypatch):
        model = intercept(make_model().to(fake_cuda.DEVICE), 256)
        foreseen = bytes_for_graphs(model, CONFIG)
    assert seen == {Form(4, 4): 2, Form(128, 1): 2}
    assert foreseen > (len(graph_sizes(4)) + len(PREFILL_SIZES)) * GRAPH_BYTES


@pytest.mark.gpu
def test_auto_on_cuda_leaves_room_for_the_largest_step():
    network = make_model().to("cuda")
    model = intercept(network, 256)
    blocks = num_hbm_blocks(model, CROWD, "auto")[0]
    caches = model.new_caches(blocks, 16)
    free, total = torch.cuda.mem_get_info()
    assert blocks > 0 and free > 0.02 * total and len(caches) == len(model.spec.shapes)
    del caches
    torch.cuda.empty_cache()  # else nothing is left for processes that later tests start


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_rank_of_each_engine_has_a_device_of_its_own(device, monkeypatch):
    engines = [EngineConfig(device=device, data_parallel_size=2, data_parallel_rank=n, **FOUR) for n in (0, 1)]
    with fake_cuda.device(monkeypatch, count=8):
        assert [own_device(one, rank) for one in engines for rank in range(4)] == [f"cuda:{n}" for n in range(8)]


@pytest.mark.parametrize("device", ["cpu", "auto", "cuda"])
def test_without_devices_it_is_what_was_asked_for(device):
    assert own_device(EngineConfig(device=device, **FOUR), 3) == device


def test_one_process_may_have_any_device_and_several_the_cpu(monkeypatch):
    with fake_cuda.device(monkeypatch, count=2):
        assert own_device(EngineConfig(device="cuda:1")) == "cuda:1"
        assert own_device(EngineConfig(device="cpu", **FOUR)) == "cpu"


def test_what_cannot_be_is_refused(monkeypatch):
    with fake_cuda.device(monkeypatch, count=3):
        with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2, .* 3 CUDA devices for 2 x 2 processes"):
            own_device(EngineConfig(**FOUR))
        with pytest.raises(ConfigError, match="data_parallel_size is 4, but this machine has 3"):
            own_device(EngineConfig(data_parallel_size=4))
        with pytest.raises(ConfigError, match=r"distributed_executor is ray, .* cpu as the device"):
            own_device(EngineConfig(tensor_parallel_size=2, distributed_executor="ray"))
    with pytest.raises(ConfigError, match="device is cuda:1, but each of 4 processes needs its own"):
        EngineConfig(device="cuda:1", **FOUR)


@pytest.mark.parametrize("kib", [30, 100, 400, 4000])
def test_blocks_and_window_slots_fill_what_is_given_and_a_lone_request_never_lacks_a_slot(kib):
    """A window of 24 tokens lies in two blocks; its request has two more, and one for a copy."""
    model, config = intercept(make_model("Gemma3"), 256), replace(CONFIG, max_model_len=16, max_num_batched_tokens=48)
    num_blocks, num_slots = num_hbm_blocks(model, config, kib << 10)
    taken = sum(cache.nbytes for layer in model.new_caches(num_blocks, 16, num_slots) for cache in layer)
    assert (kib << 10) - 2 * 16 * model.spec.kv_bytes_per_token < taken <= kib << 10
    assert min(num_blocks, 3 + 2 + 3) <= num_slots <= num_blocks
    assert (num_slots == num_blocks) == (kib < 200)
