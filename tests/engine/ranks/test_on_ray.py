"""Ranks that Ray starts, on two nodes that are processes of this machine: what they say, who ends with whom, and what is refused.

`--long` ends ranks of both sizes in both ways.
"""

import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest
import torch

from kvstore.engine.ranks import on_ray
from kvstore.engine.remote_engine import RemoteEngine
from kvstore.errors import ConfigError, EngineDiedError
from tests.support.engines import cached, counters, greedy, open_engine, settle, tokens
from tests.support.ranks import SIZES, end_while_it_answers, is_gone
from tests.support.ray_cluster import ray_cluster
from tests.support.redis_server import free_port
from tests.support.service.replicas import needs_ray
from tests.support.service.server_process import ENVIRONMENT
from tests.support.waiting import wait_until

MODEL = {"tokenizer": True}
PROMPTS = [tokens(seed, 30 + 9 * seed) for seed in range(6)]
ON_RAY = {"distributed_executor": "ray"}
SILENCE_S, START_S = 10.0, 300.0
SHORT = [("tensor", signal.SIGKILL), ("pipeline", signal.SIGSTOP)]
CASES = [(size, sign) for size in SIZES for sign in (signal.SIGKILL, signal.SIGSTOP)]


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
        for _ in range(2):
            assert [out.token_ids for out in engine.generate(PROMPTS, greedy(20))] == expected
            settle(engine)
            engine.loop.call(engine.loop.pool.evict_all)
        assert counters(engine)["loaded"] > 0 and counters(engine)["load_failures"] == 0
    wait_until(lambda: is_gone(rank), "its end")
    assert signal.getsignal(signal.SIGTERM) is before
    with open_engine(model, store) as engine:
        outs = engine.generate(PROMPTS, greedy(20))
        assert [out.token_ids for out in outs] == expected
        assert [cached(out)[2] for out in outs] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


@pytest.mark.ray
@needs_ray
@pytest.mark.parametrize(("size", "sign"), CASES)
def test_a_rank_that_ends_or_hangs_is_started_again(model, ray_here, size, sign, request):
    """And one that Ray has started is gone when its engine is, killed or closed."""
    if (size, sign) not in SHORT and not request.config.getoption("--long"):
        pytest.skip("needs --long")
    with RemoteEngine(model, {"hbm": "2MiB"}, device="cpu", silence_s=SILENCE_S, **ON_RAY, **SIZES[size]) as engine:
        expected = engine.generate([PROMPTS[1]], greedy(8))[0].token_ids
        for victim in ("rank", "first"):
            first, (rank,) = engine.pid, ranks(ray_here)
            if victim == "rank":
                end_while_it_answers(engine, rank, sign)
            else:
                os.kill(first, signal.SIGKILL)
            wait_until(lambda: engine.state == "running" and engine.pid != first, "the restart", START_S)  # noqa: B023
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


@pytest.mark.ray
@needs_ray
def test_too_little_room_is_told(model, ray_here, monkeypatch):
    monkeypatch.setattr(on_ray, "ANSWER_S", 5.0)
    with pytest.raises(ConfigError, match=r"no room for 4 ranks of \d+ threads: it has \d+ CPUs, .* OMP_NUM_THREADS"):
        open_engine(model, **ON_RAY, **SIZES["tensor"], **SIZES["pipeline"])
    with open_engine(model, **ON_RAY, **SIZES["tensor"]):  # nothing of it is left
        pass


@pytest.mark.ray
@needs_ray
def test_a_rank_that_cannot_start_is_named(model, ray_here, monkeypatch):
    """Here as on a machine without this package."""
    module = types.ModuleType("not_on_that_machine")
    module.Rank = type("Rank", (), {"__module__": module.__name__, "run": lambda self, *_: None})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(on_ray, "RankActor", module.Rank)
    with pytest.raises(EngineDiedError, match=r"rank 1 of 2 does not start: .*No module named 'not_on_that_machine'"):
        open_engine(model, **ON_RAY, **SIZES["tensor"])


NO_CLUSTER = """
import sys
from kvstore.engine.ranks import on_ray
from kvstore.service.command.cli import main
on_ray.ANSWER_S = 2.0
sys.argv[0] = "kvstore"
code = main(sys.argv[1:])
sys.stderr.flush()
import os; os._exit(code)
"""


@pytest.mark.ray
@needs_ray
@pytest.mark.parametrize(("address", "why"), [("", "nothing within 2 s"), ("nowhere", "Invalid address format")])
def test_a_cluster_that_does_not_answer_is_told(model, tmp_path, address, why):
    command = ["serve", model, "--device", "cpu", "--distributed-executor", "ray", "--tensor-parallel-size", "2",
               "--disk", "0", "--engine-process", "off", "--port", str(free_port())]  # fmt: skip
    environment = {**ENVIRONMENT, "RAY_ADDRESS": address or f"127.0.0.1:{free_port()}"}
    ended = subprocess.run(
        [sys.executable, "-c", NO_CLUSTER, *command], env=environment, cwd=tmp_path, capture_output=True, text=True,
        timeout=START_S,
    )  # fmt: skip
    told = next(line for line in ended.stderr.splitlines() if line.startswith("kvstore:"))
    assert ended.returncode == 2 and why in told and "ray start --head" in told


def test_without_ray_its_installation_is_told(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvstore\[ray\]'"):
        open_engine(model, **ON_RAY, **SIZES["tensor"])
