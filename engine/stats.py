"""What an engine shows of itself, as a plain dict: counters and gauges of the loop, of its tiers and its sessions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvstore.config import format_size

if TYPE_CHECKING:
    from kvstore.engine.core.scheduler import Scheduler
    from kvstore.engine.model.step.runner import StepTimes
    from kvstore.engine.text.output_processor import Totals


def loop_stats(
    scheduler: Scheduler, times: StepTimes, totals: Totals, num_aborted: int, of_hbm: Mapping[str, object]
) -> dict[str, object]:
    """To be called between two steps. Step times are running totals in seconds. of_hbm: what else is said of it."""
    pool = scheduler.manager.pool
    return {
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
            **of_hbm,
        },
        "step": asdict(times),
        **scheduler.connector.stats(),
    }


def describe_tiers(stats: Mapping[str, Any]) -> str:
    """What an engine has taken, such as "hbm 512.0 MiB (auto), cpu 1.0 GiB, disk 8.0 GiB"."""
    sizes = {tier: stats[tier]["blocks"] * stats[tier]["block_bytes"] for tier in ("hbm", "cpu") if stats.get(tier)}
    if stats.get("disk"):
        sizes["disk"] = stats["disk"]["capacity_bytes"]
    auto = {"hbm": " (auto)"} if stats["hbm"].get("is_auto") else {}
    return ", ".join(f"{tier} {format_size(size)}{auto.get(tier, '')}" for tier, size in sizes.items() if size)
