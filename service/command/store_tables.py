"""What the commands on a store print for a person, from results as in `commands`.

--json has all numbers; `kvstore stats` shows those that one acts upon: a row per tier, other figures, failures if any.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvstore.config import format_size
from kvstore.engine.outputs import MISSES
from kvstore.service.command.prompt import YOU, printable
from kvstore.service.command.terminal import MODEL, counted

NONE = "–"
PIPE_WIDTH = 160  # when stdout is no terminal, so that nothing is cut
TITLE_CHARS, TITLE_MIN_CHARS = 60, 8
SYSTEM = "system> "
SPEAKERS = {"user": YOU, "assistant": MODEL, "system": SYSTEM}
Stats = Mapping[str, Any]
WIDE = 100  # columns, from which on reads and writes are shown too
COLUMNS = ("blocks", "used / limit", "full", "hit tokens", "hit rate", "evicted", "reads", "writes")
NUM_NARROW = 6  # of them
TIERS = ("hbm", "cpu", "disk", "remote")
LOST = {"dropped_saves": "saves", "dropped_writes": "writes"}
TROUBLES = {  # counters of the store whose place is among the failures
    "load_failures": "loads",
    "identity_mismatches": "blocks that were not what they should be",
    "housekeeping_errors": "background work",
    "policy_file_errors": "the policy's file",
}


def console() -> Console:
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def show_evicted(result: Mapping[str, Any], out: Console) -> None:
    verb = "would be evicted" if result["dry_run"] else "evicted"
    for tier, amount in result["tiers"].items():
        out.print(f"{tier}: {counted(amount['blocks'], 'block')}, {format_size(amount['bytes'])} {verb}")
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
        num_bad = report.get("num_corrupt", 0) + report.get("num_orphans", 0)  # `bad_ids` are the first of them
        out.print(f"blocks: {report['num_ok']:,} sound, {num_bad:,} damaged")
    for place in report.get("set_aside") or ():
        out.print(f"a file was damaged as a whole and was moved to {place}, and an empty one took its place")
    if not report.get("is_complete", True):
        out.print("the check of the blocks had to stop: their file is damaged")
    if report.get("bad_ids"):
        if delete:
            num_gone = report["num_deleted"]
            out.print(f"deleted {counted(num_gone, 'block')}: what was damaged, and what was computed after it")
        else:
            out.print("they are never served, and computed again when they are needed; --delete takes them out")
    sessions = report.get("sessions")
    if sessions is not None:
        num_problems = len(sessions["problems"])
        what = f"{counted(sessions['num_turns'], 'turn')}; {counted(num_problems, 'problem')}"
        out.print(f"sessions: {sessions['num_sessions']:,}, with {what}")
        for problem in sessions["problems"]:
            out.print(Text("  " + printable(problem)))
    out.print("all is well" if is_sound(report) else "damage was found")


def show_compacted(result: Mapping[str, Any], out: Console) -> None:
    before, after = result.get("before_bytes", 0), result.get("after_bytes", 0)
    out.print(
        f"blocks: {format_size(before)} before, {format_size(after)} now; {format_size(abs(before - after))} "
        + ("given back" if after <= before else "more")
    )


def show_why(result: Mapping[str, Any], out: Console) -> None:
    """What a request found, and what it missed and why, for each of its answers."""
    for usage in result["answers"]:
        details, miss = usage["cached_tokens_details"], usage["miss"]
        num_cached = sum(details.values()) - details.get("quantised", 0)  # which is counted by tier, too
        out.print(f"{usage['prompt_tokens']:,} prompt tokens, {num_cached:,} of them cached")
        if miss is None:
            out.print("nothing was computed that an earlier request of a known conversation had")
            continue
        place = "before all messages" if "message" not in miss else f"in message {miss['message']} ({miss['role']})"
        out.print(Text(f"missed {miss['tokens']:,} tokens from token {miss['token']:,} on, {place}: {_cause(miss)}"))


def _cause(miss: Mapping[str, Any]) -> str:
    when = f"{short_time(time.time() - miss['at'])} ago" if "at" in miss else None
    facts = ", ".join(fact for fact in (miss.get("tier"), when, miss.get("why")) if fact is not None)
    return printable(MISSES[miss["cause"]] + (f" ({facts})" if facts else ""))


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
    """What was said, as `kvstore chat` shows it, below a line about the session."""
    session, now_s = result["session"], time.time()
    facts = [
        counted(session["turns"], "turn"),
        f"{session['tokens']:,} tokens",
        f"last used {short_time(now_s - session['updated_s'])} ago",
    ]
    if session.get("model"):
        facts.insert(0, printable(str(session["model"])))
    if session.get("expires_s") is not None:
        facts.append(f"expires {_expires(session, now_s)}")
    out.print(Text(f"{session['id']}: {', '.join(facts)}", style="bold"), soft_wrap=True)
    _show_messages(result["messages"], out)


def show_deleted(name: str, result: Mapping[str, Any], out: Console) -> None:
    blocks = counted(result["blocks"], "block")
    out.print(f"session {name} is deleted, with {blocks} that no other session refers to", soft_wrap=True)


def show_accepted(_: str, result: Mapping[str, Any], out: Console) -> None:
    said = "the sessions that are missing are given up" if result["accepted"] else "no sessions are missing"
    out.print(f"{said}; those that are there stay", soft_wrap=True)


def _show_messages(messages: Sequence[Mapping[str, Any]], out: Console) -> None:
    for message in messages:
        who = SPEAKERS.get(message.get("role", ""), printable(message.get("role", "?")) + "> ")
        style = "dim" if who == SYSTEM else ""
        parts = [message.get("content", ""), *map(_call, message.get("tool_calls") or ())]
        out.print(Text(who + printable("\n".join(filter(None, parts))), style=style), soft_wrap=True)


def _call(call: Mapping[str, Any]) -> str:
    """A call of a tool as name(arguments), which are the text of a JSON object, or the object."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    return f"{name}({arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)})"


