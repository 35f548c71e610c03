"""Sizes and options: what is accepted, and that a refusal names the thing, the value and the remedy."""

import contextlib
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config import CacheTiers, format_size, parse_size
from kvstore.engine.config import EngineConfig, SchedulerConfig
from kvstore.errors import ConfigError, KVStoreError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0), (123, 123), ("123", 123), (1.9, 1), ("1e3", 1000), ("1GiB", 2**30), ("1.5GiB", 3 * 2**29),
        ("2GB", 2 * 10**9), ("2 gb", 2 * 10**9), (" 512 MiB ", 2**29), ("1kb", 1000), ("1KiB", 1024), ("3m", 3 * 2**20),
        ("1T", 2**40), ("1TB", 10**12), ("7b", 7), ("0.5KiB", 512), ("1.KiB", 1024), ("0GiB", 0),
    ],
)  # fmt: skip
def test_sizes(value, expected):
    assert parse_size(value) == expected


@pytest.mark.parametrize(
    "value",
    ["", "GiB", "-1", -1, -0.5, "1 2", "1,5GiB", "1PiB", "1GiBs", "auto", "0x10", "1_000", None, True, False, [], "nan",
     float("nan"), float("inf"), "inf", "1e99", "99999999999TiB", "1.2.3", "+5"],
)  # fmt: skip
def test_what_is_no_size_is_refused_with_the_accepted_forms(value):
    with pytest.raises(ConfigError, match="give a number of bytes, or a number with a unit") as error:
        parse_size(value, "cpu")
    assert str(error.value).startswith(f"cpu is {value!r}")


@given(st.integers(0, 2**50))
def test_any_whole_number_is_itself(size):
    assert parse_size(size) == size


@given(st.text(max_size=8))
def test_any_text_is_a_size_or_a_config_error(text):
    with contextlib.suppress(ConfigError):
        assert 0 <= parse_size(text) <= 2**62


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**30 - 2**14, "1.0 GiB"),  # never "1024.0 MiB"
        (3 * 2**29, "1.5 GiB"),
        (2**50, "1024.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_sizes_for_people(size, text):
    assert format_size(size) == text


def test_tiers_are_bytes_once_they_are_built():
    tiers = CacheTiers(hbm="1GiB", cpu="2GiB", disk="8GB", path="~/somewhere")
    assert (tiers.hbm, tiers.cpu, tiers.disk, tiers.path) == (2**30, 2**31, 8 * 10**9, "~/somewhere")
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiers.cpu = 0


def test_tiers_have_defaults_and_hbm_may_be_auto():
    assert CacheTiers() == CacheTiers(hbm="auto", cpu=0, disk=0, path=None)
    assert CacheTiers(cpu=0, disk=0, path="there").path == "there", "a tier that is off may have a path"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hbm": 0}, "hbm is 0.*give \"auto\" or a size"),
        ({"hbm": "0GiB"}, "hbm is 0"),
        ({"cpu": "auto"}, "cpu is 'auto'"),
        ({"cpu": "much"}, "cpu is 'much'"),
        ({"disk": -5, "path": "p"}, "disk is -5"),
        ({"disk": "1GiB"}, "path is not set, but disk is"),
        ({"disk_per_tenant": -1}, "disk_per_tenant is -1"),
        ({"codec": "gzip"}, "codec is 'gzip'; give one of raw, zstd, split-zstd, exact12"),
        ({"cpu": 1, "remote": "http://x"}, "remote is 'http://x'; give redis://"),
        ({"cpu": 1, "remote": "redis://a", "remote_ttl_s": 0}, "remote_ttl_s is 0"),
        ({"cpu": 1, "remote": "redis://a"}, "no secret of the fleet"),
    ],
)  # fmt: skip
def test_wrong_tiers_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        CacheTiers(**options)


def test_tiers_from_a_dict_or_nothing():
    assert CacheTiers.of(None) == CacheTiers()
    tiers = CacheTiers(cpu="1MiB")
    assert CacheTiers.of(tiers) is tiers
    assert CacheTiers.of({"hbm": "1MiB", "disk": 7, "path": Path("p")}) == CacheTiers(2**20, 0, 7, Path("p"))


@pytest.mark.parametrize("value", [{"gpu": 1}, {"hbm": 1, "ram": 2}, {1: 2, "x": 3}, "1GiB", 5, [("hbm", 1)]])
def test_what_describes_no_tiers_is_refused(value):
    with pytest.raises(
        ConfigError, match=r"cache_tiers (has unknown names.* known are hbm, cpu, disk, path, codec|is .*CacheTiers)"
    ):
        CacheTiers.of(value)


def test_the_defaults_of_an_engine_are_valid():
    config = EngineConfig()
    assert (config.block_size, config.max_num_seqs, config.max_num_batched_tokens) == (16, 64, 2048)


def test_the_scheduler_gets_its_own_piece():
    config = EngineConfig(block_size=8, max_num_seqs=3, max_num_batched_tokens=2, policy="priority")
    assert config.scheduler(100) == SchedulerConfig(100, 8, 3, 2, "priority")


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1"])
def test_devices(device):
    assert EngineConfig(device=device).device == device


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; give one of auto, float32"),
        ({"load": "never"}, "load is 'never'; give one of auto, always"),
        ({"policy": "lifo"}, "policy is 'lifo'"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"block_size": 0}, "block_size is 0; give a whole number from 1 to 256"),
        ({"block_size": 257}, "block_size is 257"),
        ({"block_size": 16.0}, "block_size is 16.0"),
        ({"block_size": True}, "block_size is True"),
        ({"block_size": None}, "block_size is None"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens is 'many'"),
        ({"max_model_len": 1}, "max_model_len is 1; give a whole number from 2"),
        ({"tokenizer": " "}, "tokenizer is ' '; give a text"),
        ({"revision": 5}, "revision is 5; give a text"),
        ({"seed": 2**63}, "seed is"),
        ({"seed": 0.5}, "seed is 0.5"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_with_the_remedy(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        EngineConfig(**options)
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, KVStoreError)


def test_fewer_tokens_a_step_than_requests_is_allowed():
    assert EngineConfig(max_num_seqs=64, max_num_batched_tokens=8).max_num_batched_tokens == 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cpu": 0, "remote": "redis://a"}, "cpu and disk are 0"),
        ({"role": "both"}, "role is 'both'; give one of prefill, decode"),
        ({"role": "prefill"}, "remote is not set"),
        ({"role": "decode", "remote": "redis://a"}, "prefill_url is not set"),
        ({"role": "prefill", "remote": "redis://a", "prefill_url": "http://a"}, "role is not decode"),
        ({"prefill_url": "http://a"}, "role is not decode"),
        ({"role": "decode", "remote": "redis://a", "prefill_url": "a"}, "prefill_url is 'a'; give http://host:8000"),
    ],
)
def test_remote_tiers_and_roles_that_cannot_be_are_refused(options, words, monkeypatch):
    monkeypatch.setenv("KVSTORE_FLEET_SECRET", "the secret of this fleet, 32 characters")
    with pytest.raises(ConfigError, match=words):
        CacheTiers(**{"cpu": "1MiB", **options})
    both = CacheTiers(cpu="1MiB", remote="redis://a", role="decode", prefill_url="http://a:1")
    assert both.prefill_url == "http://a:1"
