"""bfloat16 in 8.25 bits: how much is lost, that storing it again loses nothing, that no bytes lead outside."""

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.kernels import int8
from tests.kernels.test_exact12 import Fenced
from tests.support.native import needs_compiler

Uint8 = int8.Uint8
GROUPS = st.lists(st.integers(0, 65535).filter(lambda one: one >> 7 & 0xFF != 0xFF), min_size=32, max_size=96)


def normal(num_groups: int, seed: int = 0) -> Uint8:
    """Elements as of KV, of groups of very different sizes."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((num_groups, 32)) * np.exp2(rng.integers(-140, 120, (num_groups, 1)))
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2").reshape(-1).view(np.uint8)


def values_of(raw: Uint8) -> np.ndarray:
    return (raw.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float64).reshape(-1, 32)


def decoded(stored: Uint8, num_bytes: int) -> Uint8 | None:
    out = np.empty(num_bytes, np.uint8)
    return out if int8.decode(stored, out) else None


@pytest.mark.usefixtures("codec_way")
@pytest.mark.parametrize("num_groups", [1, 2, 31, 320])
def test_what_is_lost_is_small_and_lost_once(num_groups: int) -> None:
    raw = normal(num_groups)
    stored = int8.encode(raw)
    assert stored is not None and len(stored) == 33 * num_groups
    found = decoded(stored, len(raw))
    assert found is not None
    exact, lossy = values_of(raw), values_of(found)
    largest = np.abs(exact).max(1, keepdims=True)
    is_kept = largest >= 2.0**-120
    assert is_kept.any() and (np.abs(lossy - exact) <= np.where(is_kept, largest * 2**-7, largest)).all()
    assert not lossy[~is_kept[:, 0]].any(), "what is so small became something else than 0"
    again = int8.encode(found)
    assert again is not None and np.array_equal(again, stored), "what came back lost more when it was stored again"


@pytest.mark.usefixtures("codec_way")
@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0], ids=["inf", "-inf", "nan"])
def test_what_is_not_finite_or_no_whole_groups_is_none(bits: int) -> None:
    raw = normal(4)
    raw.view("<u2")[77] = bits
    assert int8.encode(raw) is None
    assert int8.encode(normal(2)[:-2]) is None and int8.encode(normal(1)[:0]) is None


@pytest.mark.usefixtures("codec_way")
def test_bytes_that_nobody_has_encoded_are_refused() -> None:
    raw = normal(3)
    stored = int8.encode(raw)
    assert stored is not None
    for other in (stored[:-1], np.append(stored, np.uint8(0)), stored[:0]):
        assert decoded(other, len(raw)) is None
    assert decoded(stored, len(raw) - 2) is None and decoded(stored, len(raw) + 64) is None
    stored[1] = 255
    assert decoded(stored, len(raw)) is None, "an exponent that no finite number has"


@needs_compiler
@given(GROUPS, st.integers(0, 2**32 - 1))
def test_compiled_code_does_what_numpy_does(elements: list[int], seed: int) -> None:
    raw = np.array(elements[: len(elements) // 32 * 32], "<u2").view(np.uint8)
    expected, stored = np.empty(len(raw) // 64 * 33, np.uint8), int8.encode(raw)
    assert int8.encode_in_numpy(raw, expected) and stored is not None and np.array_equal(stored, expected)
    anything = np.random.default_rng(seed).integers(256, size=len(stored), dtype=np.uint8)
    largest = np.full_like(stored, 128)  # steps that nobody writes
    largest[: len(stored) // 33] = 254
    for some in (stored, anything, largest):
        outs = [np.empty_like(raw), np.empty_like(raw)]
        did = int8.decode(some, outs[0]), int8.decode_in_numpy(some, outs[1])
        assert did[0] == did[1] and (not did[0] or np.array_equal(*outs))


@needs_compiler
@pytest.mark.parametrize("num_groups", [1, 3, 64])
def test_nothing_outside_is_touched(num_groups: int) -> None:
    raw = normal(num_groups)
    source, stored, out = Fenced(len(raw)), Fenced(33 * num_groups), Fenced(len(raw))
    source.bytes[:] = raw
    functions = int8.compiled()
    assert functions is not None
    places = [ctypes.c_void_p(one.bytes.ctypes.data) for one in (source, stored, out)]
    assert functions[0](places[0], places[1], num_groups) and functions[1](places[1], places[2], num_groups)
    assert np.array_equal(out.bytes, decoded(stored.bytes, len(raw)))  # type: ignore[arg-type]
