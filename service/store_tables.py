"""What the commands on a store print for a person: tables of sizes and counts of results as in `commands`."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.config import format_size
from service.terminal import printable

NONE = "–"
PIPE_WIDTH = 160  # when stdout is no terminal, so that nothing is cut
TITLE_CHARS = 60
_SKIPPED = {"block_bytes", "capacity", "codec", "index_loaded", "read_failures", "failures", "models"}


def console() -> Console:
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def show_stats(stats: Mapping[str, Any], out: Console) -> None:
    """Model and requests, a row per tier, what failed, and the counters that are not zero."""
    tokens, requests = stats.get("tokens") or {}, stats.get("requests") or {}
    if stats.get("model"):
        out.print(Text(f"model {printable(str(stats['model']))}", style="bold"))
    out.print(_tier_table(stats))
    facts = []
    prompt_tokens = tokens.get("prompt_tokens", 0)
    if prompt_tokens:
        share = tokens.get("cached_tokens", 0) / prompt_tokens
        facts.append(("hit rate", f"{share:.1%} of {prompt_tokens:,} prompt tokens"))
    if requests:
        facts.append(("requests", _counts(requests)))
    sessions = stats.get("sessions") or {}
    facts.append(("sessions", f"{sessions.get('sessions', 0):,}, with {sessions.get('turns', 0):,} turns"))
    for name, amount in (_part(stats, "disk").get("models") or {}).items():
        shown = f"{num_blocks(amount['blocks'])}, {format_size(amount['bytes'])}"
        facts.append((f"model {printable(name) or 'not named'}", shown))
    if policy := _part(stats, "policy"):
        facts.append(("eviction", _policy(policy)))
    facts += _failures(stats)
    counters = {name: value for name, value in _part(stats, "store").items() if name not in _SKIPPED}
    if shown := _counts(counters):
        facts.append(("store", shown))
    _print_facts(facts, out)


def _part(stats: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return stats.get(name) or {}


def _policy(policy: Mapping[str, Any]) -> str:
    """What is asked for, what that means on each tier now, and what it was learned from."""
    in_force = ", ".join(f"{tier} {name}" for tier, name in policy["in_force"].items())
    shown = policy["policy"] if policy["policy"] != "auto" else f"auto (now {in_force})"
    learned = f"{policy['num_returns_learned']:,} returns learned"
    return f"{shown}; {policy['num_conversations']:,} conversations, {learned}"


def _tier_table(stats: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("tier")
    for heading in ("blocks", "used", "capacity", "full", "hit tokens", "reads", "writes", "evicted"):
        table.add_column(heading, justify="right")
    store = _part(stats, "store")
    hits = (stats.get("tokens") or {}).get("cached_by_tier") or {}
    for tier in ("hbm", "cpu"):
        part = _part(stats, tier)
        if part:
            block_bytes, cached = part.get("block_bytes", 0), part.get("cached_blocks", 0)
            moved = (store.get("loaded"), store.get("saved")) if tier == "cpu" else (None, None)
            used, capacity = cached * block_bytes, part.get("blocks", 0) * block_bytes
            table.add_row(tier, *_tier_row(cached, used, capacity, hits.get(tier), moved, part.get("evicted_blocks")))
    disk = _part(stats, "disk")
    if disk:
        moved = (disk.get("reads"), disk.get("writes"))
        used, capacity = disk.get("bytes", 0), disk.get("capacity_bytes", 0)
        row = _tier_row(disk.get("blocks"), used, capacity, hits.get("disk"), moved, store.get("disk_evictions"))
        table.add_row("disk", *row)
    return table


def _tier_row(
    blocks: int | None, used: int, capacity: int, hits: int | None, moved: Sequence[int | None], evicted: int | None
) -> list[str]:
    full = f"{used / capacity:.0%}" if capacity else NONE
    sizes = [format_size(used), format_size(capacity) if capacity else NONE, full]
    return [_count(blocks), *sizes, _count(hits), *map(_count, moved), _count(evicted)]


def _count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def _failures(stats: Mapping[str, Any]) -> list[tuple[str, str]]:
    disk, store = _part(stats, "disk"), _part(stats, "store")
    causes = {**(disk.get("failures") or {}), **(store.get("read_failures") or {})}
    facts = [("failures", ", ".join(f"{printable(str(cause))} {num:,}" for cause, num in causes.items()) or "none")]
    if disk.get("degraded"):
        facts.append(("degraded", f"the disk cannot be written: {printable(str(disk['degraded']))}"))
    if disk.get("broken"):
        facts.append(("broken", "the disk tier's file is damaged"))
    return facts


def _counts(values: Mapping[str, Any]) -> str:
    """Numbers that are not zero, with their names."""
    shown = []
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value:
            continue
        words = name.replace("_", " ")
        if name.endswith("_per_s"):
            shown.append(f"{words.removesuffix(' per s')} {value:,.0f}/s")
        elif name.endswith("_bytes"):
            shown.append(f"{words.removesuffix(' bytes')} {format_size(value)}")
        elif name.endswith("_s"):
            shown.append(f"{words.removesuffix(' s')} {value:,.3g} s")
        else:
            shown.append(f"{words} {value:,}" if isinstance(value, int) else f"{words} {value:,.3g}")
    return ", ".join(shown)


def _print_facts(facts: Sequence[tuple[str, str]], out: Console) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(Text(name), Text(value))
    out.print(table)


def num_blocks(number: int) -> str:
    return f"{number:,} block{'s' * (number != 1)}"


def show_evicted(result: Mapping[str, Any], out: Console) -> None:
    verb = "would be evicted" if result["dry_run"] else "evicted"
    for tier, amount in result["tiers"].items():
        out.print(f"{tier}: {num_blocks(amount['blocks'])}, {format_size(amount['bytes'])} {verb}")
    if not result["tiers"]:
        out.print("there is no tier to evict from")


def is_sound(report: Mapping[str, Any]) -> bool:
    """Whether a verification found nothing wrong."""
    sessions = report.get("sessions") or {}
    damaged = report.get("bad_ids") or report.get("num_corrupt") or report.get("num_orphans")
    return not (damaged or report.get("set_aside") or sessions.get("problems")) and bool(
        report.get("is_complete", True)
    )


def show_verified(report: Mapping[str, Any], delete: bool, out: Console) -> None:
    if "num_ok" in report:
        num_bad = len(report.get("bad_ids") or ())
        out.print(f"blocks: {report['num_ok']:,} sound, {num_bad:,} damaged")
    for place in report.get("set_aside") or ():
        out.print(f"a file was damaged as a whole and was moved to {place}, and an empty one took its place")
    if not report.get("is_complete", True):
        out.print("the check of the blocks had to stop: their file is damaged")
    if report.get("bad_ids"):
        if delete:
            num_gone = report.get("num_deleted") or len(report["bad_ids"])
            out.print(f"deleted {num_blocks(num_gone)}: what was damaged, and what was computed after it")
        else:
            out.print("they are never served, and computed again when they are needed; --delete takes them out")
    sessions = report.get("sessions")
    if sessions is not None:
        num_problems = len(sessions["problems"])
        out.print(
            f"sessions: {sessions['num_sessions']:,}, with {sessions['num_turns']:,} turns; {num_problems:,} problems"
        )
        for problem in sessions["problems"]:
            out.print(Text("  " + printable(problem)))
    out.print("all is well" if is_sound(report) else "damage was found")


def show_compacted(result: Mapping[str, Any], out: Console) -> None:
    before, after = result.get("before_bytes", 0), result.get("after_bytes", 0)
    out.print(
        f"blocks: {format_size(before)} before, {format_size(after)} now; {format_size(before - after)} given back"
    )


def show_sessions(sessions: Sequence[Mapping[str, Any]], tenant: str, out: Console) -> None:
    if not sessions:
        out.print(Text("no sessions" + (f" of tenant {printable(tenant)}" if tenant else "")))
        return
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("id", no_wrap=True)
    for heading in ("turns", "tokens", "last used"):
        table.add_column(heading, justify="right")
    table.add_column("title", no_wrap=True, overflow="ellipsis", max_width=TITLE_CHARS)
    for session in sessions:
        title = Text(" ".join(printable(str(session["title"])).split()))
        counts = (f"{session['turns']:,}", f"{session['tokens']:,}", ago(time.time() - session["updated_s"]))
        table.add_row(Text(str(session["id"])), *counts, title)
    out.print(table)


def ago(seconds: float) -> str:
    """A time in the past, in its largest unit."""
    for unit, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= unit:
            count = int(seconds // unit)
            return f"{count:,} {name}{'s' * (count != 1)} ago"
    return "just now"
