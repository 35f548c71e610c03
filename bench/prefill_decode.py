"""What does a first token cost when another server computes the prompt?

One server alone beside a pair of them (`--role prefill`, `--role decode`) and a redis-server, all on this machine: new
prompts of random ids, in turns, seconds until the answer of one token, medians. `stored`: until the prefill server has
said that the prompt is in the Redis; what is left is the way back and the last block.
"""

import argparse
import json
import os
import random
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import Request, urlopen

from bench.common import Report, alternate, arguments, median, run, spread
from bench.peers.__main__ import model_folder
from bench.remote import redis_server
from bench.serving import Served, serve
from kvstore.remote.names import SECRET_VARIABLE

TIERS = ("--device", "cpu", "--hbm", "512MiB", "--cpu", "1GiB", "--disk", "0")
ADMIN_KEY = "key-of-this-benchmark"
VOCAB = 256  # of random prompts


def posted(server: Served, path: str, body: dict[str, object] | None = None) -> dict[str, object]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(server.url + path, data, headers), timeout=120) as reply:
        found: dict[str, object] = json.load(reply)
    return found


def first_token_s(server: Served, num_tokens: int) -> float:
    prompt = [random.randrange(10, VOCAB) for _ in range(num_tokens)]
    started = time.perf_counter()
    posted(server, "/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True})
    return time.perf_counter() - started


def asked_of(server: Served) -> tuple[int, float]:
    """Prompts that another server has computed for it, and the seconds of all of them."""
    stats: dict[str, dict[str, dict[str, dict[str, float]]]] = posted(server, "/admin/stats")  # type: ignore[assignment]
    found = stats["remote"]["prefill"]
    return int(found["computed"]), found["seconds"]["sum"]  # type: ignore[call-overload]


def body(parsed: argparse.Namespace, report: Report) -> None:
    os.environ.setdefault(SECRET_VARIABLE, "a secret for this benchmark alone")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvstore-bench-")))
        port, _ = stack.enter_context(redis_server(folder))
        model = str(stack.enter_context(model_folder("tiny" if parsed.quick else "m", parsed.keep_models)))
        remote = ("--remote", f"redis://127.0.0.1:{port}")
        alone = stack.enter_context(serve(model, TIERS, folder))
        prefill = stack.enter_context(serve(model, (*TIERS, *remote, "--role", "prefill"), folder))
        role = ("--role", "decode", "--prefill-url", prefill.url, "--admin-key", ADMIN_KEY)
        decode = stack.enter_context(serve(model, (*TIERS, *remote, *role), folder))
        for num_tokens in [192] if parsed.quick else parsed.tokens:
            before = asked_of(decode)
            measures = {"one server": alone, "two servers": decode}
            asking = {name: partial(first_token_s, server, num_tokens) for name, server in measures.items()}
            times = alternate(asking, parsed.repeats)
            count, seconds = (now - then for now, then in zip(asked_of(decode), before, strict=True))
            if count != parsed.repeats + 1:
                raise RuntimeError(f"{count} of {parsed.repeats + 1} prompts were computed by the other server")
            for name, found in times.items():
                stored = None if name == "one server" else 1000 * seconds / count
                ratio = median(found) / median(times["one server"])
                ms = 1000 * median(found)
                report.add(tokens=num_tokens, by=name, ms=ms, ratio=ratio, stored=stored, spread=spread(found))


def main() -> int:
    parser = arguments("prefill_decode", __doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7, help="prompts of each kind (default: 7)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2000], metavar="N", help="of a prompt")
    parser.add_argument("--keep-models", metavar="DIR", type=Path, help="models are made there once, and stay")
    return run(body, parser.parse_args(), "Prompts computed by another server; medians")


if __name__ == "__main__":
    raise SystemExit(main())
