"""Memory of a pool is touched a little ahead of its use.

The system gives a page when it is first written, which on virtual machines can take long: see bench/LOG.md.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

AHEAD_BYTES = 256 << 20  # what is touched and not used yet, at most
_PIECE_BYTES = 4 << 20
_LEAST_BYTES = 32 << 20  # less is not worth a thread
_MADV_POPULATE_WRITE = 23  # Linux 5.14; contents stay


class FirstTouch:
    """Touches the rows of some tensors on a CPU, from the first on, in a thread of its own.

    tensors: of equal length in their first dimension. Rows are expected to be used about in order. The thread ends when
    this is dropped; where the system cannot do it, nothing happens.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        row_bytes = sum(tensor.stride(0) * tensor.element_size() for tensor in tensors)
        self._num_rows = len(tensors[0])
        self._ahead = max(1, AHEAD_BYTES // row_bytes)
        self._target = 0
        self._wanted = _Wanted()
        if self._num_rows * row_bytes < _LEAST_BYTES:
            self._target = self._num_rows
            return
        parts = [_Part(t.data_ptr(), t.stride(0) * t.element_size()) for t in tensors]
        thread = threading.Thread(target=_touch, args=(parts, self._wanted), name="kvstore-touch", daemon=True)
        weakref.finalize(self, _end, thread, self._wanted, list(tensors))
        thread.start()
        self.reach(0)

    def reach(self, row: int) -> None:
        """This row is about to be used: those behind it will be. Cheap; to be called each time."""
        if self._target < self._num_rows and row + self._ahead // 2 >= self._target:
            self._target = min(self._num_rows, row + self._ahead)
            self._wanted.set(self._target)


class _Wanted:
    """How many rows the thread is to have touched; None: end."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rows: int | None = 0

    def set(self, rows: int) -> None:
        with self._changed:
            self._rows = rows
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._rows = None
            self._changed.notify()

    def beyond(self, rows: int) -> int | None:
        """Waits until more than so many are wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._rows is None or self._rows > rows)
            return self._rows

    @property
    def ended(self) -> bool:
        return self._rows is None


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor's address and what a row takes. The thread holds no tensor: it must not be the one that frees it."""

    address: int
    row_bytes: int


def _end(thread: threading.Thread, wanted: _Wanted, tensors: list[torch.Tensor]) -> None:
    """The memory, which `tensors` holds until here, is not touched any more."""
    wanted.end()
    if thread is not threading.current_thread():
        thread.join()


def _touch(parts: list[_Part], wanted: _Wanted) -> None:
    libc, done = ctypes.CDLL(None, use_errno=True), 0
    while (rows := wanted.beyond(done)) is not None:
        for part in parts:
            first, last = part.address + done * part.row_bytes, part.address + rows * part.row_bytes
            for start in range(first // mmap.PAGESIZE * mmap.PAGESIZE, last, _PIECE_BYTES):
                size = min(_PIECE_BYTES, last - start)
                if wanted.ended or libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                    return
        done = rows
