"""What the ranks of one model do together, in the same order on all of them: with gloo, or with NCCL on CUDA devices.

What NCCL does is queued on the device, and the host waits only in `join`. A wait on the device does not end with the
rank that it is for, but with `cut`; what is computed after that is wrong.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo, TCPStore

from kvstore.errors import EngineDiedError

MAX_SENDS = 4  # tensors on their way to other ranks; with more than these and than ranks, `send` waits for the oldest
CUT_TAG, AT_ONCE = 1, timedelta(milliseconds=1)  # tag 0 is of `send`
TIMEOUT = timedelta(days=1)  # long, because a rank that hangs is found by its pulse, which ends the others' wait
STORE_TIMEOUT = timedelta(minutes=10)  # for a key of the store where ranks find each other, and for its host


class Group:
    """One rank's end of the group, made without torch's global one, which belongs to the program.

    rank: counted from 0, below `size`. name: unique among the groups of a model. device: this rank's CUDA device, None:
    a CPU. A rank is alone until it calls `join`. On a CPU all operations raise EngineDiedError if another rank has
    ended.
    """

    def __init__(self, rank: int, size: int, name: str, device: torch.device | None = None) -> None:
        self.rank, self.size = rank, size
        self._name, self._device = name, device
        self._own: Any
        self._sends = deque[tuple[Any, Tensor]]()

    def join(self, rendezvous: str | Path, host: str | None = None) -> None:
        """Connect to the others; returns when all have come. rendezvous: the same for all ranks of a model, see
        `store_at`. host: address of this machine for the others; None: all are on one.
        """
        with _told_as_an_end():
            store = store_at(str(rendezvous), self._name, self.size)
            if self._device is None:
                self._own = gloo(store, self.rank, self.size, host or "127.0.0.1")
            else:
                self._own = _nccl(store, self.rank, self.size)
        self.sum(torch.zeros(1))  # returns when all are connected

    def cut(self) -> None:
        """End what this rank waits for, now and later, with EngineDiedError. Any thread may call it."""
        with suppress(RuntimeError):
            if self._device is None:  # gloo closes all its connections when the wait for one message has timed out
                self._own.recv([torch.zeros(1)], int(self.rank == 0), CUT_TAG).wait(AT_ONCE)
            else:
                self._own.abort()

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, the same on each rank; in place if that is possible."""
        own = part.to(self._device or part.device).contiguous()
        with _told_as_an_end():
            self._own.allreduce([own]).wait()
        return own.to(part.device)

    def gather(self, part: Tensor) -> Tensor:
        """All ranks' parts side by side along the last axis, in the order of ranks; the same on each rank."""
        own = part.to(self._device or part.device).contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        with _told_as_an_end():
            self._own.allgather([parts], [own]).wait()
        return torch.cat(parts, -1).to(part.device)

    # -- between the stages of a model, in their order ---------------------------------------------------------------
    def send(self, rank: int, values: Tensor) -> None:
        """Send values to a rank, possibly after this returns. Nobody may write them again."""
        values = values.contiguous()
        with _told_as_an_end():
            self._sends.append((self._own.send([values], rank, 0), values))
            # As many steps are in flight as there are stages. The last must not wait for the first, which waits for it
            # behind a step that loads.
            while len(self._sends) > max(MAX_SENDS, self.size):
                self._sends.popleft()[0].wait()

    def receive(self, rank: int, values: Tensor) -> Callable[[], Tensor]:
        """Begin to receive the next values of a rank into `values`. Returns what waits for them, and returns them."""
        return _received(self._own, rank, values)


