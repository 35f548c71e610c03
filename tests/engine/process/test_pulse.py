"""Signs of life: they go on while the loop rests or goes round, and end with a round that does not."""

import os
import socket
import threading
from contextlib import suppress

import pytest

from kvstore.engine.process.pulse import Heart, Pulse
from tests.support.waiting import TIMEOUT_S, wait_until

BEAT_S = 0.01


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
