"""Two computing threads get one of two processors each; other threads keep both; beside other work one computes."""

import itertools
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvstore.kernels.cpu import native
from kvstore.kernels.cpu.threads import FEW_ROWS, Team, bind_threads
from tests.support.native import no_compiler
from tests.support.waiting import wait_until

PROCESSORS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []  # before any test binds us
ON_TWO = f"import os\nos.sched_setaffinity(0, {PROCESSORS[:2]})\n"
BOUND = """
import json, threading, torch
from kvstore.kernels.cpu.threads import bind_threads
wait, started = threading.Event(), threading.Event()
other = threading.Thread(target=lambda: (started.set(), wait.wait()), daemon=True)
other.start(); started.wait()
torch.set_num_threads(int(os.environ["THREADS"]))
a = torch.ones(400, 400) @ torch.ones(400, 400)
done = bind_threads()
b = torch.ones(400, 400) @ torch.ones(400, 400)
at = {int(task): sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
print(json.dumps([done, at[os.getpid()], at[other.native_id], [cpus for cpus in at.values() if len(cpus) == 1]]))
assert torch.equal(a, b)
"""

needs_processors = pytest.mark.skipif(
    native.library() is None or len(PROCESSORS) < 2, reason="needs a compiler and two processors"
)


def on_two_processors(code, env=None):
    """What Python code prints in a process of its own, wherever an earlier test has bound this thread."""
    command = [sys.executable, "-c", ON_TWO + code]
    return json.loads(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)


def bound(num_threads, **environment):
    env = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    env |= {"THREADS": str(num_threads), **environment}
    return on_two_processors(BOUND, env)


@needs_processors
def test_two_threads_get_a_processor_each():
    cpus = PROCESSORS[:2]
    done, caller, other, alone = bound(2)
    assert done and caller == cpus[:1] and other == cpus
    assert sorted(alone) == [[cpu] for cpu in cpus]


@needs_processors
@pytest.mark.parametrize("environment", [{}, {"OMP_PROC_BIND": "false"}])
def test_nothing_is_bound_where_it_is_not_ours_to_choose(environment):
    cpus = PROCESSORS[:2]
    done, caller, _, alone = bound(2 if environment else 3, **environment)
    assert not done and caller == cpus and not alone


def test_without_a_compiler_nothing_is_bound():
    with no_compiler():
        assert not bind_threads({})
    assert torch.get_num_threads() >= 1


class Clock:
    """Steps of an eighth of a second each, in which threads have waited for so much of the time."""

    def __init__(self, waiting):
        self.now = self.waited = 0.0
        self.waiting, self.used, self.roamed = waiting, [], []
        self.team = Team(threads=self, clock=lambda: self.now)

    def waited_s(self):
        return self.waited

    def gather(self):
        self.is_gathered = True

    def rest(self):
        self.is_gathered = False

    @contextmanager
    def use(self, count):
        assert self.is_gathered
        self.used.append(count)
        yield

    def roam(self, may_roam):
        if self.roamed[-1:] != [may_roam]:
            self.roamed.append(may_roam)

    def step(self, num_rows):
        with self.team.step(num_rows):
            self.now += 0.125
            alone = self.used[-1] == 1
            self.waited += 0.0 if alone else 0.125 * self.waiting
        return alone


@pytest.fixture
def clock():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield Clock(0.5)
    torch.set_num_threads(before)


def test_beside_other_work_one_thread_takes_steps_of_few_rows(clock):
    alone = [clock.step(1) for _ in range(8)]
    assert not alone[0] and all(alone[1:]) and clock.team.is_crowded
    assert clock.roamed == [False, True]
    assert not clock.step(FEW_ROWS + 1), "a prompt is computed by all of them"


def test_all_threads_are_tried_again_and_less_often_in_vain(clock):
    tries = [i for i in range(400) if not clock.step(1)]
    gaps = [b - a for a, b in itertools.pairwise(tries) if b - a > 1]
    assert gaps[:4] == [9, 17, 33, 65] and set(gaps[3:]) == {65}
    clock.waiting = 0.1
    assert not all(clock.step(1) for _ in range(100))
    assert not any(clock.step(1) for _ in range(100)) and not clock.team.is_crowded


def test_where_nothing_is_counted_all_threads_compute(clock):
    clock.waited_s = lambda: None
    assert not any(clock.step(1) for _ in range(100)) and set(clock.used) == {2}


def test_more_threads_than_two_decode_beside_other_work_as_ever(clock):
    torch.set_num_threads(8)
    assert not any(clock.step(1) for _ in range(100)) and not clock.team.is_crowded


def crowded_team(is_own=False):
    """One that would let a thread decode alone for the next second of a clock that stands still."""
    team = Team(is_own, clock=lambda: 0.0)
    team._alone_until = 1.0
    return team


def test_all_threads_are_there_again_after_a_step_that_failed():
    def fail():
        torch.set_num_threads(2)
        with pytest.raises(RuntimeError, match="failed"), crowded_team().step(1):
            assert torch.get_num_threads() == (2 if native.library() is None else 1)
            raise RuntimeError("failed")
        return torch.get_num_threads()

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1) as fresh:
            assert fresh.submit(fail).result() == 2
    finally:
        torch.set_num_threads(before)


