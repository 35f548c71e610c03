"""What the reader of messages waits for: a channel or a call, and nothing once both are read."""

import gc
import os
import select
import selectors

import pytest

from kvstore.engine.process.readiness import Readiness


def is_ready(readiness: Readiness) -> bool:
    return bool(select.select([readiness.fileno()], [], [], 0)[0])


def test_calls_wake_until_they_are_forgotten():
    readiness = Readiness()
    assert not is_ready(readiness)
    readiness.drain()  # nothing to forget
    readiness.wake()
    readiness.wake()
    readiness.wait(600.0)
    assert is_ready(readiness), "waiting forgets nothing"
    readiness.drain()
    assert not is_ready(readiness)
    readiness.wait(0.0)


def test_a_channel_is_seen_at_the_same_descriptor_until_it_is_gone():
    readiness, (read, write) = Readiness(), os.pipe()
    number = readiness.fileno()
    readiness.selector.register(read, selectors.EVENT_READ)
    os.write(write, b"x")
    readiness.wait(600.0)
    readiness.drain()
    assert is_ready(readiness) and readiness.fileno() == number, "only calls are forgotten"
    readiness.selector.unregister(read)
    assert not is_ready(readiness)
    for each in (read, write):
        os.close(each)


def test_it_leaves_no_descriptor_behind():
    readiness = Readiness()
    numbers = [readiness.fileno(), *readiness.selector.get_map()]
    assert len(numbers) == 2 and all(os.fstat(number) for number in numbers)
    del readiness
    gc.collect()
    for number in numbers:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
