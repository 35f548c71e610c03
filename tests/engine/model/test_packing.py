"""Packed models must compute what the unpacked ones do, on every architecture, and leave other models alone."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama import modeling_llama
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5

from kvstore.engine.model import packing
from kvstore.engine.model.packing import (
    FusedGatedNorm,
    FusedRMSNorm,
    PackedLinear,
    ProjectionSlice,
    pack,
    packs_weights,
)
from tests.support.models import ARCHITECTURES, make_model
from tests.support.native import needs_compiler
from tests.support.packed import small_weights_packed

NAMES = ["Llama", "Qwen2", "Qwen3", "Mistral", "Phi3", "Gemma2", "Gemma3", "Cohere", "Glm4", "GPTNeoX", "Olmo2",
         "StableLm", "GptOss", "Mixtral", "Qwen3Moe"]  # fmt: skip
# Per layer: joined q/k/v, RMS norms; and norms after the last layer.
EXPECTED = {
    "Llama": (1, 2, 1), "Qwen2": (1, 2, 1), "Qwen3": (1, 4, 1), "Mistral": (1, 2, 1), "Phi3": (0, 2, 1),
    "Gemma2": (1, 4, 1), "Gemma3": (1, 6, 1), "GPTNeoX": (0, 0, 0), "Olmo2": (1, 4, 1), "Mixtral": (1, 2, 1),
    "Qwen3Moe": (1, 4, 1),
}  # fmt: skip


def logits(model: nn.Module, num_tokens: int = 9) -> torch.Tensor:
    ids = torch.arange(num_tokens, device=model.device)[None] * 37 % 157 + 3
    return model(input_ids=ids, use_cache=False).logits.float()


class Unrotated(nn.Module):
    """What the engine puts in the place of a rotary module: cos = 1, sin = 0 of the right shapes."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.rotary(*args, **kwargs)
        return torch.ones_like(cos), torch.zeros_like(sin)


def without_positions(model: nn.Module) -> nn.Module:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RotaryEmbedding"):
                setattr(parent, name, Unrotated(child))
    return model


def count(model: nn.Module, *kinds: type[nn.Module]) -> int:
    return sum(type(module) in kinds for module in model.modules())


def num_joined(model: nn.Module) -> int:
    """Attentions whose projections are one; each of these stands for three linears."""
    slices = count(model, ProjectionSlice)
    assert slices % 3 == 0
    return slices // 3


def attentions(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Attention")]


@pytest.fixture(autouse=True)
def small_packed() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        stack.enter_context(small_weights_packed())
        yield stack


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("for_cpu", [True, False])
@pytest.mark.parametrize(
    ("architecture", "dtype"), [*product(NAMES, [torch.float32, torch.bfloat16]), ("Llama", torch.float16)], ids=str
)
def test_packed_logits_equal_unpacked(architecture: str, dtype: torch.dtype, for_cpu: bool, device: str) -> None:
    if for_cpu and device == "cuda":
        pytest.skip("for a CPU")
    model = without_positions(make_model(architecture, dtype=dtype)).to(device)
    expected, linears, state = {n: logits(model, n) for n in (1, 9, 40)}, count(model, nn.Linear), torch.get_rng_state()
    pack(model, for_cpu)
    assert torch.equal(torch.get_rng_state(), state)
    tolerance = 2e-5 if dtype is torch.float32 else 0.05
    is_routed = "num_experts_per_tok" in ARCHITECTURES[architecture] and dtype is not torch.float32
    for n, reference in expected.items():
        actual = logits(model, n)
        assert not actual.requires_grad
        errors = (actual - reference).abs().amax(-1)  # rounded otherwise, a token may go to another expert
        assert (errors.median() if is_routed else errors.max()) <= tolerance * reference.abs().max()
    assert count(model, nn.Linear, PackedLinear) == linears - 3 * num_joined(model)
    if architecture in EXPECTED:
        qkv, norms, last = EXPECTED[architecture]
        assert count(model, FusedRMSNorm) == 3 * norms + last
        if not for_cpu or packing.packs_weights(dtype):
            assert num_joined(model) == 3 * qkv
    modules = list(model.modules())
    pack(model, for_cpu)
    assert list(model.modules()) == modules, "what is packed stays"


def test_packed_for_cuda_a_norm_is_one_call_where_its_scale_has_the_dtype_of_the_input() -> None:
    """Llama's weight is its scale; Gemma's is 1 + weight, which bfloat16 would round for every token alike."""
    for architecture, dtype in (("Llama", torch.bfloat16), ("Gemma2", torch.float32)):
        model = make_model(architecture, dtype=torch.bfloat16)
        pack(model, for_cpu=False)
        norms = [module for module in model.modules() if isinstance(module, FusedRMSNorm)]
        assert norms and {norm._scale.dtype for norm in norms} == {dtype}


@pytest.mark.gpu
def test_a_norm_packed_for_cuda_is_one_kernel() -> None:
    model = make_model("Llama", dtype=torch.bfloat16).to("cuda")
    pack(model, for_cpu=False)
    names: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.__name__)
            return function(*args, **(kwargs or {}))

    x = torch.randn(1, 5, 64, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad(), Names():
        model.model.norm(x)
    assert [name for name in names if "view" not in name and "detach" not in name] == ["_fused_rms_norm.default"]


@pytest.mark.parametrize("tied", [True, False])
def test_head_tied_to_the_embedding(tied: bool) -> None:
    model = make_model("Llama", tie_word_embeddings=tied)
    expected, embedding = logits(model), model.get_input_embeddings().weight.clone()
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    head = weakref.ref(model.lm_head.weight)
    pack(model, for_cpu=True)
    gc.collect()
    assert (head() is not None) == tied
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.get_input_embeddings().weight, embedding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_biases(dtype: torch.dtype) -> None:
    model = make_model("Llama", dtype=dtype, attention_bias=True, mlp_bias=True)
    expected = logits(model)
    biases = [(module.k_proj.bias, module.k_proj.weight) for module in attentions(model)]
    pack(model, for_cpu=True)
    assert num_joined(model) == (3 if packs_weights(dtype) else 0)
    assert (logits(model) - expected).abs().max() <= (2e-5 if dtype is torch.float32 else 0.03) * expected.abs().max()
    for module, (bias, weight) in zip(attentions(model), biases, strict=True):
        assert torch.equal(module.k_proj.bias, bias) and torch.equal(module.k_proj.weight, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 8, 64, 300])
