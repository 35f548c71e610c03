"""What all tests share: the `gpu` marker skips itself, torch uses one thread, Hypothesis has no deadline.

Kernels are tested on a CUDA device, and without one in Triton's interpreter: the fixture `kernel_device`.
"""

import glob
import importlib.util
import os

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: a second thread only waits
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network
# Triton reads this when a kernel's module is imported: too early to ask torch, whose import takes seconds.
if not glob.glob("/dev/nvidia[0-9]*"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("kvstore", deadline=None)
settings.load_profile("kvstore")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="kill loops of hundreds of rounds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if "gpu" in item.keywords]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request: pytest.FixtureRequest) -> str:
    """Where a test calls kernels; `cpu` means the interpreter."""
    if request.param == "cpu":
        if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("no interpreter of kernels: Triton is missing, or compiles for the device that is here")
        import interpreted

        interpreted.repair()
    return request.param
