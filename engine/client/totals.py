"""The counters of several engines in one dict, of the shape that one engine has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SAME = {"block_bytes", "block_size", "bounds", "ranks_version"}  # in all engines


def total(parts: Sequence[Any], name: str = "") -> Any:
    """The sum of numbers, item by item of lists and dicts. Of rates the mean, of texts the first, of flags any.

    None stands for what is not known, or not so.
    """
    known = [part for part in parts if part is not None]
    if not known:
        return None
    first = known[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for part in known for key in part)
        return {key: total([part.get(key) for part in known], str(key)) for key in keys}
    if isinstance(first, bool):
        return any(known)
    if name in SAME or isinstance(first, str):
        return first
    if isinstance(first, Sequence):
        return [total(items) for items in zip(*known, strict=True)]
    return sum(known) / len(known) if name.endswith("_per_s") else sum(known)


def total_stats(engines: Sequence[Mapping[str, Any]], disk: Mapping[str, Any] | None) -> dict[str, Any]:
    """Counters of all engines that answer, and of the disk that they share; None without one."""
    found: dict[str, Any] = total(engines)
    if disk is None:
        return found
    links = [remote for engine in engines if (remote := engine.get("remote"))]
    found.pop("remote", None)  # that is this disk
    found["store"] = total([found["store"], disk["store"]])
    found["disk"] = dict(disk["disk"])
    found["disk"]["degraded"] = total([disk["disk"].get("degraded"), *(link["degraded"] for link in links)])
    for figure in ("evictable", "in_force"):
        found["policy"][figure]["disk"] = disk["policy"][figure]["disk"]
    found["lost"] = disk["lost"]
    return found
