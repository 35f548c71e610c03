"""Touches the memory of a pool a little ahead of its use.

The system provides a page when it is first written, which can take long on virtual machines: see bench/LOG.md.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from queue import SimpleQueue

import torch

AHEAD_BYTES = 256 << 20  # touched but not used yet, at most
_PIECE_BYTES = 4 << 20
LEAST_BYTES = 32 << 20  # a smaller tensor is not worth a thread
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; keeps the contents


class FirstTouch:
    """Touches the rows of a tensor on a CPU, from the first on, in a thread of its own.

    Rows are expected to be used roughly in order. The thread ends when this object is dropped. Nothing happens if the
    system cannot touch pages, or if the tensor has fewer than least_bytes. ahead_bytes: AHEAD_BYTES unless given.
    """

    def __init__(self, tensor: torch.Tensor, ahead_bytes: int | None = None, least_bytes: int = LEAST_BYTES) -> None:
        row_bytes = tensor.stride(0) * tensor.element_size()
        self._num_rows = len(tensor)
        self._ahead = max(1, (AHEAD_BYTES if ahead_bytes is None else ahead_bytes) // row_bytes)
        self._piece = max(1, min(_PIECE_BYTES // row_bytes, self._ahead // 2))
        self._target = 0
        self._wanted: SimpleQueue[int] = SimpleQueue()  # how many rows to touch in all; 0: end
        if self._num_rows * row_bytes < least_bytes:
            self._target = self._num_rows
            return
        ended = threading.Event()
        # The thread holds no tensor, because it must not be the one that frees it.
        arguments = (tensor.data_ptr(), row_bytes, self._wanted, ended)
        thread = threading.Thread(target=_touch, args=arguments, name="kvstore-touch", daemon=True)
        weakref.finalize(self, _end, thread, self._wanted, ended, tensor)
        thread.start()
        self.reach(0)

    def reach(self, row: int) -> None:
        """Note that this row is about to be used, and the following rows soon. Cheap; call it each time.

        What was used is made good at once, in small pieces: many at a time take a processor from the model for long.
        """
        if self._target < self._num_rows and row + self._ahead - self._piece >= self._target:
            self._target = min(self._num_rows, row + self._ahead)
            self._wanted.put(self._target)


def _end(thread: threading.Thread, wanted: SimpleQueue[int], ended: threading.Event, tensor: torch.Tensor) -> None:
    """End touching. `tensor` keeps the memory alive until then."""
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
