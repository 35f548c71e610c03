"""OwnedDisk: the disk tier of several engines on one machine. One process owns it, and the engines' processes ask it.

Puts the parts together, as `block_store` does for other engines. Blocks have the ids and records that an engine with a
disk of its own gives them, so that either finds what the other has stored. Loads no torch.

The engines ask through a Unix socket, as in `kvstore.remote.owned_blocks`. Requests and answers are RESP2's. Ids are 32
bytes, and a value is a block's header and payload, as on disk. `ASK id...` and `HAS id...` answer with a 0 or 1 for
each id; asking counts as a use. `GET id` answers with a value or nil. `PUT (id value)...` stores values in the order of
their chain, each with the id of the block before it, empty for the first; it answers with a 0 or 1 for each, once they
are durable, or with the error OOM while nothing can be written. `DEL id...` deletes these and what builds on them.
Whatever else is asked, with ids of another length too, is answered with the error ERR.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import pairwise

from kvstore.admin.private_folder import PrivateFolder
from kvstore.block_store import open_host_parts
from kvstore.blocks.ids import BLOCK_ID_BYTES, BlockId
from kvstore.blocks.records import ReadResult
from kvstore.config import CacheTiers
from kvstore.disk.codec import Codec, Header, decode_header, encode_head, is_intact
from kvstore.disk.opening import OpeningDisk
from kvstore.errors import StoreError
from kvstore.remote.resp_replies import Replies
from kvstore.remote.unix_server import UnixServer
from kvstore.tiers.port import FULL

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
            self.upkeep = self._parts
            self.path = owner_path(folder)
            try:
                listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                listener.bind(self.path)
                listener.listen(64)
            except OSError as error:
                raise _no_socket(error) from error
            self._server = UnixServer("kvstore-owner", listener, self._serve)
            opened.pop_all()
        self._folder = folder
        self._parts.keep_house()

    # -- what engines ask, each in a thread of its own ---------------------------------------------------------------
    def _serve(self, connection: socket.socket) -> None:
        requests = Replies(lambda buffers: _received(connection, buffers))
        with suppress(OSError, ValueError):  # the other side has gone, or is not understood
            while True:
                [request] = requests.to([None], False)
                if not isinstance(request, list) or not all(isinstance(part, bytes) for part in request):
                    return  # it does not speak the protocol
                given = [part for part in request if isinstance(part, bytes)]
                for part in self._answer(given, partial(_is_there, connection)):
                    connection.sendall(part)

    def _answer(self, request: Sequence[bytes], is_wanted: Callable[[], bool]) -> list[bytes | memoryview]:
        name, *given = request or [b""]
        ids = [one for one in given[::2] if one] if name == b"PUT" else given
        if any(len(one) != BLOCK_ID_BYTES for one in ids):
            return [b"-ERR an id has %d bytes\r\n" % BLOCK_ID_BYTES]
        if name in (b"ASK", b"HAS"):
            return _flags(self.has(given, is_use=name == b"ASK"))
        if name == b"GET" and len(given) == 1:
            found = self._read(given[0])
            if found is None:
                return [b"$-1\r\n"]
            head, payload = found
            return [b"$%d\r\n" % (len(head) + payload.nbytes) + head, payload, b"\r\n"]
        if name == b"PUT" and len(given) % 2 == 0:
            stored = self.put(list(zip(given[::2], given[1::2], strict=True)), is_wanted)
            if not any(stored) and self._parts.degraded is not None:
                return [b"-%s the disk cannot be written\r\n" % FULL.encode()]
            return _flags(stored)
        if name == b"DEL":
            self.forget(given, DELETE_S)
            return [b"+OK\r\n"]
        return [b"+PONG\r\n"] if name == b"PING" else [b"-ERR unknown command\r\n"]

    def has(self, block_ids: Sequence[BlockId], is_use: bool) -> list[bool]:
        with self._lock:
            if is_use:
                self._store.conversations.touch(block_ids)
                for before, block_id in pairwise(block_ids):  # a splice: its records do not say what is before it
                    self._store.disk.contents.link(block_id, before)
            return [self._store.contains(block_id) for block_id in block_ids]

    def _read(self, block_id: BlockId) -> tuple[bytes, memoryview] | None:
        """Header and payload of a block that has passed all checks; None if there is none. A damaged one is deleted."""
        disk, started = self._parts.disk, time.perf_counter()
        assert disk is not None
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
        """Store values, each with the id of the block before it, unless one is damaged, or that block is not there.
        Returns which are durable. is_wanted: False once who asked has ended; a deletion that begins after that must not
        miss these blocks.
        """
        headers = [_checked(value, self._capacity_bytes) for _, value in pairs]
        accepted = set[BlockId]()
        with self._lock:
            if not is_wanted():  # asked with the lock: `forget` deletes what was accepted before
                return [False] * len(pairs)
            for (before, value), header in zip(pairs, headers, strict=True):
                is_there = not before or self._store.is_writing(before) or self._store.contains(before)
                if header is not None and is_there:
                    payload = memoryview(value)[len(value) - header.raw_bytes :]
                    if self._store.write(header.record, payload, None) is not None:
                        accepted.add(header.record.block_id)
        self._parts.wait_until(lambda: self._have_ended(accepted), PUT_S)
        stored = [False] * len(pairs)
        with self._lock:
            for i, ((before, _), header) in enumerate(zip(pairs, headers, strict=True)):
                if header is not None and (block_id := header.record.block_id) in accepted:
                    stored[i] = self._store.contains(block_id)
                    if stored[i] and before and before != header.record.parent_id:
                        self._store.disk.contents.link(block_id, before)  # where a splice begins
        return stored

    def _have_ended(self, block_ids: Collection[BlockId]) -> bool:
        """Whether the writes of these have ended. Call it with the lock."""
        self._store.collect()  # nobody here asks for a ticket's own end
        return not any(map(self._store.is_writing, block_ids))

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
        self._parts.close()


def _checked(value: bytes, capacity_bytes: int) -> Header | None:
    """The header of a sound value that may be stored; None for any other."""
    header = decode_header(value)
    if header is None or header.codec is not Codec.RAW or not is_intact(value, header):
        return None
    return header if header.raw_bytes * LARGEST_BLOCK <= capacity_bytes else None


def _flags(found: Sequence[bool]) -> list[bytes | memoryview]:
    return [b"$%d\r\n%s\r\n" % (len(found), bytes(b"01"[one] for one in found))]


def _is_there(connection: socket.socket) -> bool:
    """Whether the other side has not closed its end."""
    ends = select.poll()
    ends.register(connection, 0)  # a hang-up is always reported
    return not ends.poll(0)


def _received(connection: socket.socket, buffers: Sequence[memoryview]) -> int:
    num_bytes = connection.recv_into(buffers[0])
    if not num_bytes:
        raise ConnectionError("the connection was closed")
    return num_bytes
