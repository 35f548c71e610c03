"""What an engine shows of itself, in a few words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.config import format_size


def describe_tiers(stats: Mapping[str, Any]) -> str:
    """What an engine has taken, such as "hbm 512.0 MiB (auto), cpu 1.0 GiB, disk 8.0 GiB"."""
    sizes = {tier: stats[tier]["blocks"] * stats[tier]["block_bytes"] for tier in ("hbm", "cpu") if stats.get(tier)}
    if stats.get("disk"):
        sizes["disk"] = stats["disk"]["capacity_bytes"]
    auto = {"hbm": " (auto)"} if stats["hbm"].get("is_auto") else {}
    return ", ".join(f"{tier} {format_size(size)}{auto.get(tier, '')}" for tier, size in sizes.items() if size)
