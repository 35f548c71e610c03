"""Checks the structure of an LMDB 0.9 data file without LMDB. Run as a program: `python -I disk_walk.py FILE`.

Exit codes: 1 with the problems printed, 0 without problems, 70 when it cannot check. It is a process of its own because
it holds the GIL, and a hostile file can make it slow. Imports nothing of this package.
"""

import struct
import sys
from collections.abc import Iterator
from itertools import islice
from typing import BinaryIO

OK, BAD, CANNOT = 0, 1, 70
PAGE_HEADER_BYTES, NODE_HEADER_BYTES, META_BYTES = 16, 8, 152
BRANCH, LEAF2 = 1, 0x20
BIG_DATA, SUB_DATA, DUP_DATA = 1, 2, 4
NO_ROOT = 2**64 - 1

_PAGE = struct.Struct("=8xHHHH")  # padding, flags, lower, upper
_NODE = struct.Struct("=HHHH")  # size (low, high), flags, key size; in a branch the first three are the child
_META = struct.Struct("=16x24xI44x40xQQQ")  # page size, root of the main database, last page, transaction


def problems(path: str) -> Iterator[str]:
    """The problems that lmdb.verify finds, then those that it does not look for."""
    from lmdb.verify import VerifyError, verify

    try:
        found = verify(path, subdir=False)
        yield from found
        if not found:
            with open(path, "rb") as file:
                yield from _Walk(file).problems()
    except (VerifyError, OSError, RecursionError, ValueError, struct.error) as error:
        yield str(error)


class _Walk:
    """Two facts that LMDB's writes rely on and that lmdb.verify, which has passed, does not check.

    The nodes of a page fill it without gap or overlap, or a delete would move wrong bytes; and the keys of a branch
    divide those below it, or records could not be found.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        first = _META.unpack(file.read(META_BYTES))
        self._page_bytes: int = first[0]
        file.seek(self._page_bytes)
        newer = max(first, _META.unpack(file.read(META_BYTES)), key=lambda meta: meta[3])
        self._roots: list[int] = [newer[1]]

    def problems(self) -> Iterator[str]:
        while self._roots:
            root = self._roots.pop()
            if root != NO_ROOT:
                yield from self._page(root, None, None)

    def _page(self, number: int, low: bytes | None, high: bytes | None) -> Iterator[str]:
        """Check a page whose keys must be at least `low` and less than `high`."""
        self._file.seek(number * self._page_bytes)
        page = self._file.read(self._page_bytes)
        _, flags, lower, upper = _PAGE.unpack_from(page)
        if flags & LEAF2:
            return
        num_nodes, used, below = (lower - PAGE_HEADER_BYTES) // 2, 0, []
        for i, offset in enumerate(struct.unpack_from(f"={num_nodes}H", page, PAGE_HEADER_BYTES)):
            first, second, third, key_bytes = _NODE.unpack_from(page, offset)
            start = offset + NODE_HEADER_BYTES
            key, data = page[start : start + key_bytes], start + key_bytes
            data_bytes = 0
            if flags & BRANCH:
                below.append((key, first | second << 16 | third << 32))
            else:
                data_bytes = 8 if third & BIG_DATA else first | second << 16
                if third & SUB_DATA and not third & DUP_DATA:
                    self._roots.append(struct.unpack_from("=40xQ", page, data)[0])
            used += (NODE_HEADER_BYTES + key_bytes + data_bytes + 1) & ~1
            # LMDB never reads the first key of a branch page.
            if not (flags & BRANCH and i == 0) and not ((low is None or low <= key) and (high is None or key < high)):
                yield f"page {number}: a key is not where the pages above it say"
        if used != self._page_bytes - upper:
            yield f"page {number}: its nodes take {used} bytes of {self._page_bytes - upper}"
        for i, (key, child) in enumerate(below):
            upper_bound = below[i + 1][0] if i + 1 < len(below) else high
            yield from self._page(child, low if i == 0 else key, upper_bound)


def main(path: str) -> int:
    try:
        import lmdb.verify  # noqa: F401
    except ImportError:
        return CANNOT
    found = list(islice(problems(path), 3))
    print("\n".join(found))
    return BAD if found else OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
