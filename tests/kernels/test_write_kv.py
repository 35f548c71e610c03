"""A step's keys and values into the paged cache: the kernel gives the twin's bits; both fill exactly their slots."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kernels import reference
from kvstore.kernels.kv import rotate_and_write, write_kv
from kvstore.rope.rotary import Style
from tests.support.rotations import KINDS, MAX_LEN, kinds, rotation

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_BLOCKS, BLOCK_SIZE = 60, 4
STRIDES = ["contiguous", "packed", "transposed", "odd", "scattered"]


class Step:
    """Raw tensors of some tokens, views as a model's projections give them, and slots of which every fourth is -1."""

    def __init__(self, num_tokens, heads, dtype, strides="packed", device="cpu", seed=0) -> None:
        num_heads, num_kv_heads, head_dim, value_dim = (*heads, heads[2])[:4]
        generator = torch.Generator().manual_seed(seed)
        sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        width = sum(sizes) + {"odd": 3}.get(strides, 0)
        packed = torch.randn(num_tokens, width, generator=generator).to(dtype).to(device)
        packed[:, sizes[0] + sizes[1] :][:, : sizes[2]] = packed[:, sizes[0] :][:, : sizes[1]] * -0.5 + 3
        parts = [part.unflatten(1, (-1, head_dim)) for part in packed[:, : sum(sizes)].split(sizes, dim=1)]
        if strides == "contiguous":
            parts = [part.contiguous() for part in parts]
        if strides == "transposed":
            parts = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts]
        if strides == "scattered":  # elements of a head apart
            parts = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in parts]
        self.query, self.key, self.value = *parts[:2], parts[2][..., :value_dim]
        places = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[:num_tokens]
        places[3::4] = -1
        self.slots = places.to(device)
        self.positions = torch.randint(MAX_LEN, (num_tokens,), generator=generator).to(device)
        self.shape = (NUM_BLOCKS, BLOCK_SIZE)

    def caches(self) -> list[torch.Tensor]:
        return [part.new_full((*self.shape, *part.shape[1:]), 5.0) for part in (self.key, self.value)]

    def run(self, function, turn) -> list[torch.Tensor]:
        """Rotated query and key, and both caches."""
        caches = self.caches()
        at = None if turn is None else turn.at(self.positions).spread_out()
        rotated = function(self.query, self.key, self.value, *caches, self.slots, at)
        return [tensor.cpu().contiguous() for tensor in (*rotated, *caches)]


def check(step, turn, function=None):
    """function: Triton's where none is given."""
    if function is None:
        from kvstore.kernels.cuda.kv import rotate_and_write as function
    results, wanted = (step.run(each, turn) for each in (function, reference.rotate_and_write))
    for result, expected in zip(results, wanted, strict=True):
        assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8))  # the sign of zero included


@pytest.mark.parametrize("name", KINDS)
def test_the_kernel_gives_the_bits_of_the_twin(name, kernel_device):
    rotations = kinds(torch.bfloat16, device=kernel_device)[name]
    step = Step(5, (6, 2, 32), torch.bfloat16, device=kernel_device)
    for turn in {id(turn): turn for turn in rotations}.values():
        check(step, turn)


@pytest.mark.parametrize(
    ("heads", "strides"),
    [
        *(((3, 1, 20), strides) for strides in STRIDES),
        ((4, 4, 16), "packed"),
        ((5, 5, 48), "odd"),
        ((4, 2, 20, 12), "packed"),
    ],
    ids=str,
)
def test_any_shape_and_strides(heads, strides, kernel_device):
    step = Step(4, heads, torch.bfloat16, strides, kernel_device)
    for name in ("half", "partial upcast", "none"):
        check(step, kinds(torch.bfloat16, heads[2], kernel_device)[name][0])


@settings(max_examples=15)
@given(
    st.integers(0, 6), st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 12)), st.sampled_from(DTYPES),
    st.sampled_from(list(Style)), st.booleans(), st.integers(1, 12), st.integers(0, 1000),
)  # fmt: skip
def test_any_step(kernel_device, num_tokens, heads, dtype, style, upcast, half, seed):
    group, num_kv_heads, half_dim = heads
    step = Step(num_tokens, (group * num_kv_heads, num_kv_heads, 2 * half_dim), dtype, "packed", kernel_device, seed)
    check(step, rotation(dtype, style, upcast, 2 * min(half, half_dim), device=kernel_device))


def test_writing_alone_is_writing_without_rotation(kernel_device):
    from kvstore.kernels.cuda import kv as kv_triton

    step = Step(7, (2, 2, 16), torch.float16, device=kernel_device)
    caches, expected = step.caches(), step.caches()
    kv_triton.write(step.key, step.value, *caches, step.slots)
    reference.write_kv(step.key, step.value, *expected, step.slots)
    assert all(torch.equal(cache, wanted) for cache, wanted in zip(caches, expected, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("turned", [True, False])
def test_exactly_the_slots_are_filled(device, turned):
    """Through the door that the model uses: what it returns, what it writes, what it leaves, what it is given."""
    step = Step(8, (4, 2, 16), torch.bfloat16, device=device)
    turn = rotation(torch.bfloat16, rotary_dim=16, device=device).at(step.positions) if turned else None
    given_key, caches = step.key.clone(), step.caches()
    query, key = rotate_and_write(step.query, step.key, step.value, *caches, step.slots, turn)
    assert torch.equal(step.key, given_key)
    assert torch.equal(query, step.query if turn is None else turn.apply(step.query))
    assert torch.equal(key, step.key if turn is None else turn.apply(step.key))
    slots = step.slots.tolist()
    assert slots.count(-1) == 2
    for cache, rows in zip(caches, (key, step.value), strict=True):
        for place, found in enumerate(cache.flatten(0, 1)):
            wanted = rows[slots.index(place)] if place in slots else torch.full_like(found, 5.0)
            assert torch.equal(found, wanted)


def test_no_slot_at_all():
    caches = [torch.zeros(2, 2, 1, 4) for _ in range(2)]
    write_kv(torch.ones(3, 1, 4), torch.ones(3, 1, 4), *caches, torch.tensor([-1, -1, -1]))
    assert not any(cache.any() for cache in caches)


@pytest.mark.gpu
def test_a_cache_of_more_elements_than_32_bits_count():
    from kvstore.kernels.cuda import kv as kv_triton

    num_blocks, block_shape = (1 << 31) // (16 * 8 * 128) + 3, (16, 8, 128)
    caches = [torch.zeros(num_blocks, *block_shape, dtype=torch.float16, device="cuda") for _ in range(2)]
    rows = torch.randn(2, 2, 8, 128, device="cuda").half()
    last = num_blocks * 16 - 1
    kv_triton.write(rows[0], rows[1], *caches, torch.tensor([last, 1], device="cuda"))
    for cache, (high, low) in zip(caches, rows, strict=True):
        assert torch.equal(cache[-1, -1], high) and torch.equal(cache[0, 1], low)
        assert cache.count_nonzero() == high.count_nonzero() + low.count_nonzero()
