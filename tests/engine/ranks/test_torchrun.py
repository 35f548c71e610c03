"""Ranks on several machines, which are processes of this one: no rank has a share of another one's memory.

`--long` has torchrun start four on two machines, and kills or stops each kind.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from kvstore.engine.config import EngineConfig
from kvstore.engine.ranks.torchrun import num_processes_here
from kvstore.engine.remote_engine import RemoteEngine
from kvstore.errors import ConfigError, EngineDiedError
from tests.support.engines import ask, cached, counters, greedy, open_engine, settle, tokens
from tests.support.ranks import SIZES, end_while_it_answers
from tests.support.redis_server import free_port
from tests.support.service.server_process import COMMAND, ENVIRONMENT, START_S, ServerProcess
from tests.support.service.server_process import SIZES as TIERS
from tests.support.service.serving import KEY
from tests.support.waiting import TIMEOUT_S, wait_until

MODEL = {"tokenizer": True}
SILENCE_S = 10.0  # a busy machine lets no process wait so long
PROMPTS = [tokens(seed, 30 + 9 * seed) for seed in range(6)]
SECRET = {"KVSTORE_FLEET_SECRET": "the secret of this fleet, 32 characters"}


def flags_of(size: dict[str, int]) -> list[str]:
    return [text for name, count in size.items() for text in ("--" + name.replace("_", "-"), str(count))]


@contextmanager
def other_rank(model: str, size: dict[str, int], monkeypatch, log: Path, **changes: str) -> Iterator[subprocess.Popen]:
    """Rank 1 of 2, and this process as rank 0: the environment that torchrun would make."""
    environment = {**SECRET, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in {**environment, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    command = [*COMMAND, "serve", model, "--device", "cpu", "--distributed-executor", "torchrun", *flags_of(size)]
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            command, env={**ENVIRONMENT, **environment, "RANK": "1", **changes}, stderr=stderr, cwd=log.parent
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_elsewhere_says_the_same_over_the_same_store(model, plain, tmp_path, monkeypatch, size):
    expected, store, options = [plain(prompt, 20) for prompt in PROMPTS], tmp_path / "store", SIZES[size]
    with other_rank(model, options, monkeypatch, tmp_path / "log") as other:
        with open_engine(model, store, max_num_batched_tokens=48, distributed_executor="torchrun", **options) as engine:
            for _ in range(2):
                assert [out.token_ids for out in engine.generate(PROMPTS, greedy(20))] == expected
                settle(engine)
                engine.loop.call(engine.loop.pool.evict_all)
            assert counters(engine)["loaded"] > 0 and counters(engine)["load_failures"] == 0
        assert other.wait(TIMEOUT_S) == 0, (tmp_path / "log").read_text()
    with open_engine(model, store) as engine:
        outs = engine.generate(PROMPTS, greedy(20))
        assert [out.token_ids for out in outs] == expected
        assert [cached(out)[2] for out in outs] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


def test_the_end_of_a_rank_elsewhere_ends_the_engine_and_the_others(model, tmp_path, monkeypatch):
    with (
        other_rank(model, SIZES["tensor"], monkeypatch, tmp_path / "log") as other,
        open_engine(model, distributed_executor="torchrun", **SIZES["tensor"]) as engine,
    ):
        end_while_it_answers(engine, other.pid, signal.SIGKILL)
        wait_until(lambda: engine.closed)
        with pytest.raises(EngineDiedError, match=r"rank 1 of 2 ended \(its connection has ended\)"):
            ask(engine, PROMPTS[1])


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_elsewhere_that_hangs_ends_the_engine_after_its_silence(model, tmp_path, monkeypatch, size, capfd):
    """Its process is there still, with its connections, which nobody here can end: the first rank waits no longer, and
    a process beside the other one kills that.
    """
    executor = {"distributed_executor": "torchrun", "silence_s": SILENCE_S}
    with (
        other_rank(model, SIZES[size], monkeypatch, tmp_path / "log") as other,
        RemoteEngine(model, {"hbm": "2MiB"}, device="cpu", **executor, **SIZES[size]) as engine,
    ):
        end_while_it_answers(engine, other.pid, signal.SIGSTOP)
        wait_until(lambda: engine.state == "failed")
        assert f"kvstore: rank 1 of 2 ended (no sign of life for {SILENCE_S:g} s)" in capfd.readouterr().err
        assert other.wait(TIMEOUT_S) == -signal.SIGKILL, "its guard has killed it"


def test_another_number_of_processes_is_refused(model, monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        **SECRET,
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2, but .* is 4"):
        open_engine(model, distributed_executor="torchrun", tensor_parallel_size=2, pipeline_parallel_size=2)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="only rank 0 has an engine"):
        open_engine(model, distributed_executor="torchrun", tensor_parallel_size=2)


@pytest.mark.parametrize(("told", "here"), [({"LOCAL_WORLD_SIZE": "2"}, 2), ({}, 8), ({"LOCAL_WORLD_SIZE": "many"}, 8)])
def test_ranks_on_one_machine_share_its_memory(told, here):
    sizes = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}
    assert num_processes_here(EngineConfig(**sizes, distributed_executor="torchrun"), told) == here
    assert num_processes_here(EngineConfig(**sizes), told) == 8, "this process has started them all"
    assert num_processes_here(EngineConfig(data_parallel_size=3), told) == 3


# -- torchrun itself ---------------------------------------------------------------------------------------------------
@contextmanager
def machines(model: str, size: dict[str, int], num_each: int, folder: Path) -> Iterator[list[ServerProcess]]:
    """Two of them, with so many ranks each. Yields their agents; the first rank serves."""
    port, master = free_port(), str(free_port())
    agents = []
    serve = ["-m", "kvstore.service.command.cli", "serve", model, "--device", "cpu", "--store", str(folder / "store"),
             *TIERS, "--port", str(port), "--api-key", KEY, "--distributed-executor", "torchrun",
             "--engine-timeout", str(SILENCE_S), *flags_of(size)]  # fmt: skip
    for node in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
                   "--nproc-per-node", str(num_each), "--master-addr", "127.0.0.1", "--master-port", master,
                   "--max-restarts", "5", "--monitor-interval", "0.2"]  # fmt: skip
        with (folder / f"log-{node}").open("wb") as log:
            process = subprocess.Popen(
                [*command, *serve], env={**ENVIRONMENT, **SECRET}, stdout=log, stderr=log, cwd=folder,
                start_new_session=True,
            )  # fmt: skip
        agents.append(ServerProcess(process, folder / f"log-{node}", ("127.0.0.1", port)))
    try:
        yield agents
    finally:
        for agent in agents:
            left = [] if agent.process.poll() is not None else psutil.Process(agent.process.pid).children(True)
            agent.kill()
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def workers(agent: ServerProcess) -> list[psutil.Process]:
    return psutil.Process(agent.process.pid).children()


def computing(worker: psutil.Process) -> psutil.Process:
    """The process that computes: the first rank's is the engine's, below the server."""
    children = (child for child in worker.children() if "kvstore.engine.core_process" in child.cmdline())
    return next(children, worker)


def said(agent: ServerProcess) -> list[str] | None:
    """What the served model says to all prompts; None while it is not there."""
    try:
        body = {"prompt": PROMPTS, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        reply = agent.post("/v1/completions", body)
    except OSError:
        return None
    return [choice["text"] for choice in reply.json()["choices"]] if reply.status == 200 else None


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("num_each", "victim"), [(1, 1), (1, 0), (2, 1), (2, 0)])
def test_torchrun_starts_all_ranks_again(model, tmp_path, num_each, victim, sign, request):
    """After one of them was killed, or hung; and none is left when torchrun ends."""
    if (num_each, victim, sign) != (1, 1, signal.SIGKILL) and not request.config.getoption("--long"):
        pytest.skip("needs --long")
    with open_engine(model) as engine:
        expected = [out.text for out in engine.generate(PROMPTS, greedy(12))]
    size = SIZES["tensor"] | (SIZES["pipeline"] if num_each == 2 else {})
    with machines(model, size, num_each, tmp_path) as agents:
        try:
            wait_until(lambda: said(agents[0]) == expected, "the first answer", START_S)
            before = [process for agent in agents for process in workers(agent)]
            assert len(before) == 2 * num_each
            hit = workers(agents[victim])[0]
            (hit if sign == signal.SIGKILL else computing(hit)).send_signal(sign)
            if sign == signal.SIGSTOP:  # it is missed when something is asked
                assert said(agents[0]) is None
            wait_until(lambda: not any(process.is_running() for process in before), "all end", START_S)
            wait_until(lambda: said(agents[0]) == expected, "the next answer", START_S)
            now = [process for agent in agents for process in psutil.Process(agent.process.pid).children(True)]
            for agent in agents:
                agent.process.send_signal(signal.SIGTERM)
            wait_until(lambda: all(agent.process.poll() is not None for agent in agents), "their end", START_S)
            wait_until(lambda: not any(process.is_running() for process in now), "no orphan", START_S)
        except AssertionError:
            print(*(agent.log.read_text()[-4000:] for agent in agents), sep="\n---\n")
            raise
