"""What vLLM's KV depends on, by objects that look like vLLM's."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from kvstore.hosts.vllm_identity import namespace


@dataclass
class Cache:
    tokens_per_hash: int = 16
    blocks_per_chunk: int = 1


def named(num_ranks: int, is_canonical: bool) -> bytes:
    """Of a model that vLLM says may be spread over any number of ranks."""
    parallel = SimpleNamespace(
        world_size=num_ranks, tp_size=num_ranks, pp_size=1, pcp_size=1, dcp_size=1, is_parallelism_agnostic=True
    )
    own = SimpleNamespace(
        parallel=parallel, model=SimpleNamespace(dtype="float32"), groups=(), cache=Cache(), kv_cache_layout="LBHNC",
        canonical_layout=is_canonical, replicated_layout=False,
    )  # fmt: skip
    return namespace(SimpleNamespace(config=own), None, "these weights", 4096, Path("nowhere"), "0.32")


def test_another_number_of_ranks_finds_something_in_the_canonical_layout_alone():
    assert named(1, is_canonical=False) != named(2, is_canonical=False)
    assert named(1, is_canonical=True) == named(2, is_canonical=True) != named(1, is_canonical=False)
