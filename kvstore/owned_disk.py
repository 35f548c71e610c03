"""OwnedDisk: the disk tier of several engines on one machine. One process owns it, and the engines' processes ask it.

Puts the parts together, as `block_store` does for other engines. Blocks have the ids and records that an engine with a
disk of its own gives them, so that either finds what the other has stored. Loads no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from kvstore.admin.private_folder import PrivateFolder
from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import ReadResult
from kvstore.config import CacheTiers
from kvstore.disk.codec import Codec, Header, decode_header, encode_head, is_intact
from kvstore.disk.opening import OpeningDisk
from kvstore.disk.tier import DiskTier
from kvstore.errors import StoreError
from kvstore.remote.disk_owner import OwnerServer, Value
from kvstore.store.host_blocks import open_host_parts
from kvstore.store.parts import Housekeeper
from kvstore.store.upkeep import TieredUpkeep

LARGEST_BLOCK = 4  # of the capacity
SOCKET_NAME = "disk.sock"
PUT_S = 60.0  # how long a batch may take until it is durable; who asked gives up earlier
DELETE_S = 2.0
RATES_NAME = "shared disk"  # under which the rates of its reads are remembered


def owner_folder() -> PrivateFolder:
    """Where the engines find the owner. Raises StoreError."""
    try:
        return PrivateFolder()
    except OSError as error:
        raise _no_socket(error) from error


def owner_path(folder: PrivateFolder) -> str:
    """The owner's socket, once it answers."""
    return str(folder.path / SOCKET_NAME)


def _no_socket(error: OSError) -> StoreError:
    return StoreError(f"the engines' socket cannot be made: {error}; give another TMPDIR")


