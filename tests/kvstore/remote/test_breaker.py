"""Tests of kvstore.remote.breaker."""

from kvstore.remote.breaker import FIRST_S, LAST_S, Breaker


def test_it_opens_at_once_and_waits_longer_each_time():
    now = [0.0]
    breaker, waits = Breaker(lambda: now[0]), []
    assert not breaker.is_open
    assert breaker.probe_in_s is None
    for _ in range(10):
        breaker.failed("gone")
        waits.append(breaker.probe_in_s)
        now[0] += breaker.probe_in_s
    assert waits[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert max(waits) == LAST_S
    assert (breaker.error, breaker.num_opened) == ("gone", 1)


def test_a_probe_closes_it_and_a_quiet_time_forgives():
    now = [0.0]
    breaker = Breaker(lambda: now[0])
    breaker.failed("gone")
    breaker.probe_succeeded()
    assert not breaker.is_open
    breaker.failed("again")
    assert breaker.probe_in_s == 2 * FIRST_S, "it answers probes and nothing else"
    breaker.probe_succeeded()
    now[0] += 100
    breaker.failed("later")
    assert breaker.probe_in_s == FIRST_S