def show_stats(stats: Stats, out: Console) -> None:
    out.print(stats_view(stats, out.width))


@contextmanager
def live_stats(out: Console) -> Iterator[Callable[[Stats], None]]:
    """Yields a function that shows numbers: in a terminal they replace the ones before, elsewhere they follow below."""
    if not out.is_terminal:
        yield lambda stats: show_stats(stats, out)
        return
    from rich.live import Live  # which single answers do without

    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:

        def show(stats: Stats) -> None:
            at = Text(f"{time.strftime('%H:%M:%S')}, Ctrl-C ends", style="dim")
            live.update(Group(stats_view(stats, out.width), at), refresh=True)

        yield show


def stats_view(stats: Stats, width: int) -> Group:
    parts: list[Text | Table] = []
    if stats.get("model"):
        parts.append(Text(f"model {printable(str(stats['model']))}", style="bold"))
    parts.append(_tier_table(stats, width))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (*_facts(stats), *_troubles(stats)):
        table.add_row(Text(name), Text(value))
    return Group(*parts, table)


def _part(stats: Stats, name: str) -> Stats:
    return stats.get(name) or {}


# -- the tiers -------------------------------------------------------------------------------------------------------
def _tier_table(stats: Stats, width: int) -> Table:
    """A row per tier; empty columns are left out."""
    rows = {tier: _tier_row(stats, tier) for tier in TIERS if _part(stats, tier)}
    num_columns = len(COLUMNS) if width >= WIDE else NUM_NARROW
    shown = [i for i in range(num_columns) if any(row[i] != NONE for row in rows.values())]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tier", no_wrap=True)
    for i in shown:
        table.add_column(COLUMNS[i], justify="right", no_wrap=True)
    for tier, row in rows.items():
        table.add_row(tier, *(row[i] for i in shown))
    return table


def _tier_row(stats: Stats, tier: str) -> tuple[str, ...]:
    part, store, tokens = _part(stats, tier), _part(stats, "store"), _part(stats, "tokens")
    moved: tuple[int | None, int | None] = (None, None)
    hits, num_tokens = _part(tokens, "cached_by_tier").get(tier), tokens.get("prompt_tokens", 0)
    hit_rate = f"{hits / num_tokens:.1%}" if hits is not None and num_tokens else NONE
    if tier == "remote":  # how much it holds is not known here
        return NONE, NONE, NONE, _count(hits), hit_rate, NONE, _count(part["reads"]), _count(part["stored"])
    if tier == "disk":
        blocks, used, limit = part.get("blocks"), part.get("bytes", 0), part.get("capacity_bytes", 0)
        evicted = store.get("disk_evictions")
        moved = (part.get("reads"), part.get("writes")) if store else moved  # else those of this command
    else:
        block_bytes, blocks = part.get("block_bytes", 0), part.get("cached_blocks", 0)
        used, limit = blocks * block_bytes, part.get("blocks", 0) * block_bytes
        evicted = part.get("evicted_blocks")
        if tier == "cpu":
            moved = (store.get("loaded"), store.get("saved"))
    full = f"{used / limit:.0%}" if limit else NONE
    amount = f"{format_size(used)} / {format_size(limit) if limit else NONE}"
    return (_count(blocks), amount, full, _count(hits), hit_rate, _count(evicted), *map(_count, moved))


def _count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


