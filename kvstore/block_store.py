"""BlockStore: the disk tier by itself, for engines that have memory and names of their own for blocks.

The seam to other engines, as `connector` is the one to ours. Puts the parts together; knows no host, loads no torch.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn, cast

from kvstore.admin.commands import EvictRequest, read_arguments
from kvstore.admin.control import ControlServer
from kvstore.blocks.keys import MAX_KEY_BYTES, MAX_POSITION, Namespace
from kvstore.blocks.records import Finished
from kvstore.config import format_size, parse_size
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.io_queue import BATCH_BYTES, IoQueue
from kvstore.disk.records import label
from kvstore.disk.tier import DiskTier
from kvstore.errors import ConfigError, DegradedError, StoreError
from kvstore.forks import leave_to_parent
from kvstore.policy.planner import Planner
from kvstore.policy.policies import POLICIES
from kvstore.policy.steering import Steering
from kvstore.stats import StoreStats
from kvstore.store.host_blocks import HostBlocks
from kvstore.store.housekeeping import Housekeeper
from kvstore.store.learned import Learned
from kvstore.store.parts import DiskParts
from kvstore.store.progress import StoreProgress
from kvstore.store.upkeep import TieredUpkeep

LEAST_CAPACITY_BYTES = 1 << 20
USUAL_BLOCK_BYTES = 128 << 10  # to size what is remembered of conversations; blocks may have any size


class BlockStore:
    """Blocks of bytes by keys, in a directory that this process owns; `open` and `close`, or a context manager.

    path: made where it is missing. namespace: what else the bytes depend on, such as a digest of the weights, dtype and
    layout: blocks of another namespace are not found, but share the capacity. capacity: bytes, or a text such as
    "200GiB". policy: "return", "lru" or "fifo". owner: who this is, for people who ask who uses the store.

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
            directory = StoreDirectory.open(path, name=owner)
            opened.callback(directory.close)
            self._names = Namespace(directory.secret, namespace, label(owner))
            self._running = _Upkept(_open_parts(directory, capacity_bytes, policy, self._names), owner, opened)
        self._parts = self._running.parts
        self._store, self._lock = self._parts.store, self._parts.lock
        self._finalizer = weakref.finalize(self, self._running.close)  # also at the interpreter's exit
        leave_to_parent(self, "the store", _finalizer=lambda: None)

    # -- blocks ------------------------------------------------------------------------------------------------------
    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Of each, whether it is stored: durable, and not about to be deleted.

        For a moment after the start, until its index is loaded, LMDB is asked, which may have to load a page.
        """
        with self._lock:
            return [self._store.contains(block_id) for block_id in self._names.ids(keys)]

    def write(
        self, key: bytes, parent: bytes | None, position: int, data: memoryview, *, conversation: str | None = None
    ) -> int | None:
        """Begin to store a block; returns the ticket of what `poll` will say of it. Until then `data` must not change.

        None: refused, as too much waits to be written, or the disk cannot be written at the moment; that is counted.
        What comes after the pause finds out whether it can. parent: the key before it, None for the first; where that
        is not stored, nothing else is evicted for this block. position: of its first token. conversation: a name of
        the caller's; without one it is recognised by the parent.
        """
        _check_block(key, parent, position)
        view = _bytes_of(data)
        with self._lock:
            return self._store.write(self._names.record(key, parent, position, time.time()), view, conversation)

    def read_into(self, key: bytes, into: memoryview, *, is_hint: bool = False) -> int:
        """Begin to read a block into memory of its exact size; returns the ticket of what `poll` will say of it.

        Its length, its checksum, namespace, key and parent are checked before it is ok. A damaged one is deleted, and
        what builds on it. is_hint: nobody waits for it yet, so it goes behind all others.
        """
        view = _bytes_of(into, writable=True)
        with self._lock:
            index = self._store.disk.contents.index
            entry = None if index is None else index.get(self._names.block_id(key))
            wanted = self._names.wanted(key, None if entry is None else entry.parent_id)
            return self._store.read(wanted, view, is_hint)

    def poll(self) -> list[Finished]:
        """What has ended since the last call."""
        with self._lock:
            self._store.poll()
            return self._store.tickets.collect()

    # -- who needs them ----------------------------------------------------------------------------------------------
    def arrive(self, conversation: str, keys: Sequence[bytes]) -> None:
        """A request with this chain waits or runs: its blocks go after all others, until `finish`.

        conversation: the name of a session, or of the request; the same one again, before it has finished, replaces the
        chain. A conversation is recognised by its chain, too. Where a host tells of no requests, `touch` and the
        parents of what is written stand in for them.
        """
        with self._lock:
            self._store.conversations.arrive(conversation, self._names.ids(keys))

    def finish(self, conversation: str, keys: Sequence[bytes] = ()) -> None:
        """The request has ended. keys: its chain with the answer, where that is known. Unknown names do nothing."""
        with self._lock:
            self._store.conversations.finish(conversation, self._names.ids(keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        """These blocks, head first, were of use just now."""
        with self._lock:
            self._store.conversations.touch(self._names.ids(keys))

    def pin(self, keys: Sequence[bytes], ttl_s: float | None) -> None:
        """Keep the conversation of this chain longer than others for so long; None: until `unpin` or a restart.

        A priority, not a lock: what is left to evict when all is pinned goes all the same.
        """
        with self._lock:
            self._store.conversations.pin(self._names.ids(keys), math.inf if ttl_s is None else ttl_s)

    def unpin(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._store.conversations.pin(self._names.ids(keys), 0.0)

    def expire(self, keys: Sequence[bytes], ttl_s: float | None) -> None:
        """The conversation of this chain goes first after so long without a request; None: it does not."""
        expires_s = math.inf if ttl_s is None else time.time() + ttl_s
        with self._lock:
            self._store.conversations.pin(self._names.ids(keys), None, expires_s)

    def forget(self, keys: Sequence[bytes]) -> int:
        """Delete this chain, head first, and what builds on the last block of it; returns how many blocks that are.

        What others build on, such as a system prompt, stays. `flush` returns when they are gone. While the index is
        loaded, it is remembered, and 0 returned.
        """
        with self._lock:
            return self._store.forget(self._names.ids(keys)) if keys else 0

    # -- looking after -----------------------------------------------------------------------------------------------
    @property
    def reason(self) -> str | None:
        """Why nothing can be written at the moment; None: it can."""
        return self._parts.degraded

    @property
    def is_degraded(self) -> bool:
        return self._parts.degraded is not None

    @property
    def has_pending_work(self) -> bool:
        """There are tickets that `poll` has not said all of."""
        with self._lock:
            return bool(self._store.tickets)

    def stats(self) -> dict[str, Any]:
        """As `Engine.stats()`, without what a store by itself does not have. disk: among others read_bytes_per_s and
        write_bytes_per_s, the measured rates, or None.
        """
        return self._running.stats()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all writes and deletions are durable; False: it takes longer, or the disk cannot be written."""
        return self._running.flush(timeout_s)

    def close(self) -> None:
        """Write what waits, for 5 s at most, and give the store back. Twice does no harm; all else raises StoreError.

        The memory of what had not ended is the caller's again, unless the disk hangs.
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
        raise ConfigError(
            f"namespace is {namespace!r}; give bytes that name the weights, dtype and layout of the blocks"
        )
    if policy not in POLICIES:
        raise ConfigError(f"policy is {policy!r}; give one of {', '.join(POLICIES)}")
    capacity_bytes = parse_size(capacity, "capacity")
    if capacity_bytes < LEAST_CAPACITY_BYTES:
        raise ConfigError(
            f"capacity is {format_size(capacity_bytes)}; give {format_size(LEAST_CAPACITY_BYTES)} or more"
        )
    return capacity_bytes


def _check_block(key: bytes, parent: bytes | None, position: int) -> None:
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ConfigError(f"a key has {len(key):,} bytes; give 1 to {MAX_KEY_BYTES:,}")
    if key == parent:
        raise ConfigError(f"block {key[:40]!r} is its own parent; give the key before it, or None for the first")
    if not 0 <= position <= MAX_POSITION:
        raise ConfigError(f"position is {position}; give that of the block's first token")


def _bytes_of(memory: memoryview, writable: bool = False) -> memoryview:
    if not memory.nbytes or not memory.c_contiguous or (writable and memory.readonly):
        kind = f"{memory.nbytes} bytes{', read-only' * memory.readonly}{', in pieces' * (not memory.c_contiguous)}"
        raise ConfigError(f"a block's memory is {kind}; give contiguous bytes{', writable ones' * writable}")
    return memory.cast("B")


# -- while it is open ------------------------------------------------------------------------------------------------
def _open_parts(directory: StoreDirectory, capacity_bytes: int, policy: str, names: Namespace) -> DiskParts[HostBlocks]:
    clock, stats, progress = time.time, StoreStats(), StoreProgress()
    model = names.fingerprint.hex()
    learned = Learned(directory.path, model, stats)
    steering = Steering(policy, clock, {"disk": capacity_bytes // USUAL_BLOCK_BYTES}, learned.steering)
    stats.policy_file_errors += steering.state_was_bad
    planner = Planner(block_bytes=1, block_size=1)  # for the rate of reads
    learned.restore(planner)
    disk = DiskTier(directory, capacity_bytes)
    io = IoQueue(disk, progress.wake, batch_bytes=min(BATCH_BYTES, capacity_bytes // 32))
    store = HostBlocks(disk, io, steering, planner, stats, clock, names.root)
    return DiskParts(directory, threading.RLock(), progress, store, disk, io, learned)


class _Closed:
    """In the place of a store that was closed."""

    def __getattr__(self, name: str) -> NoReturn:
        raise StoreError("the store was closed; open it again")


class _Upkept:
    """What works while a store is open, whoever calls. Knows nothing of the BlockStore, which may be dropped unclosed.

    opened: what is to be undone when it cannot run.
    """

    def __init__(self, parts: DiskParts[HostBlocks], owner: str, opened: ExitStack) -> None:
        self.parts = parts
        self._owner = owner
        self._upkeep = TieredUpkeep(parts)
        opened.callback(parts.close)
        assert parts.directory is not None
        self._control = ControlServer(parts.directory, self._handle)
        opened.pop_all()
        self._housekeeper = Housekeeper(parts)
        self._is_closed = False
        leave_to_parent(self, "the store", _is_closed=True)

    def _handle(self, command: str, arguments: dict[str, Any]) -> Mapping[str, Any]:
        """Answer another process. Raises KVStoreError."""
        request = read_arguments(command, arguments)
        if command == "stats":
            return self.stats()
        if command == "verify":
            return {**self._upkeep.verify(request.delete), "set_aside": []}
        if command == "compact":
            return self._upkeep.compact()
        if command == "evict" and isinstance(request, EvictRequest) and request.session is None:
            amounts, _ = self._upkeep.evict(request.selection(None))
            on_disk = amounts["disk"]
            tiers = {"disk": {"blocks": on_disk.num_blocks, "bytes": on_disk.num_bytes}}
            return {"dry_run": request.dry_run, "tiers": tiers}
        if command == "sessions":
            return {"sessions": []}
        raise StoreError(f"the store is used by {self._owner} for blocks alone: it has no sessions")

    def stats(self) -> dict[str, Any]:
        parts = self.parts
        with parts.lock:
            found = parts.store.as_dict()
        nothing = dict.fromkeys(("hbm", "cpu", "sessions", "requests", "tokens"))
        lost = None if parts.directory is None else parts.directory.loss()
        return {"model": self._owner, **nothing, **found, "lost": lost}

    def flush(self, timeout_s: float | None) -> bool:
        parts = self.parts
        is_done = parts.wait_until(lambda: parts.store.is_idle or parts.degraded is not None, timeout_s)
        if not is_done or parts.degraded is not None or parts.disk is None:
            return False
        try:
            parts.disk.sync()
        except DegradedError:
            return False
        return True

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._control.close()
        self.parts.drain()
        self._housekeeper.join()
        self.parts.close()
