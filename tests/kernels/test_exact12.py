"""bfloat16 in 12 bits: every bit comes back, C writes what numpy writes, and no stored bytes lead outside of memory."""

import ctypes
import mmap
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.kernels import exact12
from kvstore.kernels.cpu import native
from tests.support.native import needs_compiler

Uint8 = exact12.Uint8
EVERY = np.arange(65536, dtype="<u2")
SIZES = [1, 31, 32, 33, 63, 4095, 4096, 4097, 4128, 10240]


def normal(count: int, seed: int = 0) -> Uint8:
    """Elements as of KV, with some that are rare: zeros, NaN, infinities, denormal and huge ones."""
    rng = np.random.default_rng(seed)
    elements = (rng.standard_normal(count).astype("<f4").view("<u4") >> 16).astype("<u2")
    elements[rng.integers(count, size=count // 100)] = rng.integers(65536, size=count // 100)
    return elements.view(np.uint8)


def every_pattern() -> Uint8:
    """Each of the 65,536 among seven others that are frequent, so that it becomes smaller."""
    return np.stack([EVERY, *[np.full_like(EVERY, 0x3F80)] * 7], axis=1).ravel().view(np.uint8)


def decoded(stored: Uint8, num_bytes: int, decode: Callable[[Uint8, Uint8], bool] = exact12.decode) -> Uint8 | None:
    out = np.empty(num_bytes, np.uint8)
    return out if decode(stored, out) else None


@pytest.mark.usefixtures("codec_way")
@pytest.mark.parametrize("raw", [every_pattern(), *map(normal, (4095, 4097, 10240))], ids=len)
def test_every_bit_comes_back_and_it_is_smaller(raw: Uint8) -> None:
    stored = exact12.encode(raw)
    assert stored is not None and len(stored) < 0.9 * len(raw)
    found = decoded(stored, len(raw))
    assert found is not None and np.array_equal(found, raw)


@pytest.mark.usefixtures("codec_way")
def test_what_does_not_get_smaller_is_none() -> None:
    assert exact12.encode(EVERY.view(np.uint8)) is None and exact12.encode(np.zeros(2, np.uint8)) is None
    assert exact12.encode(np.zeros(4097, np.uint8)) is None, "no whole elements"


@needs_compiler
@pytest.mark.parametrize("count", SIZES)
def test_compiled_code_writes_what_numpy_writes(count: int) -> None:
    for seed in range(5):
        raw = normal(count, seed)
        expected, stored = exact12.encode_in_numpy(raw), exact12.encode(raw)
        assert stored is None if len(expected) >= len(raw) else np.array_equal(stored, expected)  # type: ignore[arg-type]
        for decode in (exact12.decode, exact12.decode_in_numpy):
            found = decoded(expected, len(raw), decode)
            assert found is not None and np.array_equal(found, raw)


ELEMENTS = st.lists(st.integers(0, 65535), min_size=1, max_size=200)


@given(ELEMENTS, st.integers(1, 60))
def test_any_elements_come_back(elements: list[int], times: int) -> None:
    raw = np.repeat(np.array(elements, "<u2"), times).view(np.uint8)
    expected, stored = exact12.encode_in_numpy(raw), exact12.encode(raw)
    assert stored is None if len(expected) >= len(raw) else np.array_equal(stored, expected)  # type: ignore[arg-type]
    found = decoded(expected, len(raw))
    assert found is not None and np.array_equal(found, raw)


# -- bytes that nobody has written -----------------------------------------------------------------------------------
@given(st.data(), st.sampled_from(SIZES))
def test_changed_bytes_are_decoded_alike_or_refused(data: st.DataObject, count: int) -> None:
    stored = exact12.encode_in_numpy(normal(count))
    stored = stored[: data.draw(st.integers(0, len(stored)))] if data.draw(st.booleans()) else stored
    changed = np.concatenate([stored, np.frombuffer(data.draw(st.binary(max_size=80)), np.uint8)])
    for place in data.draw(st.lists(st.integers(0, max(len(changed) - 1, 0)), max_size=4)) if len(changed) else ():
        changed[place] ^= data.draw(st.integers(1, 255))
    expected = decoded(changed, 2 * count, exact12.decode_in_numpy)
    found = decoded(changed, 2 * count)
    assert found is None if expected is None else np.array_equal(found, expected)  # type: ignore[arg-type]


class Fenced:
    """Memory that ends at a page which nobody may touch: whoever goes on ends the process."""

    def __init__(self, num_bytes: int) -> None:
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._mapping = mmap.mmap(-1, size + mmap.PAGESIZE)
        whole = np.frombuffer(self._mapping, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(whole.ctypes.data + size), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        self.bytes = whole[size - num_bytes : size]


@needs_compiler
@given(st.binary(max_size=300), st.integers(0, 200))
@example(b"\0" * 16 + b"\xff\xff" + b"\0" * 48, 32)  # 65,535 escapes
@example(b"\0" * 16 + b"\1\0" + b"\0" * 48 + b"\x20\0\1", 32)  # one behind the last element
def test_nothing_outside_is_touched(stored: bytes, count: int) -> None:
    source, out = Fenced(len(stored)), Fenced(2 * count)
    source.bytes[:] = np.frombuffer(stored, np.uint8)
    expected = decoded(source.bytes, 2 * count, exact12.decode_in_numpy)
    assert exact12.decode(source.bytes, out.bytes) == (expected is not None)


@needs_compiler
@pytest.mark.parametrize("count", SIZES)
def test_every_length_that_is_too_short_is_refused(count: int) -> None:
    raw = normal(count)
    stored = exact12.encode_in_numpy(raw)
    whole, out = Fenced(len(stored)), Fenced(len(raw))
    whole.bytes[:] = stored
    assert exact12.decode(whole.bytes, out.bytes) and np.array_equal(out.bytes, raw)
    for length in (*range(0, len(stored), 97), len(stored) - 1):
        short = Fenced(length)
        short.bytes[:] = stored[:length]
        assert not exact12.decode(short.bytes, out.bytes)


# -- processors ------------------------------------------------------------------------------------------------------
KINDS = {"plain": ["-march=x86-64"], "ssse3": ["-mssse3"], "avx2": ["-mavx2"], "avx512": ["-mavx512bw", "-mavx512vl"]}
NEEDED = {"plain": "sse2", "ssse3": "ssse3", "avx2": "avx2", "avx512": "avx512bw"}


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_every_width_of_vectors_gives_the_same(kind: str, tmp_path: Path) -> None:
    if f" {NEEDED[kind]} " not in Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n")[0] + " ":
        pytest.skip(f"this processor has no {NEEDED[kind]}")
    source = Path(native.__file__).parent / native.CODEC_SOURCES[0]
    command = [os.environ.get("CC") or "cc", "-O3", *KINDS[kind], "-fPIC", "-shared", "-o", tmp_path / "c.so", source]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(tmp_path / "c.so"))
    for count in SIZES[3:]:
        raw = normal(count)
        expected, made, out = exact12.encode_in_numpy(raw), np.empty(len(raw) * 2, np.uint8), np.empty_like(raw)
        place = [ctypes.c_void_p(one.ctypes.data) for one in (raw, made, out)]
        size = library.kvstore_exact12_encode(place[0], ctypes.c_int64(count), place[1], ctypes.c_int64(len(made)))
        assert np.array_equal(made[:size], expected)
        assert library.kvstore_exact12_decode(place[1], ctypes.c_int64(size), place[2], ctypes.c_int64(count))
        assert np.array_equal(out, raw)
