"""How fast are blocks through a Redis, and a person's turn on a server that gets its KV only from there?

`client`: our client beside redis-benchmark, redis-py and valkey-glide-sync, with values of the sizes of blocks.
`redis-benchmark` runs with one connection and a pipeline of the same depth, so it shows what the server and the
loopback can do. Also measured: blocks through the remote tier, which checks each of them. `turn`: time to first token
of a returning turn whose KV is on the local disk, in the Redis (by our client and by redis-py), behind a slow network,
or nowhere. `outage`: time to first token of new prompts while the Redis is killed or stopped, beside a server that has
none. Uses its own redis-server on the loopback. All in turns, medians.
"""

import argparse
import csv
import gc
import io
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from bench.common import Report, alternate, arguments, median, random_prompts, run, spread
from bench.peers.__main__ import model_folder
from kvstore.blocks.records import BlockRecord, ReadResult
from kvstore.errors import RemoteError
from kvstore.remote.address import RedisAddress
from kvstore.remote.names import SECRET_VARIABLE, BlockNames, FleetSecret
from kvstore.remote.redis_blocks import RedisBlocks, RedisSession
from kvstore.remote.resp import RespClient
from kvstore.remote.resp_replies import Landed
from kvstore.tiers.port import BlockTier, Chain, Keeps, ReadDone, ReadJob, TierSession, WriteDone, WriteJob
from kvstore.tiers.worker import TierWorker, WorkerLimits

A_SECOND = 1.0
SIZES = {"12 KiB": 12 << 10, "64 KiB": 64 << 10, "256 KiB": 256 << 10, "1 MiB": 1 << 20}
BATCH_BYTES = 4 << 20
WINDOW, NUM_NEW = 4096, 16
PARTS = ["client", "turn", "outage"]
OUTAGE_S = 8.0
RATES = (10, 1)  # MB/s of slow networks
Measures = dict[str, Callable[[], float]]


