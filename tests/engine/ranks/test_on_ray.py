"""Ranks that Ray starts, on two nodes that are processes of this machine: what they say, and who ends with whom.

No rank has a share of another one's memory; also without Ray, where a process stands for an actor. `--long` ends ranks
of both sizes in both ways.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge
from types import SimpleNamespace

import psutil
import pytest
import torch

from kvstore import Engine
from kvstore.engine.ranks.ranks import Door, entered
from kvstore.errors import ConfigError, EngineDiedError
from tests.support.engines import ask, greedy, open_engine, same_kv, save_model, stored_kv
from tests.support.faults import fail
from tests.support.ranks import PROMPTS, SIZES, WINDOWED, check_reads, check_says, end_while_it_answers, is_gone
from tests.support.ray_cluster import ray_cluster
from tests.support.redis_server import free_port
from tests.support.service.replicas import needs_ray
from tests.support.service.server_process import ENVIRONMENT
from tests.support.waiting import TIMEOUT_S, wait_until

MODEL = {"tokenizer": True}
ON_RAY = {"distributed_executor": "ray"}
SILENCE_S, START_S = 6.0, 300.0
SHORT = [("tensor", signal.SIGKILL), ("pipeline", signal.SIGSTOP)]
CASES = [(size, sign) for size in SIZES for sign in (signal.SIGKILL, signal.SIGSTOP)]
KEY, OTHER_KEY = b"k" * 32, b"o" * 32
ENOUGH_S, SHORT_S = 60.0, 0.2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[tuple[str, list[psutil.Process]]]:
    """Each of its nodes has room for one rank."""
    with ray_cluster(2, torch.get_num_threads(), tmp_path_factory.mktemp("ray")) as found:
        yield found


@pytest.fixture
def ray_here(cluster, monkeypatch) -> list[psutil.Process]:
    monkeypatch.setenv("RAY_ADDRESS", cluster[0])
    return cluster[1]


def ranks(nodes: list[psutil.Process]) -> list[int]:
    """The processes of ranks that Ray has started."""
    found = []
    for one in (one for node in nodes for one in node.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            found += [one.pid] if one.name().startswith("ray::RankActor") else []
    return found


@pytest.mark.ray
@needs_ray
@pytest.mark.parametrize("size", SIZES)
def test_ranks_on_ray_say_the_same_over_the_same_store(model, plain, tmp_path, ray_here, size):
    expected, store = [plain(prompt, 20) for prompt in PROMPTS], tmp_path / "store"
    before = signal.getsignal(signal.SIGTERM)
    with open_engine(model, store, max_num_batched_tokens=48, **ON_RAY, **SIZES[size]) as engine:
        (rank,) = ranks(ray_here)
        check_says(engine, expected)
    wait_until(lambda: is_gone(rank), "its end")
    assert signal.getsignal(signal.SIGTERM) is before
    with open_engine(model, store) as engine:
        check_reads(engine, expected)


@pytest.mark.ray
@needs_ray
@pytest.mark.parametrize(("size", "sign"), CASES)
def test_a_rank_that_ends_or_hangs_is_started_again(model, ray_here, size, sign, request):
    """And one that Ray has started is gone when its engine is, killed or closed."""
    if (size, sign) not in SHORT and not request.config.getoption("--long"):
        pytest.skip("needs --long")
    with Engine(
        model, {"hbm": "2MiB"}, device="cpu", silence_s=SILENCE_S, **ON_RAY, **SIZES[size], process="own"
    ) as engine:
        expected = engine.generate([PROMPTS[1]], greedy(8))[0].token_ids
        for victim in ("rank", "first"):
            first, (rank,) = engine.core.pid, ranks(ray_here)
            end_while_it_answers(engine, *((rank, sign) if victim == "rank" else (first, signal.SIGKILL)))
            wait_until(lambda: engine.core.state == "running" and engine.core.pid != first, "the restart", START_S)  # noqa: B023
            wait_until(lambda: is_gone(first) and is_gone(rank), "their end")  # noqa: B023
            assert engine.generate([PROMPTS[1]], greedy(8))[0].token_ids == expected
    wait_until(lambda: not ranks(ray_here), "their end")


@pytest.mark.ray
@needs_ray
def test_a_program_that_is_connected_stays_so_and_its_places_are_given_back(model, plain, ray_here):
    import ray

    ray.init(address="auto", logging_level="warning")
    try:
        with open_engine(model, **ON_RAY, **SIZES["tensor"]) as engine:
            assert engine.generate([PROMPTS[1]], greedy(8))[0].token_ids == plain(PROMPTS[1], 8)
            assert ray.available_resources().get("CPU", 0) == 0
        wait_until(lambda: ray.available_resources().get("CPU") == 2 * torch.get_num_threads(), "its places are free")
        groups = ray.util.placement_group_table().values()
        assert {(one["strategy"], len(one["bundles"]), one["state"]) for one in groups} == {("PACK", 2, "REMOVED")}
    finally:
        ray.shutdown()


# -- what cannot start -------------------------------------------------------------------------------------------------
CHAT = """
import os, sys, types
from kvstore.engine.ranks import on_ray
from kvstore.service.command.cli import main

