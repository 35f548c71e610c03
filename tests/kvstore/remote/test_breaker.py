"""Tests of kvstore.remote.breaker."""

from kvstore.remote.breaker import FIRST_S, LAST_S, Breaker


def test_it_opens_at_once_and_waits_longer_each_time(clock):
    breaker, waits = Breaker(clock), []
    assert not breaker.is_open
    assert breaker.probe_in_s is None
    breaker.failed("gone")
    for _ in range(10):
        waits.append(breaker.probe_in_s)
        clock.now_s += breaker.probe_in_s
        breaker.probe_failed("gone")
    assert waits[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert max(waits) == LAST_S
    assert (breaker.error, breaker.num_opened) == ("gone", 1)


def test_a_probe_closes_it_and_a_quiet_time_forgives(clock):
    breaker = Breaker(clock)
    breaker.failed("gone")
    breaker.probe_succeeded()
    assert not breaker.is_open
    breaker.failed("again")
    assert breaker.probe_in_s == 2 * FIRST_S, "it answers probes and nothing else"
    breaker.probe_succeeded()
    clock.now_s += 100
    breaker.failed("later")
    assert breaker.probe_in_s == FIRST_S


def test_what_fails_with_it_does_not_make_the_probe_wait_longer(clock):
    """Threads that were waiting when it went away fail one after another."""
    breaker = Breaker(clock)
    for _ in range(4):
        breaker.failed("gone")
        clock.now_s += FIRST_S / 8
    assert breaker.probe_in_s == FIRST_S / 2
    breaker.probe_failed("still gone")
    assert (breaker.probe_in_s, breaker.num_opened) == (2 * FIRST_S, 1)
