"""A CUDA device that is none: tensors whose values lie on the CPU and which say that they are on `cuda:0`, or another.

Operations compute real values. They raise where a device would: for tensors of two devices in one operation, for what a
capture does not allow, for indices out of range. Triton's kernels run in the interpreter, after a look at what they are
given. Everything is done at once, so that nothing here says anything about the order of streams.
"""

from __future__ import annotations

import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils._device
from torch.utils._python_dispatch import TorchDispatchMode

from kvstore.engine.client import local
from kvstore.engine.core.step_loop import StepLoop
from kvstore.engine.model import probe
from kvstore.engine.model.parallel.group import Part
from kvstore.kernels import kv as kernel_kv
from kvstore.memory import device_transfer

Replaced = tuple[Any, str, Any]  # an object, its attribute, and what that is instead
DEVICE = torch.device("cuda", 0)
TOTAL_BYTES, FREE_BYTES = 1 << 30, 1 << 29
NUM_SMS = 4
# What reads a result to go on: the host waits for the device.
WAITING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "bincount", "is_nonzero"}
BRACKETS = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class FakeCudaError(RuntimeError):
    """What a device would not do."""


class OnDevice(torch.Tensor):
    """values: the same tensor on the CPU. To torch's C++ it is on the CPU too: this build may know no other device."""

    values: torch.Tensor
    device, is_cuda, is_cpu = DEVICE, True, False
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> OnDevice:
        assert not isinstance(values, OnDevice)
        with torch.inference_mode(False):  # views of what was made outside of it are none of its own
            made = torch.Tensor._make_wrapper_subclass(
                cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype
            )
        made.values = values
        return made

    def __repr__(self, **_: object) -> str:
        return f"OnDevice({self.values!r})"

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.values.untyped_storage()

    def tolist(self) -> Any:
        DRIVER.wait("tolist")
        return self.values.tolist()

    def get_device(self) -> int:
        return DEVICE.index

    def cpu(self) -> torch.Tensor:
        DRIVER.wait("a copy to the host")
        return self.values.clone()

    def to(self, *args: Any, **options: Any) -> torch.Tensor:
        copies = options.pop("copy", False)
        device, dtype, *_ = torch._C._nn._parse_to(*args, **options)
        if device is not None and device.type == "cpu":
            return self.cpu() if dtype is None else self.cpu().to(dtype)
        return torch.Tensor.to(self, dtype or self.dtype, copy=copies)

    def numpy(self, **_: object) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return DRIVER.run(func, args, kwargs or {})


