"""The means of bench.gpu: shapes and amounts, goals, rows of the table, the clock, time on a device, weights."""

import gc
import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.common import LlamaShape, Report, config_sizes, median, say, spread
from bench.ttft import MODEL_L

LLAMA_8B = LlamaShape(
    hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, intermediate_size=14336, vocab_size=128256,
    max_position_embeddings=40960,
)  # fmt: skip
QWEN_05B = replace(MODEL_L, max_position_embeddings=40960)
TINY_LLAMA = LlamaShape(
    hidden_size=128, num_layers=3, num_heads=8, num_kv_heads=2, intermediate_size=256, vocab_size=512
)
TINY_QWEN = replace(TINY_LLAMA, hidden_size=112, num_heads=14)
BLOCK_SIZE = 16
SHARD_BYTES = 2 << 30  # the digest of the weights uses a thread per file
MEMORY_FOLDER = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Case:
    """One model's shape, and how much is measured with it. All lengths are in tokens."""

    name: str
    family: str  # "llama" or "qwen2"
    shape: LlamaShape
    hbm: str  # sizes of the tiers
    cpu: str
    disk: str
    copy_bytes: int
    histories: tuple[int, ...] = (2048, 8192, 32768)
    overlaps: tuple[tuple[int, int], ...] = ((2048, 64), (8192, 64), (8192, 1024), (32768, 64))  # history, new
    new_tokens: int = 64
    prefills: tuple[int, ...] = (2048, 8192)
    batches: tuple[int, ...] = (1, 8, 64)
    window: int = 34816
    step_tokens: int = 8192
    repeats: int = 5

    @property
    def head_dim(self) -> int:
        return self.shape.hidden_size // self.shape.num_heads

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.shape.num_layers * self.shape.num_kv_heads * self.head_dim * 2  # K and V, two bytes each


CASES = (
    Case("Qwen-2.5-0.5B", "qwen2", QWEN_05B, "8GiB", "4GiB", "8GiB", copy_bytes=384 << 20),
    Case("Llama-3.1-8B", "llama", LLAMA_8B, "12GiB", "12GiB", "24GiB", copy_bytes=512 << 20),
)


def rehearsal(case: Case) -> Case:
    """The same case with sizes for a CPU."""
    return replace(
        case,
        name=f"tiny {case.family}",
        shape=TINY_LLAMA if case.family == "llama" else TINY_QWEN,
        hbm="16MiB",
        cpu="16MiB",
        disk="64MiB",
        copy_bytes=1 << 20,
        histories=(64, 256, 512),
        overlaps=((64, 16), (512, 128)),
        new_tokens=16,
        prefills=(256,),
        window=1024,
        step_tokens=256,
        repeats=2,
    )


def quick(case: Case) -> Case:
    """Little of everything."""
    few = {"histories": case.histories[:2], "overlaps": case.overlaps[:1], "prefills": case.prefills[:1]}
    return replace(case, **few, batches=case.batches[:2], repeats=2)  # type: ignore[arg-type]


# -- results ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Goal:
    """A limit for a ratio."""

    limit: float
    at_most: bool = False

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.limit:g}"

    def verdict(self, ratio: float) -> str:
        return "reached" if (ratio <= self.limit if self.at_most else ratio >= self.limit) else "missed"


OVERLAP, SAVING = Goal(1.15, at_most=True), Goal(1.03, at_most=True)
BANDWIDTH, DECODE, PREFILL = Goal(0.9), Goal(0.7), Goal(1.1)


@dataclass(slots=True)
class Board:
    """The rows of one run."""

    report: Report
    device: str  # named in every row
    num_wrong: int = 0  # mismatches and failures

    def add(
        self,
        part: str,
        model: str,
        measure: str,
        value: float | None = None,
        unit: str | None = None,
        ratio: float | None = None,
        to: str | None = None,
        goal: Goal | None = None,
        times: list[float] | None = None,
        note: str | None = None,
    ) -> None:
        """ratio: relative to what `to` names; the goal limits it. times: the measurements of the value, in seconds."""
        self.report.add(
            part=part,
            model=model,
            measure=measure,
            value=value,
            unit=unit,
            ratio=ratio,
            to=to,
            goal=None if goal is None else str(goal),
            result=None if goal is None or ratio is None else goal.verdict(ratio),
            spread=None if times is None else spread(times),
            repeats=None if times is None else len(times),
            note=note,
            device=self.device,
        )

    def check(self, part: str, model: str, measure: str, wrong: str | None, note: str | None = None) -> None:
        """Add the row of a check. wrong: what is wrong; None if it is right."""
        self.num_wrong += wrong is not None
        self._event(part, model, measure, "ok" if wrong is None else "MISMATCH", wrong or note)

    def failed(self, part: str, model: str, error: Exception) -> None:
        self.num_wrong += 1
        first = str(error).strip().split("\n")[0][:200]
        self._event(part, model, "the part", "FAILED", f"{type(error).__name__}: {first}")

    def skipped(self, part: str, model: str, why: str) -> None:
        self._event(part, model, "the part", "skipped", why)

    def _event(self, part: str, model: str, measure: str, result: str, note: str | None) -> None:
        self.report.add(part=part, model=model, measure=measure, result=result, note=note, device=self.device)


