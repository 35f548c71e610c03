"""Memory that is touched ahead of its use keeps what is in it, and its thread ends with its owner."""

import gc
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from kvstore.blocks.records import Save, TransferPlan
from kvstore.kernels.cpu import threads as cpu_threads
from kvstore.kernels.cpu.threads import FirstTouch
from kvstore.memory.layout import KVLayout
from kvstore.memory.transfer import Arena, Transfer
from tests.support.arenas import alike
from tests.support.faults import constants
from tests.support.waiting import wait_until


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvstore-touch"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threads())  # of other tests' arenas, which may end meanwhile
    yield
    gc.collect(1)  # what is older is none of these tests'
    assert set(threads()) <= before


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_contents_stay_and_every_row_may_be_reached() -> None:
    tensor = torch.zeros(1000, 33, dtype=torch.int32)
    tensor[:, 1:] = torch.arange(1000, dtype=torch.int32)[:, None]
    touch = FirstTouch(tensor, ahead_bytes=64 << 10, least_bytes=0)
    for row in range(1000):
        touch.reach(row)
        tensor[row, 0] = row
    del touch
    assert torch.equal(tensor[:, 0], torch.arange(1000, dtype=torch.int32))
    assert torch.equal(tensor[:, 5], tensor[:, 0])


@pytest.mark.skipif(sys.platform != "linux", reason="pages are counted by Linux's /proc")
def test_saves_have_the_memory_behind_them_touched() -> None:
    gc.collect()  # not in the middle of the test
    before = resident_bytes()
    with constants(cpu_threads, AHEAD_BYTES=16 << 20):
        layout = KVLayout(alike(2, 8, 128), 64, torch.float32, (None, None))
        arena = Arena(layout, num_arena_blocks=80, pin=False)  # of 1 MiB
        transfer = Transfer(arena)
    for arena_block in range(0, 40, 8):
        transfer.begin(TransferPlan(saves=(Save(0, 0, 64, arena_block, 0),)), (0,))
    wait_until(lambda: resident_bytes() - before >= 38 << 20)
    assert resident_bytes() - before <= 70 << 20, "behind the last save, and not all"
    arena.close()


def test_what_is_used_is_made_good_at_once_and_in_small_pieces() -> None:
    """A row is 1 MiB: after it the thread has little to do, however far it is ahead."""
    touch = FirstTouch(torch.zeros(600, 1 << 20, dtype=torch.uint8), ahead_bytes=256 << 20)
    targets = []
    for row in range(40):
        touch.reach(row)
        targets.append(touch._target)
    assert targets[0] == 256 and targets[-1] >= 256 + 39 - 4
    assert max(later - sooner for sooner, later in pairwise(targets)) <= 4


def test_little_memory_gets_no_thread() -> None:
    before = set(threads())
    touch = FirstTouch(torch.zeros(10, 10))
    touch.reach(9)
    assert set(threads()) <= before


def test_the_tensors_outlive_their_thread() -> None:
    for _ in range(20):
        touch = FirstTouch(torch.zeros(4096, 4096, dtype=torch.uint8), least_bytes=0)
        touch.reach(3000)
        del touch
