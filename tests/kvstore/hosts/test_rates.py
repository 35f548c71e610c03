"""Load or compute: by measured rates, and never for ever by old ones."""

from kvstore.hosts.rates import LoadOrCompute
from kvstore.policy.planner import RETRY_EVERY

BLOCK, TOKENS = 1 << 20, 16


def rates(read_bytes_per_s, prefill, always=False):
    found = LoadOrCompute(BLOCK, TOKENS, always)
    found.read(round(read_bytes_per_s), 1.0)
    found.computed(prefill, 1.0)
    return found


def test_until_computing_was_measured_everything_is_loaded():
    unmeasured = LoadOrCompute(BLOCK, TOKENS)
    unmeasured.read(BLOCK, 100.0)
    assert unmeasured.should_load(100_000, 0, is_first=False)


def test_a_fast_disk_is_read_and_a_slow_one_a_little():
    assert rates(1e9, 5_000).should_load(32_768, 0, is_first=False)
    slow = rates(20e6, 5_000)  # 53 ms a block, of which computing takes 3
    assert not slow.should_load(32_768, 0, is_first=False)
    assert not slow.should_load(16, 0, is_first=True)
    assert rates(60e6, 5_000).should_load(16, 0, is_first=True), "a head that costs less than 20 ms is always loaded"
    assert rates(20e6, 5_000, always=True).should_load(32_768, 0, is_first=False)


def test_what_is_read_before_counts():
    busy = rates(400e6, 5_000)
    assert busy.should_load(1024, 0, is_first=False)
    assert not busy.should_load(1024, 1000, is_first=False)


def test_a_disk_that_became_fast_is_believed():
    changed = rates(60e6, 5_000)
    assert not changed.should_load(4096, 0, is_first=False)
    for _ in range(60):
        changed.read(BLOCK, 0.001)
    assert changed.should_load(4096, 0, is_first=False)


def test_a_disk_too_slow_for_a_single_block_is_tried_now_and_then():
    slow = rates(1e6, 5_000)  # a second a block
    for _ in range(3):
        assert [slow.should_load(TOKENS, 0, is_first=True) for _ in range(RETRY_EVERY)].count(True) == 1
        assert not any(slow.should_load(2 * TOKENS, 0, is_first=False) for _ in range(RETRY_EVERY))
    slow.read(100 * BLOCK, 1.0)
    assert slow.should_load(TOKENS, 0, is_first=True)
