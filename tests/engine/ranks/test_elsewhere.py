"""Ranks on several machines, which are processes of this one: no rank has a share of another one's memory.

They come in as those do that Ray has started; Ray itself is in test_on_ray.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvstore.errors import EngineDiedError
from tests.support.engines import ask, cached, counters, greedy, open_engine, settle, tokens
from tests.support.ranks import SIZES, end_while_it_answers
from tests.support.service.server_process import ENVIRONMENT
from tests.support.waiting import TIMEOUT_S, wait_until

MODEL = {"tokenizer": True}
PROMPTS = [tokens(seed, 30 + 9 * seed) for seed in range(6)]
ON_RAY = {"distributed_executor": "ray"}
OTHER = """
import sys
from kvstore.engine.ranks.on_ray import RankActor

rank, host, port, key = sys.argv[1:]
RankActor().run(int(rank), host, int(port), bytes.fromhex(key))
"""


@pytest.fixture
def others(monkeypatch, tmp_path) -> Iterator[list[subprocess.Popen]]:
    """The other ranks of engines that are opened meanwhile: this is Ray to them, and an actor is a process."""
    found: list[subprocess.Popen] = []

    def start(rank: int, host: str, port: int, key: bytes) -> subprocess.Popen:
        command = [sys.executable, "-c", OTHER, str(rank), host, str(port), key.hex()]
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


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_elsewhere_says_the_same_over_the_same_store(model, plain, tmp_path, others, size):
    expected, store = [plain(prompt, 20) for prompt in PROMPTS], tmp_path / "store"
    with open_engine(model, store, max_num_batched_tokens=48, **ON_RAY, **SIZES[size]) as engine:
        for _ in range(2):
            assert [out.token_ids for out in engine.generate(PROMPTS, greedy(20))] == expected
            settle(engine)
            engine.loop.call(engine.loop.pool.evict_all)
        assert counters(engine)["loaded"] > 0 and counters(engine)["load_failures"] == 0
    assert others[0].wait(TIMEOUT_S) == 0, (tmp_path / "log").read_text()
    with open_engine(model, store) as engine:
        outs = engine.generate(PROMPTS, greedy(20))
        assert [out.token_ids for out in outs] == expected
        assert [cached(out)[2] for out in outs] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("size", "sign", "how"),
    [
        ("tensor", signal.SIGKILL, "its connection has ended"),
        ("pipeline", signal.SIGSTOP, r"no sign of life for \d+ s"),
    ],
)
def test_the_end_of_a_rank_elsewhere_ends_the_engine(model, others, size, sign, how):
    """Also of one that hangs: its process is there still, with its connections, which nobody here can end."""
    with open_engine(model, **ON_RAY, **SIZES[size]) as engine:
        end_while_it_answers(engine, others[0].pid, sign)
        wait_until(lambda: engine.closed)
        with pytest.raises(EngineDiedError, match=rf"rank 1 of 2 ended \({how}\)"):
            ask(engine, PROMPTS[1])
