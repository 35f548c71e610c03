"""What all benchmarks share: the machine, the arguments, alternating measurement, the table, the JSON file.

Ctrl-C ends a benchmark with the results so far and exit code 130.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130
Row = dict[str, Any]  # one result, as in the JSON file


def machine(with_torch: bool = True) -> Row:
    """The machine of the measurements. Loading torch takes seconds, which a benchmark without tensors saves."""
    import psutil

    found: Row = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_bytes": psutil.virtual_memory().total,
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    return found | _torch() if with_torch else found


def _torch() -> Row:
    import torch

    found: Row = {"torch": torch.__version__, "torch_threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Also keeps the command, for the JSON file."""
        found = super().parse_args(args, namespace)
        found.command = shlex.join([*self.prog.split(), *(sys.argv[1:] if args is None else args)])
        return found

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def arguments(name: str, description: str, uses_torch: bool = True) -> argparse.ArgumentParser:
    """A parser with the flags of every benchmark. Without torch there are no threads to set."""
    parser = _Parser(prog=f"python -m bench.{name}", description=description)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the results to FILE")
    parser.add_argument("--quick", action="store_true", help="few repeats: shows that it runs, measures little")
    if uses_torch:
        parser.add_argument("--threads", type=int, default=2, help="torch threads (default: 2)")
    return parser


@dataclass(slots=True)
class Report:
    """The results of one run, in order."""

    title: str
    display: Callable[[Row], Row] = dict  # turns a result into the row that people are shown
    results: list[Row] = field(default_factory=list)
    keep: Callable[[list[Row]], None] = lambda results: None  # called after each result, with all of them

    def add(self, **row: Any) -> None:
        self.results.append(row)
        self.keep(self.results)
        say("  " + ", ".join(f"{name} {_text(value)}" for name, value in self.display(row).items()))

    def show(self) -> None:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=self.title)
        rows = [self.display(row) for row in self.results]
        for name in (columns := list(dict.fromkeys(name for row in rows for name in row))):
            numeric = any(isinstance(row.get(name), int | float) for row in rows)
            table.add_column(name, justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*(_text(row.get(name)) for name in columns))
        # A file or a pipe has no width of its own.
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
        console.print(table)


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def run(
    body: Callable[[argparse.Namespace, Report], None],
    parsed: argparse.Namespace,
    title: str,
    display: Callable[[Row], Row] = dict,
    keep_json: bool = False,
) -> int:
    """Run a benchmark, show its table and write its JSON file, also when Ctrl-C cuts it short.

    keep_json: write the file anew after each result, for a benchmark that may be killed.
    """
    report, code = Report(title, display), 0
    uses_torch = "threads" in parsed
    if uses_torch:
        import torch

        torch.set_num_threads(parsed.threads)
    found = machine(uses_torch)
    print(", ".join(f"{name} {value}" for name, value in found.items()), file=sys.stderr, flush=True)
    if uses_torch and found["load_average"] > 1:
        print("other jobs are running: these numbers will mean little", file=sys.stderr, flush=True)
    if parsed.json and keep_json and (parsed.json.is_file() or not parsed.json.exists()):
        report.keep = lambda results: _replace_json(parsed.json, parsed.command, found, results)
    try:
        body(parsed, report)
    except KeyboardInterrupt:
        print("interrupted: these results are not complete", file=sys.stderr)
        code = EXIT_INTERRUPTED
    if report.results:
        report.show()
    if parsed.json:
        _write_json(parsed.json, parsed.command, found, report.results)
    return code


def _write_json(path: Path, command: str, found: Row, results: list[Row]) -> None:
    document = {"machine": found, "command": command, "results": results}
    path.write_text(json.dumps(document, indent=1) + "\n")


def _replace_json(path: Path, command: str, found: Row, results: list[Row]) -> None:
    """Write the file anew. A process that is killed meanwhile leaves the previous file, with one result less."""
    fresh = path.with_name(path.name + ".part")
    _write_json(fresh, command, found, results)
    fresh.replace(path)


def alternate(measures: Mapping[str, Callable[[], float]], repeats: int, warm_ups: int = 1) -> dict[str, list[float]]:
    """Measure several things in turns, in reverse order every other round, so that a drift of the machine affects all.

    Each measure returns seconds. Results of warm-up rounds are dropped.
    """
    names = list(measures)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_ups, repeats):
        for name in names if number % 2 == 0 else reversed(names):
            value = measures[name]()
            if number >= 0:
                found[name].append(value)
    return found


