"""What the ranks of one model do together, in the same order on all of them; on CPUs, with gloo."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from kvstore.engine.model.parallel.stores import store_at
from kvstore.errors import EngineDiedError

MAX_SENDS = 4  # tensors on their way to other ranks; with more than these and than ranks, `send` waits for the oldest
CUT_TAG, AT_ONCE = 1, timedelta(milliseconds=1)  # tag 0 is of `send`
TIMEOUT = timedelta(days=1)  # long, because a rank that hangs is found by its pulse, which ends the others' wait


class Group(Protocol):
    """One rank's end of the group. rank: counted from 0, below `size`."""

    rank: int
    size: int

    def join(self, rendezvous: str | Path, host: str | None = None) -> None:
        """Connect to the others; returns when all have come. rendezvous: the same for all ranks of a model, see
        `kvstore.engine.model.parallel.stores`. host: address of this machine for the others; None: all are on one.
        """
        ...

    def cut(self) -> None:
        """End what this rank waits for, now and later, with EngineDiedError. Any thread may call it."""
        ...

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, the same on each rank; in place if that is possible."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """All ranks' parts side by side along the last axis, in the order of ranks; the same on each rank."""
        ...


class Pipe(Group, Protocol):
    """A group whose ranks are the stages of a model, in their order."""

    def send(self, rank: int, values: Tensor) -> None:
        """Send values to a rank, possibly after this returns. Nobody may write them again."""
        ...

    def receive(self, rank: int, values: Tensor) -> Callable[[], Tensor]:
        """Begin to receive the next values of a rank into `values`. Returns what waits for them, and returns them."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a model that one rank has."""

    group: Group | None = None  # the ranks that share each of its layers; None: it has them alone
    pipe: Pipe | None = None  # the stages that share the layers; None: it has all layers

    @property
    def num_ranks(self) -> int:
        """The number of ranks that compute the model."""
        return (1 if self.group is None else self.group.size) * (1 if self.pipe is None else self.pipe.size)

    def join(self, rendezvous: str | Path, host: str | None = None) -> None:
        """Join the groups, as in `Group.join`."""
        for group in (self.group, self.pipe):
            if group is not None:
                group.join(rendezvous, host)

    def cut(self) -> None:
        """Cut the groups, as in `Group.cut`."""
        for group in (self.group, self.pipe):
            if group is not None:
                group.cut()

    def least(self, number: int) -> int:
        """The least of the numbers that all ranks give."""
        for group in (self.group, self.pipe):
            if group is not None:
                number = int(group.gather(torch.tensor([number])).min())
        return number


class ProcessGroup:
    """A `Pipe` of processes, made without torch's global one, which belongs to the program.

    name: unique among the groups of a model. A rank is alone until it calls `join`. All operations raise
    EngineDiedError if another rank has ended.
    """

    def __init__(self, rank: int, size: int, name: str) -> None:
        self.rank, self.size = rank, size
        self._name = name
        self._own: Any
        self._sends = deque[tuple[Any, Tensor]]()

    def join(self, rendezvous: str | Path, host: str | None = None) -> None:
        with told_as_an_end():
            store = store_at(str(rendezvous), self._name, self.size)
            self._own = gloo(store, self.rank, self.size, host or "127.0.0.1")
        self.sum(torch.zeros(1))  # returns when all are connected

    def cut(self) -> None:
        with suppress(RuntimeError):  # gloo closes all its connections when the wait for one message has timed out
            self._own.recv([torch.zeros(1)], int(self.rank == 0), CUT_TAG).wait(AT_ONCE)

    def sum(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        with told_as_an_end():
            self._own.allreduce([part]).wait()
        return part

    def gather(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with told_as_an_end():
            self._own.allgather([parts], [part.contiguous()]).wait()
        return torch.cat(parts, -1)

    def send(self, rank: int, values: Tensor) -> None:
        values = values.contiguous()
        with told_as_an_end():
            self._sends.append((self._own.send([values], rank, 0), values))
            # As many steps are in flight as there are stages. The last must not wait for the first, which waits for it
            # behind a step that loads.
            while len(self._sends) > max(MAX_SENDS, self.size):
                self._sends.popleft()[0].wait()

    def receive(self, rank: int, values: Tensor) -> Callable[[], Tensor]:
        with told_as_an_end():
            receiving = self._own.recv([values], rank, 0)

        def received() -> Tensor:
            with told_as_an_end():
                receiving.wait()
            return values

        return received


@contextmanager
def told_as_an_end() -> Iterator[None]:
    """In this context, torch's error says that another rank has ended."""
    try:
        yield
    except RuntimeError as error:  # of sockets, with many messages
        raise EngineDiedError("a rank of the model has ended") from error


def gloo(store: Any, rank: int, size: int, host: str) -> Any:
    """Its sockets listen only at this address."""
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
    options._timeout = TIMEOUT
    return ProcessGroupGloo(store, rank, size, options)