class OutOfTimeError(Exception):
    """The budget is used up, and the current measurement is given up."""


@dataclass(slots=True)
class Clock:
    """Seconds since the start, against the budget, whose last twentieth is for closing what is open."""

    budget_s: float
    started_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def is_over(self) -> bool:
        return self.elapsed_s >= 0.95 * self.budget_s

    def check(self) -> None:
        if self.is_over:
            raise OutOfTimeError(f"the budget of {self.budget_s:g} s is used up")

    def timely(self, measure: Callable[[], float]) -> Callable[[], float]:
        """The same measurement, which raises OutOfTimeError instead of beginning too late."""

        def measured() -> float:
            self.check()
            return measure()

        return measured

    def say(self, text: str) -> None:
        say(f"[{self.elapsed_s:6.1f} s] {text}")


# -- the device ------------------------------------------------------------------------------------------------------
def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_s(device: torch.device, work: Callable[[], object], times: int = 1) -> float:
    """The seconds of one run of `work`, from an idle device until it is idle again; the mean of several runs."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return (time.perf_counter() - started) / times


def memory_bytes_per_s(device: torch.device) -> float:
    """The speed of the device's memory: bytes read and written per second by a plain copy within it."""
    size = 4 << 30 if device.type == "cuda" else 64 << 20
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [timed_s(device, lambda: target.copy_(source), times=4) for _ in range(4)]
    return 2 * size / median(seconds[1:])


def release_memory(device: torch.device) -> None:
    """Free memory that nobody refers to any more, including models in cycles, for the next engine."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# -- weights ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Weights:
    """A random model on disk."""

    folder: Path
    num_parameters: int
    step_bytes: int  # of the weights that a decode step reads: all except a separate table of embeddings


@contextmanager
def random_weights(case: Case, device: torch.device, folder: Path | None) -> Iterator[Weights]:
    """Seeded random weights in bf16, drawn on the device shard by shard; removed afterwards.

    They are made in `folder`, or else in a folder in memory, if the system has one with enough room.
    """
    config = _config(case)
    shapes = _parameter_shapes(config)
    num_parameters = sum(shape.numel() for shape in shapes.values())
    separate = 0 if config.tie_word_embeddings else case.shape.vocab_size * case.shape.hidden_size
    with TemporaryDirectory(prefix="kvstore-bench-", dir=folder or _memory_folder(2 * num_parameters)) as name:
        made = Path(name)
        config.save_pretrained(made)
        _write_shards(made, shapes, device)
        yield Weights(made, num_parameters, 2 * (num_parameters - separate))


def _memory_folder(num_bytes: int) -> Path | None:
    """A folder in memory if it could hold twice as much; None: the temporary directory."""
    has_room = MEMORY_FOLDER.is_dir() and shutil.disk_usage(MEMORY_FOLDER).free > 2 * num_bytes
    return MEMORY_FOLDER if has_room else None


def _config(case: Case) -> Any:
    from transformers import LlamaConfig, Qwen2Config

    family, tied = (LlamaConfig, False) if case.family == "llama" else (Qwen2Config, True)
    return family(**config_sizes(case.shape), tie_word_embeddings=tied, dtype="bfloat16")


def _parameter_shapes(config: Any) -> dict[str, torch.Size]:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _write_shards(folder: Path, shapes: dict[str, torch.Size], device: torch.device) -> None:
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        if size and size + 2 * shape.numel() > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += 2 * shape.numel()
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]

    def write(number: int) -> None:
        from safetensors.torch import save_file

        generator = torch.Generator(device).manual_seed(number)
        tensors = {name: _random(name, shapes[name], generator).cpu() for name in shards[number]}
        save_file(tensors, folder / files[number], metadata={"format": "pt"})

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(len(shards))))
    places = {name: files[number] for number, names in enumerate(shards) for name in names}
    total = sum(2 * shape.numel() for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Random values as such models are initialised: norms are one, biases zero."""
    options = {"dtype": torch.bfloat16, "device": generator.device}
    if len(shape) == 1:
        return torch.ones(shape, **options) if "norm" in name else torch.zeros(shape, **options)
    return torch.empty(shape, **options).normal_(0.0, 0.02, generator=generator)