def say(text: str) -> None:
    """Show progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> float | None:
    """Half the interquartile range, relative to the median: how far a median can be trusted."""
    if len(values) < 3:
        return None
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / median(values)


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """A Llama's sizes, or those of a Qwen 2, which differs by biases and by its tied embeddings."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int = 4096

    def with_layers(self, num_layers: int) -> "LlamaShape":
        """The same with so many layers, and as large a part of the vocabulary, which stays a multiple of 64."""
        size = self.vocab_size * num_layers // self.num_layers // 64 * 64
        return replace(self, num_layers=num_layers, vocab_size=size)


QWEN_HYBRID = LlamaShape(  # Qwen 3.5 0.8B
    hidden_size=1024, num_layers=24, num_heads=8, num_kv_heads=2, intermediate_size=3584, vocab_size=248320
)


@contextmanager
def random_llama(shape: LlamaShape, dtype: str = "bfloat16", seed: int = 0) -> Iterator[tuple[Path, int]]:
    """A Llama with seeded random weights and a tokenizer of made-up words, in a folder that is removed afterwards.

    Yields the folder and the number of parameters.
    """
    from transformers import LlamaConfig

    config = LlamaConfig(**config_sizes(shape), tie_word_embeddings=False)
    with random_model(config, dtype, seed) as made:
        yield made


@contextmanager
def random_qwen(shape: LlamaShape, dtype: str = "bfloat16", seed: int = 0) -> Iterator[tuple[Path, int]]:
    """The same as `random_llama`, for a Qwen 2, whose output projection is its embedding."""
    from transformers import Qwen2Config

    config = Qwen2Config(**config_sizes(shape), tie_word_embeddings=True)
    with random_model(config, dtype, seed) as made:
        yield made


@contextmanager
def random_qwen_hybrid(shape: LlamaShape, dtype: str = "bfloat16", seed: int = 0) -> Iterator[tuple[Path, int]]:
    """The same for a Qwen 3.5 of the small sizes: of four layers three are linear attention, with 16 heads of 128."""
    from transformers import Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        **config_sizes(shape), head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16,
        linear_key_head_dim=128, linear_value_head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    with random_model(config, dtype, seed) as made:
        yield made


def config_sizes(shape: LlamaShape) -> Row:
    """The sizes by their names in configurations of transformers."""
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": shape.max_position_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }


@contextmanager
def random_model(config: Any, dtype: str, seed: int = 0) -> Iterator[tuple[Path, int]]:
    """A model of this configuration of transformers, with a tokenizer whose words are w0, w1 ..., and its parameters'
    number.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    with TemporaryDirectory(prefix="kvstore-bench-") as folder:
        model.save_pretrained(folder)
        _word_tokenizer(config.vocab_size).save_pretrained(folder)
        del model
        yield Path(folder), num_parameters


def _word_tokenizer(vocab_size: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{token_id}": token_id for token_id in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", unk_token="w0")


def random_prompts(num_prompts: int, num_tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Token ids drawn evenly from the vocabulary; the same seed gives the same prompts."""
    import random

    rng = random.Random(seed)
    return [[rng.randrange(1, vocab_size) for _ in range(num_tokens)] for _ in range(num_prompts)]


# -- the page cache --------------------------------------------------------------------------------------------------
def drop_from_page_cache(path: Path, most_bytes: int) -> str | None:
    """Drop a synced file from memory. Returns how that was done; None if more than `most_bytes` stay there.

    Pages that a process has mapped and touched stay, so close the file first, or do not touch it.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_bytes(path) <= most_bytes:
        return "fadvise"
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
    except OSError:
        return None
    return "drop_caches" if resident_bytes(path) <= most_bytes else None


def resident_bytes(path: Path) -> float:
    """How much of a file is in the page cache; infinity if the system does not tell."""
    import ctypes
    import mmap

    import numpy as np

    size, page_bytes = path.stat().st_size, mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    if size == 0 or not hasattr(libc, "mincore"):
        return float("inf")
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapping:
        view = np.frombuffer(mapping, np.uint8)
        pages = np.zeros(-(-size // page_bytes), np.uint8)
        address, found = view.ctypes.data, pages.ctypes.data
        code = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(found))
        del view
    return float("inf") if code else float((pages & 1).sum()) * page_bytes
