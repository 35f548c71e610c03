"""What joins two processes: messages, whole and in order; signs of life; restarts, and what is settled at the start."""

import gc
import os
import random
import re
import select
import selectors
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue

import pytest

from kvstore import CacheTiers, Engine
from kvstore.engine import process
from kvstore.engine.client.remote import MAX_DELAY_S, WINDOW_S, Readiness, Restarts
from kvstore.engine.process import SPIN_COUNT, Channel, Child, Heart, Start, spin_briefly
from kvstore.errors import EngineDiedError
from tests.support.faults import before_each, constants, fail
from tests.support.ranks import is_gone
from tests.support.waiting import TIMEOUT_S, wait_until

BEAT_S = 0.01
FOR_EVER_S = 1e9


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
        with constants(process, PROGRAM="program"):
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


def test_nothing_of_the_configuration_is_in_the_list_of_processes(started_anew):
    one = Child(Start(FOR_EVER_S, {"model": "secret"}))
    while not (shown := Path(f"/proc/{one.pid}/cmdline").read_bytes()):
        pass  # it is about to run the program
    one.end(b"leave", 0.0)
    assert shown.endswith(b"\0-m\0kvstore.engine.program\0the engine's process\0")


def test_a_process_that_cannot_be_started_leaves_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    with before_each(process, "spawned", fail), pytest.raises(RuntimeError, match="injected"):
        Child(Start(FOR_EVER_S, {}))
    assert len(os.listdir("/proc/self/fd")) == before


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
