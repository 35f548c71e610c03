"""Hit rate against capacity: as characters in a terminal, and as a picture in a file.

Knows a plan as --json prints it, and nothing of how it came about.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.config import format_size
from kvstore.errors import KVStoreError
from kvstore.planning.sizing import Point, best_so_far

HEIGHT, MOST_COLUMNS, LEAST_COLUMNS = 12, 72, 24
GUTTER = 8  # for the scale
MOST_LABELS = 9  # of a picture's capacities
POINT, KNEE, LINE, IDEAL = "●", "◆", "·", "─"
ASCII = str.maketrans({POINT: "o", KNEE: "#", LINE: ".", IDEAL: "-", "┤": "|", "└": "+", "┴": "+"})


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
