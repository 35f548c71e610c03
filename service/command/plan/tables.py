"""What `kvstore plan` prints for a person: what was replayed, what was assumed, a table, a chart and the advice."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.planning.sizing import FLAT
from kvstore.service.command.plan.chart import chart, short_size
from kvstore.service.command.store_tables import NONE, num_blocks
from kvstore.service.command.terminal import printable

TIERS = ("hbm", "cpu", "disk")
RATES = {  # of the service model: name, and how it is written
    "prefill_tokens_per_s": ("prefill", "{:,.0f} tokens/s"),
    "decode_tokens_per_s": ("decode", "{:,.4g} tokens/s a request"),
    "max_batch": ("batch", "{:,}"),
    "load_bytes_per_s": ("load", "{:,.3g} GB/s"),
    "read_bytes_per_s": ("read", "{:,.3g} GB/s"),
    "write_bytes_per_s": ("write", "{:,.3g} GB/s"),
}
WIDE = 100  # columns from which the table gets wider spacing
CAPTION = "hits: the hit rate, in all and by the tier that held them on arrival; TTFT: its mean"
NOTABLE = 0.01
CLOSE = 0.02  # of the ideal: there is no need for more


def show_plan(plan: Mapping[str, Any], out: Console) -> None:
    for line in (_replayed(plan["trace"]), _assumed(plan["assumptions"]), *_notes(plan)):
        out.print(Text(line))
    out.print(_table(plan, tight=out.width < WIDE))
    out.print(Text(CAPTION, style="dim"))
    out.print()
    for line in chart(plan, out.width, plain=not out.encoding.startswith("utf")):
        out.print(Text(line), no_wrap=True)
    out.print()
    for line in advice(plan):
        out.print(Text(line, style="bold"))


# -- above the table -------------------------------------------------------------------------------------------------
def _replayed(trace: Mapping[str, Any]) -> str:
    facts = [
        _counted(trace["requests"], "request"),
        _counted(trace["conversations"], "conversation"),
        _duration(trace["hours"]),
        f"{trace['prompt_tokens']:,} prompt and {trace['output_tokens']:,} output tokens",
    ]
    blocks = f"{num_blocks(trace['working_set_blocks'])} of {_counted(trace['block_size'], 'token')}"
    kept = f"working set {blocks}, {short_size(trace['working_set_bytes'])}"
    return f"{printable(trace['name'])}: {', '.join(facts)}; {kept}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _duration(hours: float) -> str:
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    return f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"


def _assumed(assumptions: Mapping[str, Any]) -> str:
    kv, on_disk = assumptions["kv_bytes_per_token"], assumptions["disk_bytes_per_token"]
    size = f"KV {short_size(kv)} a token"
    if abs(on_disk / kv - 1) > 0.01:
        size += f", {short_size(on_disk)} on disk"
    rates = {name: f"{word} {_rate(form, assumptions['service'][name])}" for name, (word, form) in RATES.items()}
    if "prefill_tokens_per_s" in assumptions["measured"]:
        num_tokens = assumptions["computed_tokens"]
        source = f"from {_counted(num_tokens, 'computed token')}" if num_tokens else "by an earlier engine"
        rates["prefill_tokens_per_s"] += f" ({source})"
    measured = [text for name, text in rates.items() if name in assumptions["measured"]]
    others = [text for name, text in rates.items() if name not in assumptions["measured"]]
    parts = [*assumptions["sizes"], f"policy {assumptions['policy']}", size, ", ".join(others)]
    return f"assumed: {'; '.join(parts)}" + (f"; measured by the store: {', '.join(measured)}" if measured else "")


def _rate(form: str, value: float) -> str:
    return form.format(value / 1e9 if "GB" in form else value)


def _notes(plan: Mapping[str, Any]) -> list[str]:
    notes = list(plan["trace"]["notes"])
    rows = [row for row in (plan["no_cache"], *plan["points"], plan["ideal"]) if row]
    overloaded = [row for row in rows if row["load"] > 1]
    if overloaded:
        where = "everywhere" if len(overloaded) == len(rows) else f"in {len(overloaded)} of {len(rows)} rows"
        worst = max(row["load"] for row in overloaded)
        text = f"more is asked of the service than it can do {where} (up to {worst:.1f} times as much)"
        notes.append(f"{text}: TTFT is then mostly time in a queue that only grows")
    dropped = max((row["dropped_share"] for row in plan["points"]), default=0.0)
    if dropped > NOTABLE:
        text = f"up to {dropped:.0%} of what was computed was not saved"
        notes.append(f"{text}: CPU had no room beside what is being read, or is yet to be written")
    num_refused = max((row["num_refused"] for row in plan["points"]), default=0)
    if num_refused:
        notes.append(f"up to {_counted(num_refused, 'request')} did not fit in the smallest HBM and were refused")
    if not plan["is_complete"]:
        notes.append("interrupted: not all sizes were replayed")
    return [f"note: {note}" for note in notes]


# -- the table -------------------------------------------------------------------------------------------------------
def _table(plan: Mapping[str, Any], tight: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0 if tight else (0, 1))
    for heading in ("HBM", "CPU", "disk"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("hits", "in HBM", "in CPU", "on disk", "TTFT", "P90"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    if plan["no_cache"]:
        table.add_row(NONE, NONE, NONE, *_measures(plan["no_cache"]), "no cache", style="dim")
    for row in plan["points"]:
        sizes = [short_size(row[f"{tier}_bytes"]) if row[f"{tier}_bytes"] else NONE for tier in TIERS]
        is_knee = row == plan["knee"]
        table.add_row(*sizes, *_measures(row), "< knee" if is_knee else "", style="bold" if is_knee else None)
    if plan["ideal"]:
        sizes = [short_size(plan["ideal"]["hbm_bytes"]), "all", NONE]
        table.add_row(*sizes, *_measures(plan["ideal"]), "unlimited", style="dim")
    return table


def _measures(row: Mapping[str, Any]) -> list[str]:
    by_tier = row["hit_rate_by_tier"]
    shares = [f"{by_tier[tier]:.1%}" if by_tier[tier] else NONE for tier in TIERS]
    return [f"{row['token_hit_rate']:.1%}", *shares, _seconds(row["ttft_mean_s"]), _seconds(row["ttft_p90_s"])]


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:,.2f} s" if value < 100 else f"{value:,.0f} s"


# -- the advice ------------------------------------------------------------------------------------------------------
def advice(plan: Mapping[str, Any]) -> list[str]:
    """A sentence that says what to buy, and one that says what it does for TTFT."""
    rows, knee = plan["points"], plan["knee"]
    if knee is not None:
        return [f"{_reach(knee, plan)}; {_beyond(knee, rows)}.", *_faster(knee, plan)]
    best = max(rows, key=lambda row: (row["token_hit_rate"], -row["total_bytes"]))
    lowest = min(rows, key=lambda row: row["total_bytes"])
    num_capacities = len({row["total_bytes"] for row in rows})
    if num_capacities > 1 and best["token_hit_rate"] - lowest["token_hit_rate"] < FLAT:
        return [f"No knee: more brings nothing; {_reach(lowest, plan)}.", *_faster(lowest, plan)]
    if num_capacities < 3:
        return [f"{_reach(best, plan)}; a knee needs three capacities or more.", *_faster(best, plan)]
    is_close = plan["ideal"] and plan["ideal"]["token_hit_rate"] - best["token_hit_rate"] < CLOSE
    rest = "which is all there is" if is_close else "and still more would bring more"
    return [f"No knee, the hit rate rises about evenly; {_reach(best, plan)}, {rest}.", *_faster(best, plan)]


def _named(row: Mapping[str, Any], rows: list[dict[str, Any]]) -> str:
    """The tiers below HBM; HBM too, where there are several of it."""
    several_hbm = len({one["hbm_bytes"] for one in rows}) > 1
    shown = [("HBM", row["hbm_bytes"])] if several_hbm or row["cpu_bytes"] == row["disk_bytes"] == 0 else []
    shown += [(name, row[f"{name.lower()}_bytes"]) for name in ("CPU", "disk") if row[f"{name.lower()}_bytes"]]
    texts = [f"{name} {short_size(size)}" for name, size in shown]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _reach(row: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    named = _named(row, plan["points"])
    verb = "reach" if " and " in named else "reaches"
    rate = f"{row['token_hit_rate']:.1%}"
    return f"{named} {verb} {rate}" + (f" of {plan['ideal']['token_hit_rate']:.1%} possible" if plan["ideal"] else "")


def _beyond(knee: Mapping[str, Any], rows: list[dict[str, Any]]) -> str:
    larger = [row for row in rows if row["total_bytes"] > knee["total_bytes"]]
    goal = min(larger, key=lambda row: (abs(row["total_bytes"] / knee["total_bytes"] - 2), -row["token_hit_rate"]))
    factor = goal["total_bytes"] / knee["total_bytes"]
    gained = max(row["token_hit_rate"] for row in larger if row["total_bytes"] <= goal["total_bytes"])
    points = 100 * (gained - knee["token_hit_rate"])
    amount = "twice as much" if 1.8 <= factor <= 2.2 else f"{factor:.1f} times as much"
    if points < 0.05:
        return f"{amount} adds nothing"
    return f"{amount} adds {points:.1f} point{'s' * (round(points, 1) != 1)}"


def _faster(row: Mapping[str, Any], plan: Mapping[str, Any]) -> list[str]:
    if not plan["no_cache"]:
        return []
    without, with_it = plan["no_cache"]["ttft_mean_s"], row["ttft_mean_s"]
    return [f"The mean TTFT is {_seconds(with_it)} there, and {_seconds(without)} without a cache."]
