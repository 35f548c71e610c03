"""Memory of a pool is touched a little ahead of its use.

The system gives a page when it is first written, which on virtual machines can take long: see bench/LOG.md.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from queue import SimpleQueue

import torch

AHEAD_BYTES = 256 << 20  # what is touched and not used yet, at most
_PIECE_BYTES = 4 << 20
_LEAST_BYTES = 32 << 20  # less is not worth a thread
_MADV_POPULATE_WRITE = 23  # Linux 5.14; contents stay


class FirstTouch:
    """Touches the rows of a tensor on a CPU, from the first on, in a thread of its own.

    Rows are expected to be used about in order. The thread ends when this is dropped; where the system cannot do it,
    nothing happens.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        row_bytes = tensor.stride(0) * tensor.element_size()
        self._num_rows = len(tensor)
        self._ahead = max(1, AHEAD_BYTES // row_bytes)
        self._target = 0
        self._wanted: SimpleQueue[int] = SimpleQueue()  # rows that are to have been touched; 0: end
        if self._num_rows * row_bytes < _LEAST_BYTES:
            self._target = self._num_rows
            return
        ended = threading.Event()
        # The thread holds no tensor: it must not be the one that frees it.
        arguments = (tensor.data_ptr(), row_bytes, self._wanted, ended)
        thread = threading.Thread(target=_touch, args=arguments, name="kvstore-touch", daemon=True)
        weakref.finalize(self, _end, thread, self._wanted, ended, tensor)
        thread.start()
        self.reach(0)

    def reach(self, row: int) -> None:
        """This row is about to be used: those behind it will be. Cheap; to be called each time."""
        if self._target < self._num_rows and row + self._ahead // 2 >= self._target:
            self._target = min(self._num_rows, row + self._ahead)
            self._wanted.put(self._target)


def _end(thread: threading.Thread, wanted: SimpleQueue[int], ended: threading.Event, tensor: torch.Tensor) -> None:
    """The memory, which `tensor` holds until here, is not touched any more."""
    ended.set()
    wanted.put(0)
    if thread is not threading.current_thread():
        thread.join()


def _touch(address: int, row_bytes: int, wanted: SimpleQueue[int], ended: threading.Event) -> None:
    libc, first = ctypes.CDLL(None, use_errno=True), address // mmap.PAGESIZE * mmap.PAGESIZE
    while rows := wanted.get():
        last = address + rows * row_bytes
        for start in range(first, last, _PIECE_BYTES):
            size = ctypes.c_size_t(min(_PIECE_BYTES, last - start))
            if ended.is_set() or libc.madvise(ctypes.c_void_p(start), size, _MADV_POPULATE_WRITE):
                return
        first = last // mmap.PAGESIZE * mmap.PAGESIZE
