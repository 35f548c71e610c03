"""Opens the tiers below HBM and puts the parts of their store together."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from kvstore.blocks.holdings import Holdings
from kvstore.blocks.ids import lineage_root
from kvstore.config import CacheTiers
from kvstore.disk.opening import OpeningDisk
from kvstore.disk.records import label
from kvstore.disk.tier import DiskTier
from kvstore.errors import ConfigError
from kvstore.memory.layout import KVLayout
from kvstore.memory.ranked import FarBlocks, OtherRanks, RankedTransfer, make_transfer
from kvstore.memory.tier import CpuTier
from kvstore.memory.transfer import Arena
from kvstore.policy.planner import Planner
from kvstore.policy.policies import Steering
from kvstore.remote.address import parse_prefill_url
from kvstore.remote.names import PREFILL_KEY, BlockNames, FleetSecret, fleet_secret
from kvstore.remote.object_address import ObjectAddress, parse_remote_url
from kvstore.remote.owned_blocks import OwnedBlocks
from kvstore.remote.prefill import PrefillServer
from kvstore.remote.redis_blocks import RedisBlocks
from kvstore.remote.spread import SpreadTier
from kvstore.stats import MOST_LOSSES, Losses, StoreStats
from kvstore.store.context import Identity, StoreContext
from kvstore.store.control_plane import KVStore
from kvstore.store.history import Learned
from kvstore.store.parts import StoreProgress
from kvstore.store.remote import RemoteSource
from kvstore.store.tiered import StoreParts, TieredConnector
from kvstore.store.write_back import WriteBack
from kvstore.tiers.port import BlockTier
from kvstore.tiers.worker import BATCH_BYTES, TierWorker, WorkerLimits

STAGING_BYTES = 64 << 20
AT_ONCE_LIMITS = WorkerLimits(gather_s=0.0)  # a believed tier gets whole batches


def open_tiered(
    tiers: CacheTiers, layout: KVLayout, model: str, fingerprint: Callable[[Path | None], str], device: torch.device,
    load: str, least_arena_blocks: int, num_hbm_blocks: int, policy: str, opening: OpeningDisk | None,
    reports: bool = False, secret: bytes | None = None, others: OtherRanks | None = None, owner: str | None = None,
) -> TieredConnector:  # fmt: skip
    """The connector for tiers of which one below HBM has a size.

    fingerprint: 64 hexadecimal digits that name weights, rotation and layout; called with the file in which digests of
    weights may be cached. least_arena_blocks: those that the staging area needs when the CPU tier is off but the disk
    is on. num_hbm_blocks: of the engine's pool. policy: of eviction. opening: the disk, None without one; this waits
    for it, and the connector closes it, also when this raises. reports: to `KVConnector.holdings`. secret: of a fleet,
    whose servers have the same block ids; None: the store's own. others: ranks that have the other heads, where the
    layout says that this one has some. owner: the socket of the process that owns the disk of this and other engines
    (`kvstore.owned_disk`); then these tiers have none. Raises ConfigError or StoreError.
    """
    directory = None if opening is None else opening.directory
    with ExitStack() as opened:
        if opening is not None:
            opened.callback(opening.close)
        tiers.check_room(layout.block_bytes, layout.checkpoint_blocks)
        if layout.num_state_blocks and tiers.codec == "int8":
            raise ConfigError(
                "codec", "int8, but the model keeps states or windows beside its KV", "give exact12 or raw"
            )
        name = fingerprint(None if directory is None else directory.path / "weights.json")
        num_arena_blocks = max(least_arena_blocks + 2 * layout.checkpoint_blocks, STAGING_BYTES // layout.block_bytes)
        if tiers.cpu:
            num_arena_blocks = int(tiers.cpu) // layout.block_bytes
        clock, stats, progress = time.time, StoreStats(losses=Losses(MOST_LOSSES)), StoreProgress()
        learned = Learned(None if directory is None else directory.path, name, stats)
        capacities = {"hbm": num_hbm_blocks, "cpu": num_arena_blocks, "disk": int(tiers.disk) // layout.block_bytes}
        steering = Steering(policy, clock, capacities, learned.steering)
        stats.policy_file_errors += steering.state_was_bad
        planner = Planner(layout.block_bytes, layout.block_size, always=load == "always" or tiers.role == "decode")
        learned.restore(planner)
        descriptor = None if others is None else others.arena_descriptor
        arena = Arena(layout, num_arena_blocks, device.type == "cuda", descriptor)
        on_disk = None if opening is None else opening.join(layout.dtype.itemsize, layout.dtype is torch.bfloat16)
        disk, write_back, remote = None if on_disk is None else on_disk.tier, None, None
        fleet = None if tiers.remote is None else fleet_secret(tiers.fleet_secret_file)
        secret = secret or (fleet.root if fleet else os.urandom(32) if directory is None else directory.secret)
        records = () if on_disk is None else on_disk.records
        holdings = Holdings(partial(lineage_root, secret, name), records) if reports else None
        in_cpu, losses = holdings if tiers.cpu else None, stats.losses if disk is None else None
        cpu = CpuTier(num_arena_blocks, arena.erase, bool(tiers.cpu), steering.order("cpu"), clock, in_cpu, losses)
        context = StoreContext(cpu, arena.view, steering, stats, clock)
        # Freed pages become usable two transactions later, so a batch must be small compared with the file.
        batch_bytes = min(BATCH_BYTES, max(int(tiers.disk) // 32, layout.block_bytes))
        io = TierWorker("disk", disk, progress.wake, WorkerLimits(batch_bytes=batch_bytes))
        if on_disk is not None:
            on_disk.index.state_shape = (layout.num_state_blocks, layout.block_size)
            tenant_bytes = None if tiers.disk_per_tenant is None else int(tiers.disk_per_tenant)
            write_back = WriteBack(context, on_disk, io, tenant_bytes, holdings)
        own = make_transfer(device, arena, progress.wake)
        transfer = own if others is None else RankedTransfer(own, others)
        if others is not None:
            others.use(FarBlocks(arena))
        identity = Identity(
            bytes.fromhex(name), label(model), layout.block_size, layout.num_state_blocks, layout.window_blocks
        )
        if owner is not None or fleet is not None:
            remote = remote_source(tiers, owner, fleet, name, layout, progress.wake, disk)
        store = KVStore(context, planner, identity, io, transfer, arena.splice, write_back, remote)
        parts = StoreParts(
            directory, threading.RLock(), progress, store, io, learned, secret, cpu, arena, transfer, holdings
        )
        connector = TieredConnector(parts, name)
        opened.pop_all()
    return connector


def remote_source(
    tiers: CacheTiers, owner: str | None, fleet: FleetSecret | None, fingerprint: str, layout: KVLayout,
    wake: Callable[[], None], disk: DiskTier | None,
) -> RemoteSource:  # fmt: skip
    """The tier of `--remote`, or the disk that another process owns: to the engine that is its disk."""
    if fleet is None:
        assert owner is not None
        tier = TierWorker("disk", OwnedBlocks(owner), wake, AT_ONCE_LIMITS)
        return RemoteSource(tier, None, is_told=True, finds_states=True)  # it deletes what builds on a block
    names = BlockNames(fleet, bytes.fromhex(fingerprint))
    workers = [TierWorker("remote", one, wake, AT_ONCE_LIMITS) for one in open_shared(tiers, names, layout)]
    prefill = None
    if tiers.prefill_url is not None:
        prefill = PrefillServer(parse_prefill_url(tiers.prefill_url), fleet.derived(PREFILL_KEY), fingerprint, wake)
    shared = workers[0] if len(workers) == 1 else SpreadTier(workers)
    has_objects = isinstance(parse_remote_url(str(tiers.remote)), ObjectAddress)
    return RemoteSource(shared, None if disk is None else disk.read, prefill, finds_states=has_objects)


def open_shared(tiers: CacheTiers, names: BlockNames, layout: KVLayout) -> list[BlockTier]:
    """The store of `--remote`; several Redis."""
    address = parse_remote_url(str(tiers.remote))
    if isinstance(address, ObjectAddress):
        from kvstore.remote.object_blocks import ObjectBlocks  # needs obstore, which only some have

        objects = ObjectBlocks(
            address, names, tiers.remote_ttl_s, layout.block_size, layout.block_bytes,
            num_state_blocks=layout.num_state_blocks, state_span=max(layout.window_blocks, 1),
        )  # fmt: skip
        return [objects]
    return [RedisBlocks(one, names, tiers.remote_ttl_s) for one in address]
