"""Pictures for the README, from the JSON files of bench.peers, bench.ttft and bench.gpu: returning turns, and speed.

Missing rows are left out. Quick runs and rehearsals are refused, because they measure too little. The same files give
the same bytes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common import EXIT_USAGE, Row, say
from bench.peers.__main__ import MODELS

SHAPES = {"m": "Llama, 110 million parameters", "l": "Qwen-2.5-0.5B's shape"}  # of bench.peers; others are not drawn
PEERS = {"vllm": "vLLM", "transformers": "transformers", "llamacpp": "llama.cpp"}
STATES = {"last turn, after a restart": "after a restart", "last turn, computed anew": "computed anew"}
TIERS = {  # measures of bench.ttft and bench.gpu without what they say in brackets
    "HBM hit": "in HBM",
    "CPU hit": "on the CPU",
    "disk hit, page cache warm": "on disk",
    "disk hit, page cache warm, same process": "on disk",
    "disk hit after a restart, page cache warm": "after a restart",
    "disk hit after a restart, page cache cold": "not in page cache",
    "history recomputed": "computed anew",
}
COLOURS = {"kvstore": "#2f6fde", "the peer": "#a9b1bc", "ahead of the peer": "#2f6fde", "behind it": "#d9822b"}
INK, FAINT, EDGE, PAPER = "#24292f", "#6e7781", "#d0d7de", "#ffffff"
# Inches. There are two columns of panels. A bar takes BAR, a group of bars GAP more, a heading or title HEADING.
WIDTH, MARGIN, LABELS, VALUES, BAR, GAP, HEADING, TOP, BOTTOM = 9.0, 0.3, 1.25, 0.55, 0.16, 0.07, 0.28, 0.65, 0.5


class PictureError(Exception):
    """A file that cannot be drawn; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar."""

    whose: str  # a name in COLOURS
    value: float
    text: str  # at its end


@dataclass(slots=True)
class Panel:
    """Groups of bars by heading and label. A later group replaces one of the same name."""

    title: str
    blocks: dict[str, dict[str, list[Bar]]] = field(default_factory=dict)
    line: float | None = None  # a value with which all bars are compared

    def add(self, heading: str, label: str, *bars: Bar) -> None:
        self.blocks.setdefault(heading, {})[label] = list(bars)

    @property
    def groups(self) -> list[list[Bar]]:
        return [bars for block in self.blocks.values() for bars in block.values()]

    @property
    def height(self) -> float:
        """In inches, without the title."""
        return HEADING * len(self.blocks) + sum(GAP + BAR * len(bars) for bars in self.groups)

    @property
    def largest(self) -> float:
        return max(bar.value for bars in self.groups for bar in bars)


@dataclass(frozen=True, slots=True)
class Result:
    """One benchmark's file."""

    name: str  # of the benchmark, without `bench.`
    asked: argparse.Namespace  # its flags, as far as they matter here
    rows: list[Row]
    machine: str

    @property
    def peer(self) -> str:
        shared = ", shared memory" if self.asked.lmcache == "shm" else ""
        return PEERS[self.asked.peer] + (f" + LMCache{shared}" if self.asked.lmcache else "")


def read(path: Path) -> Result:
    """Read a file. Raises PictureError if it is not ours, or measures too little."""
    try:
        document = json.loads(path.read_text())
        words, rows, machine = shlex.split(document["command"]), document["results"], document["machine"]
        name = words[2].removeprefix("bench.")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise PictureError(f"{path} is not what a benchmark writes with --json: {error}") from error
    if name not in ("peers", "ttft", "gpu"):
        raise PictureError(f"{path} is of bench.{name}; pictures are drawn from bench.peers, bench.ttft and bench.gpu")
    if any("(rehearsal)" in row.get("device", "") for row in rows):
        raise PictureError(f"{path} is a rehearsal on a CPU, which measures nothing")
    flags = argparse.ArgumentParser()
    flags.add_argument("--peer")
    flags.add_argument("--lmcache", nargs="?", const="default")
    flags.add_argument("--quick", action="store_true")
    flags.add_argument("--model", default=SHAPES["l"])
    flags.add_argument("--history", type=int, default=2048)
    flags.add_argument("--new", type=int, default=64)
    asked, _ = flags.parse_known_args(words[3:])
    if asked.quick:
        raise PictureError(f"{path} is of a run with --quick, which measures too little; run it without")
    return Result(name, asked, rows, f"{machine['cpu']}, {machine['cores']} cores, torch {machine.get('torch', '-')}")