@contextmanager
def redis_server(folder: Path) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A server that keeps nothing, on a free port, and its process."""
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("python -m bench.remote: redis-server is not installed")
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with RespClient(RedisAddress("127.0.0.1", port)) as client:
            while not answers(client):
                time.sleep(0.01)
        yield port, process
    finally:
        process.kill()
        process.wait()


def answers(client: RespClient) -> bool:
    try:
        return client.call("PING") == b"PONG"
    except RemoteError:
        return False


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def of_benchmark(port: int, command: str, size: int, count: int, depth: int) -> Callable[[], float]:
    """The seconds for as many values, from the rate that redis-benchmark reports."""
    # Its GETs ask for what its SETs before have left.
    words = ["redis-benchmark", "-p", port, "-c", 1, "-P", depth, "-d", size, "-n", count, "-t", command, "--csv"]

    def measure() -> float:
        found = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=True)
        rows = list(csv.DictReader(io.StringIO(found.stdout)))
        return count / float(rows[0]["rps"])

    return measure


def bench_size(report: Report, repeats: int, port: int, name: str, size: int, num_bytes: int) -> None:
    depth, count = max(1, BATCH_BYTES // size), num_bytes // size
    values = [memoryview(bytearray(os.urandom(size))) for _ in range(depth)]
    places = [memoryview(bytearray(size)) for _ in range(depth)]
    keys = [b"block-%d" % i for i in range(depth)]
    rounds = range(count // depth)
    client = RespClient(RedisAddress("127.0.0.1", port))

    def ours(commands: list[tuple[Any, ...]], into: list[memoryview]) -> Callable[[], float]:
        return lambda: timed(lambda: [client.pipeline(commands, into) for _ in rounds])

    sets: Measures = {"redis-benchmark": of_benchmark(port, "set", size, count, depth)}
    gets: Measures = {"redis-benchmark": of_benchmark(port, "get", size, count, depth)}
    sets["ours"] = ours([("SET", *pair) for pair in zip(keys, values, strict=True)], [])
    gets["ours"] = ours([("GET", key) for key in keys], places)
    add_redis_py(port, keys, places, rounds, gets)
    add_glide(port, keys, values, places, rounds, sets, gets)
    names = BlockNames(FleetSecret("a secret for this benchmark alone"), size.to_bytes(32, "little"))
    shared = RedisBlocks(RedisAddress("127.0.0.1", port), names, 1000.0)
    through = ThroughTier(shared, size, 8 * depth)
    gets["the tier, checked"] = lambda: timed(lambda: through.read_all(len(rounds) // 8))
    for what, measures in (("set", sets), ("get", gets)):
        times = alternate(measures, repeats)
        plain = median(times["redis-benchmark"])
        for who, seconds in times.items():
            speed = count * size / median(seconds) / 1e9
            ratio = plain / median(seconds)
            report.add(measure=what, size=name, client=who, GB_per_s=speed, ratio=ratio, spread=spread(seconds))
    if any(bytes(place) != value for place, value in zip(places, values, strict=True)):
        raise RuntimeError("what came back is not what was stored")
    client.close()
    through.tier.close(10.0)


class ThroughTier:
    """Blocks of one chain there, and room for all of them: read by the tier's threads, each of them checked."""

    def __init__(self, tier: BlockTier, size: int, count: int) -> None:
        self._woken = threading.Event()
        self.tier = TierWorker("remote", tier, self._woken.set, WorkerLimits(gather_s=0.0))
        ids = [bytes(32), *(os.urandom(32) for _ in range(count))]
        tokens = bytes(4 * 16)
        records = [BlockRecord(one, parent, tokens, bytes(32)) for parent, one in pairwise(ids)]
        places = [memoryview(bytearray(size)) for _ in records]
        self._reads = [ReadJob(i, record, place) for i, (record, place) in enumerate(zip(records, places, strict=True))]
        payload = memoryview(os.urandom(size))
        jobs = [WriteJob(i, record, size, lambda: payload, i) for i, record in enumerate(records)]
        self.tier.submit_writes(jobs, Chain(ids[0], tuple(ids[1:])))
        self._wait(1)

    def _wait(self, count: int) -> None:
        while count:
            self._woken.wait()
            self._woken.clear()
            for done in self.tier.completed():
                if isinstance(done, WriteDone) and done.error is not None:
                    raise RuntimeError(f"the tier does not answer: {done.error}")
                if isinstance(done, ReadDone) and done.result is not ReadResult.OK:
                    raise RuntimeError(f"a block came back {done.result.value}")
                count -= 1

    def read_all(self, num_times: int) -> None:
        for _ in range(num_times):
            for read in self._reads:
                self.tier.submit_read(read)
            self._wait(len(self._reads))


class RedisPy:
    """redis-py in place of `RespClient`: each value comes as bytes, and is copied into its place."""

    def __init__(self, port: int) -> None:
        import redis

        self._pipeline = redis.Redis(port=port).pipeline(transaction=False)

    def pipeline(
        self, commands: Sequence[Sequence[Any]], into: Sequence[memoryview | None] = (), timeout_s: float | None = None
    ) -> list[Any]:
        for command in commands:
            self._pipeline.execute_command(*command)
        replies: list[Any] = self._pipeline.execute()
        if commands[0][0] == "SET":  # which is told by a truth value
            replies = [b"OK" if reply else reply for reply in replies]
        for i, place in enumerate(into):
            if isinstance(replies[i], bytes) and place is not None:
                head_bytes = len(replies[i]) - place.nbytes
                place[:] = memoryview(replies[i])[head_bytes:]
                replies[i] = Landed(replies[i][:head_bytes])
        return replies

    def call(self, *command: Any, timeout_s: float | None = None) -> Any:
        return self.pipeline([command])[0]

    def close(self) -> None:
        self._pipeline.close()


@dataclass(frozen=True, slots=True)
class RedisPyBlocks:
    """`RedisBlocks` by redis-py."""

    blocks: RedisBlocks
    keeps: ClassVar[Keeps] = RedisBlocks.keeps

    def __str__(self) -> str:
        return str(self.blocks)

    @property
    def most_read_bytes(self) -> int:
        return self.blocks.most_read_bytes

    def session(self) -> TierSession:
        client: Any = RedisPy(self.blocks.address.port)
        return RedisSession(client, self.blocks.names, self.blocks.ttl_s)


def add_redis_py(port: int, keys: list[bytes], places: list[memoryview], rounds: range, gets: Measures) -> None:
    found, commands = RedisPy(port), [("GET", key) for key in keys]
    gets["redis-py"] = lambda: timed(lambda: [found.pipeline(commands, places) for _ in rounds])


