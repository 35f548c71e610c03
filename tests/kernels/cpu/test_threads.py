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
CHILD = Path(__file__).parents[2] / "children/threads_child.py"

needs_processors = pytest.mark.skipif(
    native.library() is None or len(PROCESSORS) < 2, reason="needs a compiler and two processors"
)


def on_two_processors(*arguments, **environment):
    """What a process of its own sees, wherever an earlier test has bound this thread."""
    command = [sys.executable, str(CHILD), str(PROCESSORS[:2]), *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@needs_processors
def test_two_threads_get_a_processor_each():
    cpus = PROCESSORS[:2]
    done, caller, other, alone = on_two_processors("bound", "2")
    assert done and caller == cpus[:1] and other == cpus
    assert sorted(alone) == [[cpu] for cpu in cpus]


@needs_processors
@pytest.mark.parametrize("environment", [{}, {"OMP_PROC_BIND": "false"}])
def test_nothing_is_bound_where_it_is_not_ours_to_choose(environment):
    cpus = PROCESSORS[:2]
    done, caller, _, alone = on_two_processors("bound", "2" if environment else "3", **environment)
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
    assert on_two_processors("crowded") == [True, 1, 2, 2, 1], "crowded, alone, then all; free to roam, then bound"


@needs_processors
def test_who_rests_has_no_helper_and_gets_a_bound_one_again():
    assert on_two_processors("resting") == [1, 0, 1, 0, True]


@needs_processors
def test_what_a_turn_moves_before_its_forward_finds_a_helper_on_the_other_processor():
    """Also after a pause, in which the helper has ended: states are loaded then."""
    assert on_two_processors("loading") == [2, 2]
