"""Lean layers must compute what the layers they stand for compute, and stand for nothing else."""

import pytest
import torch

from kvstore.connector import NullConnector
from kvstore.engine.model import lean, packing
from kvstore.engine.model.interception import PositionFreeModel
from kvstore.engine.model.probe import intercept
from kvstore.kernels.paged_batch import PagedBatch
from tests.support.models import make_model

WINDOW = 128
PLAIN = ("Llama", "Qwen2", "Qwen3", "Mistral", "Qwen3Moe", "Mixtral", "Granite", "Gemma")
OTHERS = ("Gemma2", "Olmo2", "Cohere", "GPTNeoX", "Phi3", "Glm4")


@pytest.fixture(autouse=True)
def small_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MIN_FLOAT32_ELEMENTS", 0)
    monkeypatch.setattr(packing, "MIN_BFLOAT16_ELEMENTS", 0)


def packed(name: str, dtype: torch.dtype = torch.float32, **changes: object) -> PositionFreeModel:
    return intercept(make_model(name, dtype=dtype, **changes), WINDOW, pack=True)


def plain_logits(name: str, token_ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.inference_mode():
        return make_model(name, dtype=dtype)(input_ids=token_ids[None], use_cache=False).logits[0]


def forward(model: PositionFreeModel, token_ids: torch.Tensor, sample_tokens: list[int]) -> torch.Tensor:
    count = len(token_ids)
    num_blocks = -(-count // 16)
    caches, positions = model.new_caches(num_blocks, 16), torch.arange(count)
    batch = PagedBatch([0, count], [count], torch.arange(num_blocks)[None], positions, 16)
    with torch.inference_mode():
        return model.forward(token_ids, positions, batch, caches, NullConnector(), torch.tensor(sample_tokens))


def num_lean(model: PositionFreeModel) -> int:
    return sum(isinstance(m.__dict__.get("forward"), lean.LeanLayer) for m in model.network.modules())


@pytest.mark.parametrize("name", PLAIN)
def test_plain_layers_are_taken_over_and_give_the_same_logits(name: str) -> None:
    model, token_ids = packed(name), torch.randint(160, (50,), generator=torch.Generator().manual_seed(1))
    assert num_lean(model) == model.spec.num_layers
    expected = plain_logits(name, token_ids)
    torch.testing.assert_close(forward(model, token_ids, list(range(50))), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_stay_and_the_model_works(name: str) -> None:
    model, token_ids = packed(name), torch.randint(160, (40,), generator=torch.Generator().manual_seed(1))
    assert num_lean(model) == 0
    assert model.network.kvstore_carrier.pruned_layer is None
    expected = plain_logits(name, token_ids)
    torch.testing.assert_close(forward(model, token_ids, list(range(40))), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral"])
@pytest.mark.parametrize("samples", [[49], [0], [3, 20, 49]])
def test_the_last_layer_may_compute_the_samples_alone(name: str, samples: list[int]) -> None:
    model, token_ids = packed(name), torch.randint(160, (50,), generator=torch.Generator().manual_seed(2))
    assert model.network.kvstore_carrier.pruned_layer == model.spec.num_layers - 1
    every = forward(model, token_ids, list(range(50)))
    torch.testing.assert_close(forward(model, token_ids, samples), every[samples], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma", "Mixtral"])
def test_a_part_of_a_prefill_that_samples_nothing(name: str) -> None:
    model, token_ids = packed(name), torch.randint(160, (60,), generator=torch.Generator().manual_seed(6))
    expected = forward(model, token_ids, [59])
    caches, positions = model.new_caches(4, 16), torch.arange(60)
    with torch.inference_mode():
        for start, end, samples in ((0, 40, []), (40, 60, [19])):
            part = positions[start:end]
            batch = PagedBatch([0, end - start], [end], torch.arange(4)[None], part, 16)
            asked = torch.tensor(samples, dtype=torch.int64)
            found = model.forward(token_ids[start:end], part, batch, caches, NullConnector(), asked)
            assert found.shape == (len(samples), 160)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_pruned_step_still_writes_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_pieces_of_a_prefill_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, token_ids = packed(name), torch.randint(160, (60,), generator=torch.Generator().manual_seed(3))
    whole = forward(model, token_ids, list(range(60)))
    monkeypatch.setattr(lean, "PIECE_TOKENS", 16)
    torch.testing.assert_close(forward(model, token_ids, list(range(60))), whole, atol=1e-5, rtol=1e-5)


def test_the_whole_network_is_lean_where_all_layers_are() -> None:
    model = packed("Llama")
    assert isinstance(model.network.kvstore_carrier.lean, lean.LeanNetwork)
    token_ids = torch.randint(160, (30,), generator=torch.Generator().manual_seed(4))
    direct = forward(model, token_ids, [5, 29])
    model.network.kvstore_carrier.lean = None
    assert torch.equal(forward(model, token_ids, [5, 29]), direct)


@pytest.mark.parametrize("name, changes", [("Gemma", {}), ("Granite", {"embedding_multiplier": 2.0})])
def test_a_network_that_scales_its_embedding_keeps_its_own_forward(name: str, changes: dict[str, object]) -> None:
    model = packed(name, **changes)
    assert num_lean(model) == 3
    assert model.network.kvstore_carrier.lean is None


def test_a_layer_that_scales_its_sums_stays() -> None:
    assert num_lean(packed("Granite", residual_multiplier=0.9)) == 0


def test_bfloat16_agrees_to_its_rounding() -> None:
    model = packed("Llama", torch.bfloat16)
    assert num_lean(model) == 3
    token_ids = torch.randint(160, (50,), generator=torch.Generator().manual_seed(5))
    found, exact = forward(model, token_ids, list(range(50))).float(), plain_logits("Llama", token_ids)
    theirs = plain_logits("Llama", token_ids, torch.bfloat16).float()
    assert float((found - exact).norm()) <= 1.2 * float((theirs - exact).norm())


def test_a_layer_that_computes_something_else_is_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with the parts of a plain one, whose forward uses them in another way."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    original = LlamaDecoderLayer.forward

    def scaled(self: object, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return original(self, hidden_states, *args, **kwargs) * 1.01

    monkeypatch.setattr(LlamaDecoderLayer, "forward", scaled)
    assert num_lean(packed("Llama")) == 0
