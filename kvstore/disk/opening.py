"""The disk tier of a store while it is being opened: a thread checks the file and reads its index, under whatever else
loads.

Knows no policy. What is on disk is known when it is joined, so nobody above asks whether it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kvstore.blocks.records import BlockRecord
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.index import DiskIndex
from kvstore.disk.tier import DiskTier
from kvstore.kernels import exact12

LOGGER = logging.getLogger("kvstore.store")
TELL_S = 1.0  # how often somebody who waits is told how far it is


@dataclass(frozen=True, slots=True)
class OpenDisk:
    """index: of all that is on disk. records: the same blocks' headers, where they were wanted."""

    tier: DiskTier
    index: DiskIndex
    records: list[BlockRecord]


class OpeningDisk:
    """Begins at once. `join` hands everything over; if that is never called, `close` it.

    directory: owned by this process; `close` closes it, too. capacity_bytes, codec: see `DiskTier`. tell: called with
    how far it is, once a second while somebody waits. with_records: whether the blocks' headers are read, which takes a
    page of each.
    """

    def __init__(
        self, directory: StoreDirectory, capacity_bytes: int, codec: str = "raw",
        tell: Callable[[str], object] = LOGGER.info, with_records: bool = False,
    ) -> None:  # fmt: skip
        self.directory = directory
        self._tell = tell
        self._how_far = f"checking {directory.path / 'blocks'}"
        self._is_unwanted = False
        self._tier: DiskTier | None = None
        self._opened: OpenDisk | None = None
        self._error: Exception | None = None

        def run() -> None:
            try:
                self._tier = DiskTier(directory, capacity_bytes, codec)
                self._opened = self._read(self._tier, with_records)
            except Exception as error:  # the top of a thread: whoever joins it is told
                self._error = error

        self._thread = threading.Thread(target=run, name="kvstore-index", daemon=True)
        self._thread.start()

    def _read(self, tier: DiskTier, with_records: bool) -> OpenDisk:
        """What cannot be read is computed and written again."""
        total = f"{tier.num_blocks:,} blocks"
        batches, records, num_read = [], list[BlockRecord](), 0
        try:
            for batch in tier.scan():
                batches.append(batch)
                num_read += len(batch)
                self._how_far = f"reading the index of {tier.file.path}: {num_read:,} of {total}"
                if self._is_unwanted:
                    break
            for part in tier.records(batches) if with_records else ():
                records += part
                self._how_far = f"reading the headers of {tier.file.path}: {len(records):,} of {total}"
                if self._is_unwanted:
                    break
        except Exception:  # of whatever kind: the store opens with what was read
            tier.counts.failed("scan")
        return OpenDisk(tier, DiskIndex.build(batches), records)

    def join(self, itemsize: int = 2, is_bfloat16: bool = True) -> OpenDisk:
        """Wait for it. itemsize: of `DiskTier`. is_bfloat16: else nothing is written in exact12 or int8. Raises as
        that.
        """
        while self._thread.is_alive():
            self._thread.join(TELL_S)
            if self._thread.is_alive():
                self._tell(self._how_far)
        if self._opened is None:
            assert self._error is not None
            raise self._error
        tier = self._opened.tier
        tier.itemsize = itemsize
        if tier.codec in ("exact12", "int8") and not is_bfloat16:
            LOGGER.warning("codec is %s, which is for bfloat16; this model's KV is not, and is stored raw", tier.codec)
            tier.codec = "raw"
        elif tier.codec == "exact12" and exact12.compiled() is None:
            LOGGER.warning("codec is exact12, which is slower than split-zstd here: there is no C compiler")
        return self._opened

    def close(self) -> None:
        """Stop reading, and close the disk and the directory."""
        self._is_unwanted = True
        with suppress(Exception):  # what prevented the opening concerns nobody any more
            self.join()
        if self._tier is not None:
            self._tier.close()
        self.directory.close()
