"""Opens the tiers below HBM and puts the parts of their store together."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from kvstore.config import CacheTiers
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.io_queue import BATCH_BYTES, IoQueue
from kvstore.disk.records import label
from kvstore.disk.tier import DiskTier
from kvstore.memory.arena import Arena
from kvstore.memory.device_transfer import DeviceTransfer
from kvstore.memory.layout import KVLayout
from kvstore.memory.streams import CudaStreams
from kvstore.memory.tier import CpuTier
from kvstore.memory.transfer import Transfer
from kvstore.policy.planner import Planner
from kvstore.policy.steering import Steering
from kvstore.stats import StoreStats
from kvstore.store.control_plane import KVStore
from kvstore.store.learned import Learned
from kvstore.store.parts import DataPlane, StoreParts
from kvstore.store.progress import StoreProgress
from kvstore.store.stored import Identity
from kvstore.store.tiered import TieredConnector
from kvstore.store.write_back import WriteBack

STAGING_BYTES = 64 << 20


def open_tiered(
    tiers: CacheTiers,
    layout: KVLayout,
    model: str,
    fingerprint: Callable[[Path | None], str],
    device: torch.device,
    load: str,
    least_slots: int,
    num_hbm_blocks: int,
    policy: str,
    directory: StoreDirectory | None,
) -> TieredConnector:
    """See `kvstore.connector.open_connector`. directory: of the disk; it is closed also when this raises."""
    with ExitStack() as opened:
        if directory is not None:
            opened.callback(directory.close)
        tiers.check_room(layout.block_bytes)
        name = fingerprint(None if directory is None else directory.path / "weights.json")
        num_slots = max(least_slots, STAGING_BYTES // layout.block_bytes)
        if tiers.cpu:
            num_slots = int(tiers.cpu) // layout.block_bytes
        clock, stats, progress = time.time, StoreStats(), StoreProgress()
        learned = Learned(None if directory is None else directory.path, name, stats)
        capacities = {"hbm": num_hbm_blocks, "cpu": num_slots, "disk": int(tiers.disk) // layout.block_bytes}
        steering = Steering(policy, clock, capacities, learned.steering)
        stats.policy_file_errors += steering.state_was_bad
        planner = Planner(layout.block_bytes, layout.block_size, always=load == "always")
        learned.restore(planner)
        arena = Arena(layout, num_slots, pin=device.type == "cuda")
        cpu = CpuTier(num_slots, arena.erase, bool(tiers.cpu), steering.order("cpu"), clock)
        disk, write_back = None, None
        if directory is not None:
            disk = DiskTier(directory, int(tiers.disk), tiers.codec, itemsize=layout.dtype.itemsize)
        # Freed pages can be used two transactions later, so a batch must be small beside the file.
        batch_bytes = min(BATCH_BYTES, max(int(tiers.disk) // 32, layout.block_bytes))
        io = IoQueue(disk, progress.wake, batch_bytes=batch_bytes)
        if disk is not None:
            tenant_bytes = None if tiers.disk_per_tenant is None else int(tiers.disk_per_tenant)
            write_back = WriteBack(disk, cpu, io, arena.view, stats, clock, steering, tenant_bytes)
        transfer = make_transfer(device, arena, progress.wake)
        identity = Identity(bytes.fromhex(name), label(model), layout.block_size)
        store = KVStore(cpu, io, write_back, transfer, identity, planner, arena.copy_tokens, stats, clock, steering)
        secret = os.urandom(32) if directory is None else directory.secret
        lock = threading.RLock()
        parts = StoreParts(directory, lock, progress, store, disk, io, learned, secret, cpu, arena, transfer)
        connector = TieredConnector(parts, name)
        opened.pop_all()
    return connector


def make_transfer(device: torch.device, arena: Arena, wake: Callable[[], None]) -> DataPlane:
    if device.type == "cuda":
        return DeviceTransfer(arena, CudaStreams(device), wake)
    return Transfer(arena)
