"""Torch's ProcessGroupNCCL on `tests.support.fake_cuda`, over gloo. Two ranks in two processes.

A rank that has ended is not noticed: whoever waits for it waits until `abort`, and then goes on with what is there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kvstore.engine.model.parallel.group import gloo
from tests.support.fake_cuda import OnDevice

WAIT_S = 60.0


class FakeWork:
    """As torch's Work. The host waits in place of the device."""

    def __init__(self, aborted: threading.Event, start: Callable[[], Any]) -> None:
        self._aborted = aborted
        self._work = None if aborted.is_set() else start()

    def wait(self) -> None:
        try:
            if self._work is not None:
                self._work.wait()
        except RuntimeError:
            assert self._aborted.wait(WAIT_S), "nobody has aborted what waits for a rank that has ended"

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()


class FakeNccl:
    """As much of ProcessGroupNCCL as is used."""

    class Options:
        """Without a meaning here."""

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._gloo, self._aborted = gloo(store, rank, size, "127.0.0.1"), threading.Event()

    def _started(self, start: Callable[..., Any], *tensors: list[Any], **options: Any) -> FakeWork:
        assert all(isinstance(tensor, OnDevice) for each in tensors for tensor in each), (
            "NCCL takes no tensors on the host"
        )
        values = [[tensor.values for tensor in each] for each in tensors]
        return FakeWork(self._aborted, lambda: start(*values, **options))

    def allreduce(self, tensors: list[Any]) -> FakeWork:
        return self._started(self._gloo.allreduce, tensors)

    def allgather(self, outputs: list[list[Any]], inputs: list[Any]) -> FakeWork:
        return self._started(lambda out, given: self._gloo.allgather([out], given), outputs[0], inputs)

    def send(self, tensors: list[Any], rank: int, tag: int) -> FakeWork:
        return self._started(lambda values: self._gloo.send(values, rank, tag), tensors)

    def recv(self, tensors: list[Any], rank: int, tag: int) -> FakeWork:
        return self._started(lambda values: self._gloo.recv(values, rank, tag), tensors)

    def abort(self) -> None:
        self._aborted.set()
