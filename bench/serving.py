"""How long do people wait over HTTP: TTFT and inter-token latency per turn, throughput, hit rate by tier?

The server runs in a process of its own (`kvstore serve`); this process is its clients. The arms run one after another
on the same conversations: nothing cached, prefix cache only, all tiers, and all tiers after a restart of the server.
Other parts: the cost of HTTP, many streams at once, and one tenant beside another's request of very many sequences.
"""

import argparse
import asyncio
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from bench.common import LlamaShape, Report, Row, arguments, median, random_llama, run, say
from bench.serving_load import TIERS, Client, Conversation, Load, TurnResult, new_session, talk

MODEL_M = LlamaShape(
    hidden_size=768, num_layers=12, num_heads=12, num_kv_heads=4, intermediate_size=2048, vocab_size=16384
)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}w3 {{ m.content }} w2 {% else %}w1 {{ m.content }} w2 "
    "{% endif %}{% endfor %}{% if add_generation_prompt %}w3 {% endif %}"
)
WORDS = "tea coffee red blue Lisbon Oslo train garden piano river Ada Tom seven maple winter bread cloud".split()
START_S, PORT_WAIT_S = 120.0, 0.05
ARMS = ("none", "prefix", "tiers", "restart")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve."""

    name: str
    tiers: Sequence[str]  # flags of `kvstore serve`
    salted: bool = False
    restart: bool = False


class Served:
    """A server in a process of its own."""

    def __init__(self, model: str | None, flags: Sequence[str], log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "kvstore.service.command.cli", "serve", *([model] if model else [])]
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port), *flags], stdout=out, stderr=out, start_new_session=True
            )
        self._log = log
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                with urlopen(f"{self.url}/ready", timeout=5):
                    return
            except (URLError, OSError):
                time.sleep(PORT_WAIT_S)
        raise RuntimeError(f"the server did not start: {self._log.read_text()[-500:]}")

    def resident_bytes(self) -> int:
        """The resident bytes of the server and of the processes that it has started."""
        import psutil

        parent = psutil.Process(self._process.pid)
        return sum(process.memory_info().rss for process in [parent, *parent.children(recursive=True)])

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def free_port() -> int:
    """Below those that the kernel hands out, so that nobody takes it between two starts of a server."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def serve(model: str | None, flags: Sequence[str], folder: Path) -> Iterator[Served]:
    server = Served(model, flags, folder / "server.log")
    try:
        yield server
    finally:
        server.close()


# -- conversations ---------------------------------------------------------------------------------------------------
async def converse(server: Served, load: Load, arm: Arm, last: bool, talks: Sequence[Conversation]) -> Row:
    """Run all turns of an arm, or with `last` only the last turn of each conversation."""
    first_turn = load.num_turns if last else 1
    last_turn = load.num_turns - 1 if arm.restart and not last else load.num_turns
    async with new_session() as session:
        client = Client(server.url, session, load, arm.salted)
        seconds = await talk(client, load, talks, first_turn, last_turn)
    return {"results": client.results, "seconds": seconds}


def measure_arm(model: str | None, load: Load, arm: Arm, common: Sequence[str], report: Report) -> None:
    talks = [Conversation(number) for number in range(load.num_conversations)]
    with TemporaryDirectory(prefix="kvstore-bench-") as name:
        folder = Path(name)
        tiers = [flag.replace("STORE", str(folder / "store")) for flag in arm.tiers]
        with serve(model, [*common, *tiers], folder) as server:
            found = asyncio.run(converse(server, load, arm, False, talks))
        if arm.restart:
            with serve(model, [*common, *tiers], folder) as server:
                found = asyncio.run(converse(server, load, arm, True, talks))
    _add_rows(report, load, arm.name, found["results"], found["seconds"])


