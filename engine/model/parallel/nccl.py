"""What ranks do together when each has a CUDA device of its own: with NCCL. And which groups a rank has.

What is said here is queued on the device, and the host waits only in `join`. A wait on the device does not end with
the rank that it is for, but with `cut`; what is computed after that is wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvstore.engine.model.parallel.group import TIMEOUT, Part, ProcessGroup, told_as_an_end
from kvstore.engine.model.parallel.stores import store_at


class DeviceGroup:
    """A `Group`, made as `ProcessGroup` is. Tensors on the host are taken to the device and back."""

    def __init__(self, rank: int, size: int, name: str, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._name, self._device = name, device
        self._own: Any

    def join(self, rendezvous: str | Path, host: str | None = None) -> None:
        with told_as_an_end():
            self._own = _nccl(store_at(str(rendezvous), self._name, self.size), self.rank, self.size)
        self.sum(torch.zeros(1))  # returns when all are connected

    def cut(self) -> None:
        _abort(self._own)

    def sum(self, part: Tensor) -> Tensor:
        own = part.to(self._device).contiguous()
        with told_as_an_end():
            self._own.allreduce([own]).wait()
        return own.to(part.device)

    def gather(self, part: Tensor) -> Tensor:
        own = part.to(self._device).contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        with told_as_an_end():
            self._own.allgather([parts], [own]).wait()
        return torch.cat(parts, -1).to(part.device)


class DevicePipe:
    """A `Pipe`, made as `ProcessGroup` is. It sums and gathers tensors on the host only, with gloo.

    Each pair of neighbours has a communicator of its own, and two stages have two. What one communicator does runs in
    its order, so a send in the one direction would wait for a receive in the other.
    """

    def __init__(self, rank: int, size: int, name: str, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._name, self._device = name, device
        self._on_host = ProcessGroup(rank, size, name)
        self.sum, self.gather = self._on_host.sum, self._on_host.gather
        self._pairs: dict[int, Any] = {}  # by the stage that sends
        self._sends = deque[tuple[Any, Tensor]]()

    def join(self, rendezvous: str | Path, host: str | None = None) -> None:
        self._on_host.join(rendezvous, host)
        for sender in sorted({self.rank, self._before}):  # in one order for all: a first message waits for the other
            with told_as_an_end():
                store = store_at(str(rendezvous), f"{self._name}-{sender}", 2)
                pair = self._pairs[sender] = _nccl(store, int(sender != self.rank), 2)
                nothing = [torch.zeros(1, device=self._device)]
                (pair.send(nothing, 1, 0) if sender == self.rank else pair.recv(nothing, 0, 0)).wait()

    @property
    def _before(self) -> int:
        return (self.rank - 1) % self.size

    def cut(self) -> None:
        self._on_host.cut()
        for pair in self._pairs.values():
            _abort(pair)

    def send(self, rank: int, values: Tensor) -> None:
        """To the next stage, or from the last to the first. Neither the host nor the computation waits for it."""
        assert rank == (self.rank + 1) % self.size
        values = values.contiguous()
        with told_as_an_end():
            while self._sends and self._sends[0][0].is_completed():
                self._sends.popleft()
            self._sends.append((self._pairs[self.rank].send([values], 1, 0), values))

    def receive(self, rank: int, values: Tensor) -> Callable[[], Tensor]:
        assert rank == self._before
        with told_as_an_end():
            receiving = self._pairs[rank].recv([values], 0, 0)

        def received() -> Tensor:
            with told_as_an_end():
                receiving.wait()  # the computation waits
            return values

        return received


def part_of_process(rank: int, tensor_size: int, pipeline_size: int, device: str) -> Part:
    """The part of rank `rank`. The ranks of one stage have consecutive numbers. device: as in `own_device`."""
    stage, index = divmod(rank, tensor_size)
    of_stage, of_pipe = (index, tensor_size, f"stage-{stage}"), (stage, pipeline_size, f"pipe-{index}")
    if device.startswith("cuda"):
        place = torch.device(device)
        group = DeviceGroup(*of_stage, place) if tensor_size > 1 else None
        return Part(group, DevicePipe(*of_pipe, place) if pipeline_size > 1 else None)
    return Part(
        ProcessGroup(*of_stage) if tensor_size > 1 else None, ProcessGroup(*of_pipe) if pipeline_size > 1 else None
    )


def _nccl(store: Any, rank: int, size: int) -> Any:
    from torch.distributed import ProcessGroupNCCL  # builds for CPUs have none

    options = ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return ProcessGroupNCCL(store, rank, size, options)


def _abort(own: Any) -> None:
    with suppress(RuntimeError):
        own.abort()
