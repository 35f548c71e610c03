"""Tests of kvstore.tiers.worker."""

from kvstore.tiers.worker import FIRST_S, LAST_S, TierHealth


def test_it_is_tried_again_after_a_longer_while_each_time(clock):
    health, waits = TierHealth(clock), []
    assert health.error is None and health.retry_in_s is None and not health.is_paused
    health.failed("gone")
    for _ in range(10):
        assert health.is_paused
        waits.append(health.retry_in_s)
        clock.now_s += health.retry_in_s
        assert not health.is_paused and health.retry_in_s == 0
        health.failed("still gone")
    assert waits == [min(FIRST_S * 2**n, LAST_S) for n in range(10)] and waits[-1] == LAST_S
    assert (health.error, health.num_failures) == ("still gone", 1)


def test_a_success_ends_it_and_a_quiet_time_forgives(clock):
    health = TierHealth(clock)
    health.failed("gone")
    health.succeeded()
    assert health.error is None and not health.is_paused
    health.failed("again")
    assert health.retry_in_s == 2 * FIRST_S, "it answers probes and nothing else"
    health.succeeded()
    clock.now_s += 100
    health.failed("later")
    assert (health.retry_in_s, health.num_failures) == (FIRST_S, 3)


def test_what_fails_with_it_does_not_make_the_next_try_wait_longer(clock):
    """Threads that were waiting when it went away fail one after another."""
    health = TierHealth(clock)
    for what in ("gone", "gone", "closed", "closed"):
        health.failed(what)
        clock.now_s += FIRST_S / 8
    assert (health.error, health.retry_in_s, health.num_failures) == ("gone", FIRST_S / 2, 1)
