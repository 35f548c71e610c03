"""Where faults are put in: a load that fails or is torn, a step that cannot be launched, a disk that does not do its
work. One place for each, so that a change of the product is followed in one place.
"""

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from kvstore.disk import env as disk_env
from kvstore.disk import format as disk_format
from kvstore.disk import tier
from kvstore.kernels.kv import BlockLoad, save_layers
from kvstore.store import parts
from tests.support.waiting import TIMEOUT_S


@contextmanager
def before_each_load(fault: Callable[[int, Callable[[], None]], object]) -> Iterator[None]:
    """In here `fault` is called with the number of each layer that is loaded, and with what leaves garbage of it."""
    load_layer = BlockLoad.load_layer

    def faulty(load: BlockLoad, layer: int, key_cache: Any, value_cache: Any) -> None:
        def tear() -> None:
            key_cache[load._block_numbers] = 1e3

        fault(layer, tear)
        load_layer(load, layer, key_cache, value_cache)

    with mock.patch.object(BlockLoad, "load_layer", faulty):
        yield


@contextmanager
def before_each_save(fault: Callable[[int], object]) -> Iterator[None]:
    """In here `fault` is called with the first layer of each save on a CPU; what it raises, the save raises."""

    def faulty(arena: Any, layers: Any, *arguments: Any) -> None:
        fault(layers[0][0])
        save_layers(arena, layers, *arguments)

    with mock.patch("kvstore.memory.transfer.save_layers", faulty):
        yield


@contextmanager
def before_each_step(engine: Any, fault: Callable[[], object]) -> Iterator[None]:
    """In here `fault` is called before each step is launched; what it raises, the step raises."""
    with before_each(engine.loop.runner, "launch", fault):
        yield


@contextmanager
def before_each(owner: Any, name: str, fault: Callable[[], object]) -> Iterator[None]:
    """In here `fault` is called before each call of this method; what it raises, the call raises."""
    with before_each_call(owner, name, lambda *_, **__: fault()):
        yield


@contextmanager
def before_each_call(owner: Any, name: str, fault: Callable[..., object]) -> Iterator[None]:
    """`before_each` with the call's arguments."""
    method = getattr(owner, name)

    def faulty(*arguments: Any, **named: Any) -> Any:
        fault(*arguments, **named)
        return method(*arguments, **named)

    with mock.patch.object(owner, name, faulty):
        yield


def fail() -> None:
    raise RuntimeError("injected")


@contextmanager
def disk_that(**operations: Callable[..., Any]) -> Iterator[None]:
    """In here the disk tier's operations of these names (write, read, scan ...) are these."""
    with mock.patch.multiple(tier.DiskTier, **operations):
        yield


def constants(owner: Any, **values: Any) -> AbstractContextManager[object]:
    """In here these constants of a module (limits, sizes, seconds) are others."""
    return mock.patch.multiple(owner, **values)


@contextmanager
def stuck_disk() -> Iterator[threading.Event]:
    """In here writes wait for the event, and a store that is closed does not wait for them for long."""
    go, write = threading.Event(), tier.DiskTier.write

    def stuck(*arguments: Any, **named: Any) -> Any:
        go.wait(2 * TIMEOUT_S)
        return write(*arguments, **named)

    with constants(parts, DRAIN_S=0.2), disk_that(write=stuck):
        yield go


def disk_with(free_bytes: int, total_bytes: int) -> AbstractContextManager[object]:
    """In here the file system of the store has so much room."""
    return mock.patch.object(disk_format, "free_bytes", lambda path: (free_bytes, total_bytes))


def copying_that(copies: Callable[..., object]) -> AbstractContextManager[object]:
    """In here a compaction copies records by this."""
    return mock.patch.object(disk_env, "_copy_records", copies)


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """In here no file of this process may grow beyond this: what a full disk is to whoever writes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def transactions_that(fault: Callable[[], object]) -> Iterator[None]:
    """In here `fault` is called at the begin of each transaction that writes blocks; what it raises, LMDB raises."""
    begin = tier._delete_and_touch
    with mock.patch.object(tier, "_delete_and_touch", lambda *args: (fault(), begin(*args))[1]):
        yield


@contextmanager
def reads_that(fault: Callable[[], object]) -> Iterator[None]:
    """In here `fault` is called before each read of a block; what it raises, LMDB raises."""
    read = tier._read
    with mock.patch.object(tier, "_read", lambda *args: (fault(), read(*args))[1]):
        yield