@needs_processors
def test_a_thread_that_we_have_not_bound_stays_where_its_owner_put_it():
    """Not even where the one that stepped before it roamed, or has ended."""
    cpus = PROCESSORS
    team = crowded_team()

    def step(num_rows, cpu):
        team._threads.waited_s()  # looks at the threads that help this one
        os.sched_setaffinity(0, {cpu})
        with team.step(num_rows):
            inside = os.sched_getaffinity(0)
        return inside, os.sched_getaffinity(0), threading.get_native_id()

    for num_rows, cpu in ((1, cpus[0]), (FEW_ROWS + 1, cpus[1]), (1, cpus[1])):
        with ThreadPoolExecutor(1) as fresh:
            inside, after, native_id = fresh.submit(step, num_rows, cpu).result()
        assert inside == after == {cpu}
        wait_until(lambda place=Path(f"/proc/self/task/{native_id}"): not place.exists())


@needs_processors
def test_a_bound_thread_roams_until_its_user_moves_it():
    first, second = PROCESSORS[:2]

    def places():
        os.sched_setaffinity(0, {first, second})
        torch.set_num_threads(2)
        assert bind_threads({})
        team = crowded_team()
        for num_rows in (1, FEW_ROWS + 1, 1):
            with team.step(num_rows):
                yield os.sched_getaffinity(0)
        os.sched_setaffinity(0, {second})
        with team.step(FEW_ROWS + 1):
            yield os.sched_getaffinity(0)

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1) as fresh:
            found = fresh.submit(lambda: list(places())).result()
    finally:
        torch.set_num_threads(before)
    assert found == [{first, second}, {first}, {first, second}, {second}]


@needs_processors
def test_busy_processes_on_our_processors_are_noticed():
    assert on_two_processors(CROWDED) == [True, 1, 2, 2, 1], "crowded, alone, then all; free to roam, then bound"


CROWDED = """
import json, subprocess, sys, time, torch
from kvstore.kernels.cpu.threads import PATIENCE_S, Team, bind_threads
torch.set_num_threads(2)
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
try:
    bind_threads()
    team, x, until, seen = Team(), torch.ones(300, 300), time.monotonic() + 60, []
    while not (team.is_crowded and seen[-1] == 1) and time.monotonic() < until:
        with team.step(1):
            seen.append(torch.get_num_threads())
            for _ in range(20):
                x @ x
    at = len(os.sched_getaffinity(0))
    time.sleep(PATIENCE_S[0])
    with team.step(1):
        print(json.dumps([team.is_crowded, seen[-1], torch.get_num_threads(), at, len(os.sched_getaffinity(0))]))
finally:
    for one in busy:
        one.kill()
"""


@needs_processors
def test_who_rests_has_no_helper_and_gets_a_bound_one_again():
    assert on_two_processors(RESTING) == [1, 0, 1, 0, True]


RESTING = """
import json, threading, time, torch
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from kvstore.kernels.cpu.threads import Team
torch.set_num_threads(2)
team, x, cpus = Team(), torch.ones(300, 300), []

def alone():
    found = []
    for task in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has just ended
            if len(os.sched_getaffinity(task)) == 1 and task != threading.get_native_id():
                found.append(task)
    return found

def step():
    with team.step(64):
        x @ x
    found = len(alone())
    team.rest()
    until = time.monotonic() + 60
    while alone() and time.monotonic() < until:  # nobody waits for the end of a helper
        time.sleep(0.005)
    return [found, len(alone())]

with ThreadPoolExecutor(1) as fresh:  # the thread that steps
    found = [*fresh.submit(step).result(), *fresh.submit(step).result()]
    print(json.dumps([*found, all(torch.isfinite(fresh.submit(lambda: x @ x).result().flatten()).tolist())]))
"""


@needs_processors
def test_what_a_turn_moves_before_its_forward_finds_a_helper_on_the_other_processor():
    """Also after a pause, in which the helper has ended: states are loaded then."""
    assert on_two_processors(LOADING) == [2, 2]


LOADING = """
import json, time, torch
from contextlib import suppress
from kvstore import Engine, SamplingParams
torch.set_num_threads(2)
found = []

def processors():
    of = []
    for task in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has just ended
            of.append(tuple(os.sched_getaffinity(task)))
    return {cpus for cpus in of if len(cpus) == 1}

with Engine(None, {"hbm": "64MiB"}, device="cpu") as engine:
    run = engine.loop.runner.launch
    def launch(output):
        torch.ones(1 << 20).add_(1)
        found.append(len(processors()))
        return run(output)
    engine.loop.runner.launch = launch
    firsts, until = [], time.monotonic() + 60
    for _ in range(2):
        found.clear()
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
        firsts.append(found[0])
        while len(processors()) > 1 and time.monotonic() < until:  # the caller stays bound
            time.sleep(0.005)
    print(json.dumps(firsts))
"""
