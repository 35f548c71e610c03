"""Sums up the outcomes of an evaluation: recall with its confidence interval, row by row.

Knows nothing of models. An outcome is one asked fact, and whether the answer was right.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.builtin_model.conversations import Asked

DISTANCES = (64, 128, 256, 512, 768, 1024)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One asked fact, the answer it got, and whether that was right."""

    asked: Asked
    distance: int  # tokens from the end of the telling to the question
    answer: str
    right: bool


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    name: str
    right: int
    count: int

    @property
    def recall(self) -> float:
        return self.right / self.count if self.count else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.right, self.count)


def wilson(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % confidence interval of a share (E. B. Wilson, 1927)."""
    if count == 0:
        return 0.0, 1.0
    share, spread = right / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def row(name: str, outcomes: Iterable[Outcome], keep: Callable[[Outcome], bool] = lambda _: True) -> Row:
    kept = [outcome.right for outcome in outcomes if keep(outcome)]
    return Row(name, sum(kept), len(kept))


def distance_rows(told: list[Outcome]) -> list[Row]:
    rows, low = [], 0
    for high in DISTANCES:
        within = [o for o in told if low <= o.distance < high]
        rows.append(row(f"distance {low}-{high - 1} tokens", within))
        low = high
    return rows


def rows_of(outcomes: list[Outcome]) -> list[Row]:
    """All rows of the table; the first is the recall that counts."""
    told = [o for o in outcomes if o.asked.value is not None]
    rows = [
        row("RECALL of told facts", told),
        row("unknown answered as unknown", outcomes, lambda o: o.asked.value is None),
        row("corrected facts", told, lambda o: o.asked.corrected),
        row("never corrected facts", told, lambda o: not o.asked.corrected),
        row("value repeated when acknowledged", told, lambda o: o.asked.repeated),
        row("value said by the user only", told, lambda o: not o.asked.repeated),
        *distance_rows(told),
    ]
    for group in sorted({o.asked.kind.group for o in told}):
        rows.append(row(f"kind: {group}", [o for o in told if o.asked.kind.group == group]))
    return rows


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| what | right | asked | recall % | 95 % interval |", "|---|---|---|---|---|"]
    for one in rows:
        low, high = one.interval
        lines.append(f"| {one.name} | {one.right} | {one.count} | {100 * one.recall:.1f} "
                     f"| {100 * low:.1f} - {100 * high:.1f} |")
    return "\n".join(lines)
