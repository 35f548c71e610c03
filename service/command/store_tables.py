"""What evict, verify, compact and sessions print for a person, from results as in `commands`."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.config import format_size
from kvstore.service.command.terminal import MODEL, YOU, printable

NONE = "–"
PIPE_WIDTH = 160  # when stdout is no terminal, so that nothing is cut
TITLE_CHARS, TITLE_MIN_CHARS = 60, 8
SYSTEM = "system> "
SPEAKERS = {"user": YOU, "assistant": MODEL, "system": SYSTEM}


def console() -> Console:
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def num_blocks(number: int) -> str:
    return f"{number:,} block{'s' * (number != 1)}"


def num_turns(number: int) -> str:
    return f"{number:,} turn{'s' * (number != 1)}"


def show_evicted(result: Mapping[str, Any], out: Console) -> None:
    verb = "would be evicted" if result["dry_run"] else "evicted"
    for tier, amount in result["tiers"].items():
        out.print(f"{tier}: {num_blocks(amount['blocks'])}, {format_size(amount['bytes'])} {verb}")
    if not result["tiers"]:
        out.print("there is no tier to evict from")


def is_sound(report: Mapping[str, Any]) -> bool:
    sessions = report.get("sessions") or {}
    damaged = report.get("bad_ids") or report.get("num_corrupt") or report.get("num_orphans")
    return not (damaged or report.get("set_aside") or sessions.get("problems")) and bool(
        report.get("is_complete", True)
    )


def show_verified(delete: bool, report: Mapping[str, Any], out: Console) -> None:
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
        what = f"{num_turns(sessions['num_turns'])}; {num_problems:,} problem{'s' * (num_problems != 1)}"
        out.print(f"sessions: {sessions['num_sessions']:,}, with {what}")
        for problem in sessions["problems"]:
            out.print(Text("  " + printable(problem)))
    out.print("all is well" if is_sound(report) else "damage was found")


def show_compacted(result: Mapping[str, Any], out: Console) -> None:
    before, after = result.get("before_bytes", 0), result.get("after_bytes", 0)
    out.print(
        f"blocks: {format_size(before)} before, {format_size(after)} now; {format_size(before - after)} given back"
    )


def show_sessions(tenant: str, result: Mapping[str, Any], out: Console) -> None:
    """Numbers and ids are shown whole, as far as there is room; titles are cut."""
    sessions: Sequence[Mapping[str, Any]] = result["sessions"]
    if not sessions:
        out.print(Text("no sessions" + (f" of tenant {printable(tenant)}" if tenant else "")))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("id", no_wrap=True)
    table.add_column("title", max_width=TITLE_CHARS, min_width=TITLE_MIN_CHARS)
    for heading in ("turns", "tokens", "age", "expires"):
        table.add_column(heading, justify="right", no_wrap=True)
    now_s = time.time()
    for session in sessions:
        text = " ".join(printable(str(session["title"])).split())
        title = Text(text, no_wrap=True, overflow="ellipsis")
        counts = (f"{session['turns']:,}", f"{session['tokens']:,}", short_time(now_s - session["updated_s"]))
        table.add_row(Text(str(session["id"])), title, *counts, _expires(session, now_s))
    out.print(table)
    out.print(Text("age: since the last turn; kvstore sessions show ID prints what was said", style="dim"))


def _expires(session: Mapping[str, Any], now_s: float) -> str:
    at_s = session.get("expires_s")
    return NONE if at_s is None else "due" if at_s <= now_s else f"in {short_time(at_s - now_s)}"


def short_time(seconds: float) -> str:
    """A length of time in its largest unit: 12 min."""
    seconds = max(round(seconds), 0)
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{round(seconds / unit):,} {name}"
    return f"{seconds} s"


def show_transcript(_: str, result: Mapping[str, Any], out: Console) -> None:
    """What was said, as `kvstore chat` shows it, below a line about the session; at the end what was set aside."""
    session, now_s = result["session"], time.time()
    facts = [
        num_turns(session["turns"]),
        f"{session['tokens']:,} tokens",
        f"last used {short_time(now_s - session['updated_s'])} ago",
    ]
    if session.get("model"):
        facts.insert(0, printable(str(session["model"])))
    if session.get("expires_s") is not None:
        facts.append(f"expires {_expires(session, now_s)}")
    out.print(Text(f"{session['id']}: {', '.join(facts)}", style="bold"), soft_wrap=True)
    _show_messages(result["messages"], out)
    for one in result.get("aside") or ():
        unreadable = "" if one["messages"] is not None else " (it cannot be read)"
        out.print(Text(f"set aside by a repair: turn {one['turn']}{unreadable}", style="bold"))
        _show_messages(one["messages"] or (), out)


def show_deleted(name: str, result: Mapping[str, Any], out: Console) -> None:
    blocks = num_blocks(result["blocks"])
    out.print(f"session {name} is deleted, with {blocks} that no other session refers to", soft_wrap=True)


def show_repaired(name: str, result: Mapping[str, Any], out: Console) -> None:
    if not result["repaired"]:
        out.print(f"session {name} is whole; nothing was changed", soft_wrap=True)
        return
    kept, aside = result["turns"], result["aside"]
    out.print(
        f"session {name} has its first {num_turns(kept)}; {aside} more {'is' if aside == 1 else 'are'} "
        f"set aside, and shown by `kvstore sessions show {name}`", soft_wrap=True,
    )  # fmt: skip


def show_accepted(_: str, result: Mapping[str, Any], out: Console) -> None:
    said = "the sessions that are missing are given up" if result["accepted"] else "no sessions are missing"
    out.print(f"{said}; those that are there stay", soft_wrap=True)


def _show_messages(messages: Sequence[Mapping[str, str]], out: Console) -> None:
    for message in messages:
        who = SPEAKERS.get(message.get("role", ""), printable(message.get("role", "?")) + "> ")
        style = "dim" if who == SYSTEM else ""
        out.print(Text(who + printable(message.get("content", "")), style=style), soft_wrap=True)
