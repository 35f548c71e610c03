"""Every kernel compiles for sm_80 and sm_90 without a GPU, and the machine code is what its text says.

Attention takes seconds a case: for sm_80, and some cases more, with `--long`.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
TESTS = Path(__file__).parents[2]
MODULES = sorted(
    path.stem for path in (TESTS.parent / "kernels/cuda").glob("*.py") if "@triton.jit" in path.read_text()
)
SPILLED_BYTES = 16  # of a thread: once, not in every turn of a loop
SHARED_BYTES = {80: 100 << 10, 90: 227 << 10}  # of which a program may have as much on A100's smaller sisters and H100


@pytest.fixture(scope="module", params=MODULES)
def result(request, tmp_path_factory) -> dict:
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        "PYTHONPATH": str(TESTS.parent),
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "TRITON_DUMP_PTXAS_LOG": "1",
    }
    is_long = request.config.getoption("--long")
    extent = "long" if is_long else "short"
    command = [sys.executable, str(TESTS / "children/compile_child.py"), request.param, extent]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    architectures = {90} if request.param == "attention" and not is_long else set(SHARED_BYTES)
    return json.loads(child.stdout) | {"module": request.param, "architectures": architectures}


def test_kernels_compile_and_fit(result):
    """No kernel that is launched is left out; registers and shared memory suffice."""
    kernels = result["compiled"]
    assert sorted({kernel["kernel"] for kernel in kernels}) == result["launched"]
    assert {kernel["architecture"] for kernel in kernels} == result["architectures"]
    for kernel in kernels:
        assert kernel["reported"], kernel
        assert kernel["spilled_bytes"] <= SPILLED_BYTES, kernel
        assert kernel["shared_bytes"] <= SHARED_BYTES[kernel["architecture"]], kernel


@pytest.mark.parametrize("result", ["kv"], indirect=True)
def test_what_is_moved_is_moved_16_bytes_at_a_time(result):
    """Over the bus, and rotated without a fused multiply-add: that would round once what the model rounds twice."""
    for kernel in result["compiled"]:
        assert kernel["fmas"] == [], kernel
        if kernel["kernel"] in ("_load_kernel", "_save_kernel"):
            numbers = {"ld.global.b64"}  # of blocks, places, positions, addresses
            assert set(kernel["accesses"]) == numbers | {"ld.global.v4.b32", "st.global.v4.b32"}, kernel
