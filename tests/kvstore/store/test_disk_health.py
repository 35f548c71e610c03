"""When a disk that failed is tried again: after a longer while each time, and at once after it has worked."""

from kvstore.store.write_back import FIRST_RETRY_S, LAST_RETRY_S, Backoff, DiskHealth


def test_each_failure_doubles_the_wait_up_to_the_last(clock):
    backoff = Backoff(clock)
    assert backoff.is_over
    waits_s = []
    for _ in range(10):
        backoff.failed()
        assert not backoff.is_over
        waits_s.append(backoff.at_s - clock.now_s)
        clock.now_s = backoff.at_s
        assert backoff.is_over
    assert waits_s == [min(FIRST_RETRY_S * 2**n, LAST_RETRY_S) for n in range(10)] and waits_s[-1] == LAST_RETRY_S
    backoff.failed()
    backoff.succeeded()
    assert backoff.is_over
    backoff.failed()
    assert backoff.at_s == clock.now_s + FIRST_RETRY_S


def test_a_disk_is_paused_while_what_failed_waits_and_has_an_error_until_it_works(clock):
    health = DiskHealth(clock)
    assert not health.is_paused
    health.write_failed("full")
    assert health.error == "full" and health.is_paused and not health.write.is_over and health.heal.is_over
    clock.now_s += FIRST_RETRY_S
    assert health.error == "full" and not health.is_paused
    health.heal_failed("read-only")
    assert health.error == "read-only" and health.is_paused and health.write.is_over and not health.heal.is_over
    health.write_failed("full")
    health.recovered()
    assert health.error is None and not health.is_paused and health.write.is_over and health.heal.is_over
    health.write_failed("full")
    assert health.write.at_s == clock.now_s + FIRST_RETRY_S, "the next failure is a first one"