# -- what is drawn ---------------------------------------------------------------------------------------------------
def returning_turn(results: Sequence[Result]) -> list[Panel]:
    """Milliseconds to the first token: ours beside each peer's in the same run, and ours by tier."""
    panels: dict[str, Panel] = {}
    for one in results:
        if one.name == "peers":
            for row in one.rows:
                if row.get("model") in SHAPES and (state := _state(row, one.rows)):
                    title = f"{SHAPES[row['model']]}, {MODELS[row['model']].last_prompt_tokens:,} tokens"
                    ours, peer = _ms("kvstore", row["ours"]), _ms("the peer", row["peer"])
                    _panel(panels, title).add(one.peer, state, ours, peer)
            continue
        for row in one.rows:
            where, what = f"{one.asked.history:,} + {one.asked.new} tokens", row.get("measure", "").split(" (")[0]
            title = f"kvstore by tier, {Path(one.asked.model).name}"
            if one.name == "gpu":
                where, _, what = what.partition(" tokens, ")
                where, title = f"{where} tokens", f"{row['model']}, {row.get('device')}"
            if what in TIERS and row.get("unit") == "ms" and row.get("part", "ttft") == "ttft":
                _panel(panels, title).add(where, TIERS[what], _ms("kvstore", row["value"]))
    return list(panels.values())


def _state(row: Row, rows: Sequence[Row]) -> str | None:
    """The state of a conversation's last turn in a row: warm, after a restart, anew; None for any other row."""
    measure = row["measure"]
    if measure.endswith(", warm"):
        last = max(other["measure"] for other in rows if other["measure"].endswith(", warm"))
        return "warm" if measure == last else None
    return STATES.get(measure)


def speed(results: Sequence[Result]) -> list[Panel]:
    """Our tokens per second over the peer's."""
    panels: dict[str, Panel] = {}
    for one in results:
        for row in one.rows:
            if one.name == "peers" and row.get("unit") == "tok/s" and row["model"] in SHAPES:
                measure = row["measure"] + (" tokens" if row["measure"].startswith("prefill") else "")
                _panel(panels, SHAPES[row["model"]]).add(measure, one.peer, _ratio(row["ratio"]))
            elif one.name == "gpu" and row["part"] == "prefill" and row.get("ratio") is not None:
                panel = _panel(panels, f"{row['model']}, {row['device']}")
                panel.add(f"prefill, beside {row['to']}", row["measure"].removesuffix(", ours"), _ratio(row["ratio"]))
    for panel in panels.values():
        panel.line = 1.0
    return list(panels.values())


def _panel(panels: dict[str, Panel], title: str) -> Panel:
    return panels.setdefault(title, Panel(title))


def _ratio(value: float) -> Bar:
    return Bar("ahead of the peer" if value >= 1 else "behind it", value, f"{value:.2f}")


def _ms(whose: str, value: float) -> Bar:
    return Bar(whose, value, f"{value:,.0f}" if value >= 10 else f"{value:.1f}")


def versions(results: Sequence[Result]) -> str:
    """The versions of the peers, and the machines."""
    named: dict[str, None] = {}
    for one in results:
        for row in one.rows:
            if row.get("measure") == "versions":
                wanted = [one.asked.peer, "lmcache"] if one.asked.lmcache else [one.asked.peer]
                packages = row["peer"].split(", ")
                named |= dict.fromkeys(text for text in packages if any(_plain(text).startswith(n) for n in wanted))
    return "; ".join([*named, *dict.fromkeys(one.machine for one in results)])


def _plain(name: str) -> str:
    return name.replace("-", "").replace("_", "")


