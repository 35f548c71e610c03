"""AIPerf as small as can be: makes two sessions, and replays traces against a server one request after the other."""

import json
import sys
import time
from pathlib import Path
from urllib.request import Request, urlopen

BLOCK = 64


def install(folder: Path) -> Path:
    """Returns the command."""
    path = folder / "aiperf"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
    path.chmod(0o755)
    return path


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def synthesize() -> None:
    run = Path(flag("--output")) / "run"
    run.mkdir()
    rows = [
        {"session_id": name, "input_length": tokens, "output_length": 700}
        for name in ("a", "b")
        for tokens in (30_000, 9_000, 12_000)
    ]
    (run / "dataset.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def ask(session: str, request: dict) -> dict:
    """One record of profile_export.jsonl."""
    text = "".join(f"{session}{block:04}".ljust(BLOCK, ".") for block in request["hash_ids"])
    body = {"model": flag("--model"), "messages": [{"role": "user", "content": text}], "temperature": 0,
            "max_tokens": request["out"], "ignore_eos": True}  # fmt: skip
    started = time.time_ns()
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(f"{flag('--url')}/v1/chat/completions", json.dumps(body).encode(), headers)) as reply:
        usage = json.load(reply)["usage"]
    ended = time.time_ns()
    metrics = {
        "usage_prompt_tokens": usage["prompt_tokens"],
        "usage_prompt_cache_read_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "time_to_first_token": (ended - started) / 1e6,
    }
    times = {"x_correlation_id": session, "request_start_ns": started, "request_end_ns": ended}
    return {"metadata": times, "metrics": {name: {"value": value} for name, value in metrics.items()}}


def profile() -> None:
    traces = [json.loads(path.read_text()) for path in sorted(Path(flag("--input-file")).iterdir())]
    records = [ask(trace["id"], request) for trace in traces for request in trace["requests"]]
    total = sum(len(request["hash_ids"]) for trace in traces for request in trace["requests"])
    new = sum(len(trace["requests"][-1]["hash_ids"]) for trace in traces)
    out = Path(flag("--output-artifact-dir"))
    out.mkdir()
    (out / "profile_export.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    summary = {"theoretical_prefix_cache_hit": {"avg": 100 * (1 - new / total)}}
    (out / "profile_export_aiperf.json").write_text(json.dumps(summary))


if __name__ == "__main__":
    {"synthesize": synthesize, "profile": profile}[sys.argv[1]]()
