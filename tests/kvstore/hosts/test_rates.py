"""Load or compute: by measured rates, and never for ever by old ones."""

from kvstore.hosts.rates import LoadOrCompute

BLOCK, TOKENS = 1 << 20, 16


def rates(read_bytes_per_s, prefill, always=False):
    found = LoadOrCompute(BLOCK, TOKENS, always)
    found.read(round(read_bytes_per_s), 1.0)
    found.computed(prefill, 1.0)
    return found


def test_until_computing_was_measured_everything_is_loaded():
    unmeasured = LoadOrCompute(BLOCK, TOKENS)
    unmeasured.read(BLOCK, 100.0)
    assert unmeasured.should_load(100_000, 0)


def test_a_fast_disk_is_read_and_a_slow_one_a_little():
    assert rates(1e9, 5_000).should_load(32_768, 0)
    slow = rates(20e6, 5_000)  # 53 ms a block, of which computing takes 3
    assert not slow.should_load(32_768, 0)
    assert not slow.should_load(16, 0)
    assert rates(60e6, 5_000).should_load(16, 0), "a head that costs less than 20 ms is always loaded"
    assert rates(20e6, 5_000, always=True).should_load(32_768, 0)


def test_what_is_read_before_counts():
    busy = rates(400e6, 5_000)
    assert busy.should_load(1024, 0)
    assert not busy.should_load(1024, 1000)


def test_a_disk_that_became_fast_is_believed():
    changed = rates(60e6, 5_000)
    assert not changed.should_load(4096, 0)
    for _ in range(60):
        changed.read(BLOCK, 0.001)
    assert changed.should_load(4096, 0)
