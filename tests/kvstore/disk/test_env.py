"""Tests of kvstore.disk.env: many inside or one alone. What compaction costs is tested where tables are known, and what
LMDB must not see beside the directory.
"""

import threading
from functools import partial
from types import SimpleNamespace

import pytest

from kvstore.disk.env import MAX_INSIDE, LiveTables
from tests.support.waiting import together as run_together
from tests.support.waiting import wait_until


class Opened:
    """How often tables were opened and closed; never twice at a time."""

    def __init__(self) -> None:
        self.num_opened = self.num_closed = 0

    def __call__(self):
        assert self.num_opened == self.num_closed
        self.num_opened += 1
        return SimpleNamespace(env=self)

    def close(self, clean: bool) -> None:
        self.num_closed += 1


def test_many_are_inside_or_one_is_alone():
    opened = Opened()
    tables, inside, together = LiveTables(opened), [False] * 4, []

    def enter(number: int) -> None:
        for _ in range(300):
            with tables.alone() if number == 0 else tables:
                inside[number] = True
                if number == 0 or inside[0]:
                    together.append(sum(inside))
                if number == 0:
                    tables.shut()
                    tables.open()
                inside[number] = False

    run_together(*(partial(enter, i) for i in range(4)))
    assert together == [1] * 300 and opened.num_opened == 301


def test_no_more_are_inside_than_lmdb_has_places_for():
    tables, inside, go, most = LiveTables(Opened()), [], threading.Event(), []

    def enter(number: int) -> None:
        with tables:
            inside.append(number)
            most.append(len(inside))
            go.wait()
            inside.remove(number)

    threads = [threading.Thread(target=enter, args=(i,)) for i in range(MAX_INSIDE + 5)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(most) == MAX_INSIDE)
    go.set()
    for thread in threads:
        thread.join()
    assert max(most) == MAX_INSIDE and len(most) == MAX_INSIDE + 5


def test_what_cannot_be_opened_again_is_none_until_it_can():
    opened = Opened()
    tables = LiveTables(opened)
    with tables as found:
        assert found is not None
    with pytest.raises(AssertionError), tables.alone():
        tables.shut()
        opened.num_opened += 1
        tables.open()
    with tables as found:
        assert found is None
    opened.num_opened -= 1
    with tables.alone():
        tables.open()
        tables.open()
    with tables as found:
        assert found is not None
    tables.close()
    with tables as found:
        assert found is None