class Factories(TorchDispatchMode):
    """Sees operations that take no tensor, such as `torch.empty(3, device="cuda")`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return DRIVER.run(func, args, kwargs or {})


class Driver:
    """What happens on the device. waits: operations for which the host waited. memory: bytes that are free, and all."""

    def __init__(self) -> None:
        self.memory = (FREE_BYTES, TOTAL_BYTES)
        self.waits: list[str] = []
        self.recording: list[Callable[[], object]] | None = None  # of the capture that is going on
        self.is_invalid = False  # that capture did what it must not: its end will fail
        self.has_generator = True  # which a capture takes, and gives back if it ends well
        self.pool: object = None  # that the allocator takes all memory from, in a capture
        self.pinned: dict[int, int] = {}  # address -> bytes

    # -- host memory -------------------------------------------------------------------------------------------------
    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self.pinned[storage.data_ptr()] = storage.nbytes()
        weakref.finalize(tensor, self.pinned.pop, storage.data_ptr(), None)
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        start = tensor.data_ptr()
        end = start + tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
        return any(first <= start and end <= first + size for first, size in list(self.pinned.items()))

    def wait(self, what: str) -> None:
        self.waits.append(what)
        self.is_invalid = self.recording is not None
        if self.recording is not None:
            raise FakeCudaError(f"{what} waits for the device")

    def end_pool(self, index: int, pool: object) -> None:
        if index != DEVICE.index or self.pool != pool:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pool = None

    # -- operations --------------------------------------------------------------------------------------------------
    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        tensors = [*tensors_in(args), *tensors_in(kwargs.values())]
        device = kwargs.get("device") or next((value for value in args if isinstance(value, torch.device)), None)
        goes_there = device is not None and torch.device(device).type == "cuda"
        is_there = any(isinstance(tensor, OnDevice) for tensor in tensors)
        if name == "_to_copy" and is_there and not goes_there:  # of another dtype; `OnDevice.cpu` goes to the host
            device = None
        if kwargs.get("pin_memory"):
            return self.pin(func(*args, **{**kwargs, "pin_memory": None}))
        if not (goes_there or is_there):
            return func(*args, **kwargs)
        with Factories():  # in inference mode, what is made of other operations comes as it is
            if (out := func.decompose(*args, **kwargs)) is not NotImplemented:
                return out
        if goes_there:
            assert device.index in (None, DEVICE.index), f"{name}: there is no {device}"
        if name in ("_to_copy", "copy_"):
            self.check_copy(name, args, kwargs, goes_there)
        else:
            self.check(name, tensors, args)
        leaves = device is not None and not goes_there  # to the host
        out = self.compute(func, args, kwargs)
        if leaves or name == "equal":
            return out
        given = {id(t.values): t for t in tensors if isinstance(t, OnDevice)}  # what was changed comes back as it is
        return mapped(lambda value: given[id(value)] if id(value) in given else wrapped(value), out)

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = mapped(values_of, args), {name: mapped(values_of, value) for name, value in kwargs.items()}
        if "device" in kwargs and kwargs["device"] is not None:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        if func is torch.ops.aten.histc.default:  # a CPU counts floats only
            args = (args[0].float(), *args[1:])
        try:
            out = func(*args, **kwargs)
        except IndexError as error:
            raise FakeCudaError(f"CUDA error: device-side assert triggered ({func}: {error})") from error
        if self.recording is not None:
            self.recording.append(lambda: replace(out, func(*args, **kwargs)))
        return out

    def check_copy(self, name: str, args: Any, kwargs: Any, goes_there: bool) -> None:
        """Between host and device, a copy waits unless it is of pinned memory and told not to."""
        if name == "copy_":
            target, source = args[:2]
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            is_there, came = isinstance(target, OnDevice), isinstance(source, OnDevice)
            host = source if is_there else target
        else:
            host, non_blocking = args[0], kwargs.get("non_blocking", False)
            came = isinstance(host, OnDevice)
            is_there = came or goes_there
        if came == is_there:
            return
        if not (non_blocking and self.is_pinned(host)):
            self.wait(f"a copy {'to' if is_there else 'from'} the device, of {tuple(host.shape)} in pageable memory")

    def check(self, name: str, tensors: list[torch.Tensor], args: Any) -> None:
        elsewhere = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim()]
        if elsewhere and name in BRACKETS and isinstance(args[0], OnDevice):  # brackets bring indices there
            self.wait(f"{name} by indices on the host")
            elsewhere = [tensor for tensor in elsewhere if not any(tensor is one for one in indices(name, args))]
        if elsewhere:
            shapes = [tuple(tensor.shape) for tensor in elsewhere]
            raise FakeCudaError(f"{name}: expected all tensors to be on {DEVICE}, but these are on the CPU: {shapes}")
        masks = [tensor for tensor in indices(name, args) if tensor.dtype in (torch.bool, torch.uint8)]
        is_filled = name.startswith("index_put") and args[2].numel() == 1
        if name in WAITING or (masks and not is_filled):
            self.wait(name)
        if name.startswith(("index", "_index", "gather")):
            for tensor in indices(name, args):
                check_range(name, args[0], tensor)

    # -- kernels -----------------------------------------------------------------------------------------------------
    def launch(
        self, run: Callable[..., object], kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any
    ) -> None:
        """In the interpreter. Whatever is given is on the device, or memory that it can reach."""
        assert all(count > 0 for count in grid), f"{kernel.__name__}: an empty grid, {grid}"
        assert torch.cuda.current_device() == DEVICE.index
        for name, value in zip(kernel.arg_names, args, strict=False):
            if isinstance(value, torch.Tensor) and not (isinstance(value, OnDevice) or self.is_pinned(value)):
                raise FakeCudaError(f"{kernel.__name__}: {name} cannot be accessed from Triton (cpu tensor?)")
        args = tuple(values_of(value) for value in args)

        def work() -> None:
            run(kernel, *args, grid=grid, warmup=warmup, **options)

        work()
        if self.recording is not None:
            self.recording.append(work)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """In an operation's arguments; `torch.utils._pytree` would take half of a test's time."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """What `change` makes of a value, or of each in a list or a tuple."""
    if isinstance(value, list | tuple):
        return type(value)(mapped(change, one) for one in value)
    return change(value)


def values_of(value: Any) -> Any:
    return value.values if isinstance(value, OnDevice) else value


def wrapped(value: Any) -> Any:
    return OnDevice(value) if isinstance(value, torch.Tensor) else value


def replace(old: Any, new: Any) -> None:
    """In a replay, results go to where they were in the capture."""
    for before, after in zip(tensors_in([old]), tensors_in([new]), strict=True):
        if before.data_ptr() != after.data_ptr():
            before.copy_(after)


def indices(name: str, args: Any) -> Iterable[torch.Tensor]:
    """Index tensors of an indexing operation."""
    if name in BRACKETS:
        return [tensor for tensor in args[1] if tensor is not None]
    return (
        [args[2]]
        if name in ("index_select", "index_copy", "index_copy_", "index_fill_", "index_add_", "gather")
        else []
    )


def check_range(name: str, source: Any, index: Any) -> None:
    """A negative index is from the end only where brackets are."""
    if name not in BRACKETS and index.numel() and int(values_of(index).min()) < 0:
        raise FakeCudaError(f"CUDA error: device-side assert triggered ({name}: an index below 0)")


# -- torch.cuda --------------------------------------------------------------------------------------------------------
class Stream:
    """As torch.cuda.Stream; everything that is given to it is done at once."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = DEVICE if device is None else torch.device(device)
        assert self.device == DEVICE
        self.cuda_stream = id(self)

    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event) and event.at_s is not None, "an event that was never recorded"

    def synchronize(self) -> None:
        DRIVER.wait("Stream.synchronize")


