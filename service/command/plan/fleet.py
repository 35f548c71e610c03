"""`kvstore plan --servers`: the same traffic over fleets, by their size and by how turns find their server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.config import SIZE, ValueForm, one_of, parse_size, several, whole
from kvstore.planning.fleet import FLEET_TIERS, ROUTINGS, SAMPLE, FleetConfig, PaperFleet
from kvstore.planning.replay_config import ReplayConfig
from kvstore.planning.traces import Trace
from kvstore.service.command.plan.chart import short_size
from kvstore.service.command.progress import progress
from kvstore.service.command.store_tables import NONE, console
from kvstore.service.settings.options import Option

MOST_SERVERS = 1000
CLOSE = 0.8  # of its bandwidth: transfers wait


BANDWIDTH = ValueForm(parse=lambda text: float(parse_size(text)), accepts="bytes a second, such as 3GB", low=1)
FLEET_OPTIONS = (
    Option(
        "--servers", several(whole(1, MOST_SERVERS)), None,
        "replay over fleets of so many servers, such as 1,10,100,1000", mirrored=False,
    ),
    Option(
        "--routing", several(one_of(*ROUTINGS)), list(ROUTINGS), f"of turns: {', '.join(ROUTINGS)}", "all",
        mirrored=False,
    ),
    Option("--remote", SIZE, 0, "size of a tier that all servers share", "none", mirrored=False),
    Option("--network", BANDWIDTH, 3e9, "of each server to that tier in a second", "3GB", mirrored=False),
    Option("--remote-bandwidth", BANDWIDTH, 12e9, "of that tier in all, in a second", "12GB", mirrored=False),
    Option(
        "--restart", one_of("with-disks", "without-disks"), None,
        "a tenth of the servers restarts half-way, and keeps its disks or not", mirrored=False,
    ),
)  # fmt: skip


def run_fleet(trace: Trace, server: ReplayConfig, values: Mapping[str, Any], assumed: str) -> None:
    rows: list[dict[str, Any]] = []
    total = len(trace.requests)
    cases = [(num, routing) for num in values["servers"] for routing in values["routing"]]
    with progress("replaying", values["json"]) as told:
        for number, (num, routing) in enumerate(cases):
            config = FleetConfig(
                num, routing, server, values["remote"] // server.block_bytes, values["network"],
                values["remote_bandwidth"], values["restart"] is not None, values["restart"] != "without-disks",
            )  # fmt: skip
            rows.append(
                PaperFleet(trace, config, lambda done, n=number: told((n + done / total) / len(cases))).run()  # type: ignore[misc]
            )
    if values["json"]:
        print(json.dumps({"assumed": assumed, "sample": SAMPLE, "fleets": rows}))
    else:
        show_fleets(rows, assumed, console())


def show_fleets(rows: list[dict[str, Any]], assumed: str, out: Console) -> None:
    out.print(
        Text(f"the traffic is that of {SAMPLE} servers, of which as many are simulated as divide the fleet's number")
    )
    out.print(Text(f"assumed: {assumed}"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("servers", "routing", "hits", *FLEET_TIERS, "TTFT", "P90", "read/s", "written/s"):
        table.add_column(heading, justify="left" if heading == "routing" else "right", no_wrap=True)
    for row in rows:
        tiers = [f"{row['hit_rate_by_tier'][tier]:.1%}" for tier in FLEET_TIERS]
        rates = [short_size(row[name]) if row[name] else NONE for name in
                 ("remote_read_bytes_per_s", "remote_write_bytes_per_s")]  # fmt: skip
        times = [f"{1000 * row[name]:,.0f} ms" for name in ("ttft_mean_s", "ttft_p90_s")]
        table.add_row(f"{row['servers']:,}", row["routing"], f"{row['hit_rate']:.1%}", *tiers, *times, *rates)
    out.print(table)
    for line in advice_on_fleets(rows):
        out.print(Text(line, style="bold"))


def advice_on_fleets(rows: list[dict[str, Any]]) -> list[str]:
    """Where the shared tier's bandwidth is what is missing, and what a restart does."""
    found = []
    for routing in dict.fromkeys(row["routing"] for row in rows):
        own = [row for row in rows if row["routing"] == routing]
        full = next((row for row in own if row["remote_load"] > CLOSE), None)
        if full is not None:
            found.append(
                f"{routing}: at {full['servers']:,} servers the shared tier's bandwidth is used up; more room brings "
                "nothing."
            )
        elif (last := own[-1])["saturating_servers"] is not None:
            found.append(
                f"{routing}: the shared tier's bandwidth is enough for {last['saturating_servers']:,.0f} servers."
            )
        for row in own:
            if "after_restart" in row and row["after_restart"]["restarted"]["requests"]:
                one, other = row["after_restart"]["restarted"], row["after_restart"]["others"]
                found.append(
                    f"{routing}, {row['servers']:,} servers: after the restart {one['hit_rate']:.1%} hits and "
                    f"{1000 * one['ttft_mean_s']:,.0f} ms on the restarted tenth, "
                    f"{other['hit_rate']:.1%} and {1000 * other['ttft_mean_s']:,.0f} ms elsewhere."
                )
    return found
