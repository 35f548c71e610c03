"""What joins two processes: messages, whole and in order; signs of life; restarts, and what is settled at the start."""

import gc
import os
import random
import re
import select
import selectors
import socket
import sys
import threading
from contextlib import suppress

import pytest

from kvstore import CacheTiers, Engine
from kvstore.engine.process.channel import Channel
from kvstore.engine.process.pulse import Heart, Pulse
from kvstore.engine.process.readiness import Readiness
from kvstore.engine.process.restarts import MAX_DELAY_S, WINDOW_S, Restarts
from kvstore.engine.process.spawn import SPIN_COUNT, spin_briefly
from tests.support.waiting import TIMEOUT_S, wait_until

BEAT_S = 0.01


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


def test_delays_double_until_their_limit():
    restarts = Restarts(10, clock=lambda: 0.0)
    delays = []
    while restarts.note_end("signal 9"):
        delays.append(restarts.delay_s)
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, *[MAX_DELAY_S] * 3]


def test_an_end_is_forgotten_after_an_hour(caplog):
    now = 0.0
    restarts = Restarts(2, clock=lambda: now)
    assert restarts.note_end("signal 9") and restarts.note_end("signal 11") and restarts.why == "signal 11"
    now = WINDOW_S
    assert not restarts.note_end("exit code 1")
    assert caplog.messages[-1].endswith("it is not started again: the limit of restarts an hour is 2")
    now = WINDOW_S + 1.0
    assert restarts.note_end("signal 9") and restarts.delay_s == 1.0


def test_a_heart_beats_while_the_loop_goes_round_and_stops_with_it(capfd):
    """It is never more than a few beats ahead of this thread, so no round seems long because this one had to wait."""
    reader, writer = socket.socketpair()
    writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # as little as there can be
    heart = Heart(writer.fileno(), 0.5, BEAT_S)
    for _ in range(100):  # twice the limit, at rest
        assert reader.recv(1)
    for _ in range(100):
        heart.begin()
        assert reader.recv(1)
    reader.settimeout(20 * BEAT_S)
    said = ""

    def has_told() -> bool:
        nonlocal said
        with suppress(TimeoutError):
            reader.recv(1000)
        said += capfd.readouterr().err
        return "Thread" in said

    wait_until(has_told, "a round that does not end")
    assert "a step of the engine has taken" in said and "--engine-timeout" in said
    with pytest.raises(TimeoutError):
        while True:  # what it has said before
            reader.recv(1000)
    reader.close()
    writer.close()


def test_silence_is_counted_told_once_and_ends_with_a_sign():
    hung = threading.Event()
    one = Pulse(1e9, hung.set, BEAT_S)
    end = os.dup(one.writer)
    one.listen()
    wait_until(lambda: one.silent_s >= 0.05)
    wait_until(lambda: os.write(end, b".") and one.silent_s <= 0.04)
    one.is_loading, one._silence_s = False, 0.1
    assert hung.wait(TIMEOUT_S)
    os.close(end)


def test_a_process_that_loads_may_be_silent_longer():
    hung = threading.Event()
    one = Pulse(0.02, hung.set, BEAT_S)
    end = os.dup(one.writer)
    one.listen()
    silent_s = 0.0
    while silent_s < 0.1:
        is_told, silent_s = hung.is_set(), one.silent_s  # in this order: it may go on between them
        assert not is_told or silent_s >= 0.1
    assert hung.wait(TIMEOUT_S) and one.silent_s == pytest.approx(0.2)
    os.close(end)


def test_a_warning_of_the_engines_process_is_one_line(model, capfd):
    with Engine(model, CacheTiers(hbm="64KiB"), device="cpu", process="own"):
        pass
    said = r"kvstore: the HBM pool holds \d+ tokens, fewer than max_model_len \d+: longer requests will be refused\n"
    assert re.fullmatch(said, capfd.readouterr().err)


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


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"GOMP_SPINCOUNT": SPIN_COUNT}),
        ({"GOMP_SPINCOUNT": "5"}, {"GOMP_SPINCOUNT": "5"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_what_the_user_says_counts(given, found):
    environment = dict(given)
    spin_briefly(environment)
    assert environment == found