def _add_rows(report: Report, load: Load, arm: str, results: list[TurnResult], seconds: float) -> None:
    good = [one for one in results if not one.error]
    for one in [one for one in results if one.error][:3]:
        say(f"  failed: {one.error}")
    num_tokens = sum(one.usage["completion_tokens"] for one in good)
    for turn in sorted({one.turn for one in results}):
        of_turn = [one for one in good if one.turn == turn]
        num_failed = sum(one.turn == turn and bool(one.error) for one in results)
        report.add(
            part="turns", loop=load.loop, arm=arm, turn=turn, num_requests=len(of_turn), num_failed=num_failed,
            **_percentiles("ttft_s", [one.ttft_s for one in of_turn]),
            **_percentiles("itl_s", [gap for one in of_turn for gap in one.gaps_s]),
            hit_rate=_hit_rates(of_turn), tokens_per_s=num_tokens / seconds,
        )  # fmt: skip


def _percentiles(name: str, values: list[float]) -> Row:
    import numpy as np

    if not values:
        return {f"{name}_p{q}": None for q in (50, 90, 99)}
    return {f"{name}_p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)}


def _hit_rates(results: list[TurnResult]) -> Row:
    """The shares of the prompt's tokens that were hit, by tier."""
    total = sum(one.usage["prompt_tokens"] for one in results)
    return {tier: sum(one.cached[tier] for one in results) / total if total else 0.0 for tier in TIERS}


# -- one client, and many streams ------------------------------------------------------------------------------------
def measure_overhead(
    model: str | None, common: Sequence[str], report: Report, vocabulary: Sequence[str], repeats: int
) -> None:
    """Turns of one client over HTTP, and of a session in this process: the time that each takes beyond the engine's.

    The answer reports the engine's time: to its first token, and from there to its last.
    """
    from kvstore import Engine, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    flags = [*common, "--hbm", "64MiB", "--disk", "0"]
    with TemporaryDirectory(prefix="kvstore-bench-") as name, serve(model, flags, Path(name)) as server:
        over_http = asyncio.run(_turns_over_http(server, params.max_tokens or 0, vocabulary, repeats))
    with Engine(model, {"hbm": "64MiB"}) as engine:
        direct = [_direct_turn(engine, params, text) for text in _messages(vocabulary, repeats)][3:]
    found = {"over_http_s": median(over_http), "direct_s": median(direct)}
    report.add(
        part="overhead", arm="process", num_requests=repeats, **found,
        overhead_s=found["over_http_s"] - found["direct_s"],
    )  # fmt: skip


def _messages(vocabulary: Sequence[str], repeats: int) -> Iterator[str]:
    rng = random.Random(0)
    for _ in range(repeats + 3):
        yield " ".join(rng.choices(vocabulary, k=24))


async def _turns_over_http(server: Served, max_tokens: int, vocabulary: Sequence[str], repeats: int) -> list[float]:
    found = []
    async with new_session() as session:
        for text in _messages(vocabulary, repeats):
            body = {"message": text, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
            started = time.perf_counter()
            async with session.post(f"{server.url}/chat", json=body) as reply:
                times = (await reply.json())["timings"]
            found.append(time.perf_counter() - started - times["ttft_s"] - times["decode_s"])
    return found[3:]


def _direct_turn(engine: Any, params: Any, text: str) -> float:
    started = time.perf_counter()
    times = engine.chat(f"turn-{time.perf_counter_ns()}").send(text, params).timings
    return time.perf_counter() - started - times.ttft_s - times.decode_s


def measure_streams(model: str | None, common: Sequence[str], report: Report, load: Load) -> None:
    """As many streams at once as there are conversations: do all end well, and how much memory do they take?"""
    with TemporaryDirectory(prefix="kvstore-bench-") as name, serve(
        model, [*common, "--hbm", "64MiB", "--max-num-seqs", "256"], Path(name)
    ) as server:  # fmt: skip
        before = server.resident_bytes()
        talks = [Conversation(number) for number in range(load.num_conversations)]
        found = asyncio.run(converse(server, load, Arm("streams", ()), False, talks))
        after = server.resident_bytes()
    good = [one for one in found["results"] if not one.error]
    report.add(
        part="streams", arm="process", num_requests=len(found["results"]),
        num_failed=len(found["results"]) - len(good), **_percentiles("ttft_s", [one.ttft_s for one in good]),
        **_percentiles("itl_s", [gap for one in good for gap in one.gaps_s]),
        tokens_per_s=sum(one.usage["completion_tokens"] for one in good) / found["seconds"],
        grown_bytes=after - before,
    )  # fmt: skip


# -- two tenants -----------------------------------------------------------------------------------------------------
def measure_fairness(model: str | None, common: Sequence[str], report: Report, load: Load) -> None:
    """One tenant's TTFT alone, and beside another's single request of 256 prompts with 16 choices each."""
    with TemporaryDirectory(prefix="kvstore-bench-") as name:
        keys = Path(name) / "keys"
        keys.touch(0o600)
        keys.write_text("".join(f"{tenant}:key-of-{tenant}\n" for tenant in ("few", "many")))
        flags = [*common, "--api-key-file", str(keys), "--store", str(Path(name) / "store")]
        with serve(model, flags, Path(name)) as server:
            found = asyncio.run(_beside_a_flood(server, load))
    alone, beside = ([one for one in results if not one.error] for results in (found["alone"], found["beside"]))
    for arm, good in (("alone", alone), ("beside", beside)):
        report.add(
            part="fairness", arm=arm, num_requests=load.num_turns, num_failed=load.num_turns - len(good),
            **_percentiles("ttft_s", [one.ttft_s for one in good]),
            tokens_per_s=None if arm == "alone" else found["flood_tokens"] / found["flood_s"],
            ratio=median([one.ttft_s for one in good]) / median([one.ttft_s for one in alone]),
        )  # fmt: skip


async def _beside_a_flood(server: Served, load: Load) -> dict[str, Any]:
    """num_turns requests alone, then as many while the other tenant's request runs, which is aborted at the end."""
    rng = random.Random(load.seed)
    words = [" ".join(rng.choices(load.vocabulary, k=load.words)) for _ in range(256)]
    body = {"prompt": words, "n": 16, "max_tokens": 256, "ignore_eos": True, "stream": True}
    async with new_session("key-of-few") as few, new_session("key-of-many") as many:
        arms = [Client(server.url, few, load, salted=True) for _ in range(2)]
        await _ask_often(arms[0], load, 3)  # for everything that is done only once
        arms[0].results.clear()
        await _ask_often(arms[0], load, load.num_turns)
        async with many.post(f"{server.url}/v1/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            num_tokens = 0

            async def read() -> None:
                nonlocal num_tokens
                async for line in reply.content:
                    num_tokens += line.startswith(b"data: {")

            reading = asyncio.create_task(read())
            while num_tokens < 1024:
                await asyncio.sleep(0.05)
            before, started = num_tokens, time.perf_counter()
            await _ask_often(arms[1], load, load.num_turns)
            seconds = time.perf_counter() - started
            assert not reading.done(), "the large request ended before the small ones; measure fewer of these"
            reading.cancel()
    return {
        "alone": arms[0].results, "beside": arms[1].results, "flood_tokens": num_tokens - before, "flood_s": seconds
    }  # fmt: skip


async def _ask_often(client: Client, load: Load, num_requests: int) -> None:
    """One request after the other, by one person who pauses."""
    rng = random.Random(load.seed)
    for number in range(num_requests):
        talking = Conversation(number)
        talking.say(load, 1)
        await client.turn(talking.messages, 1)
        await asyncio.sleep(rng.uniform(0.5, 1.5) * load.think_s)


# -- the command -----------------------------------------------------------------------------------------------------
def _parser() -> argparse.ArgumentParser:
    parser = arguments("serving", __doc__ or "", uses_torch=False)
    parser.add_argument("--model", default="builtin", help='"builtin", "m" (115 M parameters, random) or a directory')
    parser.add_argument("--part", default="all", choices=("all", "turns", "overhead", "streams", "fairness"))
    parser.add_argument("--loop", default="closed", choices=("closed", "open"))
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)}")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--clients", type=int, default=4, help="of the closed loop")
    parser.add_argument("--rate", type=float, default=4.0, help="conversations begun a second, of the open loop")
    parser.add_argument("--think", type=float, default=0.2, help="mean seconds before each further turn")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument(
        "--flags", default="", help='further flags of kvstore serve, such as --flags="--data-parallel-size 2"'
    )
    parser.add_argument("--hbm", default="auto", help="size of the first tier, such as 16MiB (default: by model)")
    return parser