class Event:
    """As torch.cuda.Event. late_s: it is said to be reached so long after it was."""

    late_s = 0.0

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._has_time, self.at_s = enable_timing, None

    def record(self, stream: Stream | None = None) -> None:
        assert stream is None or isinstance(stream, Stream)
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        return self.at_s is None or time.perf_counter() >= self.at_s + self.late_s

    def synchronize(self) -> None:
        assert self.at_s is not None
        time.sleep(max(self.at_s + self.late_s - time.perf_counter(), 0.0))

    def elapsed_time(self, end: Event) -> float:
        assert self._has_time and end._has_time and self.at_s is not None and end.at_s is not None
        return 1000 * (end.at_s - self.at_s)


class CUDAGraph:
    """What was done between two calls, to be done again over the same memory."""

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global", **_: object) -> None:
        assert DRIVER.recording is None and capture_error_mode in ("global", "thread_local", "relaxed")
        DRIVER.recording, DRIVER.pool = [], pool or (0, 0)
        DRIVER.has_generator = False

    def capture_end(self) -> None:
        """The driver's error comes before allocator and generator are told that the capture is over."""
        self._works, DRIVER.recording = DRIVER.recording, None
        if DRIVER.is_invalid:
            DRIVER.is_invalid = False
            raise FakeCudaError("CUDA error: operation failed due to a previous error during capture")
        DRIVER.has_generator = True
        DRIVER.end_pool(DEVICE.index, DRIVER.pool)

    def replay(self) -> None:
        for work in self._works:
            work()


class Runtime:
    """As much of `torch.cuda.cudart()` as is used."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        DRIVER.pinned[pointer] = size
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        return 0 if DRIVER.pinned.pop(pointer, None) else 1


class Current(threading.local):
    """A thread's device and stream."""

    def __init__(self) -> None:
        self.index, self.stream = 0, DEFAULT_STREAM

    def exchange(self, index: int) -> int:
        if index < 0:
            return -1
        before, self.index = self.index, index
        return before

    def set_device(self, device: torch.device) -> None:
        self.index = device.index

    def set_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)
        self.stream = stream


DRIVER, DEFAULT_STREAM = Driver(), Stream()


