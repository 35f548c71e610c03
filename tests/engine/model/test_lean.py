"""Lean layers must compute what the layers they stand for compute, and stand for nothing else."""

from collections.abc import Iterator

import pytest
import torch

from kvstore.connector import NullConnector
from kvstore.engine.model import lean
from kvstore.engine.model.interception import PositionFreeModel
from kvstore.engine.model.probe import intercept
from kvstore.kernels.paged_batch import PagedBatch
from tests.support.models import make_model
from tests.support.packed import small_weights_packed

WINDOW = 128
PLAIN = ("Llama", "Qwen2", "Qwen3", "Mistral", "Qwen3Moe", "Mixtral", "Granite", "Gemma")
OTHERS = ("Gemma2", "Olmo2", "Cohere", "GPTNeoX", "Phi3", "Glm4")


@pytest.fixture(autouse=True)
def small_weights_are_packed() -> Iterator[None]:
    with small_weights_packed():
        yield


def packed(name: str, **changes: object) -> PositionFreeModel:
    return intercept(make_model(name, **changes), WINDOW, pack=True)


def num_lean(model: PositionFreeModel) -> int:
    return sum(isinstance(m.__dict__.get("forward"), lean.LeanLayer) for m in model.network.modules())


@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_plain_layers_are_taken_over_and_all_give_the_same_logits(name: str) -> None:
    model, token_ids = packed(name), torch.randint(160, (50,), generator=torch.Generator().manual_seed(1))
    assert num_lean(model) == (model.spec.num_layers if name in PLAIN else 0)
    assert (model.network.kvstore_carrier.pruned_layer is None) == (name in OTHERS)
    expected = make_model(name)(input_ids=token_ids[None], use_cache=False).logits[0]
    positions = torch.arange(50)
    batch = PagedBatch([0, 50], [50], torch.arange(4)[None], positions, 16)
    with torch.inference_mode():
        found = model.forward(token_ids, positions, batch, model.new_caches(4, 16), NullConnector(), positions)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_a_pruned_step_still_writes_every_key() -> None:
    model, token_ids = packed("Llama"), torch.arange(48)
    caches, positions = model.new_caches(3, 16), torch.arange(48)
    batch = PagedBatch([0, 48], [48], torch.arange(3)[None], positions, 16)
    with torch.inference_mode():
        model.forward(token_ids, positions, batch, caches, NullConnector(), torch.tensor([47]))
        pruned = [(key.clone(), value.clone()) for key, value in caches]
        model.forward(token_ids, positions, batch, caches, NullConnector(), torch.arange(48))
    for before, after in zip(pruned, caches, strict=True):
        assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
        assert bool(after[0].abs().sum(dim=(2, 3)).all())


@pytest.mark.parametrize("name, changes", [("Gemma", {}), ("Granite", {"embedding_multiplier": 2.0})])
def test_a_network_that_scales_its_embedding_keeps_its_own_forward(name: str, changes: dict[str, object]) -> None:
    model = packed(name, **changes)
    assert num_lean(model) == 3
    assert model.network.kvstore_carrier.lean is None


def test_a_layer_that_scales_its_sums_stays() -> None:
    assert num_lean(packed("Granite", residual_multiplier=0.9)) == 0


def test_a_layer_that_computes_something_else_is_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with the parts of a plain one, whose forward uses them in another way."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    original = LlamaDecoderLayer.forward

    def scaled(self: object, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return original(self, hidden_states, *args, **kwargs) * 1.01

    monkeypatch.setattr(LlamaDecoderLayer, "forward", scaled)
    assert num_lean(packed("Llama")) == 0
