"""A process that computes for this one: signs of life go on while its loop rests or goes round, and end with a round
that does not; who is silent is killed, and each hears of the other's end.
"""

import os
import signal
import socket
import threading
from contextlib import suppress
from queue import Full, Queue

import pytest

from kvstore.engine.process import child
from kvstore.engine.process.channel import Channel
from kvstore.engine.process.child import SPIN_COUNT, Child, Heart, spin_briefly
from kvstore.engine.process.wire import Start
from kvstore.errors import EngineDiedError
from tests.support.faults import before_each, constants, fail
from tests.support.ranks import is_gone
from tests.support.waiting import TIMEOUT_S, wait_until

BEAT_S = 0.01
FOR_EVER_S = 1e9


# -- its own end -------------------------------------------------------------------------------------------------------
def test_a_heart_beats_while_the_loop_goes_round_and_stops_with_it(capfd):
    """It is never more than a beat ahead of this thread, so no round seems long because this one had to wait."""
    beats, stuck = Queue[None](1), threading.Event()
    heart = Heart(lambda: beats.put(None), 0.5, BEAT_S)
    heart.stuck = lambda why: stuck.set()
    for _ in range(100):  # twice the limit, at rest
        beats.get(timeout=TIMEOUT_S)
    for _ in range(100):
        heart.begin()
        beats.get(timeout=TIMEOUT_S)
    while not stuck.is_set():  # a round that does not end
        with suppress(Exception):
            beats.get(timeout=BEAT_S)
    said = capfd.readouterr().err
    assert "a step of the engine has taken" in said and "--engine-timeout" in said and "Thread" in said
    while not beats.empty():  # what it has said before
        beats.get()
    with pytest.raises(Full):
        beats.put(None)
        beats.put(None, timeout=20 * BEAT_S)


# -- the end of the process that has started it ------------------------------------------------------------------------
@pytest.fixture
def elsewhere():
    """(child, its own end of the channel): one that others have started."""
    ours, theirs = socket.socketpair()
    end = Channel(theirs)
    one = Child(Start(FOR_EVER_S, {}, rank=1, size=2), end=ours, beat_s=BEAT_S)
    yield one, end
    end.close()
    one.end(b"leave", 0.0)


def test_silence_is_counted_and_ends_with_a_sign(elsewhere):
    one, end = elsewhere
    one.is_loading = False
    wait_until(lambda: one.silent_s >= 0.05)
    wait_until(lambda: end.beat() or one.silent_s <= 0.04)
    one._silence_s = 0.1
    assert one.wait().startswith("no sign of life for 0.") and one.silent_s >= 0.1


def test_what_nobody_reads_is_a_sign_and_is_kept(elsewhere):
    one, end = elsewhere
    unread = threading.Event()
    one.on_unread = unread.set
    wait_until(lambda: one.silent_s >= 0.05)
    end.send(b"hello")
    assert unread.wait(TIMEOUT_S) and one.receive() == [b"hello"]


def test_a_process_that_loads_may_be_silent_longer(elsewhere):
    one, _ = elsewhere
    one._silence_s, silent_s = 0.02, 0.0
    while silent_s < 0.1:
        how, silent_s = one.how, one.silent_s  # in this order: it may go on between them
        assert how is None or silent_s >= 0.1
    one.wait()
    assert one.silent_s == pytest.approx(0.2)


def test_the_end_of_a_connection_is_one_and_what_was_said_before_is_heard(elsewhere):
    one, end = elsewhere
    ended = threading.Event()
    one.when_ended(ended.set)
    end.send(b"the last word")
    end.close()
    assert ended.wait(TIMEOUT_S) and one.how == "its connection has ended"
    heard = one.first_messages()
    assert next(heard) == b"the last word"
    with pytest.raises(EngineDiedError, match=r"rank 1 of 2 ended while it was loading \(its connection has ended\)"):
        next(heard)
    one.send(b"too late", waits=True)
    assert one.channel.num_unsent == 0


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """Starts a process that runs this text instead of ours."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def begin(program: str, silence_s: float = FOR_EVER_S) -> Child:
        (tmp_path / "program.py").write_text(program)
        with constants(child, PROGRAM="program"):
            return Child(Start(silence_s, {}), beat_s=BEAT_S)

    return begin


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("import os, sys; os.kill(os.getpid(), 9)", "signal 9"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import signal; signal.signal(signal.SIGUSR2, signal.SIG_IGN); signal.pause()", "killed: no sign of life"),
    ],
)
def test_the_end_of_a_process_is_told_and_nothing_of_it_stays(program, how, begun):
    one = begun(program, 0.1 if "killed" in how else FOR_EVER_S)
    assert one.wait().startswith(how)
    assert is_gone(one.pid)
    one.end(b"leave", FOR_EVER_S)


def test_a_process_that_takes_too_long_to_leave_is_killed(begun):
    one = begun("import signal; signal.pause()")
    one.is_loading = False
    os.kill(one.pid, signal.SIGSTOP)
    one.end(b"leave", 0.05)
    assert one.how == "signal 9"


def test_a_process_that_cannot_be_started_leaves_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    with before_each(child, "spawned", fail), pytest.raises(RuntimeError, match="injected"):
        Child(Start(FOR_EVER_S, {}))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"GOMP_SPINCOUNT": SPIN_COUNT}),
        ({"GOMP_SPINCOUNT": "5"}, {"GOMP_SPINCOUNT": "5"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_how_long_compute_threads_spin_is_settled_where_the_user_has_not(given, found):
    environment = dict(given)
    spin_briefly(environment)
    assert environment == found