class Rank:
    def run(self, *_): ...

Rank.__module__ = "not_on_that_machine"
sys.modules[Rank.__module__] = types.ModuleType(Rank.__module__)
sys.modules[Rank.__module__].Rank = Rank

CHANGE
code = main()
sys.stderr.flush()
os._exit(code)
"""


HERE, CLOSED, NOWHERE = "here", "closed", "nowhere"  # clusters


@pytest.mark.ray
@needs_ray
@pytest.mark.parametrize(
    ("where", "num_stages", "change", "code", "told"),
    [
        (HERE, 2, "on_ray.ANSWER_S = 5.0", 2, r"no room for 4 ranks of 1 threads: it has \d+ CPUs.* OMP_NUM_THREADS"),
        (HERE, 1, "on_ray.RankActor = Rank", 1, r"rank 1 of 2 does not start: .*No module named 'not_on_that_machine'"),
        (CLOSED, 1, "on_ray.ANSWER_S = 2.0", 2, r"no cluster that answers \(nothing within 2 s\); ray start --head"),
        (NOWHERE, 1, "", 2, r"no cluster that answers \(Invalid address format.*\); ray start --head"),
    ],
)
def test_the_command_says_in_a_line_why_it_cannot_start(
    model, tmp_path, cluster, where, num_stages, change, code, told
):  # fmt: skip
    command = ["chat", model, "--device", "cpu", "--distributed-executor", "ray", "--tensor-parallel-size", "2",
               "--pipeline-parallel-size", str(num_stages)]  # fmt: skip
    address = {HERE: cluster[0], CLOSED: f"127.0.0.1:{free_port()}", NOWHERE: "nowhere"}[where]
    ended = subprocess.run(
        [sys.executable, "-c", CHAT.replace("CHANGE", change), *command, "--store", str(tmp_path / "store")],
        env={**ENVIRONMENT, "RAY_ADDRESS": address}, capture_output=True, text=True, timeout=START_S,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    lines = [line for line in ended.stderr.splitlines() if line.startswith("kvstore:")]
    assert len(lines) == 2 and lines[0].startswith("kvstore: loading"), ended.stderr[-3000:]
    assert re.search(told, lines[1]) and ended.returncode == code, ended.stderr[-3000:]
    wait_until(lambda: not ranks(cluster[1]), "nothing of it is left")


STAND_IN = """
import sys, threading, types
from kvstore.engine.ranks import on_ray
from kvstore.errors import ConfigError

class RayError(Exception): ...

class Ray(types.ModuleType):
    is_there, answers = False, threading.Event()
    exceptions = types.SimpleNamespace(RayError=RayError)

    def init(self, **_):
        assert self.answers.wait(60)
        self.is_there = True

    def is_initialized(self):
        return self.is_there

    def shutdown(self):
        self.is_there = False

    def cluster_resources(self):
        raise RayError("a trace\\nof many lines\\nthe GCS has ended")

