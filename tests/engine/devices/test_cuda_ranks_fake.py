"""A model in several processes, each with a device that is none: one's tokens, one's store, and who ends with whom.

The devices do everything at once, and gloo stands in for NCCL, so that nothing here says anything about the order of
streams.
"""

import os
import signal
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from kvstore.config import MAX_SAVE_BYTES
from kvstore.engine import process
from kvstore.engine.model import devices as model_devices
from kvstore.engine.model.devices import CUDA_FRACTION
from kvstore.engine.model.step import runner
from kvstore.engine.model.step.runner import StepClock
from kvstore.engine.process import spawned
from kvstore.errors import ConfigError, EngineDiedError
from kvstore.kernels.paged_batch import start_to_host
from tests.engine.devices.test_cuda_fake import engine_on_cuda, needs_triton
from tests.support import fake_cuda
from tests.support.by_hand import crawling
from tests.support.engines import ask, cached, evict_hbm, greedy, open_engine, save_model, tokens
from tests.support.fake_nccl import FakeNccl
from tests.support.ranks import BOTH, FULL, SIZES, SLIDING, check_says, children, is_gone, rank_of
from tests.support.waiting import wait_until

if torch.cuda.is_available():
    pytest.skip("there is a CUDA device", allow_module_level=True)
MODEL = {"num_hidden_layers": 2}
TOTAL_BYTES = 4 << 30
PROMPTS = [tokens(1, 14), tokens(2, 6), tokens(3, 11)]


@contextmanager
def devices(monkeypatch, has_triton=False, count=2, free=TOTAL_BYTES, beside=()):
    """One for the first rank in this process, and one for each rank that it starts. free: bytes, on those. beside: what
    else is replaced here.
    """

    def started(name, channel, descriptors, settings):
        rank = int(name.split()[1])
        settings = {**settings, "FAKE_CUDA_RANK": f"{rank} {count} {int(has_triton)} {free} {TOTAL_BYTES}"}
        return spawned(name, channel, descriptors, settings)

    replaced = [
        (process, "spawned", started), (process, "PROGRAM", "tests.children.fake_cuda_rank"),
        (model_devices, "_MOST_TOKENS", 1),
        (torch.distributed, "ProcessGroupNCCL", FakeNccl), *beside,
    ]  # fmt: skip
    with fake_cuda.device(monkeypatch, has_triton, count=count, beside=replaced) as driver:
        driver.memory = (TOTAL_BYTES, TOTAL_BYTES)
        yield


ONE, TWO = {"num_hidden_layers": 1}, {"num_hidden_layers": 2}
WINDOWS = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "sliding_window": 6}
CASES = [
    pytest.param("Llama", ONE, {"tensor_parallel_size": 2}, True, marks=needs_triton, id="tensor, kernels"),
    pytest.param("Llama", TWO, BOTH, False, id="both"),
    pytest.param("Gemma3", WINDOWS, BOTH, False, id="both, windows"),
]


@pytest.mark.parametrize(("name", "layers", "sizes", "has_triton"), CASES)
def test_several_devices_say_what_one_process_does(name, layers, sizes, has_triton, tmp_path, monkeypatch):
    """Computed, then loaded by all, and last by one process without a device."""
    before, model = children(os.getpid()), save_model(tmp_path / "model", name, **layers)
    with open_engine(model) as plain:
        answers = [ask(plain, prompt).token_ids for prompt in PROMPTS]
    count = sizes.get("tensor_parallel_size", 1) * sizes.get("pipeline_parallel_size", 1)
    with devices(monkeypatch, has_triton, count), engine_on_cuda(model, tmp_path / "store", **sizes) as engine:
        check_says(engine, answers, PROMPTS)
    assert children(os.getpid()) <= before
    with open_engine(model, tmp_path / "store", block_size=4, max_model_len=32) as engine:
        outs = [ask(engine, prompt, 4) for prompt in PROMPTS]
        assert [out.token_ids for out in outs] == answers and all(cached(out)[2] for out in outs)


def test_the_pool_is_what_the_fullest_device_has_room_for(model, tmp_path, monkeypatch):
    """Each rank runs the largest step to measure it, with the others."""
    beside = TOTAL_BYTES - int(TOTAL_BYTES * CUDA_FRACTION) + MAX_SAVE_BYTES
    free = beside + (100 << 10) - (4 << 20) + (2 << 20)  # reserved, and the peak
    opened = partial(engine_on_cuda, model, tmp_path / "store", "auto", tensor_parallel_size=2)
    with devices(monkeypatch, free=free), opened() as engine:
        of_rank = engine.facts.block_bytes // 2
        assert engine.loop.pool.num_blocks == (100 << 10) // of_rank


def test_tokens_of_the_last_stage_are_read_behind_their_copy_and_none_once_it_has_ended(
    model, plain, tmp_path, monkeypatch
):  # fmt: skip
    """The rank that has ended is waited for no longer, and nothing wrong is said."""
    expected, said, copied, num_read = plain(PROMPTS[0], 200), list[int](), {}, 0

    def copying(numbers):
        on_host = start_to_host(numbers)
        copied[id(on_host)] = time.perf_counter()
        return on_host

    def waiting(clock, launched):
        nonlocal num_read
        assert launched.end.at_s > copied.pop(id(launched.on_host))
        num_read += 1

    beside = [(runner, "start_to_host", copying), (StepClock, "wait", waiting)]
    opened = partial(engine_on_cuda, model, tmp_path / "store", max_model_len=256, **SIZES["pipeline"])
    with devices(monkeypatch, beside=beside), opened() as engine:
        ask(engine, PROMPTS[1], 4)
        assert num_read == 4
        with crawling(engine), pytest.raises(EngineDiedError, match="rank 1 of 2 ended"):
            rank, handle = rank_of(os.getpid()), engine.submit(PROMPTS[0], greedy(200))
            wait_until(lambda: handle.pieces)
            os.kill(rank, signal.SIGKILL)
            for piece in engine.stream(handle):
                said += piece.token_ids
        assert 0 < len(said) < 200 and said == expected[: len(said)]
    assert is_gone(rank)


def test_a_rank_that_cannot_tell_what_its_device_has_done_ends_with_the_engine(model, tmp_path, monkeypatch, capfd):
    """Its thread that waits for the device has failed: without its word, this rank waits for the loads for ever."""
    monkeypatch.setenv("FAKE_CUDA_MUTE", "1")
    opened = partial(engine_on_cuda, model, tmp_path / "store", **SIZES["tensor"])
    with devices(monkeypatch), opened() as engine:
        ask(engine, PROMPTS[0], 4)
        evict_hbm(engine)
        rank, handle = rank_of(os.getpid()), engine.submit(PROMPTS[0], greedy(4))
        try:
            wait_until(lambda: handle.done)
        except AssertionError:
            os.kill(rank, signal.SIGKILL)  # else nothing ends here
            raise
        with pytest.raises(EngineDiedError, match=r"rank 1 of 2 ended \(exit code 1\)"):
            list(engine.stream(handle))
    assert "rank 1 of 2: [Errno 105] No buffer space available" in capfd.readouterr().err


def test_too_few_devices_are_refused_before_anything_is_started(model, tmp_path, monkeypatch):
    before, opened = children(os.getpid()), partial(engine_on_cuda, model, tmp_path / "store")
    too_few = "tensor_parallel_size is 2, but this machine has 3 CUDA devices for 2 x 2"
    with devices(monkeypatch, count=3), pytest.raises(ConfigError, match=too_few):
        opened(**BOTH)
    assert children(os.getpid()) <= before
