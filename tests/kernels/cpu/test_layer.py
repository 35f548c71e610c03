"""Norms and products of few rows in C against torch's: norms to rounding, products to that of their float32 sums."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kvstore.engine.model import packing
from kvstore.engine.model.lean import LeanLayer
from kvstore.engine.model.packing import FusedRMSNorm, PackedLinear
from kvstore.engine.model.probe import intercept
from kvstore.kernels.cpu import layer as layer_native
from kvstore.kernels.cpu import native
from kvstore.kernels.cpu.layer import max_rows, native_product, native_rms_norm, num_columns
from tests.support.models import make_model
from tests.support.native import needs_compiler, no_compiler
from tests.support.packed import small_weights_packed

DTYPES = [torch.float32, torch.bfloat16]

needs_products = pytest.mark.skipif(num_columns() == 0, reason="no products in C here: neither tiles nor vectors")
needs_tiles = pytest.mark.skipif(not layer_native.has_tiles(), reason="no tiles (AMX) here")
ROWS = min(max_rows(), 100) or 1  # of tests: as many as C takes, or enough for several of its groups


def random_rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def linear(num_in, num_out, with_bias=True):
    weight = random_rows(num_out, num_in, seed=1) * num_in**-0.5
    return weight, random_rows(num_out, seed=2) if with_bias else None


def assert_rounded(found, exact):
    """found, bfloat16: the float32 result, rounded once; sums in another order may turn a rounding."""
    assert found.dtype is torch.bfloat16 and found.shape == exact.shape
    bound = exact.abs() * 2**-8 + 1e-5 * exact.abs().amax()
    assert bool(((found.float() - exact).abs() <= bound).all())


@needs_products
@settings(max_examples=40)
@given(st.integers(1, ROWS), st.integers(1, 20), st.integers(1, 12), st.booleans())
def test_a_product_is_that_of_float32(num_rows, num_in, num_out, with_bias):
    weight, bias = linear(32 * num_in, num_out * (32 if layer_native.has_tiles() else 16), with_bias)
    packed = PackedLinear(weight, bias)
    assert packed.native is not None
    x = random_rows(1, num_rows, 32 * num_in, seed=3)
    exact = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    before = x.clone()
    assert_rounded(packed.native(x), exact)
    assert torch.equal(packed(x), packed.native(x)) and torch.equal(x, before)


@needs_products
@pytest.mark.parametrize("num_rows", sorted({1, 7, 31, ROWS}))
def test_a_deep_product_is_computed_in_several_parts(num_rows):
    weight, bias = linear(2 * 2048 + 32, 80 if not layer_native.has_tiles() else 96)
    x = random_rows(1, num_rows, weight.shape[1], seed=3)
    assert_rounded(PackedLinear(weight, bias).native(x), F.linear(x.float(), weight.float(), bias.float()))


@needs_products
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(use_threads, threads):
    weight, bias = linear(96, 64)
    packed, x = PackedLinear(weight, bias), random_rows(1, 7, 96)
    use_threads(threads)
    assert_rounded(packed.native(x), F.linear(x.float(), weight.float(), bias.float()))


@needs_products
def test_what_c_does_not_know_is_left_to_onednn():
    weight, bias = linear(64, 64)
    packed = PackedLinear(weight, bias)
    many, x = random_rows(1, 33, 64), random_rows(1, 4, 128)[..., :64]
    for other in (x, x.float(), x[:, :0], random_rows(1, 4, 128)):
        assert packed.native(other) is None
    assert (packed.native(many) is None) == layer_native.has_tiles()
    torch.testing.assert_close(packed(many), F.linear(many, weight, bias), atol=3e-2, rtol=2e-2)
    assert torch.equal(packed(x), packed(x.contiguous()))
    for shape in ((40, 64), (64, 48)):
        assert PackedLinear(random_rows(*shape), None).native is None
    assert PackedLinear(weight.float(), None).native is None
    assert native_product(packed.packed, weight, bias.float()) is None


@needs_products
def test_a_weight_in_another_layout_is_not_read():
    weight, _ = linear(64, 64)
    packed = PackedLinear(weight, None).packed
    other = weight.clone()
    other[40, 3] += 1
    assert native_product(packed, other, None) is None
    assert native_product(packed, weight.t().contiguous(), None) is None
    assert native_product(weight, weight, None) is None  # not packed at all


@needs_products
def test_code_that_multiplies_wrongly_is_not_used():
    right = layer_native._functions(native.library())["kv_product"]
    assert layer_native._multiplies(right, num_columns(), max_rows())

    def second_tile_of_rows_left_out(product, x, out, num_rows, threads):
        return right(product, x, out, min(num_rows, 16), threads)

    assert not layer_native._multiplies(second_tile_of_rows_left_out, num_columns(), max_rows())


@needs_tiles
def test_tiles_of_onednn_stay_as_they_were():
    """oneDNN, between products of ours with other numbers of rows, computes what it did before."""
    weight, bias = linear(256, 128)
    packed = PackedLinear(weight, bias)
    rows = [random_rows(1, count, 256, seed=count) for count in (1, 16, 17, 32, 5, 100, 40)]
    native_one, packed.native = packed.native, None
    expected = [packed(x) for x in rows]
    for _ in range(3):
        for x, wanted in zip(rows, expected, strict=True):
            native_one(x)
            assert torch.equal(packed(x), wanted)


@pytest.fixture
def small_weights_are_packed():
    with small_weights_packed():
        yield


def lean_layers_of(name):
    changes = {"hidden_size": 64, "intermediate_size": 96}
    model = intercept(make_model(name, dtype=torch.bfloat16, **changes), 64, pack=True)
    return model.network, [one.__dict__.get("forward") for one in model.network.base_model.layers]


class Attention:
    """Gives each row back, heads of queries for heads of attention."""

    sample_rows = None

    def attend(self, layer, query, key, value, scoring):
        return (query + key.repeat_interleave(query.shape[1] // key.shape[1], 1)).contiguous()


@needs_products
@pytest.mark.usefixtures("small_weights_are_packed")
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma"])
@pytest.mark.parametrize("num_rows", sorted({1, 17, ROWS}))
def test_a_layer_is_that_of_onednn(name, num_rows):
    network, layers = lean_layers_of(name)
    x = random_rows(1, num_rows, 64)
    for layer in layers:
        assert isinstance(layer, LeanLayer) and layer.native is not None
        network.kvstore_carrier.step = Attention()
        with torch.inference_mode():
            found = layer(x)
            layer.native = layer._projection.native = None
            expected = layer(x)
        bound = expected.float().abs().amax(-1, keepdim=True) * 2**-8 * 4
        assert bool(((found.float() - expected.float()).abs() <= bound).all())
        assert not torch.equal(found, x)


def norms(dtype, width, wide):
    """The same norm in C and in torch."""
    weight = torch.linspace(-2, 2, width).to(dtype)
    scale = 1.0 + weight.float() if wide else weight
    made = FusedRMSNorm(nn.Parameter(weight, requires_grad=False), scale, 1e-5, wide)
    with no_compiler():
        return made, FusedRMSNorm(made.weight, scale, 1e-5, wide)


@needs_compiler
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 64, 100, 768])
def test_norms_in_c_are_those_of_torch(width, dtype, wide):
    ours, twin = norms(dtype, width, wide)
    assert ours.native is not None and twin.native is None
    generator = torch.Generator().manual_seed(3)
    for num_rows in (1, 7, 300):
        rows = packing._samples(width, dtype).repeat(1, num_rows, 1)
        rows = rows * torch.rand(rows.shape, generator=generator).to(dtype)
        heads = torch.randn(num_rows, 5, width, generator=generator).to(dtype)[:, 1:4]
        for x in (rows, heads):
            before = x.clone()
            expected, found = twin(x).float(), ours.native(x)
            assert torch.equal(x, before) and found.dtype is dtype and found.is_contiguous()
            bound = expected.abs() * torch.finfo(dtype).eps * (8 if dtype is torch.float32 else 2) + 1e-30
            assert ((found.float() - expected).abs() <= bound).all()


@needs_compiler
def test_norms_of_other_inputs_are_left_to_torch():
    ours, twin = norms(torch.bfloat16, 32, False)
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
    for other in (x[..., :32], x[0].bfloat16()[:, :32], x.bfloat16()[..., ::2]):
        assert ours.native(other) is None
        assert torch.equal(ours(other), twin(other))


def test_without_c_there_is_no_native_norm():
    assert native_rms_norm(torch.ones(8).half(), torch.half, 1e-5, False) is None
    with no_compiler():
        assert native_rms_norm(torch.ones(8), torch.float32, 1e-5, False) is None