class DevicePipe(Group):
    """The stages of a model, with a CUDA device each. They sum and gather tensors on the host only, with gloo.

    Each pair of neighbours has a communicator of its own, and two stages have two. What one communicator does runs in
    its order, so a send in the one direction would wait for a receive in the other.
    """

    def __init__(self, rank: int, size: int, name: str, device: torch.device) -> None:
        super().__init__(rank, size, name)
        self._place = device
        self._pairs: dict[int, Any] = {}  # by the stage that sends

    def join(self, rendezvous: str | Path, host: str | None = None) -> None:
        super().join(rendezvous, host)
        for sender in sorted({self.rank, self._before}):  # in one order for all: a first message waits for the other
            with _told_as_an_end():
                store = store_at(str(rendezvous), f"{self._name}-{sender}", 2)
                pair = self._pairs[sender] = _nccl(store, int(sender != self.rank), 2)
                nothing = [torch.zeros(1, device=self._place)]
                (pair.send(nothing, 1, 0) if sender == self.rank else pair.recv(nothing, 0, 0)).wait()

    @property
    def _before(self) -> int:
        return (self.rank - 1) % self.size

    def cut(self) -> None:
        super().cut()
        for pair in self._pairs.values():
            with suppress(RuntimeError):
                pair.abort()

    def send(self, rank: int, values: Tensor) -> None:
        """To the next stage, or from the last to the first. Neither the host nor the computation waits for it."""
        assert rank == (self.rank + 1) % self.size
        values = values.contiguous()
        with _told_as_an_end():
            while self._sends and self._sends[0][0].is_completed():
                self._sends.popleft()
            self._sends.append((self._pairs[self.rank].send([values], 1, 0), values))

    def receive(self, rank: int, values: Tensor) -> Callable[[], Tensor]:
        """The computation waits for it, not the host."""
        assert rank == self._before
        return _received(self._pairs[rank], 0, values)


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a model that one rank has."""

    group: Group | None = None  # the ranks that share each of its layers; None: it has them alone
    pipe: Group | None = None  # the stages that share the layers; None: it has all layers

    @property
    def _groups(self) -> list[Group]:
        return [group for group in (self.group, self.pipe) if group is not None]

    def join(self, rendezvous: str | Path, host: str | None = None) -> None:
        """Join the groups, as in `Group.join`."""
        for group in self._groups:
            group.join(rendezvous, host)

    def cut(self) -> None:
        """Cut the groups, as in `Group.cut`."""
        for group in self._groups:
            group.cut()

    def least(self, number: int) -> int:
        """The least of the numbers that all ranks give."""
        for group in self._groups:
            number = int(group.gather(torch.tensor([number])).min())
        return number


def part_of_process(rank: int, tensor_size: int, pipeline_size: int, device: str) -> Part:
    """The part of rank `rank`. The ranks of one stage have consecutive numbers. device: as in `own_device`."""
    stage, index = divmod(rank, tensor_size)
    place = torch.device(device) if device.startswith("cuda") else None
    group = Group(index, tensor_size, f"stage-{stage}", place) if tensor_size > 1 else None
    if pipeline_size == 1:
        return Part(group)
    name = f"pipe-{index}"
    return Part(group, DevicePipe(stage, pipeline_size, name, place) if place else Group(stage, pipeline_size, name))


# -- what torch has for it -------------------------------------------------------------------------------------------
@contextmanager
def _told_as_an_end() -> Iterator[None]:
    """In this context, torch's error says that another rank has ended."""
    try:
        yield
    except RuntimeError as error:  # of sockets, with many messages
        raise EngineDiedError("a rank of the model has ended") from error


def _received(own: Any, rank: int, values: Tensor) -> Callable[[], Tensor]:
    with _told_as_an_end():
        receiving = own.recv([values], rank, 0)

    def received() -> Tensor:
        with _told_as_an_end():
            receiving.wait()
        return values

    return received


def gloo(store: Any, rank: int, size: int, host: str) -> Any:
    """Its sockets listen only at this address."""
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
    options._timeout = TIMEOUT
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int) -> Any:
    from torch.distributed import ProcessGroupNCCL  # builds for CPUs have none

    # Its own thread would end this process where a peer has ended; we notice, and raise EngineDiedError.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    options = ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return ProcessGroupNCCL(store, rank, size, options)


def tcp_store(host: str, port: int, is_host: bool) -> Any:
    """The store at this address. It lives as long as the object of the process that hosts it. Raises RuntimeError."""
    return TCPStore(host, port, None, is_host, STORE_TIMEOUT, wait_for_workers=False, multi_tenant=True)


def store_at(rendezvous: str, name: str, size: int) -> Any:
    """Where one group of ranks finds each other. rendezvous: a path, or `tcp://host:port/prefix`."""
    if not rendezvous.startswith("tcp://"):
        return FileStore(f"{rendezvous}-{name}", size)
    address, _, prefix = rendezvous.removeprefix("tcp://").rpartition("/")
    host, _, port = address.rpartition(":")
    return PrefixStore(f"{prefix}-{name}", tcp_store(host, int(port), is_host=False))
