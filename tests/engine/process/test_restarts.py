"""When a process that ended is started again: the limit, the window and the delays."""

from kvstore.engine.process.restarts import MAX_DELAY_S, WINDOW_S, Restarts


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
