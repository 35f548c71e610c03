"""Pages of SGLang's host pools as blocks: their keys, and where their bytes lie.

Reads the pools that SGLang hands over; imports nothing of SGLang.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from kvstore.hosts.jobs import HostBlock

_FACTS = (  # attributes of a pool that determine the bytes of its pages
    "dtype", "layout", "page_size", "size_per_token", "layer_num", "head_num", "head_dim", "kv_cache_dim",
    "start_layer", "end_layer", "storage_format_tag", "temporal_dtype", "conv_dtype", "indexer_dtype",
)  # fmt: skip


class PoolPages:
    """A page is one block for each piece of memory that the pool names for it (its keys, its values); these are read
    and written in place. If the pool names none, or one for each layer, a page is one block that the pool copies.

    has_pointers: whether SGLang uses the calls that name places in the pool.
    """

    def __init__(self, name: str, pool: Any, has_pointers: bool = True) -> None:
        self.pool = pool
        self.page_tokens = int(getattr(pool, "page_size", 1) or 1)
        facts = {fact: str(getattr(pool, fact, None)) for fact in _FACTS}
        facts |= {"name": str(name), "type": type(pool).__name__}
        facts["device_dtype"] = str(getattr(getattr(pool, "device_pool", None), "dtype", None))  # fp8 is kept as uint8
        self._tag = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()[:16]
        self._pieces = self._count_pieces() if has_pointers else 0  # 0: pages are copied

    @property
    def num_pieces(self) -> int:
        return self._pieces or 1

    def fits(self, pages: Sequence[str], indices: Any) -> bool:
        return len(pages) > 0 and indices is not None and indices.numel() == len(pages) * self.page_tokens

    def keys(self, pages: Sequence[str]) -> list[bytes]:
        """The keys of all pieces, page by page."""
        return [
            b"%b%b/%d-%d" % (self._tag, page.encode(), piece, self._pieces)
            for page in pages
            for piece in range(self.num_pieces)
        ]

    def blocks(self, pages: Sequence[str], memories: Sequence[memoryview], prefix: Sequence[str]) -> list[HostBlock]:
        """The pieces as blocks, each built on the one before it. memories: those of all pieces. prefix: the pages
        before these.
        """
        keys = self.keys(pages)
        parents = [self.keys(prefix[-1:])[-1] if prefix else None, *keys[:-1]]
        return [
            HostBlock(key, parent, (len(prefix) + i // self.num_pieces) * self.page_tokens, memory)
            for i, (key, parent, memory) in enumerate(zip(keys, parents, memories, strict=True))
        ]

    def by_page(self, pieces: Sequence[bool]) -> list[bool]:
        """For each page, whether all of its pieces are there."""
        return [all(pieces[i : i + self.num_pieces]) for i in range(0, len(pieces), self.num_pieces)]

    def lend(self, indices: Any, is_read: bool) -> tuple[list[memoryview], list[Any]]:
        """The memory of pages, and the tensors that hold it if pages are copied. indices: those of all tokens."""
        if self._pieces:
            pointers, sizes = self.pool.get_page_buffer_meta(indices)
            return [_memory(at, size) for at, size in zip(pointers, sizes, strict=True)], []
        make = self.pool.get_dummy_flat_data_page
        starts = self._starts(indices)
        tensors = [make() if is_read else self.pool.get_data_page(start).contiguous() for start in starts]
        return [memory_of(tensor) for tensor in tensors], tensors

    def put_back(self, indices: Any, tensors: Sequence[Any], read: Sequence[bool]) -> None:
        """Copy pages that were read into the pool."""
        for start, tensor, ok in zip(self._starts(indices), tensors, read, strict=True):
            if ok:
                self.pool.set_from_flat_data_page(start, tensor)

    def _starts(self, indices: Any) -> list[int]:
        return [int(index) for index in indices.tolist()[:: self.page_tokens]]

    def _count_pieces(self) -> int:
        if getattr(self.pool, "layout", None) in (None, "layer_first"):
            return 0
        try:
            return len(self.pool.get_page_buffer_meta(_FirstPage(range(self.page_tokens)))[0])
        except (AttributeError, NotImplementedError, TypeError, ValueError):  # TypeError: None, where it has no bytes
            return 0


class _FirstPage(list[int]):
    """Stands for a tensor of indices."""

    def tolist(self) -> list[int]:
        return list(self)


def memory_of(tensor: Any) -> memoryview:
    """The memory of a contiguous tensor, which must outlive it; a byte for an empty one, whose page is there or not."""
    size = tensor.numel() * tensor.element_size()
    return _memory(tensor.data_ptr(), size) if size else memoryview(bytearray(1))


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
