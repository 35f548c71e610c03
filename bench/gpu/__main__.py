"""What is the fast path worth on a CUDA device? Kernels, transfers, prefill, decode and returning turns, with goals.

One command, under eight minutes, random weights in bf16 in the shapes of Qwen-2.5-0.5B and Llama-3.1-8B. First every
kernel is compared with its torch twin on the device. Every returning turn is checked: its history must have come from
the tier under which it is counted. A part that fails is reported, and the next one runs; a part that the budget does
not reach is reported, too. The exit code is 1 if anything was wrong. The JSON file gets each result at once.

Without CUDA the same code runs with tiny models as a rehearsal, which measures nothing. Weights are written to memory
(/dev/shm) if there is room, 16 GB for the larger model. A run that is killed outright leaves them there.

Seconds to expect on an H200, by arithmetic (weights loaded at 2 GB/s, a disk that takes 1 GB/s), not measured; much of
the rest is compiling kernels and capturing graphs:

    part                          Qwen-2.5-0.5B  Llama-3.1-8B
    start, imports                           15
    check    kernels and twins               10             5
    copy     the bus                          3             5
    weights  drawn and written                2            15
    prefill  two models loaded               10            45
    decode                                    5            10
    ttft     all tiers, disk written         20            80
    overlap                                   8            15
    saving                                   10            30
    graphs   one more model loaded           15            50
"""

import argparse
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import torch

from bench.common import Report, Row, arguments, run, say
from bench.gpu.case import CASES, Board, Case, Clock, OutOfTimeError, quick, random_weights, rehearsal, release_memory
from bench.gpu.engines import Machine, decode, graphs, overlap, prefill, saving, ttft
from bench.gpu.kernels import check_kernels, measure_bus

REHEARSAL = "CPU rehearsal: no number here says anything about a GPU"
BUDGET_S = 480.0
STDERR = 2
GRACE_S = 60.0  # after the budget, for the running part; after that it counts as hung, and shows where
MODEL_PARTS: dict[str, Callable[[Machine], None]] = {
    "prefill": prefill,
    "decode": decode,
    "ttft": ttft,
    "overlap": overlap,
    "saving": saving,
    "graphs": graphs,
}
PARTS = ("check", "copy", *MODEL_PARTS)


@dataclass(slots=True)
class Bench:
    """Runs the requested parts, each behind a guard of its own."""

    parts: tuple[str, ...]
    device: torch.device
    folder: Path | None
    board: Board
    clock: Clock

    def run(self, cases: list[Case]) -> None:
        for case in cases:
            self.attempt("check", case, partial(check_kernels, case, self.device, self.board))
        for case in cases:
            self.attempt("copy", case, partial(measure_bus, case, self.device, self.board, self.clock))
            if any(part in MODEL_PARTS for part in self.parts):
                self.run_model(case)

    def run_model(self, case: Case) -> None:
        """Run all parts that need the model. An error outside of them is a failure of its weights."""
        if self.clock.is_over:
            for part in MODEL_PARTS:
                self.attempt(part, case, lambda: None)  # which reports that there is no time
            return
        try:
            self.clock.say(f"{case.name}: drawing random weights")
            with (
                random_weights(case, self.device, self.folder) as weights,
                TemporaryDirectory(prefix="kvstore-bench-", dir=self.folder) as store,
            ):
                self.clock.say(f"{case.name}: {weights.num_parameters / 1e6:,.0f} million parameters, bf16")
                release_memory(self.device)
                machine = Machine(case, self.device, weights, Path(store) / "store", self.board, self.clock)
                try:
                    self.run_parts(case, machine)
                finally:
                    machine.close_all()
        except Exception as error:  # one model's failure does not keep the next one from being measured
            self.fail("weights", case, error)

    def run_parts(self, case: Case, machine: Machine) -> None:
        for name, part in MODEL_PARTS.items():
            self.attempt(name, case, partial(part, machine))

    def attempt(self, name: str, case: Case, work: Callable[[], None]) -> None:
        """Run one part, if it was requested and there is time. Raises nothing but an interrupt."""
        if name not in self.parts:
            return
        try:
            self.clock.check()
            self.clock.say(f"{case.name}: {name}")
            work()
        except OutOfTimeError as error:
            self.board.skipped(name, case.name, str(error))
        except Exception as error:  # one part's failure does not keep the others from running
            self.fail(name, case, error)
        with suppress(RuntimeError):  # after an error of the device everything fails
            release_memory(self.device)

    def fail(self, name: str, case: Case, error: Exception) -> None:
        traceback.print_exception(error)
        self.board.failed(name, case.name, error)


def display(row: Row) -> Row:
    """A row with value and unit in one column, ratio and its reference in another."""
    value, ratio = row.get("value"), row.get("ratio")
    return {
        "part": row["part"],
        "model": row["model"],
        "measure": row["measure"],
        "value": None if value is None else f"{value:,.{0 if value >= 1000 else 3 if value < 1 else 1}f} {row['unit']}",
        "ratio": None if ratio is None else f"{ratio:.3g} ({row['to']})",
        "goal": row.get("goal"),
        "result": row["result"],
        "spread": row.get("spread"),
        "note": row.get("note"),
    }


def body(board: list[Board], parsed: argparse.Namespace, report: Report) -> None:
    device = chosen_device(parsed.device)
    cases = [case for case in CASES if parsed.model_shape in (None, case.name.lower())]
    name = "cpu (rehearsal)"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        cases = [rehearsal(case) for case in cases]
    if parsed.quick:
        cases = [quick(case) for case in cases]
    quiet_transformers()
    board.append(Board(report, name))
    parts = tuple(parsed.part or PARTS)
    Bench(parts, device, parsed.dir, board[0], Clock(parsed.budget_s)).run(cases)


def chosen_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def quiet_transformers() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def stop(signum: int, frame: FrameType | None) -> None:
    """A polite kill leaves the table, as Ctrl-C does."""
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("gpu", __doc__.split("\n")[0])
    parser.set_defaults(threads=0)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="cpu: a rehearsal")
    names = [case.name.lower() for case in CASES]
    parser.add_argument("--model-shape", choices=names, help="only this one (default: both)")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be given again")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, metavar="S", help="skip what is left then")
    parser.add_argument("--dir", type=Path, help="where weights and store are made (default: memory, temporary folder)")
    parsed = parser.parse_args(argv)
    if parsed.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch sees no CUDA device; give auto or cpu")
    is_rehearsal = chosen_device(parsed.device).type == "cpu"
    title = REHEARSAL if is_rehearsal else "The fast path on a CUDA device; medians"
    say(title)
    # Tiny models gain nothing by a second thread, which on a busy machine is waited for.
    parsed.threads = parsed.threads or (1 if is_rehearsal else min(8, os.cpu_count() or 1))
    faulthandler.dump_traceback_later(parsed.budget_s + GRACE_S, exit=True, file=STDERR)
    board: list[Board] = []
    try:
        code = run(partial(body, board), parsed, title, display, keep_json=True)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return code or int(any(one.num_wrong for one in board))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
