"""Recorded agent sessions, replayed by AIPerf: how much of their prompts is read from the cache, and how long do they
take: first, again, and again after `kill -9` of everything? Our engine beside vLLM alone, with LMCache, with our tier.

The sessions are traces in WEKA's format (`--traces`), or AIPerf makes some, without a network. All are made smaller by
one factor, so that the longest fits the model's window. What AIPerf calls theoretical is what an endless cache would
have. At the first replay that is what a session shares with its own past; at the others it is everything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import shutil
import string
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from bench.common import Report, Row, arguments, median, random_llama, say
from bench.peers.__main__ import MODELS, check_names, run_match, versions
from bench.peers.load import PeerError, start_all
from bench.peers.servers import MODEL_NAME, WINDOW, Server, Tiers, ours, vllm
from bench.serving_load import new_session

ARMS = ("kvstore", "vllm", "lmcache", "tier")
NAMES = {"kvstore": "kvstore", "vllm": "vLLM", "lmcache": "vLLM + LMCache", "tier": "vLLM + our tier"}
BLOCK_TOKENS = 64  # AIPerf 0.13 takes WEKA's traces as blocks of 64, whatever they say
GENERATED_BLOCK_TOKENS = 512  # of what AIPerf makes
TEMPLATE_TOKENS = 2  # around a message
MARKS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WARM_UPS = (64, 256, 1024)  # characters of unmeasured prompts, since the first steps of a process are slow
LEAST_READ, MOST_TO_WARM = {"first": 0.98, "again": 0.98, "after kill -9": 0.95}, 1.3
HIDDEN = ("sessions", "requests", "factor")

Trace = dict[str, Any]  # a session in WEKA's format


# -- traces ----------------------------------------------------------------------------------------------------------
def read_traces(folder: Path) -> list[Trace]:
    """WEKA's traces: a file for each session."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise PeerError(f"--traces {folder} has no .json file; name a folder with WEKA's traces, a session a file")
    return found


def generate(aiperf: str, num_sessions: int, seed: int, folder: Path) -> list[Trace]:
    """Sessions that AIPerf makes. In its file a row has the tokens that a request adds; here a request has them all."""
    command = [aiperf, "synthesize", "agentic-code", "--num-sessions", num_sessions, "--seed", seed, "--output", folder]
    _run(command, folder / "synthesize.log")
    [path] = folder.rglob("dataset.jsonl")
    return from_increments(map(json.loads, path.read_text().splitlines()))


