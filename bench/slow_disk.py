"""Is `load="auto"` ever slower than the better of loading everything and computing everything, on a disk of any speed?

One process, three engines in turns, medians: load=always, no store, load=auto. The history is only on disk, and the
disk tier is throttled to five speeds, from much slower than computing to much faster.
"""

import argparse
import random
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.common import LlamaShape, Report, alternate, arguments, median, random_prompts, random_qwen, run, say, spread

MODEL_L = LlamaShape(
    hidden_size=896, num_layers=24, num_heads=14, num_kv_heads=2, intermediate_size=4864, vocab_size=151936
)
SMALL = LlamaShape(hidden_size=256, num_layers=12, num_heads=4, num_kv_heads=4, intermediate_size=768, vocab_size=8192)
WINDOW = 4096
READ_OVER_COMPUTE = (8.0, 2.0, 1.0, 0.5, 0.125)  # time to read the history over the time to compute it
LEARNING_TURNS = 4  # after a change of the speed
GOAL = 1.10  # times the better of the two


class Throttle:
    """Limits the rate that all readers of a disk share. The disk itself is read at once."""

    def __init__(self, disk: Any) -> None:
        self.bytes_per_s: float | None = None  # None: no limit
        self._read = disk.read
        self._lock = threading.Lock()
        self._free_at = 0.0
        disk.read = self.read

    def read(self, expected: Any, into: memoryview) -> Any:
        if self.bytes_per_s is not None:
            with self._lock:
                now = time.perf_counter()
                self._free_at = max(now, self._free_at) + into.nbytes / self.bytes_per_s
                wait_s = self._free_at - now
            time.sleep(wait_s)
        return self._read(expected, into)


@dataclass(slots=True)
class Arm:
    """An engine that serves turns on the same history again and again."""

    engine: Any
    history: list[int]
    num_new: int
    rng: random.Random
    throttle: Throttle | None

    def turn_s(self) -> float:
        """TTFT of a turn whose history is not in memory."""
        self.forget()
        return self.ask().ttft_s

    def ask(self, salt: str = "") -> Any:
        from kvstore import SamplingParams

        prompt = self.history + [self.rng.randrange(1, self.engine.facts.vocab_size) for _ in range(self.num_new)]
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        return self.engine.generate([prompt], params, cache_salt=salt)[0]

    def learn(self) -> None:
        """Another person comes, and the first one returns a few times."""
        self.ask(f"new-{self.rng.random()}")
        for _ in range(LEARNING_TURNS):
            self.turn_s()

    def forget(self) -> None:
        """Empty the memory. The engine has no verb for this, as its eviction includes the disk."""
        self.engine.flush()
        self.engine.loop.call(self.engine.loop.pool.evict_all)
        if self.throttle is not None:
            connector: Any = self.engine.connector
            with connector.parts.lock:
                connector.parts.store.cpu.pool.evict_all()

    def set_speed(self, bytes_per_s: float | None) -> None:
        if self.throttle is not None:
            self.throttle.bytes_per_s = bytes_per_s


def open_arm(model: str, dtype: str, store: Path | None, load: str, history_tokens: int, num_new: int) -> Arm:
    from kvstore import Engine

    tiers: dict[str, object] = {"hbm": "512MiB"}
    if store is not None:
        tiers |= {"cpu": "1GiB", "disk": "4GiB", "path": store}
    say(f"loading the model ({'no store' if store is None else f'load={load}'})")
    engine = Engine(model, tiers, device="cpu", dtype=dtype, max_model_len=WINDOW, load=load)
    history = random_prompts(1, history_tokens, engine.facts.vocab_size, seed=1)[0]
    connector: Any = engine.connector
    throttle = None if store is None else Throttle(connector.parts.disk)
    return Arm(engine, history, num_new, random.Random(time.monotonic_ns()), throttle)


def compare(arms: dict[str, Arm], factors: tuple[float, ...], repeats: int, report: Report) -> None:
    for arm in arms.values():  # the history is stored, and every engine is warm
        arm.ask()
        arm.ask("somebody else")
        arm.turn_s()
    compute_s = median([arms["compute"].turn_s() for _ in range(3)])
    history_bytes = len(arms["auto"].history) // 16 * arms["auto"].engine.facts.block_bytes
    for factor in factors:
        bytes_per_s = history_bytes / (factor * compute_s)
        say(f"reading takes {factor:g} times as long as computing: {bytes_per_s / 1e6:.1f} MB/s")
        for arm in arms.values():
            arm.set_speed(bytes_per_s)
        first_s = arms["auto"].turn_s()  # it still expects the previous speed
        arms["auto"].learn()
        split_before = arms["auto"].engine.stats()["store"]["split_prefills"]
        times = alternate({name: arm.turn_s for name, arm in arms.items()}, repeats)
        num_split = arms["auto"].engine.stats()["store"]["split_prefills"] - split_before
        best_s = min(median(times["always"]), median(times["compute"]))
        report.add(
            read_over_compute=factor,
            disk_mb_per_s=bytes_per_s / 1e6,
            always_ms=1000 * median(times["always"]),
            compute_ms=1000 * median(times["compute"]),
            auto_ms=1000 * median(times["auto"]),
            auto_over_better=median(times["auto"]) / best_s,
            goal=f"<= {GOAL}",
            first_over_better=first_s / best_s,
            split=num_split,
            spread=spread(times["auto"]),
            repeats=repeats,
        )


def body(parsed: argparse.Namespace, report: Report) -> None:
    shape, repeats, history = MODEL_L, parsed.repeats, parsed.history
    if parsed.quick:
        shape, repeats, history = SMALL, min(repeats, 3), min(history, 1024)
    with ExitStack() as stack:
        stores = Path(stack.enter_context(TemporaryDirectory(prefix="kvstore-bench-", dir=parsed.dir)))
        model, dtype = parsed.model, "auto"
        if model is None:
            folder, num_parameters = stack.enter_context(random_qwen(shape))
            model, dtype = str(folder), "bfloat16"
            say(f"random Qwen 2 of {num_parameters / 1e6:.0f} million parameters, bf16")
        arms: dict[str, Arm] = {}
        for name in ("always", "compute", "auto"):
            store = None if name == "compute" else stores / name
            arms[name] = open_arm(model, dtype, store, "always" if name == "always" else "auto", history, parsed.new)
            stack.callback(arms[name].engine.close)
        compare(arms, tuple(parsed.factors), repeats, report)


def main() -> int:
    parser = arguments("slow_disk", __doc__.split("\n")[0])
    parser.add_argument("--model", metavar="DIR", help="measure this model instead of the random one")
    parser.add_argument("--history", type=int, default=2048, metavar="N", help="tokens of history (default: 2048)")
    parser.add_argument("--new", type=int, default=64, metavar="N", help="tokens of the new message (default: 64)")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each kind (default: 5)")
    parser.add_argument(
        "--factors", type=float, nargs="+", default=READ_OVER_COMPUTE, metavar="X",
        help="times to read the history over the time to compute it (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--dir", metavar="DIR", help="where the stores are made (default: the temporary directory)")
    return run(body, parser.parse_args(), "TTFT with a throttled disk: load=auto against the better of two; medians")


if __name__ == "__main__":
    sys.exit(main())
