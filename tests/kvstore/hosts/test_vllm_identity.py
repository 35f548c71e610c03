"""What vLLM's KV depends on, by objects that look like vLLM's."""

import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from kvstore.errors import ConfigError
from kvstore.hosts.vllm_identity import check_hashes, check_steps, namespace, store_folder, warnings

CONFIG = (
    "model_config.model", "model_config.revision", "model_config.hf_config", "model_config.dtype",
    "model_config.quantization", "model_config.max_model_len", "load_config.download_dir", "device_config.device_type",
    "cache_config.prefix_caching_hash_algo", "cache_config.block_size", "cache_config.mamba_cache_mode",
    "scheduler_config.max_num_batched_tokens", "kv_transfer_config.kv_connector_extra_config",
    "kv_transfer_config.kv_load_failure_policy",
)  # fmt: skip
SPEC = (
    "canonical_layout", "replicated_layout", "kv_cache_layout", "groups", "cache", "model.dtype",
    "parallel.is_parallelism_agnostic", "parallel.world_size", "parallel.tp_size", "parallel.pp_size",
    "parallel.pcp_size", "parallel.dcp_size",
)  # fmt: skip


@dataclass
class Sizes:
    tokens_per_hash: int = 16
    blocks_per_chunk: int = 1


def parallel(num_ranks: int) -> SimpleNamespace:
    """vLLM says of this model that it may be spread over any number of ranks."""
    sizes = {"pp_size": 1, "pcp_size": 1, "dcp_size": 1, "is_parallelism_agnostic": True}
    return SimpleNamespace(world_size=num_ranks, tp_size=num_ranks, **sizes)


def spec(num_ranks: int = 1, is_canonical: bool = False) -> SimpleNamespace:
    own = SimpleNamespace(
        parallel=parallel(num_ranks), model=SimpleNamespace(dtype="float32"), groups=(Sizes(),), cache=Sizes(),
        kv_cache_layout="LBHNC", canonical_layout=is_canonical, replicated_layout=False,
    )  # fmt: skip
    return SimpleNamespace(config=own)


@pytest.fixture
def config(tmp_path):
    """Of a model on this machine whose frequencies depend on the window."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    hf_config = SimpleNamespace(to_dict=lambda: {"rope_type": "longrope"})
    model = SimpleNamespace(
        model=tmp_path, revision=None, hf_config=hf_config, dtype="float32", quantization=None, max_model_len=512
    )
    return SimpleNamespace(
        model_config=model,
        load_config=SimpleNamespace(download_dir=None),
        device_config=SimpleNamespace(device_type="cpu"),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256_cbor", block_size=544, mamba_cache_mode="align"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2176),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}, kv_load_failure_policy="recompute"),
    )


def start(config, spec, folder, identity: str | None = None) -> bytes:
    """All that is read of vLLM's objects when it starts."""
    check_hashes(config)
    check_steps(config)
    assert not list(warnings(config, offload_prompt_only=False)) and store_folder(config) is None
    return namespace(spec, config, identity, 4096, folder, "0.32")


def test_steps_that_keep_states_nobody_finds_are_refused_with_the_size_to_give(config):
    config.cache_config.block_size = 384  # as vLLM has it where its kernels are others
    with pytest.raises(ConfigError, match=r"2176 tokens, and its blocks have 384 .* --max-num-batched-tokens 2304"):
        check_steps(config)
    config.cache_config.mamba_cache_mode = "none"  # a model without states
    check_steps(config)


def test_another_number_of_ranks_finds_something_in_the_canonical_layout_alone(config, tmp_path):
    def named(num_ranks: int, is_canonical: bool) -> bytes:
        return start(config, spec(num_ranks, is_canonical), tmp_path, "these weights")

    assert named(1, is_canonical=False) != named(2, is_canonical=False)
    assert named(1, is_canonical=True) == named(2, is_canonical=True) != named(1, is_canonical=False)


@pytest.mark.parametrize("path", CONFIG + SPEC)
def test_a_field_that_vllm_has_renamed_is_an_error_that_names_it(config, tmp_path, path):
    made = spec()
    start(config, made, tmp_path)
    *parents, name = path.split(".")
    holder = config if path in CONFIG else made.config
    for parent in parents:
        holder = getattr(holder, parent)
    setattr(holder, f"new_{name}", holder.__dict__.pop(name))
    with pytest.raises(ConfigError, match=re.escape(f"this vLLM has no {path} where")):
        start(config, made, tmp_path)


@pytest.mark.parametrize("name", ["dtype", "quantization", "max_model_len"])
def test_another_value_is_another_name(config, tmp_path, name):
    before = start(config, spec(), tmp_path)
    setattr(config.model_config, name, "another")
    assert start(config, spec(), tmp_path) != before
