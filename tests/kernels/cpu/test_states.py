"""What layers with a state compute in C, against transformers' own functions, on states of a pool."""

import inspect
from types import FunctionType, MethodType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_5 import modeling_qwen3_5 as authors

from kvstore.engine.model.interception import StepCarrier
from kvstore.engine.model.parallel.group import Part
from kvstore.engine.model.states import StateMixer, StatePool, observe_states
from kvstore.kernels.cpu.states import StateKernels, state_kernels
from tests.support.models import make_model
from tests.support.native import needs_compiler, no_compiler

pytestmark = needs_compiler
DTYPES = [torch.float32, torch.bfloat16]
NUM_SLOTS = 5


def opened(slots: list[int]) -> StateKernels:
    kernels = state_kernels()
    assert kernels is not None
    kernels.slots = torch.tensor(slots)
    return kernels


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_others_stay(found: torch.Tensor, before: torch.Tensor, slots: list[int]) -> None:
    others = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    assert torch.equal(found[others], before[others])


@settings(max_examples=40)
@given(
    slots=st.permutations(range(NUM_SLOTS)).map(lambda slots: slots[:3]), num_tokens=st.sampled_from((1, 2, 31, 65)),
    dims=st.tuples(*[st.sampled_from((16, 48, 128))] * 2), dtype=st.sampled_from(DTYPES), is_first=st.booleans(),
    is_normed=st.booleans(),
)  # fmt: skip
def test_the_delta_rule_is_that_of_transformers(slots, num_tokens, dims, dtype, is_first, is_normed):
    kernels, (key_dim, value_dim), heads = opened(slots), dims, (len(slots), num_tokens, 2)
    joined = random(*heads[:2], 2 * (2 * key_dim + value_dim)).to(dtype)  # its parts have strides
    query, key, value = joined.split([2 * key_dim, 2 * key_dim, 2 * value_dim], -1)
    query, key, value = query.unflatten(-1, (2, -1)), key.unflatten(-1, (2, -1)), value.unflatten(-1, (2, -1))
    query, key = (query, key) if is_normed else (query * 0.1, key * 0.1)
    decay, beta = -random(*heads, seed=1).abs(), random(*heads, seed=2).sigmoid().to(dtype)
    before = random(NUM_SLOTS, 2, key_dim, value_dim, seed=3)
    kernels.recurrent = before.clone()
    function = authors.torch_recurrent_gated_delta_rule if num_tokens == 1 else authors.torch_chunk_gated_delta_rule
    expected, states = function(
        query, key, value, g=decay, beta=beta, initial_state=None if is_first else before[slots],
        output_final_state=True, use_qk_l2norm_in_kernel=is_normed,
    )  # fmt: skip
    found, held = kernels.apply_delta_rule(
        query, key, value, decay, beta, initial_state=None if is_first else kernels.recurrent,
        use_qk_l2norm_in_kernel=is_normed,
    )  # fmt: skip
    close = 1e-4 if dtype == torch.float32 else 2e-2
    assert held is kernels.recurrent and found.dtype is dtype
    torch.testing.assert_close(found, expected, rtol=close, atol=close)
    torch.testing.assert_close(held[slots], states, rtol=1e-4, atol=1e-4)
    check_others_stay(held, before, slots)


@settings(max_examples=40)
@given(
    num_tokens=st.sampled_from((1, 3, 63, 130)), num_channels=st.sampled_from((16, 496, 1040)), width=st.integers(2, 8),
    dtype=st.sampled_from(DTYPES), has_bias=st.booleans(), activation=st.sampled_from((None, "silu")),
)  # fmt: skip
def test_a_convolution_is_that_of_transformers(num_tokens, num_channels, width, dtype, has_bias, activation):
    slots = [4, 0, 3]
    kernels, weight = opened(slots), random(num_channels, width, seed=1).to(dtype)
    bias = random(num_channels, seed=2).to(dtype) if has_bias else None
    x = random(len(slots), num_tokens, num_channels).to(dtype).transpose(1, 2)
    close = 1e-5 if dtype == torch.float32 else 4e-2
    expected = authors.causal_conv1d_fn(x.contiguous(), weight, bias, activation=activation)
    for given_x in (x, x.contiguous()):
        found = kernels.convolve(given_x, weight, bias, activation=activation)
        torch.testing.assert_close(found, expected, rtol=close, atol=close)
    pool = random(NUM_SLOTS, num_channels, width, seed=3).to(dtype)
    before, states = pool.clone(), pool[slots]
    expected = authors.causal_conv1d_update(x[..., :1].contiguous(), states, weight, bias, activation)
    found = kernels.convolve_step(x[..., :1], pool, weight, bias, activation)
    torch.testing.assert_close(found, expected, rtol=close, atol=close)
    assert torch.equal(pool[slots], states)
    check_others_stay(pool, before, slots)


def test_what_is_not_known_is_refused_before_anything_changes():
    kernels, odd = opened([0]), random(1, 1, 2, 8)
    kernels.recurrent = torch.zeros(NUM_SLOTS, 2, 8, 8)
    with pytest.raises(TypeError):
        kernels.apply_delta_rule(odd, odd, odd, odd[..., 0], odd[..., 0])
    kernels.recurrent, known = torch.zeros(NUM_SLOTS, 2, 16, 16), random(1, 1, 2, 16)
    for query, value in ((known.half(), known.half()), (known, known.bfloat16())):
        with pytest.raises(TypeError):
            kernels.apply_delta_rule(query, query, value, known[..., 0], known[..., 0])
    for x, weight, activation in (
        (random(1, 8, 1), random(8, 4), None),
        (random(1, 16, 1), random(16, 9), None),
        (random(1, 16, 1), random(16, 4).bfloat16(), None),
        (random(1, 16, 1), random(16, 4), "gelu"),
    ):
        with pytest.raises(TypeError):
            kernels.convolve(x, weight, activation=activation)


def observed(change=None) -> tuple[StateMixer, StatePool, torch.Tensor]:
    """The first module with a state of a model. change: of the results of its authors' convolution."""
    network = make_model("Qwen3_5Text")
    spec, mixers = observe_states(network, torch.arange(20), torch.arange(20))
    layer, module = next(iter(mixers.items()))
    if change is not None:
        forward = inspect.unwrap(type(module).forward)
        own = {"causal_conv1d_fn": lambda *args, **kwargs: change(authors.causal_conv1d_fn(*args, **kwargs))}
        function = FunctionType(forward.__code__, forward.__globals__ | own, argdefs=forward.__defaults__)
        module.forward = MethodType(function, module)
    mixer = StateMixer(module, StepCarrier(network, Part()), layer, 4)
    return mixer, StatePool(spec, 2, network.device), random(1, 20, module.hidden_size)


@torch.inference_mode()
def test_a_module_uses_the_kernels_only_if_they_give_the_same():
    mixer, *trial = observed()
    assert mixer.use_kernels(*trial)
    mixer, *trial = observed(lambda x: x * 1.01)
    assert not mixer.use_kernels(*trial)


@torch.inference_mode()
def test_without_a_compiler_a_module_stays_its_authors():
    mixer, *trial = observed()
    with no_compiler():
        assert not mixer.use_kernels(*trial)