class OwnedDisk:
    """Waits for the disk, then answers in `folder` until `close`. Any thread may call it. upkeep: of the disk alone.

    disk, folder: closed and removed with this, also if it raises. tiers: the sizes, of which `disk` must not be 0.
    policy: of eviction. Raises StoreError.
    """

    def __init__(self, disk: OpeningDisk, folder: PrivateFolder, tiers: CacheTiers, policy: str) -> None:
        self._capacity_bytes = int(tiers.disk)
        with ExitStack() as opened:
            opened.callback(folder.remove)
            opened.callback(disk.close)
            tenant_bytes = None if tiers.disk_per_tenant is None else int(tiers.disk_per_tenant)
            self._parts = open_host_parts(disk, self._capacity_bytes, policy, RATES_NAME, None, tenant_bytes)
            opened.callback(self._parts.close)
            self._store, self._lock = self._parts.store, self._parts.lock
            self.upkeep = TieredUpkeep(self._parts, self._store)
            self._awaited: set[int] = set()  # tickets
            self._ended: dict[int, bool] = {}  # of these: whether they are durable
            self.path = owner_path(folder)
            try:
                self._server = OwnerServer(Path(self.path), self)
            except OSError as error:
                raise _no_socket(error) from error
            opened.pop_all()
        self._folder = folder
        self._housekeeper = Housekeeper(self._parts)

    # -- what engines ask --------------------------------------------------------------------------------------------
    @property
    def degraded(self) -> str | None:
        return self._parts.degraded

    def has(self, block_ids: Sequence[BlockId], is_use: bool) -> list[bool]:
        with self._lock:
            if is_use:
                self._store.conversations.touch(block_ids)
                for before, block_id in pairwise(block_ids):  # a splice: its records do not say what is before it
                    self._store.disk.contents.link(block_id, before)
            return [self._store.contains(block_id) for block_id in block_ids]

    def read(self, block_id: BlockId) -> Value | None:
        """A block that has passed all checks; None if there is none. A damaged one is deleted."""
        disk, started = self._store_disk, time.perf_counter()
        with self._lock:
            if not self._store.contains(block_id):
                return None
        header = disk.header(block_id)
        if header is None or header.raw_bytes * LARGEST_BLOCK > self._capacity_bytes:
            result = ReadResult.CORRUPT if disk.contains(block_id) else ReadResult.FAILED
            with self._lock:
                self._store.lost(block_id, result)
            return None
        payload = memoryview(bytearray(header.raw_bytes))
        result = disk.read(header.record, payload)
        if result is not ReadResult.OK or header.record.block_id != block_id:
            with self._lock:
                self._store.lost(block_id, result if result is not ReadResult.OK else ReadResult.CORRUPT)
            return None
        with self._lock:
            self._store.stats.read += 1
            self._store.planner.read(payload.nbytes, time.perf_counter() - started, 1)
        return encode_head(header.record, payload), payload

    def put(self, pairs: Sequence[tuple[bytes, bytes]], is_wanted: Callable[[], bool]) -> list[bool]:
        """See `DiskOwner.put`. Refuses a value that is damaged, or whose block before it is not there."""
        headers = [_checked(value, self._capacity_bytes) for _, value in pairs]
        tickets: list[int | None] = []
        with self._lock:
            if not is_wanted():  # asked with the lock: `forget` deletes what was accepted before
                return [False] * len(pairs)
            accepted = set[bytes]()
            for (before, value), header in zip(pairs, headers, strict=True):
                is_of_use = not before or before in accepted or self._store.contains(before)
                ticket = None
                if header is not None and is_of_use:
                    payload = memoryview(value)[len(value) - header.raw_bytes :]
                    ticket = self._store.write(header.record, payload, None)
                if header is not None and ticket is not None:
                    accepted.add(header.record.block_id)
                tickets.append(ticket)
            wanted = {ticket for ticket in tickets if ticket is not None}
            self._awaited |= wanted
        self._parts.wait_until(lambda: self._have_ended(wanted), PUT_S)
        with self._lock:
            self._have_ended(wanted)
            self._awaited -= wanted
            done = {ticket: self._ended.pop(ticket, False) for ticket in wanted}
            stored = [ticket is not None and done[ticket] for ticket in tickets]
            for (before, _), header, is_stored in zip(pairs, headers, stored, strict=True):
                if header is not None and is_stored and before and before != header.record.parent_id:
                    self._store.disk.contents.link(header.record.block_id, before)  # where a splice begins
        return stored

    def _have_ended(self, tickets: set[int]) -> bool:
        """Whether these writes have ended. Call it with the lock."""
        for one in self._store.collect():
            if one.ticket in self._awaited:
                self._ended[one.ticket] = one.ok
        return tickets <= self._ended.keys()

    def delete(self, block_ids: Sequence[BlockId]) -> None:
        self.forget(block_ids, DELETE_S)

    # -- what its own process asks -----------------------------------------------------------------------------------
    def forget(self, block_ids: Sequence[BlockId], timeout_s: float) -> bool:
        """See `Core.forget`."""
        return self.upkeep.forget(block_ids, timeout_s)[1]

    def pin(
        self, chain: Sequence[BlockId], seconds: float | None, expires_s: float | None = None,
        tenant: str | None = None,
    ) -> None:  # fmt: skip
        """See `KVConnector.pin`."""
        with self._lock:
            self._store.conversations.pin(chain, seconds, expires_s, tenant)

    def close(self) -> None:
        """Write what waits, for a few seconds at most. The engines that ask must have ended, or they compute."""
        self._server.close()
        self._folder.remove()
        self._parts.drain()
        self._housekeeper.join()
        self._parts.close()

    @property
    def _store_disk(self) -> DiskTier:
        assert self._parts.disk is not None
        return self._parts.disk


def _checked(value: bytes, capacity_bytes: int) -> Header | None:
    """The header of a sound value that may be stored; None for any other."""
    header = decode_header(value)
    if header is None or header.codec is not Codec.RAW or not is_intact(value, header):
        return None
    return header if header.raw_bytes * LARGEST_BLOCK <= capacity_bytes else None
