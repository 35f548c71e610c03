"""Computing threads in a process of their own, with two processors: `bound`, `crowded`, `resting` or `loading`. Prints
what it has seen, as JSON. Arguments: the processors, the name, and what else that one takes.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from kvstore import Engine, SamplingParams
from kvstore.kernels.cpu.threads import PATIENCE_S, Team, bind_threads
from tests.support.waiting import TIMEOUT_S, wait_until


def places() -> Iterator[tuple[int, list[int]]]:
    """The threads of this process, and where each may run."""
    for task in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has just ended
            yield task, sorted(os.sched_getaffinity(task))


def bound(num_threads: str) -> list[object]:
    """Whether threads were bound; where the caller and another thread may run; processors that have a thread alone."""
    wait, started = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (started.set(), wait.wait()), daemon=True)
    other.start()
    started.wait()
    torch.set_num_threads(int(num_threads))
    before = torch.ones(400, 400) @ torch.ones(400, 400)
    done = bind_threads()
    after = torch.ones(400, 400) @ torch.ones(400, 400)
    assert torch.equal(before, after)
    at = dict(places())
    return [done, at[os.getpid()], at[other.native_id], [cpus for cpus in at.values() if len(cpus) == 1]]


def crowded() -> list[object]:
    """Beside two busy processes, and a while later."""
    torch.set_num_threads(2)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    later_s = 0.0
    try:
        bind_threads()
        team, x = Team(clock=lambda: time.monotonic() + later_s), torch.ones(300, 300)
        seen, until = [], time.monotonic() + TIMEOUT_S
        while not (team.is_crowded and seen[-1] == 1) and time.monotonic() < until:
            with team.step(1):
                seen.append(torch.get_num_threads())
                for _ in range(20):
                    x @ x
        at, later_s = len(os.sched_getaffinity(0)), PATIENCE_S[0]
        with team.step(1):
            return [team.is_crowded, seen[-1], torch.get_num_threads(), at, len(os.sched_getaffinity(0))]
    finally:
        for one in busy:
            one.kill()


def resting() -> list[object]:
    """How many helpers are bound after a step and after a rest, twice, and whether products are right then."""
    torch.set_num_threads(2)
    team, x = Team(), torch.ones(300, 300)

    def helpers() -> int:
        return sum(len(cpus) == 1 and task != threading.get_native_id() for task, cpus in places())

    def step() -> list[int]:
        with team.step(64):
            x @ x
        found = helpers()
        team.rest()
        wait_until(lambda: not helpers())  # nobody waits for the end of a helper
        return [found, helpers()]

    with ThreadPoolExecutor(1) as fresh:  # the thread that steps
        found = [*fresh.submit(step).result(), *fresh.submit(step).result()]
        return [*found, bool(fresh.submit(lambda: x @ x).result().isfinite().all())]


def loading() -> list[int]:
    """On how many processors threads are bound as a forward begins: of a first turn, and of one after a pause."""
    torch.set_num_threads(2)
    found: list[int] = []
    firsts = []

    def processors() -> int:
        return len({cpus[0] for _, cpus in places() if len(cpus) == 1})

    with Engine(None, {"hbm": "64MiB"}, device="cpu") as engine:
        run = engine.loop.runner.launch

        def launch(output):
            torch.ones(1 << 20).add_(1)
            found.append(processors())
            return run(output)

        engine.loop.runner.launch = launch
        for _ in range(2):
            found.clear()
            engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
            firsts.append(found[0])
            wait_until(lambda: processors() <= 1)  # the caller stays bound
    return firsts


if __name__ == "__main__":
    cpus, name, *more = sys.argv[1:]
    os.sched_setaffinity(0, json.loads(cpus))
    print(json.dumps({"bound": bound, "crowded": crowded, "resting": resting, "loading": loading}[name](*more)))