ray = sys.modules["ray"] = Ray("ray")
ray.util = sys.modules["ray.util"] = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

def said():
    try:
        with on_ray.others_on_ray([{}], 1.0, 0, 1):
            return "there are ranks"
    except ConfigError as error:
        return str(error)

on_ray.ANSWER_S = 0.1
print(said())
ray.answers.set()
for one in threading.enumerate():
    if one.name == "kvstore-ray":
        one.join()
print(ray.is_there)
on_ray.ANSWER_S = 60.0
print(said(), ray.is_there)
"""


def test_a_cluster_that_answers_too_late_is_left_and_what_fails_later_is_told_in_a_line():
    ended = subprocess.run([sys.executable, "-c", STAND_IN], capture_output=True, text=True, timeout=START_S)
    late, is_there, failed = ended.stdout.splitlines() or [ended.stderr] * 3
    assert "no cluster that answers (nothing within 0.1 s)" in late
    assert is_there == "False"
    assert failed == "the Ray cluster has ended, or fails (the GCS has ended); look at it with ray status False"


def test_without_ray_its_installation_is_told(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="pip install ray on each machine"):
        open_engine(model, **ON_RAY, **SIZES["tensor"])


@pytest.fixture
def others(monkeypatch, tmp_path) -> Iterator[list[subprocess.Popen]]:
    """The other ranks of engines that are opened meanwhile: this is Ray to them, and an actor is a process."""
    found: list[subprocess.Popen] = []

    def start(rank: int, host: str, port: int, key: bytes) -> subprocess.Popen:
        command = [sys.executable, "-m", "tests.children.ray_rank", str(rank), host, str(port), key.hex()]
        with (tmp_path / "log").open("wb") as stderr:
            found.append(subprocess.Popen(command, env=ENVIRONMENT, stderr=stderr, cwd=tmp_path))
        return found[-1]

    actor = SimpleNamespace(run=SimpleNamespace(remote=start))
    util = SimpleNamespace(
        get_node_ip_address=lambda: "127.0.0.1", remove_placement_group=lambda group: None,
        placement_group=lambda bundles, strategy: SimpleNamespace(wait=lambda timeout_s: True),
    )  # fmt: skip
    ray = SimpleNamespace(
        util=util, exceptions=SimpleNamespace(RayError=RuntimeError), is_initialized=lambda: True,
        cluster_resources=lambda: {"node:127.0.0.1": 1.0}, wait=lambda ends, timeout: ([], ends),
        remote=lambda **where: lambda kind: SimpleNamespace(remote=lambda: actor),
    )  # fmt: skip
    strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: None)
    for name, module in {"ray": ray, "ray.util": util, "ray.util.scheduling_strategies": strategies}.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield found
    for one in found:
        one.kill()
        one.wait()


@pytest.mark.parametrize(
    ("name", "size", "layers"),
    [("Llama", "tensor", {}), ("Gemma3", "tensor", WINDOWED), ("GptOss", "pipeline", WINDOWED)],
)
def test_a_rank_elsewhere_says_the_same_over_the_same_store(name, size, layers, tmp_path, others):
    model, store = save_model(tmp_path / "model", name, **layers), tmp_path / "store"
    with open_engine(model, store) as one:
        expected = [out.token_ids for out in one.generate(PROMPTS, greedy(12))]
        stored = stored_kv(one)
    with open_engine(model, store, **ON_RAY, **SIZES[size]) as engine:
        check_reads(engine, expected)
    with open_engine(model, tmp_path / "theirs", max_num_batched_tokens=48, **ON_RAY, **SIZES[size]) as engine:
        assert [out.token_ids for out in engine.generate(PROMPTS, greedy(12))] == expected
        assert same_kv(stored_kv(engine), stored)
        check_says(engine, expected)
    for other in others:
        assert other.wait(TIMEOUT_S) == 0, (tmp_path / "log").read_text()
    with open_engine(model, tmp_path / "theirs") as engine:
        check_reads(engine, expected)


@pytest.mark.parametrize(
    ("size", "sign", "how"),
    [
        ("tensor", signal.SIGKILL, "its connection has ended"),
        ("pipeline", signal.SIGSTOP, r"no sign of life for \d+ s"),
    ],
)
def test_the_end_of_a_rank_elsewhere_ends_the_engine(model, others, size, sign, how):
    """Also of one that hangs: its process is there still, with its connections, which nobody here can end."""
    with open_engine(model, silence_s=SILENCE_S, **ON_RAY, **SIZES[size]) as engine:
        end_while_it_answers(engine, others[0].pid, sign)
        wait_until(lambda: engine.closed)
        with pytest.raises(EngineDiedError, match=rf"rank 1 of 2 ended \({how}\)"):
            ask(engine, PROMPTS[1])


def come(door: Door, rank: int, key: bytes = KEY) -> socket.socket:
    return entered(door.host, door.port, rank, key)


def test_each_rank_gets_its_place():
    with Door("127.0.0.1", KEY) as door, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(door.others, 3, ENOUGH_S)
        theirs = {rank: come(door, rank) for rank in (2, 1)}
        ours = waiting.result()
        assert sorted(ours) == [1, 2]
        for rank, end in theirs.items():
            end.sendall(bytes([rank]))
            assert ours[rank].recv(2) == bytes([rank])
            end.close()
            ours[rank].close()


@contextmanager
def refusing() -> Iterator[Door]:
    """Who comes in here is refused, which is told when nobody else has come."""
    over = threading.Event()
    with Door("127.0.0.1", KEY) as door, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(door.others, 2, ENOUGH_S, lambda: over.is_set() and fail())
        yield door
        over.set()
        with pytest.raises(RuntimeError, match="injected"):
            waiting.result()
        with pytest.raises(EngineDiedError, match=r"rank 1 of 2 has not come .* 1 connections did not know the secret"):
            door.others(2, SHORT_S)


def test_another_secret_is_told_to_both():
    told = r"rank 1: the first rank at 127\.0\.0\.1 port \d+ has another secret"
    with refusing() as door, pytest.raises(ConfigError, match=told):
        come(door, 1, OTHER_KEY)


@pytest.mark.parametrize("known", [OTHER_KEY, KEY + b"other" + bytes([0, 1])], ids=["none", "what another rank proves"])
def test_who_listens_must_know_the_secret_too(known):
    """A rank tells nothing to one that does not, and one that has other ranks prove it does not."""
    with socket.create_server(("127.0.0.1", 0)) as fake, ThreadPoolExecutor(1) as threads:
        coming = threads.submit(entered, "127.0.0.1", fake.getsockname()[1], 1, KEY)
        accepted, _ = fake.accept()
        with accepted, Connection(os.dup(accepted.fileno())) as connection:
            assert connection.recv_bytes() == bytes([0, 1])
            connection.send_bytes(b"#CHALLENGE#" + bytes(20))
            connection.recv_bytes()
            connection.send_bytes(b"#WELCOME#")
            with pytest.raises(AuthenticationError):
                answer_challenge(connection, known)
            with pytest.raises(ConfigError, match="does not know the secret"):
                coming.result()


def test_the_proof_of_one_rank_lets_no_other_in():
    with (
        refusing() as door,
        socket.create_connection((door.host, door.port)) as raw,
        Connection(os.dup(raw.fileno())) as connection,
    ):
        connection.send_bytes(bytes([0, 1]))
        with pytest.raises(AuthenticationError):
            answer_challenge(connection, KEY + b"other" + bytes([0, 2]))


def test_ranks_that_do_not_come_in_time_are_named():
    with Door("127.0.0.1", KEY) as door, pytest.raises(EngineDiedError, match="rank 1, 2, 3 of 4 has not come"):
        door.others(4, SHORT_S)