def test_packed_linear_of_any_number_of_rows(num_rows: int, dtype: torch.dtype) -> None:
    if not packing.packs_weights(dtype):
        pytest.skip(f"no packed product for {dtype} here")
    linear = nn.Linear(80, 48).to(dtype).requires_grad_(False)
    packed = PackedLinear(linear.weight, linear.bias)
    x = torch.randn(1, num_rows, 160, dtype=dtype)[..., ::2]
    for rows in (x, x.contiguous(), x[0]):
        torch.testing.assert_close(
            packed(rows), linear(rows), rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-2
        )
    assert torch.equal(packed.weight, linear.weight)


def test_shared_projection_keeps_nothing_and_serves_any_order() -> None:
    model = make_model("Llama")
    attention = attentions(model)[0]
    q, k, v = (getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj"))
    pack(model, for_cpu=True)
    x, other = torch.randn(1, 5, 64), torch.randn(1, 5, 64)
    torch.testing.assert_close(attention.q_proj(x), q(x))
    torch.testing.assert_close(attention.k_proj(other), k(other))
    torch.testing.assert_close(attention.v_proj(x), v(x))
    torch.testing.assert_close(attention.k_proj(x), k(x))
    shared = attention.q_proj.shared
    assert shared._source is None and not shared._pending
    torch.testing.assert_close(attention.v_proj(x), v(x))
    assert shared._source is None and not shared._pending


def test_norm_that_computes_something_else_stays() -> None:
    class OddRMSNorm(modeling_llama.LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) + 0.01

    model = nn.Sequential(OddRMSNorm(64).requires_grad_(False))
    pack(model, for_cpu=True)
    assert count(model, FusedRMSNorm) == 0


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_norm_is_one_pass_and_computes_the_same(dtype) -> None:
    norm = modeling_qwen3_5.Qwen3_5RMSNormGated(48).to(dtype).requires_grad_(False)
    norm.weight.copy_(torch.linspace(0.5, 2, 48))
    model = nn.ModuleList([norm])
    pack(model, for_cpu=True)
    assert count(model, FusedGatedNorm) == 1
    x, gate = torch.randn(70, 48).to(dtype), 5 * torch.randn(70, 48).to(dtype)
    close = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(model[0](x, gate), norm(x, gate), rtol=close, atol=close)
    strided = gate.t().contiguous().t()
    torch.testing.assert_close(model[0](x, strided), norm(x, gate), rtol=close, atol=close)


def test_a_norm_of_what_was_gated_before_stays() -> None:
    norm = modeling_mamba2.MambaRMSNormGated(64).requires_grad_(False)
    norm.weight.copy_(torch.linspace(0.5, 2, 64))
    model = nn.ModuleList([norm])
    pack(model, for_cpu=True)
    assert model[0] is norm


def test_nothing_to_pack_with_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("mkldnn_reorder_linear_weight: not on this CPU")

    monkeypatch.setattr(packing.PackedLinear, "__init__", refuse)
    packing.packs_weights.cache_clear()
    model = make_model("Qwen2")
    expected = logits(model)
    pack(model, for_cpu=True)
    assert count(model, PackedLinear, ProjectionSlice) == 0 and count(model, nn.Linear) == 22
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    packing.packs_weights.cache_clear()


def test_small_float32_weights_stay(small_packed: ExitStack) -> None:
    small_packed.close()
    model = make_model("Llama")
    pack(model, for_cpu=True)
    assert count(model, PackedLinear, ProjectionSlice) == 0 and count(model, FusedRMSNorm) == 7
