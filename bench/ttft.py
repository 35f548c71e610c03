"""How long does a returning turn wait, by the tier that holds its history, and what does saving cost?

One process, alternating, medians. Model L is a random Qwen 2 of 0.5B's shape in bf16, made at the start and removed at
the end; with --shape qwen3.5-0.8b a model with states, in the sizes of Qwen 3.5 0.8B. Every measured turn is checked:
its history must have come from the tier under which it is counted.
"""

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.common import (
    QWEN_HYBRID,
    LlamaShape,
    Report,
    alternate,
    arguments,
    drop_from_page_cache,
    median,
    random_prompts,
    random_qwen,
    random_qwen_hybrid,
    run,
    say,
    spread,
)
from kvstore.disk.check import DATA_FILE

MODEL_L = LlamaShape(
    hidden_size=896, num_layers=24, num_heads=14, num_kv_heads=2, intermediate_size=4864, vocab_size=151936
)
SMALL = LlamaShape(hidden_size=256, num_layers=12, num_heads=4, num_kv_heads=4, intermediate_size=768, vocab_size=8192)
SHAPES = {"l": (MODEL_L, random_qwen), "qwen3.5-0.8b": (QWEN_HYBRID, random_qwen_hybrid)}
WINDOW = 4096
DECODE_PROMPT_TOKENS, DECODE_TOKENS = 128, 64
GOALS = {"cpu": 1.15, "disk": 1.4}  # TTFT relative to a hit in HBM
LEAST_SPEEDUP = 15.0  # relative to computing the history again
MOST_COLD_BYTES = 1 << 20  # of a closed store that counts as cold may still be in memory
PREFILL_COST, DECODE_COST = 0.05, 0.03


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and how often."""

    history_tokens: int
    new_tokens: int
    repeats: int
    restarts: int
    num_prefills: int  # prompts one after another in one measurement


@dataclass(slots=True)
class Person:
    """A person who returns to one engine with the same history and a message of fresh token ids."""

    engine: Any
    history: list[int]
    num_new: int
    rng: random.Random
    salts: Any = field(default_factory=itertools.count)

    def turn_s(self, tier: str | None, salt: str = "", num_new: int | None = None) -> float:
        """TTFT of one turn. Raises RuntimeError unless its history came from `tier`; None: from nowhere. num_new:
        another length of the message.
        """
        from kvstore import SamplingParams

        vocab_size = self.engine.facts.vocab_size
        prompt = self.history + [self.rng.randrange(1, vocab_size) for _ in range(num_new or self.num_new)]
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        output = self.engine.generate([prompt], params, cache_salt=salt)[0]
        found = {name: count for name, count in asdict(output.usage.cached_tokens_details).items() if count}
        found.pop("quantised", None)  # they are counted by tier, too
        size = self.engine.facts.block_size
        expected = {} if tier is None else {tier: len(self.history) // size * size}
        if tier != "any" and found != expected:
            raise RuntimeError(f"the history was to come from {tier or 'nowhere'}, but cached tokens are {found}")
        return output.ttft_s

    def cold_s(self) -> float:
        return self.turn_s(None, salt=f"cold-{next(self.salts)}")

    def keep(self, salt: str = "") -> None:
        """Bring the history into every tier by a turn that ends with it: a state is only kept where one ends."""
        self.turn_s("any", salt, num_new=1)
        self.engine.flush()

    def hit_s(self, tier: str) -> float:
        """Bring the history into every tier, drop it from those above `tier`, and measure a turn."""
        states = self.engine.loop.scheduler.manager.states
        # A state that was loaded is not kept in HBM, so there it must be computed again.
        salt = f"kept-{time.monotonic_ns()}" if tier == "hbm" and states is not None else ""
        self.keep(salt)
        if tier != "hbm":
            self.engine.loop.call(self.engine.loop.pool.evict_all)
            if states is not None:
                self.engine.loop.call(states.reset)
        if tier == "disk":
            self.evict_cpu()
        return self.turn_s(tier, salt)

    def evict_cpu(self) -> None:
        """Empty only the CPU tier. The engine has no verb for this, as its eviction includes the disk."""
        connector = self.engine.connector
        with connector.parts.lock:
            connector.parts.store.cpu.pool.evict_all()


@dataclass(slots=True)
class Bench:
    """Makes engines of one model, and measures them. model: None for the built-in one."""

    model: str | None
    dtype: str
    store: Path
    plan: Plan
    report: Report
    window: int | None = WINDOW
    codec: str = "raw"
    how: str | None = None  # the page cache was emptied

    def person(self, tiers: dict[str, object], load: str = "always") -> Person:
        from kvstore import Engine

        say(f"loading the model (tiers: {', '.join(tiers)}; load={load})")
        engine = Engine(self.model, tiers, device="cpu", dtype=self.dtype, max_model_len=self.window, load=load)
        history = random_prompts(1, self.plan.history_tokens, engine.facts.vocab_size, seed=1)[0]
        return Person(engine, history, self.plan.new_tokens, random.Random(time.monotonic_ns()))

    @property
    def tiers(self) -> dict[str, object]:
        return {"hbm": "512MiB", "cpu": "1GiB", "disk": "4GiB", "path": self.store, "codec": self.codec}

    # -- TTFT --------------------------------------------------------------------------------------------------------
    def ttft(self, tiered: Person, plain: Person, auto: Person) -> float:
        """The tiers side by side in one process. Returns the median of recomputing."""
        measures: dict[str, Callable[[], float]] = {
            "recompute": plain.cold_s,
            "hbm": lambda: tiered.hit_s("hbm"),
            "cpu": lambda: tiered.hit_s("cpu"),
            "auto": lambda: auto.hit_s("cpu"),
            "disk": lambda: tiered.hit_s("disk"),
        }
        say(f"TTFT: {self.plan.repeats} rounds of {', '.join(measures)}")
        times = alternate(measures, self.plan.repeats, warm_ups=2)
        recompute_s, hbm_s = median(times["recompute"]), median(times["hbm"])
        self.row("history recomputed (an engine without tiers)", times["recompute"], hbm_s, recompute_s)
        self.row("HBM hit", times["hbm"], hbm_s, recompute_s)
        self.row("CPU hit", times["cpu"], hbm_s, recompute_s, GOALS["cpu"])
        self.row("CPU hit, load=auto", times["auto"], hbm_s, recompute_s)
        self.row("disk hit, page cache warm, same process", times["disk"], hbm_s, recompute_s, GOALS["disk"])
        return recompute_s

    def row(self, name: str, seconds: list[float], hbm_s: float, recompute_s: float, goal: float | None = None) -> None:
        speedup = recompute_s / median(seconds)
        hit = not name.startswith("history")
        self.report.add(
            measure=name,
            value=1000 * median(seconds),
            unit="ms",
            ratio_to_hbm=median(seconds) / hbm_s,
            goal="-" if goal is None else f"<= {goal}",
            speedup=speedup,
            speedup_goal=f">= {LEAST_SPEEDUP:g}" if hit else "-",
            spread=spread(seconds),
            repeats=len(seconds),
        )

    def restarts(self, person: Person, recompute_s: float) -> None:
        """Measure after real restarts: each closes the engine and opens a new one on the same store."""
        person.keep()
        found: dict[str, list[float]] = {"warm": [], "cold": []}
        hbm: dict[str, list[float]] = {"warm": [], "cold": []}
        person.engine.close()
        for state in ["warm", "cold"] * self.plan.restarts:
            with self.restarted(state == "cold") as again:
                if again is not None:
                    found[state].append(again.turn_s("disk"))
                    hbm[state].append(median([again.hit_s("hbm") for _ in range(3)]))
        name = "disk hit after a restart, page cache"
        self.row(f"{name} warm", found["warm"], median(hbm["warm"]), recompute_s, GOALS["disk"])
        if found["cold"]:
            self.row(f"{name} cold ({self.how})", found["cold"], median(hbm["cold"]), recompute_s)
        else:
            self.report.add(measure=f"{name} cold: this machine drops no caches")

    @contextmanager
    def restarted(self, is_cold: bool) -> Iterator[Person | None]:
        """The person at a new engine on the store, which no other has open, with its page cache as asked; None if this
        machine drops no caches.
        """
        data = self.store / "blocks" / DATA_FILE
        if is_cold:
            self.how = drop_from_page_cache(data, MOST_COLD_BYTES)
            if self.how is None:
                yield None
                return
        person = self.person(self.tiers)
        with person.engine:
            self._warm_up(person)
            if is_cold:
                drop_from_page_cache(data, MOST_COLD_BYTES)  # drops what opening and saving have read ahead
            yield person

    def _warm_up(self, person: Person) -> None:
        """Turns of the same size by another person. Their KV is on disk before anything is measured."""
        for _ in range(2):
            person.turn_s("any", salt=f"restart-{time.monotonic_ns()}")
            person.turn_s("any", salt="restart")
        person.engine.flush()

    # -- what saving costs -------------------------------------------------------------------------------------------
    def cost(self, tiered: Person, plain: Person) -> None:
        plan = self.plan
        self._cost(
            f"prefill {plan.history_tokens:,}",
            tiered,
            plain,
            lambda person: prefill_s(person, plan.num_prefills),
            plan.history_tokens * plan.num_prefills,
            PREFILL_COST,
        )
        for batch in (1, 8):
            self._cost(
                f"decode, batch {batch}",
                tiered,
                plain,
                lambda person, batch=batch: decode_s(person, batch),  # type: ignore[misc]
                batch * DECODE_TOKENS,
                DECODE_COST,
            )

    def _cost(
        self,
        name: str,
        tiered: Person,
        plain: Person,
        measure: Callable[[Person], float],
        num_tokens: int,
        goal: float,
    ) -> None:
        """The seconds of the tiered engine relative to the plain one. Its last writes are flushed unmeasured."""

        def saved() -> float:
            seconds = measure(tiered)
            tiered.engine.flush()
            return seconds

        say(f"cost of saving: {self.plan.repeats} rounds of {name}")
        times = alternate({"with": saved, "without": lambda: measure(plain)}, self.plan.repeats)
        with_s, without_s = median(times["with"]), median(times["without"])
        for kind, seconds in times.items():
            self.report.add(
                measure=f"{name}, {kind} saving",
                value=num_tokens / median(seconds),
                unit="tok/s",
                cost_of_saving=f"{100 * (with_s / without_s - 1):.1f} %" if kind == "with" else None,
                goal=f"<= {100 * goal:.0f} %" if kind == "with" else "-",
                spread=spread(seconds),
                repeats=len(seconds),
            )


def prefill_s(person: Person, num_prompts: int) -> float:
    """The seconds of whole cold histories, one after the other: the KV of the first is written during the second."""
    return sum(_generate(person, [person.history], 1)[0] for _ in range(num_prompts))


def decode_s(person: Person, batch: int) -> float:
    """The seconds from the first token of all requests to the last."""
    prompts = random_prompts(batch, DECODE_PROMPT_TOKENS, person.engine.facts.vocab_size, seed=2)
    elapsed_s, ttft_s = _generate(person, prompts, 1 + DECODE_TOKENS)
    return elapsed_s - ttft_s


def _generate(person: Person, prompts: list[list[int]], num_tokens: int) -> tuple[float, float]:
    """The seconds until the last token, and until the last first token, of prompts that hit nothing."""
    from kvstore import SamplingParams

    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    outputs = person.engine.generate(prompts, params, cache_salt=f"cost-{next(person.salts)}")
    elapsed_s = time.perf_counter() - started
    if any(output.usage.cached_tokens for output in outputs):
        raise RuntimeError("a prompt that was to be computed has hit")
    return elapsed_s, max(output.ttft_s for output in outputs)


def body(parsed: argparse.Namespace, report: Report) -> None:
    plan = Plan(parsed.history, parsed.new, parsed.repeats, parsed.restarts, num_prefills=3)
    shape, made = SHAPES[parsed.shape]
    if parsed.layers:
        shape = shape.with_layers(parsed.layers)
    if parsed.quick:
        shape, made = SMALL, random_qwen
        plan = Plan(min(parsed.history, 512), parsed.new, min(parsed.repeats, 3), 1, num_prefills=1)
    with ExitStack() as stack:
        store = Path(stack.enter_context(TemporaryDirectory(prefix="kvstore-bench-", dir=parsed.dir)))
        model, dtype, window = parsed.model, "auto", None
        if model is None:
            folder, num_parameters = stack.enter_context(made(shape))
            model, dtype, window = str(folder), "bfloat16", WINDOW
            say(f"random model of {num_parameters / 1e6:.0f} million parameters, bf16")
        bench = Bench(model, dtype, store / "store", plan, report, window)
        plain = bench.person({"hbm": "512MiB"})
        stack.callback(plain.engine.close)
        tiered = bench.person(bench.tiers)
        stack.callback(tiered.engine.close)
        auto = bench.person({"hbm": "512MiB", "cpu": "1GiB"}, load="auto")
        with auto.engine:
            recompute_s = bench.ttft(tiered, plain, auto)
        bench.cost(tiered, plain)
        plain.engine.close()
        bench.restarts(tiered, recompute_s)


def main() -> int:
    parser = arguments("ttft", __doc__.split("\n")[0])
    parser.add_argument("--model", metavar="DIR", help="measure this model instead of the random one")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="l", help="the random model's (default: l)")
    parser.add_argument("--layers", type=int, help="so many of them, and as large a part of the vocabulary: in a hurry")
    parser.add_argument("--history", type=int, default=2048, metavar="N", help="tokens of history (default: 2048)")
    parser.add_argument("--new", type=int, default=64, metavar="N", help="tokens of the new message (default: 64)")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each kind (default: 7)")
    parser.add_argument("--restarts", type=int, default=3, help="restarts with each page cache (default: 3)")
    parser.add_argument("--dir", metavar="DIR", help="where the store is made (default: the temporary directory)")
    title = "TTFT of a returning turn by tier, and what saving costs (CPU); medians"
    return run(body, parser.parse_args(), title)


if __name__ == "__main__":
    sys.exit(main())
