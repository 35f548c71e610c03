"""Which device each process computes on, where several do on one machine."""

import pytest

from kvstore.engine.config import EngineConfig
from kvstore.engine.model.devices import own_device
from kvstore.errors import ConfigError
from tests.support import fake_cuda

FOUR = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


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
