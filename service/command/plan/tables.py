"""What `kvstore plan` prints and draws for a person: what was replayed and assumed, a table, a chart, the advice.

Knows a plan as --json prints it, and nothing of how it came about.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.config import format_size
from kvstore.errors import KVStoreError
from kvstore.planning.sizing import FLAT, Point, best_so_far
from kvstore.service.command.prompt import printable
from kvstore.service.command.store_tables import NONE
from kvstore.service.command.terminal import counted

HEIGHT, MOST_COLUMNS, LEAST_COLUMNS = 12, 72, 24
GUTTER = 8  # for the scale
MOST_LABELS = 9  # of a picture's capacities
POINT, KNEE, LINE, IDEAL = "●", "◆", "·", "─"
ASCII = str.maketrans({POINT: "o", KNEE: "#", LINE: ".", IDEAL: "-", "┤": "|", "└": "+", "┴": "+"})
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


def short_size(size_bytes: float) -> str:
    """As `format_size`, without a zero behind the point: 32 GiB."""
    return format_size(size_bytes).replace(".0 ", " ")


def curve_of(plan: Mapping[str, Any]) -> list[Point]:
    return best_so_far([Point(row["total_bytes"], row["token_hit_rate"]) for row in plan["points"]])


# -- in a terminal ---------------------------------------------------------------------------------------------------
def chart(plan: Mapping[str, Any], width: int, plain: bool = False) -> list[str]:
    """Lines of at most `width` characters; none where there are fewer than two capacities. plain: ASCII only."""
    curve = curve_of(plan)
    columns = min(width - GUTTER - 1, MOST_COLUMNS)
    if len(curve) < 2 or columns < LEAST_COLUMNS:
        return []
    places = _places([point.capacity for point in curve], columns)
    ideal = plan["ideal"]["token_hit_rate"] if plan["ideal"] else curve[-1].hit_rate
    top = min(max(math.ceil(max(ideal, curve[-1].hit_rate) * 10) / 10, 0.1), 1.0)
    grid = [[" "] * columns for _ in range(HEIGHT + 1)]
    grid[_level(ideal / top)] = [IDEAL if column % 2 == 0 else " " for column in range(columns)]
    _draw_curve(grid, curve, places, top)
    if plan["knee"]:
        at = next(i for i, point in enumerate(curve) if point.capacity >= plan["knee"]["total_bytes"])
        grid[_level(curve[at].hit_rate / top)][places[at]] = KNEE
    lines = ["hit rate"]
    for level in range(HEIGHT, -1, -1):
        scale = f"{top * level / HEIGHT:>6.0%} ┤" if level % 6 == 0 else " " * 7 + "┤"
        lines.append((scale + "".join(grid[level])).rstrip())
    lines += _scale_below(curve, places, columns)
    lines += _legend(bool(plan["knee"]), bool(plan["ideal"]), width)
    return [line.translate(ASCII) for line in lines] if plain else lines


def _places(capacities: list[int], columns: int) -> list[int]:
    """Columns on a logarithmic scale, where powers of two stand at equal distances."""
    low, high = math.log2(max(capacities[0], 1)), math.log2(capacities[-1])
    return [round((math.log2(max(one, 1)) - low) / (high - low) * (columns - 1)) for one in capacities]


def _level(share: float) -> int:
    return min(max(round(share * HEIGHT), 0), HEIGHT)


def _draw_curve(grid: list[list[str]], curve: list[Point], places: list[int], top: float) -> None:
    for i in range(len(curve) - 1):
        left, right = places[i], places[i + 1]
        for column in range(left + 1, right):
            part = (column - left) / (right - left)
            rate = curve[i].hit_rate + part * (curve[i + 1].hit_rate - curve[i].hit_rate)
            grid[_level(rate / top)][column] = LINE
    for point, place in zip(curve, places, strict=True):
        grid[_level(point.hit_rate / top)][place] = POINT


def _scale_below(curve: list[Point], places: list[int], columns: int) -> list[str]:
    """The axis and as many of the sizes as have room, the largest always."""
    axis = "".join("┴" if column in places else IDEAL for column in range(columns))
    labels = [" "] * columns
    free_from, free_to = 0, columns
    order = [len(curve) - 1, *range(len(curve) - 1)]
    for i in order:
        text = short_size(curve[i].capacity)
        start = min(max(places[i] - len(text) // 2, 0), columns - len(text))
        if start < free_from or start + len(text) > free_to:
            continue
        labels[start : start + len(text)] = text
        if i == order[0]:
            free_to = start - 2
        else:
            free_from = start + len(text) + 2
    return [" " * (GUTTER - 1) + "└" + axis, " " * GUTTER + "".join(labels).rstrip()]


def _legend(has_knee: bool, has_ideal: bool, width: int) -> list[str]:
    parts = [f"{POINT} all tiers together"]
    parts += [f"{KNEE} the knee"] if has_knee else []
    parts += [f"{IDEAL} {IDEAL} with room for everything"] if has_ideal else []
    line = " " * GUTTER + "   ".join(parts)
    return [line] if len(line) <= width else parts


# -- in a file -------------------------------------------------------------------------------------------------------
def draw(plan: Mapping[str, Any], path: Path) -> None:
    """Hit rate and mean TTFT against capacity. Raises KVStoreError when the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    rows = sorted(plan["points"], key=lambda row: row["total_bytes"])
    capacities = [row["total_bytes"] / 2**30 for row in rows]
    for axes, name, factor in ((above, "token_hit_rate", 100.0), (below, "ttft_mean_s", 1.0)):
        axes.plot(capacities, [row[name] * factor for row in rows], "o", color="tab:blue", label="replayed")
        for other, style, label in (("no_cache", ":", "no cache"), ("ideal", "--", "room for everything")):
            if plan[other]:
                axes.axhline(plan[other][name] * factor, linestyle=style, color="gray", label=label)
        if plan["knee"]:
            axes.axvline(plan["knee"]["total_bytes"] / 2**30, color="tab:orange", label="knee")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    curve = curve_of(plan)
    above.plot([one.capacity / 2**30 for one in curve], [one.hit_rate * 100 for one in curve], color="tab:blue")
    above.set(title=plan["trace"]["name"].replace("$", r"\$"), ylabel="tokens hit (%)")
    unit = "" if len(curve) <= MOST_LABELS else " (GiB)"
    below.set(xlabel=f"capacity of all tiers together{unit}", ylabel="mean TTFT (s)")
    if len(curve) > 1:
        below.set_xscale("log", base=2)
    if len(curve) <= MOST_LABELS:
        below.set_xticks([one.capacity / 2**30 for one in curve], [short_size(one.capacity) for one in curve])
        below.minorticks_off()
    above.legend()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise KVStoreError(f"{path} cannot be written: {error.strerror or error}") from None


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
        counted(trace["requests"], "request"),
        counted(trace["conversations"], "conversation"),
        _duration(trace["hours"]),
        f"{trace['prompt_tokens']:,} prompt and {trace['output_tokens']:,} output tokens",
    ]
    blocks = f"{counted(trace['working_set_blocks'], 'block')} of {counted(trace['block_size'], 'token')}"
    kept = f"working set {blocks}, {short_size(trace['working_set_bytes'])}"
    return f"{printable(trace['name'])}: {', '.join(facts)}; {kept}"


def _duration(hours: float) -> str:
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    return f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"


def _assumed(assumptions: Mapping[str, Any]) -> str:
    kv, on_disk = assumptions["kv_bytes_per_token"], assumptions["disk_bytes_per_token"]
    size = f"KV {short_size(kv)} a token"
    if abs(on_disk / kv - 1) > 0.01:
        size += f", {short_size(on_disk)} on disk"
    if assumptions["checkpoint_bytes"]:
        size += f", {short_size(assumptions['checkpoint_bytes'])} a checkpoint"
    rates = {name: f"{word} {_rate(form, assumptions['service'][name])}" for name, (word, form) in RATES.items()}
    if "prefill_tokens_per_s" in assumptions["measured"]:
        num_tokens = assumptions["computed_tokens"]
        source = f"from {counted(num_tokens, 'computed token')}" if num_tokens else "by an earlier engine"
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
        notes.append(f"up to {counted(num_refused, 'request')} did not fit in the smallest HBM and were refused")
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
