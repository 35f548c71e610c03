"""What a forked child finds of its parent's owners: names, and errors."""

import os
import threading

import pytest

from kvstore.errors import StoreError
from kvstore.forks import leave_to_parent


class Owner:
    def __init__(self, end: int) -> None:
        self.name, self.lock, self.closed, self.end = "a name", threading.Lock(), False, end
        leave_to_parent(self, "the thing", closed=True)

    def let_go(self) -> None:
        os.close(self.end)

    def work(self) -> None:
        with self.lock:
            pass


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_is_refused_though_the_parent_holds_the_lock():
    reading, writing = os.pipe()
    owner = Owner(os.dup(writing))
    with owner.lock:
        if (child := os.fork()) == 0:
            try:
                try:
                    owner.work()
                except StoreError as error:
                    said = f"{owner.name}, {owner.closed}, {error}"
                os.write(writing, said.encode())
            finally:
                os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    owner.let_go()  # the child has closed its own: what is written ends here
    with open(reading) as file:
        assert file.read() == "a name, True, the thing was opened before this process was forked; open it again here"
    owner.work()
    assert not owner.closed
