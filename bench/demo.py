"""`make demo`: a conversation that survives `kill -9` and outgrows its window, with a table of what each turn costs.

The engine runs in a process of its own (`bench/demo_worker.py`), so that it can be killed. Cold is the same prompt
under a cache salt that no other request has, so that nothing can hit.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from kvstore.errors import KVStoreError
from kvstore.service.command.prompt import YOU, printable
from kvstore.service.command.terminal import MODEL

SYSTEM = (
    "You are a personal assistant. The user will tell you many things about their life, and later they will ask for "
    "them. Say the value exactly as it was given."
)
BEFORE = (
    "My name is Marta.",
    "I live in Lisbon.",
    "By the way, my dog is called Biscuit.",
    "The bus was late again this morning. The coffee was cold. There was a letter for somebody called Oliver. "
    "I should call the bank tomorrow. The river was very high.",
    "Please remember that my door code is 4719.",
    "I dreamed about Venice last night. The lights went out for a moment. In the evening we sat by the fire. "
    "I still have to wash the dishes. The neighbours had a party.",
    "What is my dog called?",
)
AFTER = (
    "Sorry, I got that wrong. My door code is 5028.",
    "Do you remember my door code?",
    "What is my name?",
    *(
        f"{first} {second} There was a letter for somebody. I should call the bank tomorrow. The coffee was cold. "
        "The neighbours had a party. I could hear the birds sing."
        for first, second in (
            ("The shop was out of bread.", "People were waiting in line for hours."),
            ("I drank a cup of tea.", "Somebody left the window open."),
            ("The river was very high.", "The lights went out for a moment."),
            ("In the evening we sat by the fire.", "I still have to wash the dishes."),
            ("The bus was late again.", "I forgot my umbrella."),
            ("The train was full.", "A cat slept on the wall."),
            ("The soup was too hot.", "It rained for an hour."),
            ("I drank a cup of tea.", "The shop was out of bread."),
        )
    ),
    "My sister's name is Clara.",
    "The shop was out of bread. People were waiting in line for hours. I drank a cup of tea. The train was full. "
    "Somebody left the window open. The river was very high. The lights went out for a moment.",
    "I dreamed about Venice last night. In the evening we sat by the fire. I still have to wash the dishes.",
    "The train was full. I drank a cup of tea. I could hear the birds sing. The coffee was cold.",
    "What is my sister's name?",
    "I forgot my umbrella. Did I tell you my sister's name?",
)
PAUSE_S = 1.0  # between the last turn and kill -9, in which a person reads; new KV is on disk within two seconds
DISTURBED = 0.25  # share of all processors that other programs use
TIERS = ("hbm", "cpu", "disk", "reencoded")


@dataclass(frozen=True, slots=True)
class TurnCost:
    """One row of the table."""

    turn: int
    note: str  # what this turn is an example of
    prompt_tokens: int
    hbm: int
    cpu: int
    disk: int
    reencoded: int
    computed_tokens: int
    ttft_s: float
    cold_ttft_s: float
    truncated_tokens: int
    others_share: float = 0.0  # of all processors, taken by other programs meanwhile

    @property
    def cached_tokens(self) -> int:
        return self.hbm + self.cpu + self.disk + self.reencoded


class Worker:
    """The engine's process. Takes one JSON object per line, and answers with lines of which the last has "done"."""

    def __init__(self, model: str | None, path: str) -> None:
        command = [sys.executable, "-m", "bench.demo_worker", path, *([model] if model else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ready = self._read()
        if "error" in ready:
            self.close()
            raise KVStoreError(ready["error"])

    def turn(self, message: str) -> dict[str, Any]:
        """Send a message, print the answer as it comes, return the turn's numbers."""
        self._write({"message": message})
        while True:
            answer = self._read()
            if "error" in answer:
                raise KVStoreError(answer["error"])
            if "done" in answer:
                print(flush=True)
                return answer
            print(printable(answer["piece"]), end="", flush=True)

    def kill(self) -> None:
        """Send SIGKILL: no handler runs, nothing is flushed."""
        self._process.kill()
        self._close_pipes()
        self._process.wait()

    def close(self) -> None:
        """End the process as a user would, by the end of its input. It writes what is in flight."""
        self._close_pipes()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # unsent data for a process that has ended
                self._pipe(pipe).close()

    def _write(self, message: dict[str, Any]) -> None:
        pipe = self._pipe(self._process.stdin)
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    def _read(self) -> dict[str, Any]:
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise KVStoreError(f"the engine's process has ended (exit code {self._process.wait()})")
        found: dict[str, Any] = json.loads(line)
        return found

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


def run_demo(
    model: str | None, path: str, before: Sequence[str] = BEFORE, after: Sequence[str] = AFTER
) -> list[TurnCost]:
    """Talk, kill the engine, start it again on the same store, and continue until the window is full."""
    costs: list[TurnCost] = []
    worker = _start(model, path)
    try:
        for message in before:
            costs.append(_turn(worker, len(costs) + 1, message))
        time.sleep(PAUSE_S)
        print("\n$ kill -9   (nothing is flushed, no handler runs)\n")
        worker.kill()
        worker = _start(model, path)
        for message in after:
            costs.append(_turn(worker, len(costs) + 1, message, "after kill -9" if message is after[0] else ""))
    finally:
        worker.close()
    return costs


def _start(model: str | None, path: str) -> Worker:
    print(f"starting the engine with {model or 'the built-in model'}", file=sys.stderr, flush=True)
    return Worker(model, path)


def _turn(worker: Worker, number: int, message: str, note: str = "") -> TurnCost:
    print(f"{YOU}{message}\n{MODEL}", end="", flush=True)
    done = worker.turn(message)
    cached = {tier: done["usage"][tier] for tier in TIERS}
    if done["truncated_tokens"]:
        note = f"window full: {done['truncated_tokens']} tokens dropped"
    elif not note:
        note = "cold" if number == 1 else "warm"
    return TurnCost(
        turn=number,
        note=note,
        prompt_tokens=done["usage"]["prompt_tokens"],
        computed_tokens=done["usage"]["prompt_tokens"] - sum(cached.values()),
        ttft_s=done["ttft_s"],
        cold_ttft_s=done["cold_ttft_s"],
        truncated_tokens=done["truncated_tokens"],
        others_share=done["others_share"],
        **cached,
    )


def print_table(costs: Sequence[TurnCost]) -> None:
    """The costs of all turns, and what the tiers saved over the conversation."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="What each turn cost; cold: the same prompt with nothing cached")
    for heading in (
        "turn",
        "",
        "prompt",
        "hbm",
        "cpu",
        "disk",
        "re-encoded",
        "computed",
        "TTFT ms",
        "cold ms",
        "ratio",
    ):
        table.add_column(heading, justify="left" if heading == "" else "right")
    for cost in costs:
        counts = (cost.prompt_tokens, cost.hbm, cost.cpu, cost.disk, cost.reencoded, cost.computed_tokens)
        times = (f"{cost.ttft_s * 1000:.1f}", f"{cost.cold_ttft_s * 1000:.1f}")
        ratio = f"{cost.cold_ttft_s / cost.ttft_s:.1f}x{' *' * (cost.others_share > DISTURBED)}"
        table.add_row(str(cost.turn), cost.note, *(str(n) if n else "-" for n in counts), *times, ratio)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    print()
    console.print(table)
    if any(cost.others_share > DISTURBED for cost in costs):
        print(f"* Other programs took more than {DISTURBED:.0%} of the processors meanwhile: these times say little.")
    num_prompt = sum(cost.prompt_tokens for cost in costs)
    num_cached = sum(cost.cached_tokens for cost in costs)
    print(f"{num_cached:,} of {num_prompt:,} prompt tokens were not computed ({num_cached / num_prompt:.0%}).")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; returns 0, or 1 when the model cannot be loaded."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a local directory or a hub id (default: the built-in model)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the numbers to FILE")
    arguments = parser.parse_args(argv)
    try:
        with TemporaryDirectory(prefix="kvstore-demo-") as path:
            costs = run_demo(arguments.model, path)
    except KVStoreError as error:
        print(f"kvstore: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print_table(costs)
    if arguments.json:
        machine = {"system": platform.platform(), "cpus": os.cpu_count()}
        results = [asdict(cost) for cost in costs]
        document = {"machine": machine, "command": "python -m bench.demo", "results": results}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