@contextmanager
def _model(name: str) -> Iterator[tuple[str | None, Sequence[str]]]:
    """The argument of `kvstore serve` for the model, and words that its tokenizer knows."""
    if name == "builtin":
        yield None, WORDS
    elif name == "m":
        with random_llama(MODEL_M) as (folder, _):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(folder)
            tokenizer.chat_template = TEMPLATE
            tokenizer.save_pretrained(folder)
            yield str(folder), [f"w{number}" for number in range(10, 16000)]
    else:
        yield name, WORDS


def _load(parsed: argparse.Namespace, vocabulary: Sequence[str]) -> Load:
    big = parsed.model != "builtin"
    conversations, turns = (4, 2) if parsed.quick else (parsed.conversations, parsed.turns)
    return Load(
        parsed.loop, conversations, turns, parsed.clients, parsed.rate, parsed.think, vocabulary,
        first_words=128 if big else 60, words=128 if big else 30, max_tokens=32,
    )  # fmt: skip


def _measure(parsed: argparse.Namespace, report: Report) -> None:
    names = parsed.arms.split(",")
    with _model(parsed.model) as (model, vocabulary):
        load = _load(parsed, vocabulary)
        hbm = parsed.hbm if parsed.hbm != "auto" else "32MiB" if model else "8MiB"
        tiers = ("--hbm", hbm, "--cpu", "512MiB", "--disk", "2GiB", "--store", "STORE")
        alone = ("--hbm", hbm, "--cpu", "0", "--disk", "0")
        arms = {
            "none": Arm("none", alone, salted=True),
            "prefix": Arm("prefix", alone),
            "tiers": Arm("tiers", tiers),
            "restart": Arm("restart", tiers, restart=True),
        }
        common = shlex.split(parsed.flags)
        if parsed.part in ("all", "turns"):
            for name in names:
                say(f"{name}, {load.loop} loop")
                measure_arm(model, load, arms[name], common, report)
        if parsed.part in ("all", "overhead"):
            measure_overhead(model, common, report, vocabulary, 10 if parsed.quick else 100)
        if parsed.part in ("all", "streams"):
            many = Load("closed", 16 if parsed.quick else parsed.streams, 1, parsed.streams, 1.0, 0.0, vocabulary,
                        first_words=20, words=20, max_tokens=32)  # fmt: skip
            measure_streams(model, common, report, many)
        if parsed.part in ("all", "fairness"):
            few = Load("closed", 1, 5 if parsed.quick else 40, 1, 1.0, 0.2, vocabulary,
                       first_words=load.first_words, words=20, max_tokens=16)  # fmt: skip
            hbm = parsed.hbm if parsed.hbm != "auto" else "512MiB" if model else "64MiB"
            measure_fairness(model, (*common, *tiers[2:6], "--hbm", hbm), report, few)


