"""Signs of life: they go on while the loop rests or goes round, and end with a round that does not."""

import os
import select
import threading

import pytest

from kvstore.engine.process.pulse import Heart, Pulse

BEAT_S = 0.01


def test_a_heart_beats_while_the_loop_goes_round_and_stops_with_it(capfd):
    reader, writer = os.pipe()
    heart = Heart(writer, 0.5, BEAT_S)
    beats = select.poll()
    beats.register(reader, select.POLLIN)
    for _ in range(100):  # twice the limit, at rest
        assert os.read(reader, 1)
    for _ in range(100):
        heart.begin()
        assert os.read(reader, 1)
    while beats.poll(5000):  # a round that does not end
        os.read(reader, 1000)
    said = capfd.readouterr().err
    assert "a step of the engine has taken" in said and "--engine-timeout" in said and "Thread" in said
    os.close(reader)
    os.close(writer)


def test_silence_is_counted_told_once_and_ends_with_a_sign():
    hung = threading.Event()
    one = Pulse(1e9, hung.set, BEAT_S)
    end = os.dup(one.writer)
    one.listen()
    while one.silent_s < 0.05:
        threading.Event().wait(0.01)
    os.write(end, b".")
    while one.silent_s > 0.04:
        threading.Event().wait(0.001)
    one.is_loading, one._silence_s = False, 0.1
    assert hung.wait(60)
    os.close(end)


def test_a_process_that_loads_may_be_silent_longer():
    hung = threading.Event()
    one = Pulse(0.02, hung.set, BEAT_S)
    end = os.dup(one.writer)
    one.listen()
    while one.silent_s < 0.1:
        assert not hung.is_set()
        threading.Event().wait(0.001)
    assert hung.wait(60) and one.silent_s == pytest.approx(0.2)
    os.close(end)