# -- how -------------------------------------------------------------------------------------------------------------
def draw(panels: Sequence[Panel], title: str, note: str, path: Path) -> None:
    """A white card, so that it can be read on any page; text as outlines, so that it needs no font."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch, Patch

    tops, places = [TOP, TOP], list[tuple[int, float]]()  # column, and inches from the top
    for panel in panels:
        column = tops.index(min(tops))
        places.append((column, tops[column] + HEADING))
        tops[column] += 2 * HEADING + panel.height
    height = max(tops) + BOTTOM
    with matplotlib.rc_context({"svg.hashsalt": "kvstore", "svg.fonttype": "path", "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(WIDTH, height))
        figure.patch.set_visible(False)
        figure.add_artist(
            FancyBboxPatch(
                (0.15, 0.15), WIDTH - 0.3, height - 0.3, boxstyle="round,pad=0.1", transform=figure.dpi_scale_trans,
                facecolor=PAPER, edgecolor=EDGE, zorder=-1,
            )
        )  # fmt: skip
        figure.text(MARGIN / WIDTH, 1 - 0.38 / height, title, fontsize=11, weight="bold", color=INK)
        figure.text(MARGIN / WIDTH, 0.25 / height, note, fontsize=6.5, color=FAINT)
        whose = {bar.whose for panel in panels for bars in panel.groups for bar in bars}
        figure.legend(
            handles=[Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in whose],
            loc="upper right", bbox_to_anchor=(1 - MARGIN / WIDTH, 1 - 0.16 / height), ncols=2, frameon=False,
            fontsize=8, labelcolor=INK,
        )  # fmt: skip
        for panel, (column, top) in zip(panels, places, strict=True):
            left, width = MARGIN + LABELS + column * WIDTH / 2, WIDTH / 2 - MARGIN - LABELS - VALUES
            box = (left / WIDTH, 1 - (top + panel.height) / height, width / WIDTH, panel.height / height)
            _draw_panel(figure.add_axes(box), panel, -LABELS / width)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None, "Title": title})


def _draw_panel(axes: Any, panel: Panel, left: float) -> None:
    """Draw a panel from the top down, in inches. left: where headings begin, in widths of the axes."""
    axes.set(xlim=(0, 1.02 * max(panel.largest, panel.line or 0)), ylim=(panel.height, 0), xticks=[], yticks=[])
    axes.patch.set_visible(False)
    for side, spine in axes.spines.items():
        spine.set(visible=side == "left", color=EDGE)
    axes.set_title(panel.title, x=left, fontsize=9, color=INK, loc="left", pad=2)
    beside, y = axes.get_yaxis_transform(), 0.0
    ground = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.5}
    for heading, groups in panel.blocks.items():
        y += HEADING
        axes.text(left, y - 0.08, heading, fontsize=8, color=INK, weight="bold", transform=beside, bbox=ground)
        for label, bars in groups.items():
            middle = y + BAR * len(bars) / 2
            axes.text(-0.03, middle, label, ha="right", va="center", fontsize=8, color=FAINT, transform=beside)
            for bar in bars:
                end = (bar.value, y + BAR / 2)
                axes.barh(end[1], bar.value, BAR * 0.85, color=COLOURS[bar.whose])
                axes.annotate(
                    bar.text, end, (3, 0), textcoords="offset points", va="center", fontsize=7.5, color=INK,
                    bbox=ground,
                )  # fmt: skip
                y += BAR
            y += GAP
    if panel.line is not None:
        axes.axvline(panel.line, color=INK, linewidth=1, linestyle=(0, (2, 2)))


def pictures(paths: Iterable[Path], folder: Path) -> list[Path]:
    """Draw the contents of the files. Returns the written pictures; raises PictureError if there are none."""
    results = [read(path) for path in paths]
    wanted = {
        "returning_turn.svg": (returning_turn(results), "Returning turn: milliseconds to the first token"),
        "speed.svg": (speed(results), "Prefill and decode: our tokens/s over the peer's"),
    }
    written = []
    for name, (panels, title) in wanted.items():
        if panels:
            folder.mkdir(parents=True, exist_ok=True)
            draw(panels, title, versions(results), folder / name)
            written.append(folder / name)
    if not written:
        raise PictureError("no row of these files is one that is drawn")
    return written


def main() -> int:
    parser = argparse.ArgumentParser("python -m bench.pictures", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="written by a benchmark with --json")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pictures", metavar="DIR")
    parsed = parser.parse_args()
    try:
        for path in pictures(parsed.files, parsed.out):
            say(str(path))
    except PictureError as error:
        say(f"{parser.prog}: {error}")
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