def add_glide(
    port: int, keys: list[bytes], values: list[memoryview], places: list[memoryview], rounds: range, sets: Measures,
    gets: Measures,
) -> None:  # fmt: skip
    """Add glide if it is installed: a get of many into buffers; sets one by one or as one MSET."""
    try:
        import glide_sync
    except ImportError:
        return
    found = glide_sync.GlideClient.create(
        glide_sync.GlideClientConfiguration([glide_sync.NodeAddress("127.0.0.1", port)], request_timeout=10_000)
    )
    mapped: Any = dict(zip(keys, values, strict=True))
    sets["valkey-glide-sync"] = lambda: timed(lambda: [found.mset(mapped) for _ in rounds])
    gets["valkey-glide-sync"] = lambda: timed(lambda: [found.mget(list(keys), buffers=places) for _ in rounds])


# -- a turn ------------------------------------------------------------------------------------------------------------
class Relay:
    """A way to the server on which answers come at a rate, at most one batch behind another."""

    def __init__(self, port: int, bytes_per_s: float) -> None:
        self.bytes_per_s, self._to = bytes_per_s, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, server = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._to))
            for one in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._carry, args=one, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, is_slow: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(64 << 10):
                if is_slow:
                    time.sleep(len(piece) / self.bytes_per_s)
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)


@dataclass(slots=True)
class Arm:
    """An engine that serves turns on the same history again and again, without any of its KV in memory."""

    engine: Any
    history: list[int]
    rng: random.Random

    def turn_s(self) -> float:
        self.engine.flush()
        self.engine.loop.call(self.engine.loop.pool.evict_all)
        parts = getattr(self.engine.connector, "parts", None)
        if parts is not None:
            with parts.lock:
                parts.cpu.pool.evict_all()
        return self.ask().ttft_s

    def new_turn_s(self) -> float:
        """One on a history that nobody has."""
        self.history = [self.rng.randrange(1, self.engine.facts.vocab_size) for _ in self.history]
        return self.ask().ttft_s

    def ask(self) -> Any:
        from kvstore import SamplingParams

        prompt = self.history + [self.rng.randrange(1, self.engine.facts.vocab_size) for _ in range(NUM_NEW)]
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        return self.engine.generate([prompt], params)[0]


def settle_objects() -> None:
    """As servers do it: a full collection would take a fifth of a second of somebody's turn."""
    gc.collect()
    gc.freeze()


def bench_turn(report: Report, repeats: int, port: int, folder: Path, model: str, history_tokens: int) -> None:
    from kvstore import Engine

    os.environ.setdefault(SECRET_VARIABLE, "a secret for this benchmark alone")
    relays = {f"remote at {rate} MB/s, load=auto": Relay(port, rate * 1e6) for rate in RATES}
    tiers: dict[str, tuple[dict[str, Any], str]] = {
        "computed": ({}, "auto"),
        "local disk": ({"cpu": "512MiB", "disk": "1GiB", "path": folder / "disk"}, "always"),
        "remote": ({"cpu": "512MiB", "remote": f"redis://127.0.0.1:{port}"}, "always"),
        "remote by redis-py": ({"cpu": "512MiB", "remote": f"redis://127.0.0.1:{port}"}, "always"),
    }
    for name, relay in relays.items():
        tiers[name] = {"cpu": "512MiB", "remote": f"redis://127.0.0.1:{relay.port}"}, "auto"
    with ExitStack() as stack:
        arms: dict[str, Arm] = {}
        for name, (below, load) in tiers.items():
            engine = stack.enter_context(
                Engine(model, {"hbm": "256MiB", **below}, device="cpu", max_model_len=WINDOW, load=load)
            )
            if "redis-py" in name:
                worker = engine.connector.parts.store.remote._source.tier  # type: ignore[attr-defined]
                worker.tier = RedisPyBlocks(worker.tier)
            history = random_prompts(1, history_tokens, engine.facts.vocab_size, seed=1)[0]
            arms[name] = Arm(engine, history, random.Random(time.monotonic_ns()))
        for name, arm in arms.items():  # the history is stored, and what is to be measured has been
            for _ in range(2):
                arm.ask()
            for _ in range(6 if "auto" in name else 1):
                arm.turn_s()
        settle_objects()
        times = alternate({name: arm.turn_s for name, arm in arms.items()}, repeats)
        medians = {name: median(seconds) for name, seconds in times.items()}
        for name, seconds in times.items():
            details = arms[name].ask().usage.cached_tokens_details if name == "computed" else None
            report.add(
                measure=f"turn after {history_tokens} tokens", client=name, ms=1000 * medians[name],
                over_disk=medians[name] / medians["local disk"], over_computed=medians[name] / medians["computed"],
                spread=spread(seconds), cached=None if details is None else details.total,
            )  # fmt: skip


