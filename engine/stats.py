"""What an engine shows of itself, as a plain dict: counters and gauges of the loop, of its tiers and its sessions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvstore.config import format_size

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.output_processor import Totals
    from engine.scheduler import Scheduler


def engine_stats(
    engine: Engine, scheduler: Scheduler, totals: Totals, num_aborted: int, is_auto: bool
) -> dict[str, object]:
    """To be called with the engine's lock held. Step times are running totals in seconds. is_auto: hbm "auto"."""
    pool = engine.pool
    return {
        "model": engine.model_name,
        "requests": {
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "finished": totals.num_requests,
            "aborted": num_aborted,
            "preemptions": scheduler.num_preemptions,
        },
        "tokens": totals.as_dict(),
        "hbm": {
            "blocks": pool.num_blocks,
            "free_blocks": pool.num_free,
            "cached_blocks": pool.num_cached,
            "evicted_blocks": pool.num_evictions,
            "removed_blocks": pool.num_forgotten,
            "block_bytes": engine.block_bytes,
            "block_size": engine.block_size,
            "is_auto": is_auto,
        },
        "step": asdict(engine.step_times),
        **engine.connector.stats(),
    }


def describe_tiers(stats: Mapping[str, Any]) -> str:
    """What an engine has taken, such as "hbm 512.0 MiB (auto), cpu 1.0 GiB, disk 8.0 GiB"."""
    sizes = {tier: stats[tier]["blocks"] * stats[tier]["block_bytes"] for tier in ("hbm", "cpu") if stats.get(tier)}
    if stats.get("disk"):
        sizes["disk"] = stats["disk"]["capacity_bytes"]
    auto = {"hbm": " (auto)"} if stats["hbm"].get("is_auto") else {}
    return ", ".join(f"{tier} {format_size(size)}{auto.get(tier, '')}" for tier, size in sizes.items() if size)
