"""What of a file lies in the system's page cache, and how to have nothing of it there."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

LIBC = ctypes.CDLL(None, use_errno=True)


class ColdFile:
    """A file of which nothing is in memory when this is made; contents: what a test will ask for."""

    def __init__(self, file: Path, contents: Iterable[bytes]) -> None:
        self._file = file
        data = file.read_bytes()
        self._places = {content: data.find(content) for content in contents}
        assert all(place >= 0 for place in self._places.values()), "not in this file as it is"
        fd = os.open(file, os.O_RDWR)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def resident(self, contents: Iterable[bytes]) -> list[bool]:
        """Of each, whether all of it is in memory."""
        with self._file.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            pages = _resident_pages(mapped)
        spans = ((self._places[content], len(content)) for content in contents)
        return [
            bool(pages[start // mmap.PAGESIZE : -(-(start + size) // mmap.PAGESIZE)].all()) for start, size in spans
        ]


def _resident_pages(mapped: mmap.mmap) -> np.ndarray:
    memory = np.frombuffer(mapped, np.uint8)
    pages = np.zeros(-(-len(memory) // mmap.PAGESIZE), np.uint8)
    failed = LIBC.mincore(
        ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(len(memory)), ctypes.c_void_p(pages.ctypes.data)
    )
    assert not failed, os.strerror(ctypes.get_errno())
    return pages & 1