def _display(row: Row) -> Row:
    """Milliseconds, and hit rates in per cent."""
    shown = {"part": row["part"], "arm": row["arm"]}
    shown |= {name: row[name] for name in ("loop", "turn", "num_requests", "num_failed") if name in row}
    for name, value in row.items():
        if name.endswith(("_p50", "_p90", "_p99")) or name in ("over_http_s", "direct_s", "overhead_s"):
            shown[name.replace("_s", "") + " ms"] = None if value is None else round(value * 1000, 2)
    if "hit_rate" in row:
        shown["hits %"] = " ".join(f"{tier} {100 * rate:.0f}" for tier, rate in row["hit_rate"].items() if rate)
    if "ratio" in row:
        shown["TTFT / alone"] = round(row["ratio"], 2)
    if row.get("tokens_per_s") is not None:
        shown["tok/s"] = round(row["tokens_per_s"])
    if "grown_bytes" in row:
        shown["grown MiB"] = round(row["grown_bytes"] / 2**20, 1)
    return shown


def main() -> int:
    parsed = _parser().parse_args()
    unknown = [name for name in parsed.arms.split(",") if name not in ARMS]
    if unknown:
        print(f"python -m bench.serving: unknown arm {unknown[0]!r}; known: {', '.join(ARMS)}", file=sys.stderr)
        return 2
    return run(_measure, parsed, "Serving over HTTP", _display)


if __name__ == "__main__":
    sys.exit(main())