# -- the rest --------------------------------------------------------------------------------------------------------
def _facts(stats: Stats) -> list[tuple[str, str]]:
    tokens, requests, sessions = (_part(stats, name) for name in ("tokens", "requests", "sessions"))
    facts = []
    if prompt_tokens := tokens.get("prompt_tokens", 0):
        share = tokens.get("cached_tokens", 0) / prompt_tokens
        reencoded = _part(tokens, "cached_by_tier").get("reencoded", 0)
        extra = f", {reencoded:,} of them re-encoded" if reencoded else ""
        quantised = _part(tokens, "cached_by_tier").get("quantised", 0)
        extra += f", {quantised:,} quantised" if quantised else ""
        facts.append(("hit rate", f"{share:.1%} of {prompt_tokens:,} prompt tokens{extra}"))
    if requests:
        facts.append(("requests", _counts(requests) or "none yet"))
    if replicas := stats.get("replicas"):
        num_up = sum(one["process"]["state"] == "running" for one in replicas)
        open_ones = " and ".join(str(one["process"]["requests"]) for one in replicas)
        facts.append(("engines", f"{num_up} of {len(replicas)} answer; open requests: {open_ones}"))
    facts.append(("sessions", f"{sessions.get('sessions', 0):,}, with {counted(sessions.get('turns', 0), 'turn')}"))
    for name, amount in _part(_part(stats, "disk"), "models").items():
        shown = f"{counted(amount['blocks'], 'block')}, {format_size(amount['bytes'])}"
        facts.append((f"model {printable(name) or 'not named'}", shown))
    if remote := _part(stats, "remote"):
        facts.append(("remote", _remote(remote)))
    if policy := _part(stats, "policy"):
        facts.append(("policy", _policy(policy)))
    if rates := _rates(stats):
        facts.append(("measured", rates))
    return facts


def _remote(remote: Stats) -> str:
    """Where it is, what it was asked to move, and whether it is asked at all."""
    moved = f"{format_size(remote['read_bytes'])} read, {format_size(remote['stored_bytes'])} stored"
    state = "takes no more" if remote["full"] else "answers"
    if remote["degraded"]:
        state = "is left alone and tried again by itself"
    counts = _counts({"waiting": remote["waiting_blocks"], "dropped": remote["dropped_blocks"]})
    return f"{printable(remote['url'])} {state}; {moved}{f'; {counts}' if counts else ''}"


def _policy(policy: Stats) -> str:
    """The configured policy, what it does on each tier now, and what it has learned from."""
    shown = policy["policy"]
    if shown == "auto":
        in_force = policy["in_force"]
        names = set(in_force.values())
        each = ", ".join(f"{name} on {tier}" for tier, name in in_force.items())
        shown = f"auto, now {names.pop() if len(names) == 1 else each}"
    returns, conversations = policy["num_returns_learned"], policy["num_conversations"]
    return f"{shown}; {counted(returns, 'return')} learned, {counted(conversations, 'conversation')}"


def _rates(stats: Stats) -> str:
    store, disk = _part(stats, "store"), _part(stats, "disk")
    shown = []
    if rate := store.get("prefill_tokens_per_s"):
        shown.append(f"prefill {rate:,.0f} tokens/s")
    rates = {
        "load": store.get("load_bytes_per_s"),
        "disk read": store.get("read_bytes_per_s") or disk.get("read_bytes_per_s"),
        "disk write": disk.get("write_bytes_per_s"),
    }
    return ", ".join([*shown, *(f"{name} {format_size(rate)}/s" for name, rate in rates.items() if rate)])


def _troubles(stats: Stats) -> list[tuple[str, str]]:
    disk, store = _part(stats, "disk"), _part(stats, "store")
    causes = {**(disk.get("failures") or {}), **(store.get("read_failures") or {})}
    causes |= {f"remote {cause}": num for cause, num in _part(stats, "remote").get("failures", {}).items()}
    causes |= {words: store[name] for name, words in TROUBLES.items() if store.get(name)}
    facts = []
    if shown := _counts({printable(str(cause)): num for cause, num in causes.items()}):
        facts.append(("failures", shown))
    if lost := _counts({words: store.get(name) for name, words in LOST.items()}):
        facts.append(("dropped", f"{lost}: there was no room, or the disk was too slow"))
    for part in (stats, disk):
        if part.get("lost"):
            facts.append(("lost", printable(str(part["lost"]))))
    if _part(stats, "sessions").get("lost"):
        facts.append(("lost", "the sessions' file was removed or replaced; kvstore compact writes a removed one again"))
    if _part(stats, "sessions").get("unreachable"):
        facts.append(("away", "the Redis with the sessions does not answer: the counts are old"))
    if _part(stats, "sessions").get("missing"):
        facts.append(("missing", "sessions that this store held; kvstore verify says more"))
    if reason := _part(stats, "answers").get("failing"):
        facts.append(("degraded", f"the store of answers fails: {printable(str(reason))}"))
    if disk.get("degraded"):
        facts.append(("degraded", f"the disk cannot be written: {printable(str(disk['degraded']))}"))
    if reason := _part(stats, "remote").get("degraded"):
        facts.append(("degraded", f"the remote tier does not answer: {printable(str(reason))}"))
    if disk.get("broken"):
        facts.append(("broken", "the disk tier's file is damaged; kvstore verify says more"))
    return facts


def _counts(values: Stats) -> str:
    """Numbers that are not zero, with their names."""
    counts = {name: value for name, value in values.items() if isinstance(value, int) and not isinstance(value, bool)}
    return ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in counts.items() if value)