def bench_outage(report: Report, repeats: int, folder: Path, model: str, history_tokens: int, harm: int) -> None:
    """New prompts on a server with a Redis and on one without, in turns; from some moment on the Redis is harmed."""
    from kvstore import Engine

    os.environ.setdefault(SECRET_VARIABLE, "a secret for this benchmark alone")
    with ExitStack() as stack:
        port, process = stack.enter_context(redis_server(folder))
        arms: dict[str, Arm] = {}
        for name, below in {"without": {}, "with": {"remote": f"redis://127.0.0.1:{port}"}}.items():
            tiers = {"hbm": "256MiB", "cpu": "512MiB", **below}
            engine = stack.enter_context(Engine(model, tiers, device="cpu", max_model_len=WINDOW))
            arms[name] = Arm(engine, [0] * history_tokens, random.Random(len(arms)))
            arms[name].new_turn_s()
        settle_objects()
        times = alternate({name: arm.new_turn_s for name, arm in arms.items()}, repeats)
        process.send_signal(harm)
        harmed_s, after = time.perf_counter(), list[tuple[float, float]]()
        while time.perf_counter() - harmed_s < OUTAGE_S:
            began_s = time.perf_counter() - harmed_s
            after.append((began_s, arms["with"].new_turn_s()))
            times["without"].append(arms["without"].new_turn_s())
        plain = median(times["without"])
        later = [seconds for began_s, seconds in after if began_s > A_SECOND]
        name = signal.Signals(harm).name
        for what, some in (
            ("before", times["with"]), ("the first one after", [after[0][1]]),
            ("the slowest within a second", [seconds for began_s, seconds in after if began_s <= A_SECOND]),
            ("later than a second", later), ("the slowest of those", [max(later)]),
        ):  # fmt: skip
            ms = 1000 * (max(some) if "slowest" in what else median(some))
            report.add(measure=f"{name}: {what}", client="with a Redis", ms=ms, over_computed=ms / 1000 / plain)
        slowest = max(times["without"])
        report.add(
            measure=f"{name}: the slowest", client="without one", ms=1000 * slowest, over_computed=slowest / plain
        )


def body(parsed: argparse.Namespace, report: Report) -> None:
    repeats, num_bytes, history = parsed.repeats, parsed.megabytes << 20, parsed.history
    if parsed.quick:
        repeats, num_bytes, history = min(repeats, 3), min(num_bytes, 32 << 20), min(history, 256)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvstore-bench-")))
        port, _ = stack.enter_context(redis_server(folder))
        for name, size in SIZES.items() if "client" in parsed.parts else ():
            bench_size(report, repeats, port, name, size, num_bytes)
        if parsed.parts != ["client"]:
            model = stack.enter_context(model_folder("tiny" if parsed.quick else "m", parsed.keep_models))
        if "turn" in parsed.parts:
            bench_turn(report, repeats, port, folder, str(model), history)
        for harm in (signal.SIGKILL, signal.SIGSTOP) if "outage" in parsed.parts else ():
            bench_outage(report, repeats, folder, str(model), history // 4, harm)


def main() -> int:
    parser = arguments("remote", __doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=256, metavar="N", help="that are moved (default: 256)")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each kind (default: 5)")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="which")
    parser.add_argument("--history", type=int, default=2048, metavar="N", help="tokens before the turn (default: 2048)")
    parser.add_argument("--keep-models", metavar="DIR", type=Path, help="models are made there once, and stay")
    return run(body, parser.parse_args(), "Through a Redis on the loopback; medians")


if __name__ == "__main__":
    sys.exit(main())
