"""Torch's refusal to wait for a device is the whole process's: what other engines do meanwhile must not meet it."""

import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

from kvstore import Engine
from kvstore.engine.model.step.waiting import WAITING, DeviceWaiting
from tests.support import fake_cuda
from tests.support.engines import greedy, save_model, tokens
from tests.support.waiting import TIMEOUT_S

TURN_S = 0.2  # in which the other thread gets as far as it can
without_a_card = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture
def modes() -> Iterator[list[str]]:
    """All modes that were set, the first one before."""
    found = ["warn"]

    def set_mode(mode):
        found.append(mode)
        if len(found) == 2:
            warnings.warn("a prototype feature", stacklevel=2)

    with mock.patch.multiple(torch.cuda, get_sync_debug_mode=lambda: found[-1], set_sync_debug_mode=set_mode):
        yield found


def test_waiting_is_refused_for_a_while_only(modes):
    """Without a word of torch, which says at the first time that this is a prototype: that would end the capture."""
    with pytest.raises(RuntimeError, match="waits"), DeviceWaiting().refused():
        raise RuntimeError("it waits")
    assert modes == ["warn", "error", "warn"]


def test_trials_of_two_engines_leave_the_mode_as_it_was(modes):
    """The second one must not take the first one's mode for what was there before. Both start within `allowed`."""
    waiting, inside, both = DeviceWaiting(), [], threading.Barrier(2)

    def start(number):
        with waiting.allowed():
            both.wait(TIMEOUT_S)
            with waiting.refused():
                inside.append(number)
                assert not threading.Event().wait(TURN_S) and inside[-1] == number
                inside.append(number)

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(start, number) for number in range(2)]:
            future.result(2 * TIMEOUT_S)
    assert inside in ([0, 0, 1, 1], [1, 1, 0, 0]) and modes == ["warn", "error", "warn", "error", "warn"]


@without_a_card
def test_a_step_of_another_engine_comes_before_or_after_a_trial(tmp_path, monkeypatch):
    model = save_model(tmp_path, num_hidden_layers=1)
    with (
        fake_cuda.device(monkeypatch) as driver,
        Engine(model, {"hbm": "1MiB"}, device="cuda", max_model_len=32) as engine,
    ):
        with WAITING.refused():
            assert driver.refuses_to_wait
            handle = engine.submit(tokens(1, 5), greedy(2))
            assert not threading.Event().wait(TURN_S) and not handle.output.token_ids
        assert len(list(engine.stream(handle))) == 2
