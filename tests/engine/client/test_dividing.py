"""Tests of kvstore.engine.client.opening."""

import os
from dataclasses import replace

import pytest

from kvstore.config import CacheTiers
from kvstore.engine.client.opening import check_divisible, divided, environment_of_each
from kvstore.engine.config import EngineConfig
from kvstore.errors import ConfigError

SECRET = "the secret of this fleet, 32 characters"


def test_each_has_its_part_of_memory_and_none_of_the_disk(tmp_path):
    tiers = CacheTiers(hbm="1GiB", cpu="4GiB", disk="10GiB", path=str(tmp_path))
    each = divided(EngineConfig(None, tiers, data_parallel_size=4), b"\1" * 32, "socket")
    assert [one.data_parallel_rank for one in each] == [0, 1, 2, 3]
    for one in each:
        assert (one.tiers.hbm, one.tiers.cpu, one.tiers.disk) == (1 << 30, 1 << 30, 0)
        assert one.common_root() == b"\1" * 32 and one.disk_owner == "socket"
        assert EngineConfig.of(one.arguments()) == one
        assert "0101" not in repr(one)


def test_what_cannot_be_shared_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSTORE_FLEET_SECRET", SECRET)
    disk = {"disk": "1GiB", "path": tmp_path}
    wrong = {
        "cpu is 0": EngineConfig(None, CacheTiers(**disk), data_parallel_size=2),
        "remote is set, but so is a disk": EngineConfig(
            None, CacheTiers(cpu="1GiB", remote="redis://localhost", **disk), data_parallel_size=2
        ),
        "distributed_executor": EngineConfig(None, distributed_executor="ray", data_parallel_size=2),
        "kv_events": EngineConfig(None, kv_events="tcp://*:5557", data_parallel_size=2),
    }
    for words, config in wrong.items():
        with pytest.raises(ConfigError, match=words):
            check_divisible(config)
        check_divisible(replace(config, data_parallel_size=1))
    for size in (0, 65, "2", True):
        with pytest.raises(ConfigError, match="data_parallel_size is"):
            EngineConfig(None, data_parallel_size=size)
    with pytest.raises(ConfigError, match="device is cuda:1"):
        EngineConfig(None, device="cuda:1", data_parallel_size=2)


def test_processors_are_divided_unless_the_user_has_said(monkeypatch):
    num = len(os.sched_getaffinity(0))
    assert environment_of_each(1, {}) == {} == environment_of_each(2, {"OMP_NUM_THREADS": "8"})
    assert environment_of_each(num, {}) == {"OMP_NUM_THREADS": "1"} == environment_of_each(10 * num, {})
