"""Messages through a socket pair: whole, in order, whatever the kernel takes at once, and an end that is seen."""

import gc
import os
import random
import select
import selectors
import socket
import sys
import threading

import pytest

from kvstore.engine.process.channel import Channel, Readiness


@pytest.fixture
def pair():
    ends = tuple(map(Channel, socket.socketpair()))
    yield ends
    for end in ends:
        end.close()


def message_of(number: int) -> bytes:
    """Its content is derived from its number; lengths from one byte to more than the kernel takes."""
    rng = random.Random(number)
    return rng.randbytes(rng.choice((1, 5, 40, 3000, 70_000, 400_000)))


def test_messages_arrive_whole_and_in_order(pair):
    one, other = pair
    sent = [message_of(number) for number in range(60)]
    found: list[bytes] = []
    for message in sent:
        one.send(message)  # never waits
        if len(found) % 7 == 0:
            found += other.receive()
    assert one.num_unsent > 0
    while one.num_unsent:
        found += other.receive()
        one.flush()
    found += other.receive()
    assert found == sent and other.receive() == []


def test_a_message_that_comes_in_bytes_is_one_message():
    raw, end = socket.socketpair()
    channel = Channel(end)
    whole = (5).to_bytes(8, sys.byteorder) + b"hello" + (1).to_bytes(8, sys.byteorder) + b"."
    found = []
    for byte in whole:
        found.append(channel.receive())
        raw.send(bytes([byte]))
    found.append(channel.receive())
    assert found == [[]] * 13 + [[b"hello"]] + [[]] * 8 + [[b"."]]
    raw.close()
    channel.close()


class FlushedMeanwhile(socket.socket):
    """While its first message is sent, another thread flushes the channel, as one that waits for messages does."""

    channel: Channel | None = None

    def send(self, *given) -> int:
        channel, self.channel = self.channel, None
        if channel is not None:
            other = threading.Thread(target=channel.flush)
            other.start()
            other.join(0.2)  # it waits until this one is sent
        return super().send(*given)


def test_a_message_goes_out_once_although_two_threads_flush():
    ours, theirs = socket.socketpair()
    end = FlushedMeanwhile(fileno=ours.detach())
    one, other = Channel(end), Channel(theirs)
    end.channel = one
    for message in (b"first", b"second"):
        one.send(message)
    assert other.receive() == [b"first", b"second"]
    one.close()
    other.close()


def test_send_all_waits_for_the_reader(pair):
    one, other = pair
    sent = [message_of(number) for number in range(40)]
    found: list[bytes] = []

    def read():
        while len(found) < len(sent):
            found.extend(other.receive())

    reader = threading.Thread(target=read)
    reader.start()
    for message in sent:
        one.send_all(message)
        assert one.num_unsent == 0
    reader.join()
    assert found == sent


def test_what_was_said_before_the_end_is_heard(pair):
    one, other = pair
    one.send(b"last words")
    one.close()
    assert other.receive() == [b"last words"] and other.receive() == [] and other.ended
    other.send(b"x" * 10)  # dropped
    other.send_all(b"x" * 10**6)
    assert other.num_unsent == 0


def test_an_end_with_unsent_messages_is_the_end_of_these(pair):
    one, other = pair
    one.send(b"x" * 10**6)
    assert one.num_unsent == 1 and not one.ended
    other.close()
    one.flush()
    assert one.num_unsent == 0 and one.receive() == [] and one.ended


def test_a_sign_of_life_is_heard_and_is_no_message(pair):
    one, other = pair
    one.beat()
    one.send(b"hello")
    one.beat()
    assert other.receive() == [b"hello"] and other.is_heard
    other.is_heard = False
    assert other.receive() == [] and not other.is_heard
    one.beat()
    assert other.receive() == [] and other.is_heard


def test_signs_of_life_wait_for_nobody_and_none_is_behind_bytes_that_wait(pair):
    """The other end reads nothing, as one that is busy."""
    one, other = pair
    while not one.num_unsent:
        one.beat()
    for _ in range(1000):
        one.beat()
    assert one.num_unsent == 1
    while one.num_unsent:
        assert other.receive() == []
        one.beat()
    one.send(b"hello")
    found = []
    while not found:
        found = other.receive()
    assert found == [b"hello"]


# -- what a reader waits for -------------------------------------------------------------------------------------------
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
