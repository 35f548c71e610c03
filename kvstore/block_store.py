"""BlockStore: the disk tier by itself, for engines that have memory and names of their own for blocks.

The seam to other engines, as `connector` is the one to ours. Puts the parts together; knows no host, loads no torch.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

from kvstore.admin.commands import EvictRequest, read_arguments
from kvstore.admin.control import ControlServer
from kvstore.blocks.ids import BlockId
from kvstore.blocks.keys import MAX_KEY_BYTES, MAX_POSITION, Namespace
from kvstore.blocks.records import Finished
from kvstore.config import format_size, one_of, parse_size
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.opening import OpeningDisk
from kvstore.disk.records import label
from kvstore.errors import ConfigError, StoreError
from kvstore.forks import leave_to_parent
from kvstore.policy.planner import Planner
from kvstore.policy.policies import POLICIES, Steering
from kvstore.stats import StoreStats
from kvstore.store.history import Learned
from kvstore.store.host_blocks import HostBlocks
from kvstore.store.parts import DiskParts, StoreProgress
from kvstore.tiers.worker import BATCH_BYTES, TierWorker, WorkerLimits

LEAST_CAPACITY_BYTES = 4 << 20  # below it LMDB has no room to move
USUAL_BLOCK_BYTES = 128 << 10  # to size what a disk remembers of conversations; its blocks may have any size
LARGEST_BLOCK = 8  # of the capacity; larger ones would leave too little for others


class BlockStore:
    """Blocks of bytes by keys, in a directory that this process owns; `open` and `close`, or a context manager.

    path: made where it is missing. namespace: everything else that the bytes depend on, such as a digest of the
    weights, dtype and layout: blocks of another namespace are not found, but share the capacity. capacity: bytes, or a
    text such as "200GiB". policy: "return", "lru" or "fifo". owner: a name, for messages about who uses the store.

    A key is 1 to 4,096 bytes and names a block's content by its whole history; keys of a chain are given head first.
    No method but `flush` and `close` waits for I/O. Any thread may call them.

    Raises ConfigError for a wrong argument, StoreLockedError when the store is in use, and StoreError when its
    directory cannot be used.
    """

    def __init__(
        self, path: str | Path, *, namespace: bytes, capacity: int | str, policy: str = "return",
        owner: str = "kvstore",
    ) -> None:  # fmt: skip
        capacity_bytes = _checked(namespace, capacity, policy)
        with ExitStack() as opened:
            disk = OpeningDisk(StoreDirectory.open(path, name=owner), capacity_bytes)
            opened.callback(disk.close)
            self._names = Namespace(disk.directory.secret, namespace, label(owner))
            self._capacity_bytes = capacity_bytes
            names = self._names
            self._parts = parts = open_host_parts(disk, capacity_bytes, policy, names.fingerprint.hex(), {names.root})
            opened.callback(parts.close)
            control = ControlServer(disk.directory, partial(_answer, parts, owner))
            opened.pop_all()
        parts.keep_house()
        self._owner, self._store, self._lock = owner, parts.store, parts.lock
        self._finalizer = weakref.finalize(self, _close, control, parts)  # also at the interpreter's exit
        leave_to_parent(self, "the store", _finalizer=lambda: None)

    # -- blocks ------------------------------------------------------------------------------------------------------
    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key is stored: durable, and not about to be deleted."""
        with self._lock:
            return [self._store.contains(block_id) for block_id in self._names.ids(keys)]

    def write(
        self, key: bytes, parent: bytes | None, position: int, data: memoryview, *, conversation: str | None = None
    ) -> int | None:
        """Begin to store a block; returns the ticket that `poll` will report.

        Until then `data` must not change. None: refused and counted, because too much waits to be written or the disk
        cannot be written at the moment. Writes after a pause try again. parent: the previous key, None for the first;
        if that is not stored, nothing is evicted for this block. position: of its first token. conversation: a name
        that the caller gives; without one it is recognised by the parent.
        """
        _check_block(key, parent, position)
        view = _bytes_of(data)
        check_block_bytes(view.nbytes, self._capacity_bytes)
        with self._lock:
            return self._store.write(self._names.record(key, parent, position, time.time()), view, conversation)

    def read_into(self, key: bytes, into: memoryview) -> int:
        """Begin to read a block into memory of its exact size; returns the ticket that `poll` will report.

        Length, checksum, namespace, key and parent are checked before it is ok. A damaged block is deleted, with all
        that build on it.
        """
        view = _bytes_of(into, writable=True)
        with self._lock:
            entry = self._store.disk.contents.index.get(self._names.block_id(key))
            wanted = self._names.wanted(key, None if entry is None else entry.parent_id)
            return self._store.read(wanted, view)

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """A request will ask for this chain soon: the last of these blocks that is stored, and all it builds on, are
        read into the system's page cache, behind all other reads. Some keys of the chain will do, head first.
        """
        with self._lock:
            self._store.prefetch(self._names.ids(keys))

    def poll(self) -> list[Finished]:
        """Reads and writes that have ended since the last call."""
        with self._lock:
            self._store.poll()
            return self._store.collect()

    # -- who needs them ----------------------------------------------------------------------------------------------
    def arrive(self, conversation: str, keys: Sequence[bytes]) -> None:
        """A request with this chain waits or runs: its blocks are evicted after all others, until `finish`.

        conversation: the name of a session, or of the request; the same one again, before it has finished, replaces the
        chain. A conversation is recognised by its chain, too. If a host does not report requests, `touch` and the
        parents of written blocks stand in for them.
        """
        with self._lock:
            self._store.conversations.arrive(conversation, self._names.ids(keys))

    def finish(self, conversation: str, keys: Sequence[bytes] = ()) -> None:
        """The request has ended. keys: its chain with the answer, where that is known. Unknown names do nothing.

        When no request is left, what waits is written at once; until then small writes wait for others, for 0.2 s.
        """
        with self._lock:
            self._store.end_request(conversation, self._names.ids(keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        """These blocks, head first, were just used."""
        with self._lock:
            self._store.conversations.touch(self._names.ids(keys))

    def pin(self, keys: Sequence[bytes], ttl_s: float | None) -> None:
        """Keep the conversation of this chain longer than others for this time; None: until `unpin` or a restart.

        A pin is a priority, not a lock: when everything is pinned, pinned blocks are evicted, too.
        """
        with self._lock:
            self._store.conversations.pin(self._names.ids(keys), math.inf if ttl_s is None else ttl_s)

    def unpin(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._store.conversations.pin(self._names.ids(keys), 0.0)

    def expire(self, keys: Sequence[bytes], ttl_s: float | None) -> None:
        """Evict the conversation of this chain first after this time without a request; None: never because of time."""
        expires_s = math.inf if ttl_s is None else time.time() + ttl_s
        with self._lock:
            self._store.conversations.pin(self._names.ids(keys), None, expires_s)

    def forget(self, keys: Sequence[bytes]) -> int:
        """Delete this chain, given head first, and what builds on its last block; returns the number of blocks.

        Blocks that other chains build on, such as a system prompt, stay. `flush` returns when they are gone.
        """
        with self._lock:
            return self._store.forget_chain(self._names.ids(keys)) if keys else 0

    # -- looking after -----------------------------------------------------------------------------------------------
    @property
    def reason(self) -> str | None:
        """Why nothing can be written at the moment; None if it can."""
        return self._parts.degraded

    @property
    def is_degraded(self) -> bool:
        return self._parts.degraded is not None

    def stats(self) -> dict[str, Any]:
        """Like `Engine.stats()`, without what a store alone does not have. disk: among others read_bytes_per_s and
        write_bytes_per_s, the measured rates, or None.
        """
        return _stats(self._parts, self._owner)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all writes and deletions are durable; False: it takes longer, or the disk cannot be written."""
        try:
            self._parts.flush(timeout_s)
        except StoreError:
            return False
        return True

    def close(self) -> None:
        """Write what waits, for 5 s at most, and release the store.

        May be called twice; afterwards all other methods but `stats` and `flush` raise StoreError. Unfinished reads and
        writes return their memory to the caller, unless the disk hangs.
        """
        self._finalizer()
        self._store = cast("HostBlocks", _Closed())

    def __enter__(self) -> BlockStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# -- arguments -------------------------------------------------------------------------------------------------------
def _checked(namespace: bytes, capacity: int | str, policy: str) -> int:
    """The capacity in bytes. Raises ConfigError."""
    if not isinstance(namespace, bytes) or not namespace:
        raise ConfigError("namespace", repr(namespace), "give bytes that name weights, dtype and layout of the blocks")
    one_of(*POLICIES).check("policy", policy)
    capacity_bytes = parse_size(capacity, "capacity")
    if capacity_bytes < LEAST_CAPACITY_BYTES:
        given, least = format_size(capacity_bytes), format_size(LEAST_CAPACITY_BYTES)
        raise ConfigError("capacity", given, f"give {least} or more")
    return capacity_bytes


def check_block_bytes(block_bytes: int, capacity_bytes: int) -> None:
    """Raises ConfigError if a store of this capacity takes no block of this size."""
    if block_bytes * LARGEST_BLOCK > capacity_bytes:
        raise ConfigError(
            f"a block of {format_size(block_bytes)} is too large for a capacity of {format_size(capacity_bytes)}; "
            f"give {format_size(block_bytes * LARGEST_BLOCK)} or more"
        )


def _check_block(key: bytes, parent: bytes | None, position: int) -> None:
    if not isinstance(key, bytes):
        raise ConfigError("key", repr(key)[:40], f"give 1 to {MAX_KEY_BYTES:,} bytes")
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ConfigError(f"a key has {len(key):,} bytes; give 1 to {MAX_KEY_BYTES:,}")
    if key == parent:
        raise ConfigError(f"block {key[:40]!r} is its own parent; give the key before it, or None for the first")
    if not 0 <= position <= MAX_POSITION:
        raise ConfigError("position", str(position), "give that of the block's first token")


def _bytes_of(memory: memoryview, writable: bool = False) -> memoryview:
    if not isinstance(memory, memoryview):
        raise ConfigError(f"a block's memory is of the type {type(memory).__name__}; give a memoryview")
    if not memory.nbytes or not memory.c_contiguous or (writable and memory.readonly):
        kind = f"{memory.nbytes} bytes{', read-only' * memory.readonly}{', in pieces' * (not memory.c_contiguous)}"
        raise ConfigError(f"a block's memory is {kind}; give contiguous bytes{', writable ones' * writable}")
    return memory.cast("B")


# -- while it is open ------------------------------------------------------------------------------------------------
class _Closed:
    """Stands in for a closed store."""

    def __getattr__(self, name: str) -> NoReturn:
        raise StoreError("the store was closed; open it again")


def _answer(parts: DiskParts[HostBlocks], owner: str, command: str, arguments: dict[str, Any]) -> Mapping[str, Any]:
    """Answer another process. Raises KVStoreError."""
    request = read_arguments(command, arguments)
    if command == "stats":
        return _stats(parts, owner)
    if command == "verify":
        return {**parts.verify(request.delete), "set_aside": []}
    if command == "compact":
        return parts.compact(request.codec)
    if command == "evict" and isinstance(request, EvictRequest) and request.session is None:
        amounts, _ = parts.evict(request.selection(None))
        on_disk = amounts["disk"]
        tiers = {"disk": {"blocks": on_disk.num_blocks, "bytes": on_disk.num_bytes}}
        return {"dry_run": request.dry_run, "tiers": tiers}
    if command == "sessions":
        return {"sessions": []}
    raise StoreError(f"the store is used by {owner} for blocks alone: it has no sessions")


def _stats(parts: DiskParts[HostBlocks], owner: str) -> dict[str, Any]:
    nothing = dict.fromkeys(("hbm", "cpu", "sessions", "requests", "tokens"))
    return {"model": owner, **nothing, **parts.stats()}


def _close(control: ControlServer, parts: DiskParts[HostBlocks]) -> None:
    """No method of a BlockStore, which may be dropped unclosed. In a forked child: no effect."""
    if not control.is_closed:
        control.close()
        parts.drain()
        parts.close()


def open_host_parts(
    opening: OpeningDisk, capacity_bytes: int, policy: str, name: str, roots: Container[BlockId] | None,
    tenant_bytes: int | None = None,
) -> DiskParts[HostBlocks]:  # fmt: skip
    """opening: is closed with the parts; not if this raises. name: under which the rates of its reads are remembered.
    roots, tenant_bytes: see `HostBlocks`.
    """
    clock, stats, progress = time.time, StoreStats(), StoreProgress()
    learned = Learned(opening.directory.path, name, stats)
    steering = Steering(policy, clock, {"disk": capacity_bytes // USUAL_BLOCK_BYTES}, learned.steering)
    stats.policy_file_errors += steering.state_was_bad
    planner = Planner(block_bytes=1, block_size=1)  # for the rate of reads
    learned.restore(planner)
    disk = opening.join()
    io = TierWorker("disk", disk.tier, progress.wake, WorkerLimits(batch_bytes=min(BATCH_BYTES, capacity_bytes // 32)))
    store = HostBlocks(disk, io, steering, planner, stats, clock, roots, tenant_bytes)
    return DiskParts(opening.directory, threading.RLock(), progress, store, io, learned)
