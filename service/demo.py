"""`make demo`: a scripted conversation through our engine; what each turn costs warm and cold, in a table.

Warm is the turn as the session ran it, with the blocks of the turns before it in the cache. Cold is the same prompt
under a cache salt that no other request has, so that by design nothing can hit.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import KVStoreError
from service.terminal import MODEL, YOU, printable

SYSTEM = (
    "You are a personal assistant. The user will tell you many things about their life, and later they will ask for "
    "them. Say the value exactly as it was given."
)
SCRIPT = (
    "My name is Marta. I live in Lisbon.",
    "By the way, my dog is called Biscuit.",
    "The bus was late again this morning. The coffee was cold. There was a letter for somebody called Oliver. "
    "I should call the bank tomorrow. The river was very high.",
    "Please remember that my door code is 4719.",
    "I dreamed about Venice last night. The lights went out for a moment. In the evening we sat by the fire. "
    "I still have to wash the dishes. The neighbours had a party.",
    "What is my dog called?",
    "Sorry, I got that wrong. My door code is 5028.",
    "The shop was out of bread. People were waiting in line for hours. I drank a cup of tea. "
    "I could hear the birds sing. Somebody left the window open.",
    "Do you remember my door code?",
    "What is my sister's name?",
    "What is my name?",
    "Where do I live?",
)
MAX_ANSWER_TOKENS = 48


@dataclass(frozen=True, slots=True)
class TurnCost:
    """One row of the table; times in seconds."""

    turn: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    warm_ttft_s: float
    cold_cached_tokens: int
    cold_ttft_s: float

    @property
    def ratio(self) -> float:
        return self.cold_ttft_s / self.warm_ttft_s


def run_demo(engine: Any, script: Sequence[str] = SCRIPT) -> list[TurnCost]:
    """Hold the conversation, print it as it goes, and measure every turn warm and cold."""
    from engine import SamplingParams

    answer = SamplingParams(max_tokens=MAX_ANSWER_TOKENS, temperature=0.0)
    first_token = SamplingParams(max_tokens=1, temperature=0.0)
    # The first steps of a process pay for memory and threads that later ones have: keep them out of the table.
    engine.generate(["Hello"] * 2, answer, cache_salt="demo-warm-up")
    session = engine.chat("demo", system=SYSTEM)
    costs = []
    for number, message in enumerate(script, start=1):
        print(f"{YOU}{message}\n{MODEL}", end="", flush=True)
        for piece in session.stream(message, answer):
            print(printable(piece.text), end="", flush=True)
        print(flush=True)
        warm = session.last
        cold = engine.generate([warm.prompt_token_ids], first_token, cache_salt=f"demo-cold-{number}")[0]
        costs.append(_cost(number, warm, cold))
    return costs


def _cost(number: int, warm: Any, cold: Any) -> TurnCost:
    usage = warm.usage
    return TurnCost(
        turn=number,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        computed_tokens=usage.prompt_tokens - usage.cached_tokens,
        warm_ttft_s=warm.ttft_s,
        cold_cached_tokens=cold.usage.cached_tokens,
        cold_ttft_s=cold.ttft_s,
    )


def print_table(costs: Sequence[TurnCost]) -> None:
    """The costs of all turns, and what the cache saved over the conversation."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Time to first token, warm and cold (nothing cached)")
    for heading in ("turn", "prompt tokens", "cached", "computed", "warm ms", "cold ms", "cold / warm"):
        table.add_column(heading, justify="right")
    for cost in costs:
        counts = (cost.turn, cost.prompt_tokens, cost.cached_tokens, cost.computed_tokens)
        times = (f"{cost.warm_ttft_s * 1000:.1f}", f"{cost.cold_ttft_s * 1000:.1f}", f"{cost.ratio:.1f}x")
        table.add_row(*map(str, counts), *times)
    console = Console(highlight=False)
    print()
    console.print(table)
    num_prompt = sum(cost.prompt_tokens for cost in costs)
    num_cached = sum(cost.cached_tokens for cost in costs)
    print(f"{num_cached:,} of {num_prompt:,} prompt tokens came from the cache ({num_cached / num_prompt:.0%}).")


def _engine_class() -> Callable[..., Any]:
    from engine import Engine  # loads torch, hence here

    return Engine


def main(argv: Sequence[str] | None = None, engine_factory: Callable[..., Any] | None = None) -> int:
    """Run the demonstration; returns 0, or 1 when the model cannot be loaded. `engine_factory` is for tests."""
    parser = argparse.ArgumentParser(prog="python -m service.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a local directory or a hub id (default: the built-in model)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the numbers to FILE")
    arguments = parser.parse_args(argv)
    print(f"loading {arguments.model or 'the built-in model'}", file=sys.stderr, flush=True)
    try:
        with (engine_factory or _engine_class())(arguments.model) as engine:
            costs = run_demo(engine)
    except KVStoreError as error:
        print(f"kvstore: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print_table(costs)
    if arguments.json:
        machine = {"system": platform.platform(), "cpus": os.cpu_count()}
        results = [asdict(cost) for cost in costs]
        document = {"machine": machine, "command": "python -m service.demo", "results": results}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
