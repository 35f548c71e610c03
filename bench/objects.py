"""How fast are blocks out of a bucket or a directory, beside plain GETs of objects of the same size?

Both arms read the same groups. `obstore`: one GET of a whole object after another. `the tier`: its two threads, with
ranges of up to 2 MiB, into the places of the blocks, each of them checked. The bucket is moto's server on the
loopback, a Python program: it says what the tier costs beside the GETs, not how fast an S3 is. In turns, medians.
"""

import argparse
import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import obstore

from bench.common import Report, alternate, arguments, median, run, spread
from bench.remote import SIZES, ThroughTier, timed
from kvstore.remote.names import BlockNames, FleetSecret
from kvstore.remote.object_address import parse_object_url
from kvstore.remote.object_blocks import ObjectBlocks
from kvstore.remote.object_client import open_store

PATIENT_S = 60.0


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of a bucket of moto's server; what signs in is in the environment."""
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    os.environ |= {
        "AWS_ENDPOINT_URL": address, "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "anybody", "AWS_SECRET_ACCESS_KEY": "not-checked",
    }  # fmt: skip
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stdout=quiet, stderr=quiet)
    try:
        while not answers(address):
            time.sleep(0.1)
        key = "AWS4-HMAC-SHA256 Credential=anybody/20260101/us-east-1/s3/aws4_request"
        request = urllib.request.Request(f"{address}/kv-blocks", method="PUT", headers={"Authorization": key})
        urllib.request.urlopen(request, timeout=60).close()
        yield "s3://kv-blocks/a"
    finally:
        process.kill()
        process.wait()


def answers(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/moto-api/", timeout=5).close()
    except OSError:
        return False
    return True


def bench_store(report: Report, repeats: int, url: str, name: str, size: int, num_bytes: int) -> None:
    names = BlockNames(FleetSecret("a secret for this benchmark alone"), size.to_bytes(32, "little"))
    address = parse_object_url(url)
    shared = ObjectBlocks(address, names, 1000.0, 16, size, ask_s=PATIENT_S, transfer_s=PATIENT_S)
    count = max(1, num_bytes // size // shared.group_blocks) * shared.group_blocks
    through, store = ThroughTier(shared, size, count), open_store(address)
    groups = [one["path"] for page in obstore.list(store, names.prefix) for one in page]
    if len(groups) * shared.group_blocks != count:
        raise RuntimeError(f"{count} blocks are in {len(groups)} objects")
    plain = {"obstore, whole objects": lambda: timed(lambda: [len(obstore.get(store, one).bytes()) for one in groups])}
    times = alternate({**plain, "the tier, checked": lambda: timed(lambda: through.read_all(1))}, repeats)
    base = median(times["obstore, whole objects"])
    for who, seconds in times.items():
        speed, ratio = count * size / median(seconds) / 1e9, base / median(seconds)
        report.add(store=address.scheme, size=name, client=who, GB_per_s=speed, ratio=ratio, spread=spread(seconds))
    through.tier.close(60.0)


def body(parsed: argparse.Namespace, report: Report) -> None:
    repeats, num_bytes = parsed.repeats, parsed.megabytes << 20
    if parsed.quick:
        repeats, num_bytes = min(repeats, 3), min(num_bytes, 16 << 20)
    with ExitStack() as stack:
        urls = [f"file://{Path(stack.enter_context(TemporaryDirectory(prefix='kvstore-bench-')))}"]
        if all(importlib.util.find_spec(name) is not None for name in ("moto", "flask", "flask_cors")):
            urls.append(stack.enter_context(s3_server()))
        for url in urls:
            for name, size in SIZES.items():
                bench_store(report, repeats, url, name, size, num_bytes)


def main() -> int:
    parser = arguments("objects", __doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=64, metavar="N", help="that are moved (default: 64)")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each kind (default: 5)")
    return run(body, parser.parse_args(), "Out of a directory and a bucket on the loopback; medians")


if __name__ == "__main__":
    sys.exit(main())
