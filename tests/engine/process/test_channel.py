"""Messages through a socket pair: whole, in order, whatever the kernel takes at once, and an end that is seen."""

import random
import socket
import sys
import threading

import pytest

from kvstore.engine.process.channel import Channel


@pytest.fixture
def pair():
    ends = tuple(map(Channel, socket.socketpair()))
    yield ends
    for end in ends:
        end.close()


def message_of(number: int) -> bytes:
    """Its content is derived from its number; lengths from none to more than the kernel takes."""
    rng = random.Random(number)
    return rng.randbytes(rng.choice((0, 1, 5, 40, 3000, 70_000, 400_000)))


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
    whole = (5).to_bytes(8, sys.byteorder) + b"hello" + (0).to_bytes(8, sys.byteorder)
    found = []
    for byte in whole:
        found.append(channel.receive())
        raw.send(bytes([byte]))
    found.append(channel.receive())
    assert found == [[]] * 13 + [[b"hello"]] + [[]] * 7 + [[b""]]
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