def install(
    monkeypatch: pytest.MonkeyPatch, has_triton: bool, index: int, count: int, beside: Sequence[Replaced]
) -> Driver:
    """From now on, in this thread, there is this CUDA device of so many. has_triton: kernels may be launched. beside:
    what else is replaced.
    """
    global DRIVER
    driver = DRIVER = Driver()
    there = torch.device("cuda", index)
    monkeypatch.setitem(globals(), "DEVICE", there)
    current = Current()
    properties = types.SimpleNamespace(multi_processor_count=NUM_SMS, total_memory=TOTAL_BYTES, name="none")
    generator = types.SimpleNamespace(
        clone_state=lambda: True, graphsafe_set_state=partial(setattr, driver, "has_generator")
    )
    stand_ins: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: count,
        "current_device": lambda: current.index,
        "default_generators": [generator] * count,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "_lazy_init": lambda: None,
        "_exchange_device": current.exchange,
        "_maybe_exchange_device": current.exchange,
        "current_stream": lambda device=None: current.stream,
        "set_device": lambda device: current.set_device(torch.device(device)),
        "set_stream": current.set_stream,
        "synchronize": lambda device=None: driver.wait("synchronize") if driver.recording is not None else None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_allocated": lambda device=None: 1 << 20,
        "max_memory_allocated": lambda device=None: 2 << 20,
        "memory_reserved": lambda device=None: 4 << 20,
        "mem_get_info": lambda device=None: driver.memory,
        "graph_pool_handle": lambda: (0, 1),
        "cudart": Runtime,
    }

    def tried() -> bool:
        assert current.index == index, "Triton is tried on the current device"
        return has_triton

    torch.utils._device._device_constructors()  # which it keeps: to be taken before two of them are replaced
    replaced: list[Replaced] = [
        *beside,
        (OnDevice, "device", there),
        *((torch.cuda, name, stand_in) for name, stand_in in stand_ins.items()),
        *((torch.cuda, cls.__name__, cls) for cls in (Stream, Event, CUDAGraph)),
        *((torch, name, partial(made_on_host, getattr(torch, name))) for name in ("tensor", "as_tensor")),  # they copy
        (torch.__future__, "_overwrite_module_params_on_conversion", True),
        (torch._C, "_host_emptyCache", lambda: None),
        (torch._C, "_cuda_endAllocateToPool", driver.end_pool),
        (torch.Tensor, "pin_memory", lambda tensor: pinned_copy(tensor)),
        (torch.Tensor, "is_pinned", lambda tensor: driver.is_pinned(tensor)),
        (kernel_kv, "has_triton", lambda: has_triton),
        (local, "has_triton", tried),
        (device_transfer, "has_triton", lambda: has_triton),
        (probe, "_NUM_TOKENS", 6),  # a millisecond on a device is a second in the interpreter
        (probe, "_CHUNKS", (3, 2, 1)),
    ]
    for owner, name, stand_in in replaced:
        assert owner in (torch._C, torch.distributed) or hasattr(owner, name), name  # what a build for CPUs has not
        monkeypatch.setattr(owner, name, stand_in, raising=False)
    if has_triton:
        _launch_in_the_interpreter(monkeypatch, driver)
    return driver


@contextmanager
def device(
    monkeypatch: pytest.MonkeyPatch, has_triton: bool = False, index: int = 0, count: int = 1,
    beside: Sequence[Replaced] = (),
) -> Iterator[Driver]:  # fmt: skip
    """In this block, this thread, and threads of engines made here, there is a device. index: its number among
    `count`, of which this process uses only one. beside: what else is replaced.
    """

    def on_device(function: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            with Factories():
                function(*args)

        return run

    threads = [(StepLoop, "_run", on_device(StepLoop._run)), (Part, "join", on_device(Part.join))]
    with monkeypatch.context() as patch, Factories():
        yield install(patch, has_triton, index, count, [*beside, *threads])


def made_on_host(make: Callable[..., torch.Tensor], values: Any, device: Any = None, **options: Any) -> torch.Tensor:
    if device is None or isinstance(values, OnDevice):
        return make(values, **options)
    return make(values, **options).to(device)


def pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, OnDevice):
        raise FakeCudaError("cannot pin 'torch.cuda.FloatTensor', only dense CPU tensors can be pinned")
    return tensor if DRIVER.is_pinned(tensor) else DRIVER.pin(tensor.clone())


def _launch_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    from tests.support import interpreted

    interpreted.repair()
    run = InterpretedFunction.run

    def launch(kernel: Any, *args: Any, **options: Any) -> None:
        driver.launch(run, kernel, *args, **options)

    monkeypatch.setattr(InterpretedFunction, "run", launch)
