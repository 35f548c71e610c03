"""Does anything go wrong, however often servers are killed, stopped, filled up and damaged while people talk to them?

Rounds of random faults against `kvstore serve`, on stores that stay: `kill -9` in the middle of answers, right after a
turn, while a server starts or a store is compacted; SIGTERM; stopped processes; flipped bytes; a full disk; a Redis
that is killed, stopped or empty, with two servers. Each answer is compared with an engine that caches nothing, each
acknowledged turn is looked for after each restart, `kvstore verify` finds nothing that was not flipped on purpose,
nothing is refused unless a fault lasts, and nothing hangs. The first failure ends the campaign with exit code 1; its
round is played again, on the same stores, by the same command.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.campaign.rounds import ARMS, Arm, Round, Script
from bench.campaign.servers import Failure
from bench.campaign.talks import TIERS, talk_of
from bench.common import Report, Row, arguments, run, say

EXIT_FAILED = 1
COLUMNS = (
    "rounds", "starts", "kills", "turns", "calls", "forks", "edits", "truncations", "deletions", "left", "refused",
    "transcripts", "compared", "ties", "flips", "refused blocks", "found by verify", "computed", *TIERS,
)  # fmt: skip
ACTIONS, QUICK_ACTIONS = 8, 2  # of each client in a round


@dataclass
class Campaign:
    """What is known between rounds; in a file beside the stores. attempts: how often the round began that did not
    end; then conversations may have more turns than are known.
    """

    folder: Path
    seed: int
    number: int = 0
    attempts: int = 0
    counts: dict[str, Counter[str]] = field(default_factory=dict)  # by fault
    arms: dict[str, Arm] = field(default_factory=dict)

    @classmethod
    def resumed(cls, folder: Path, seed: int) -> Campaign:
        file = folder / "state.json"
        if not file.exists():
            return cls(folder, seed, arms={name: Arm(name, folder / name.replace(" ", "-")) for name in ARMS})
        found = json.loads(file.read_text())
        campaign = cls(folder, seed, found["number"], found["attempts"])
        campaign.counts = {fault: Counter(counts) for fault, counts in found["counts"].items()}
        for name, talks in found["talks"].items():
            campaign.arms[name] = Arm(name, folder / name.replace(" ", "-"), [talk_of(one) for one in talks])
        return campaign

    def save(self) -> None:
        talks = {name: [asdict(talk) for talk in arm.talks] for name, arm in self.arms.items()}
        state = {"seed": self.seed, "number": self.number, "attempts": self.attempts, "counts": self.counts,
                 "talks": talks}  # fmt: skip
        fresh = self.folder / "state.part"
        fresh.write_text(json.dumps(state))
        fresh.replace(self.folder / "state.json")

    def play(self, script: Script) -> None:
        self.attempts += 1
        self.save()
        one = Round(script, self.arms[script.arm], self.attempts)
        one.play()
        self.counts.setdefault(script.fault, Counter()).update(one.counts)
        self.number, self.attempts = script.number + 1, 0
        self.save()

    def close(self) -> None:
        for arm in self.arms.values():
            arm.close()

    def add_rows(self, report: Report) -> None:
        total: Counter[str] = Counter()
        for fault, counts in sorted(self.counts.items()):
            report.add(fault=fault, **{name: counts[name] for name in COLUMNS})
            total.update(counts)
        report.add(fault="all", **{name: total[name] for name in COLUMNS})


def shown(row: Row) -> Row:
    """The columns for people."""
    read = "/".join(f"{row[tier] / 1000:.0f}" for tier in TIERS)
    names = ("fault", "rounds", "starts", "kills", "turns", "transcripts", "compared", "ties", "refused blocks")
    return {**{name: row[name] for name in names}, "K tokens " + "/".join(TIERS): read}


def body(parsed: argparse.Namespace, report: Report) -> None:
    arms, actions = parsed.arms.split(","), QUICK_ACTIONS if parsed.quick else ACTIONS
    until_s = time.monotonic() + parsed.hours * 3600
    with ExitStack() as stack:
        folder = parsed.dir or Path(stack.enter_context(TemporaryDirectory(prefix="kvstore-campaign-")))
        folder.mkdir(parents=True, exist_ok=True)
        campaign = Campaign.resumed(folder, parsed.seed)
        stack.callback(campaign.close)
        stack.callback(lambda: campaign.add_rows(report))
        first = campaign.number
        while time.monotonic() < until_s and (parsed.rounds is None or campaign.number - first < parsed.rounds):
            script = Script.of(parsed.seed, campaign.number, arms, actions)
            say(f"round {script.number}: {script.arm}, {script.fault}")
            try:
                campaign.play(script)
            except Exception as error:
                say("" if isinstance(error, Failure) else traceback.format_exc())
                say(f"FAILED: {error}\nits script: {json.dumps(asdict(script))}\nits stores: {folder}")
                parsed.has_failed = True
                return


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("campaign", (__doc__ or "").split("\n\n")[0])
    parser.add_argument("--hours", type=float, default=float("inf"), help="how long (default: until Ctrl-C)")
    parser.add_argument("--rounds", type=int, metavar="N", help="at most so many")
    parser.add_argument("--seed", type=int, default=0, help="of all rounds (default: 0)")
    parser.add_argument("--dir", type=Path, help="stores and counts, to go on with (default: a temporary directory)")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"some of {', '.join(ARMS)} (default: all)")
    parsed = parser.parse_args(argv)
    if unknown := set(parsed.arms.split(",")) - set(ARMS):
        parser.error(f"--arms {', '.join(sorted(unknown))}; known: {', '.join(ARMS)}")
    if parsed.quick:
        parsed.rounds = min(parsed.rounds or 3, 3)
    parsed.has_failed = False
    code = run(body, parsed, "Rounds of faults; tokens of prompts by the tier that they came from", shown)
    return EXIT_FAILED if parsed.has_failed else code


if __name__ == "__main__":
    sys.exit(main())