def from_increments(rows: Iterator[Row]) -> list[Trace]:
    traces: dict[str, Trace] = {}
    for row in rows:
        name = row["session_id"]
        trace = traces.setdefault(name, {
            "id": name, "models": [MODEL_NAME], "block_size": GENERATED_BLOCK_TOKENS, "hash_id_scope": "local",
            "requests": [],
        })  # fmt: skip
        requests = trace["requests"]
        tokens = row["input_length"] + (requests[-1]["in"] if requests else 0)
        requests.append({
            "t": float(len(requests)), "type": "s", "model": MODEL_NAME, "in": tokens, "out": row["output_length"],
            "hash_ids": list(range(tokens // GENERATED_BLOCK_TOKENS)),
        })  # fmt: skip
    return list(traces.values())


@dataclass(frozen=True, slots=True)
class Scale:
    """One block of a smaller trace for `group` blocks of `block_tokens`."""

    group: int
    block_tokens: int

    @property
    def factor(self) -> float:
        return BLOCK_TOKENS / (self.group * self.block_tokens)


def all_requests(trace: Trace) -> Iterator[Row]:
    """Those of sub-agents, too."""
    for request in trace["requests"]:
        yield from all_requests(request) if request["type"] == "subagent" else [request]


def scale_for(traces: Sequence[Trace], window: int) -> Scale:
    """The least reduction with which every prompt and its answer fit. All traces have blocks of one size."""
    sizes = {trace["block_size"] for trace in traces}
    if len(sizes) > 1:
        raise PeerError(f"the traces have blocks of {sorted(sizes)} tokens; name a folder with one size")
    [block_tokens] = sizes
    requests = [request for trace in traces for request in all_requests(trace)]
    messages = 2 * max(len(trace["requests"]) for trace in traces) + 2
    room = window - TEMPLATE_TOKENS * messages - BLOCK_TOKENS
    peak = max(request["in"] + request["out"] for request in requests)
    return Scale(max(1, math.ceil(BLOCK_TOKENS * peak / (block_tokens * room))), block_tokens)


def scaled(trace: Trace, scale: Scale) -> Trace:
    """The same session with prompts of whole blocks, equal where they were equal."""
    ids: dict[tuple[int, ...], int] = {}

    def smaller(request: Row) -> Row:
        if request["type"] == "subagent":
            return {**request, **_prefixes(request), "requests": [smaller(inner) for inner in request["requests"]]}
        hashes, group = request["hash_ids"], scale.group
        groups = [tuple(hashes[at : at + group]) for at in range(0, len(hashes) - group + 1, group)]
        hash_ids = [ids.setdefault(blocks, len(ids)) for blocks in groups] or [ids.setdefault((), len(ids))]
        tokens = BLOCK_TOKENS * len(hash_ids)
        return {**request, "in": tokens, "out": max(1, round(request["out"] * scale.factor)), "hash_ids": hash_ids}

    def _prefixes(part: Row) -> Row:
        return {name: int(part.get(name, 0) * scale.factor) for name in ("tool_tokens", "system_tokens")}

    requests = [smaller(request) for request in trace["requests"]]
    return {**trace, **_prefixes(trace), "block_size": BLOCK_TOKENS, "requests": requests}


# -- the model -------------------------------------------------------------------------------------------------------
def character_tokenizer() -> Any:
    """A token for each printable character of ASCII, so that every token of a random model is text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    characters = ["\n", *(chr(code) for code in range(32, 127))]
    vocabulary = {token: number for number, token in enumerate([*MARKS, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)


# -- a replay --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Replay:
    """What AIPerf reports."""

    theoretical: float  # share of the prompts' blocks that came earlier in the same session
    prompt_tokens: int
    cached_tokens: int
    ttft_s: list[float]
    session_s: list[float]  # from a session's first request to the end of its last answer
    num_failed: int


def replay(aiperf: str, server: Server, model: Path, traces: Path, parsed: argparse.Namespace, out: Path) -> Replay:
    command = [
        aiperf, "profile", "--model", MODEL_NAME, "--url", server.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", model, "--custom-dataset-type", "weka_trace", "--input-file", traces,
        "--num-sessions", len(list(traces.iterdir())), "--concurrency", parsed.concurrency, "--ignore-trace-delays",
        "--use-server-token-count", "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0",
        "--random-seed", parsed.seed, "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics",
        "--workers-max", 1, "--record-processor-service-count", 1, "--output-artifact-dir", out,
    ]  # fmt: skip
    _run(command, out.with_suffix(".log"))
    summary = json.loads((out / "profile_export_aiperf.json").read_text())
    records = [json.loads(line) for line in (out / "profile_export.jsonl").read_text().splitlines()]
    return summed_up(summary, records)


def summed_up(summary: Row, records: Sequence[Row]) -> Replay:
    """summary and records: AIPerf's profile_export_aiperf.json, and the lines of its profile_export.jsonl."""
    good = [record["metrics"] for record in records if not record.get("error")]
    spans: dict[str, list[float]] = {}
    for record in records:
        times = record["metadata"]
        name = times.get("root_correlation_id") or times["x_correlation_id"]
        spans.setdefault(name, []).extend((times["request_start_ns"] / 1e9, times["request_end_ns"] / 1e9))
    return Replay(
        theoretical=summary["theoretical_prefix_cache_hit"]["avg"] / 100,
        prompt_tokens=sum(int(one["usage_prompt_tokens"]["value"]) for one in good),
        cached_tokens=sum(int(one.get("usage_prompt_cache_read_tokens", {"value": 0})["value"]) for one in good),
        ttft_s=[one["time_to_first_token"]["value"] / 1000 for one in good],
        session_s=[max(ends) - min(ends) for ends in spans.values()],
        num_failed=len(records) - len(good),
    )


def _run(command: Sequence[object], log: Path) -> None:
    with log.open("ab") as out:
        try:
            code = subprocess.run([str(word) for word in command], stdout=out, stderr=out).returncode
        except OSError as error:
            raise PeerError(f"--aiperf {command[0]} does not run: {error}") from error
    if code:
        raise PeerError(f"{command[0]} {command[1]} ended with {code}; its log: {log}")


async def warm_up(server: Server, seed: int) -> None:
    """Unmeasured prompts that no trace has."""
    rng = random.Random(seed)
    async with new_session() as session:
        for length in WARM_UPS:
            text = "".join(rng.choices(string.ascii_letters, k=length))
            body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 16,
                    "temperature": 0, "ignore_eos": True}  # fmt: skip
            async with session.post(f"{server.url}/v1/chat/completions", json=body) as reply:
                if reply.status != 200:
                    raise PeerError(f"{server.name} answered {reply.status}: {(await reply.text())[:200]}")


# -- the arms --------------------------------------------------------------------------------------------------------
def make_server(arm: str, parsed: argparse.Namespace, model: Path, folder: Path, logs: Path) -> Server:
    (folder / arm).mkdir()
    log = logs / f"{arm}.log"
    if arm == "kvstore":
        return ours(model, folder / arm, parsed.threads, log)
    tiers = Tiers("kvstore") if arm == "tier" else None
    lmcache = "default" if arm == "lmcache" else None
    made = vllm(parsed.peer_python, model, folder / arm, parsed.threads, log, lmcache, tiers)
    if parsed.eager:
        made.launches[-1].command.append("--enforce-eager")
    return made


def missing(arm: str, parsed: argparse.Namespace) -> str | None:
    """Why this arm cannot be measured; None if it can."""
    if arm == "kvstore":
        return None
    if parsed.peer_python is None:
        return "no --peer-python"
    try:
        versions(parsed.peer_python, "vllm", arm == "lmcache")
    except PeerError as error:
        return str(error)
    return None


def measure(parsed: argparse.Namespace, report: Report) -> None:
    logs = parsed.logs or Path(mkdtemp(prefix="kvstore-agentx-"))
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvstore-bench-")))
        traces = _write_traces(parsed, folder, report)
        tokenizer = character_tokenizer()
        shape = replace(MODELS[parsed.model].shape, vocab_size=len(tokenizer), max_position_embeddings=WINDOW)
        model, _ = stack.enter_context(random_llama(shape))
        tokenizer.save_pretrained(model)
        servers = {}
        for arm in parsed.arms.split(","):
            if why := missing(arm, parsed):
                report.add(arm=NAMES[arm], replay=f"absent: {why}")
            else:
                servers[arm] = make_server(arm, parsed, model, folder, logs)
        for server in servers.values():
            stack.callback(server.stop)
        arms = Arms(servers, parsed, model, traces, logs)
        start_all(servers.values())
        arms.replay("first")
        for _ in range(parsed.rounds):
            arms.replay("again")
            for server in servers.values():
                server.kill()
            start_all(servers.values())
            arms.replay("after kill -9")
        _add_rows(arms.found, report)


@dataclass(slots=True)
class Arms:
    """Servers that replay the same sessions, one after the other."""

    servers: dict[str, Server]
    parsed: argparse.Namespace
    model: Path
    traces: Path
    logs: Path
    found: dict[str, dict[str, list[Replay]]] = field(default_factory=dict)  # by arm and state
    _num_replays: int = 0

    def replay(self, state: str) -> None:
        self._num_replays += 1
        for arm, server in self.servers.items():
            say(f"{NAMES[arm]}: {state}")
            asyncio.run(warm_up(server, self._num_replays))
            out = self.logs / f"{arm}-{self._num_replays}"
            result = replay(self.parsed.aiperf, server, self.model, self.traces, self.parsed, out)
            say("  " + json.dumps(row([result], state)))
            self.found.setdefault(arm, {}).setdefault(state, []).append(result)


def _write_traces(parsed: argparse.Namespace, folder: Path, report: Report) -> Path:
    """The scaled traces, as files."""
    if parsed.traces:
        traces = read_traces(parsed.traces)[: parsed.sessions]
    else:
        (folder / "made").mkdir()
        traces = generate(parsed.aiperf, parsed.sessions, parsed.seed, folder / "made")
    scale = scale_for(traces, WINDOW)
    (folder / "traces").mkdir()
    for trace in traces:
        (folder / "traces" / f"{trace['id']}.json").write_text(json.dumps(scaled(trace, scale)))
    requests = [request for trace in traces for request in all_requests(trace)]
    longest = max(request["in"] for request in requests)
    origin = parsed.traces or "AIPerf's generator"
    said = (
        f"{len(traces)} sessions, {len(requests)} requests of at most {longest:,} tokens, from {origin}; "
        f"all lengths times {scale.factor:.3g} for a window of {WINDOW:,}"
    )
    report.add(arm="traces", replay=said, sessions=len(traces), requests=len(requests), factor=scale.factor)
    return folder / "traces"


def row(results: Sequence[Replay], state: str) -> Row:
    """Medians of several replays in the same state; percentiles are of each."""
    import numpy as np

    theoretical = median([one.theoretical for one in results]) if state == "first" else 1.0
    read = median([one.cached_tokens / one.prompt_tokens for one in results])
    p50, p90 = (median([1000 * float(np.percentile(one.ttft_s, q)) for one in results]) for q in (50, 90))
    return {
        "theoretical": theoretical, "read": read, "ratio": read / theoretical, "TTFT p50 ms": p50, "TTFT p90 ms": p90,
        "session s": median([median(one.session_s) for one in results]),
        "failed": sum(one.num_failed for one in results),
    }  # fmt: skip


def _add_rows(found: dict[str, dict[str, list[Replay]]], report: Report) -> None:
    """What each arm did, what was asked of our engine, and how that stands beside the others."""
    table = {arm: {state: row(results, state) for state, results in some.items()} for arm, some in found.items()}
    for arm, states in table.items():
        for state, values in states.items():
            least = LEAST_READ.get(state) if arm == "kvstore" else None
            asked = "-" if least is None else f">= {least:g}: {'yes' if values['ratio'] >= least else 'no'}"
            report.add(arm=NAMES[arm], replay=state, **values, asked=asked)
    pairs = zip(found["kvstore"]["after kill -9"], found["kvstore"]["again"], strict=True)
    ratio = median([row([after], "")["TTFT p50 ms"] / row([again], "")["TTFT p50 ms"] for after, again in pairs])
    asked = f"<= {MOST_TO_WARM:g}: {'yes' if ratio <= MOST_TO_WARM else 'no'}"
    report.add(arm="kvstore", replay="TTFT p50, after kill -9 / again", ratio=ratio, asked=asked)
    for arm in [arm for arm in table if arm != "kvstore"]:
        for state, values in table[arm].items():
            ratio = table["kvstore"][state]["TTFT p50 ms"] / values["TTFT p50 ms"]
            report.add(arm=f"kvstore / {NAMES[arm]}", replay=f"TTFT p50, {state}", ratio=ratio, asked="-")


# -- the command -----------------------------------------------------------------------------------------------------
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("agentx", (__doc__ or "").split("\n\n")[0])
    parser.add_argument("--arms", default=",".join(ARMS), help=f"kvstore and others of {', '.join(ARMS)}")
    parser.add_argument("--model", default="m", choices=("m", "tiny"), help="m: 85 million parameters (default: m)")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="WEKA's traces (default: AIPerf makes some)")
    parser.add_argument("--sessions", type=int, default=6, help="at most so many (default: 6)")
    parser.add_argument("--rounds", type=int, default=1, help="of again, kill -9, and again (default: 1)")
    parser.add_argument("--concurrency", type=int, default=2, help="sessions at a time (default: 2)")
    parser.add_argument("--seed", type=int, default=42, help="of texts and of made sessions (default: 42)")
    parser.add_argument("--aiperf", default="aiperf", metavar="FILE", help="the command of AIPerf (default: aiperf)")
    parser.add_argument("--peer-python", type=Path, metavar="FILE", help="python of vLLM's environment")
    parser.add_argument("--eager", action="store_true", help="vLLM compiles nothing, and starts in half the time")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="where logs go (default: a new directory)")
    parsed = parser.parse_args(argv)
    check_names(parser, parsed, arms=ARMS)
    if "kvstore" not in parsed.arms.split(","):
        parser.error(f"--arms {parsed.arms!r} is without kvstore, which the others are compared with; add it")
    if shutil.which(parsed.aiperf) is None:
        parser.error(f"--aiperf {parsed.aiperf} is not there; install aiperf in an environment, and name its command")
    if parsed.quick:
        parsed.sessions = 2
    return run_match(
        parser, parsed, measure, "Agents' sessions, replayed by AIPerf; ratio: read / theoretical, or as named", HIDDEN
    )


if __name__ == "__main__":
    sys.exit(main())
