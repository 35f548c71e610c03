"""What all tests share: the `gpu` marker skips itself, other tests see no GPU, torch uses one thread; tiny models.

Kernels are tested on a CUDA device, and without one in Triton's interpreter: the fixture `kernel_device`.
"""

import functools
import gc
import glob
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, settings

from tests.support import forked

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: a second thread only waits
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes are started, and each would compile the product
sys.dont_write_bytecode = False
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network
# Triton reads this when a kernel's module is imported: too early to ask torch, whose import takes seconds.
if not glob.glob("/dev/nvidia[0-9]*"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

gc.set_threshold(10_000)  # seldom: with torch in it, a process spends a tenth of its time there

settings.register_profile("kvstore", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # by the clock, both
settings.load_profile("kvstore")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="kill loops of hundreds of rounds")
    parser.addoption(
        "--vllm-sources", action="append", default=[], help="a folder in which a wheel of vLLM is unpacked"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]  # a keyword is also the name of a folder
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()  # what is imported and collected stays: no collection of garbage need look at it, now or later
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    forked.start_forker()
    gc.freeze()


def pytest_sessionfinish() -> None:
    forked.end_forker()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Around a test's fixtures, too: engines are made in fixtures of whole modules."""
    if "gpu" in item.keywords:
        return (yield)
    with no_devices():
        return (yield)


@contextmanager
def no_devices() -> Iterator[None]:
    """Neither this process nor those that it starts find a GPU: what expects a CPU's pool gets one.

    Asking torch at the collection has fixed what the driver sees in this process, so that tests marked `gpu` go on to.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        if "torch" in sys.modules:
            patch.setattr(sys.modules["torch"].cuda, "is_available", lambda: False)
        yield


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """What a command sets up in this process ends with the test, as the stream it writes to does."""
    loggers = [logging.getLogger(name) for name in ("kvstore", "kvstore.service", "aiohttp.server")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def started_anew() -> Iterator[None]:
    """What this test starts is started as for a user, not forked."""
    with forked.anew():
        yield


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request: pytest.FixtureRequest) -> str:
    """Where a test calls kernels; `cpu` means the interpreter."""
    if request.param == "cpu":
        if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("no interpreter of kernels: Triton is missing, or compiles for the device that is here")
        from tests.support import interpreted

        interpreted.repair()
    return request.param


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Folder of a tiny model, made once for all tests that want the same. Nobody writes into it."""
    from tests.support.engines import save_model

    return functools.cache(lambda name="Llama", **changes: save_model(tmp_path_factory.mktemp(name), name, **changes))


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, saved_model: Callable[..., str]) -> str:
    """The model of a module's tests: a plain one, but for what the module's `MODEL` says."""
    return saved_model(**getattr(request.module, "MODEL", {}))


@pytest.fixture(scope="module")
def plain(model: str):
    """What this model answers without a store."""
    from tests.support.engines import Plain

    plain = Plain(model)
    yield plain
    plain.engine.close()
