"""Products and attention by a team of the C code's own give the bits that OpenMP's threads give."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvstore.kernels.cpu.layer import NativeRMSNorm, native_rms_norm
from kvstore.kernels.cpu.threads import Threads, num_threads
from tests.support.native import needs_compiler

pytestmark = needs_compiler

ROWS = 32 * 23 + 5


def norm() -> NativeRMSNorm:
    found = native_rms_norm(torch.linspace(0.5, 1.5, 96), torch.float32, 1e-6, wide=True)
    assert found is not None
    return found


def rows(seed):
    return torch.randn(1, ROWS, 96, generator=torch.Generator().manual_seed(seed))


def in_own_team(seeds, count=2):
    """Norms of many rows by a team of so many threads; it binds the thread that computes to a processor."""
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(computed_by, Threads(is_own=True), seeds, count).result()


def computed_by(threads, seeds, count):
    before = torch.get_num_threads()
    threads.gather()
    with threads.use(count):
        assert num_threads() == count and torch.get_num_threads() == 1
        found = [norm()(rows(seed)) for seed in seeds]
    assert num_threads() == before and torch.get_num_threads() == 1, "so it stays between steps"
    threads.rest()
    assert num_threads() == torch.get_num_threads() == before
    return found


def expected(seeds):
    return [norm()(rows(seed)) for seed in seeds]


def assert_same(found, wanted):
    assert all(map(torch.equal, found, wanted)) and len(found) == len(wanted)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_team_of_any_size_computes_the_same(count):
    assert_same(in_own_team(range(20), count), expected(range(20)))


def test_helpers_that_fell_asleep_are_woken():
    for seed in range(5):
        assert_same(in_own_team([seed]), expected([seed]))
        time.sleep(0.01)


def test_callers_at_the_same_time_keep_to_their_own_work():
    wanted = expected(range(200))
    with ThreadPoolExecutor(4) as callers:
        found = callers.map(in_own_team, [range(200)] * 4)
        for one in found:
            assert_same(one, wanted)


def test_beside_busy_processes_all_items_are_done():
    """Three of them for two processors: helpers stop anywhere, in the middle of an item or before they have one."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        assert_same(in_own_team(range(300)), expected(range(300)))
    finally:
        for one in busy:
            one.kill()
            one.wait()
