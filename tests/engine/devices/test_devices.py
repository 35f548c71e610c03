"""Tests without the marker `gpu` compute on the CPU, whatever the machine has."""

import os
import subprocess
import sys

import pytest
import torch

from kvstore import Engine
from kvstore.engine.model.loading import _device
from tests.conftest import no_devices
from tests.support import fake_cuda
from tests.support.engines import save_model


def test_an_unmarked_test_finds_no_device():
    """Nor do the processes that it starts."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and not torch.cuda.is_available()
    seen = subprocess.run(
        [sys.executable, "-c", "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert seen == "''\n"


def test_an_engine_without_a_device_stays_on_the_cpu_where_a_card_is(tmp_path, monkeypatch):
    with fake_cuda.device(monkeypatch):
        assert _device("auto").type == "cuda"
        with no_devices(), Engine(save_model(tmp_path)) as engine:
            assert engine.loop.runner.model.device.type == "cpu"
        assert _device("auto").type == "cuda"


@pytest.mark.gpu
def test_a_marked_test_finds_the_device():
    assert _device("auto").type == "cuda"
