"""Counters of a store: the histogram, and that each thing that happens is counted where it happens."""

from kvstore.engine.client.messages import Forget
from kvstore.stats import Counts, Histogram, StoreStats
from tests.support.engines import ask, counters, evict_memory, open_engine, settle, tokens
from tests.support.waiting import TIMEOUT_S


def test_a_value_is_counted_in_the_first_bucket_that_holds_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.observe(value)
    assert histogram.as_dict() == {"bounds": [1.0, 2.0], "counts": [2, 1, 1], "sum": 10.0}


def test_what_was_shown_does_not_change_later():
    stats, histogram = StoreStats(), Histogram((1.0,))
    shown, buckets = stats.as_dict(), histogram.as_dict()
    stats.read_failures["corrupt"] = 1
    histogram.observe(0.5)
    assert shown["read_failures"] == {} and buckets["counts"] == [0, 0]


def test_an_entry_is_added_observed_or_averaged_by_its_kind():
    counts = Counts(["reads"], ["read_seconds"], ["read_bytes_per_s", "write_bytes_per_s"])
    for rate in (100.0, 200.0):
        counts.add(reads=2, read_seconds=0.5, read_bytes_per_s=rate)
    counts.failed("corrupt")
    shown = counts.as_dict()
    assert (shown["reads"], shown["read_seconds"]["sum"], shown["failures"]) == (4, 1.0, {"corrupt": 1})
    assert (shown["read_bytes_per_s"], shown["write_bytes_per_s"]) == (120.0, None)


def test_loads_take_time_and_removals_are_no_evictions(model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        prompt = tokens(1, 100)
        ask(engine, prompt)
        evict_memory(engine)
        ask(engine, prompt)
        settle(engine)
        stats = engine.stats()
        num_loads, num_reads = sum(stats["load_seconds"]["counts"]), sum(stats["disk"]["read_seconds"]["counts"])
        assert num_loads >= 1 and num_reads == counters(engine)["read"] == 6
        session = tokens(2, 40)
        ask(engine, session)
        settle(engine)
        before = engine.stats()
        blocks = [record for record in engine.connector.parts.cpu.pool.cached_blocks() if record is not None]
        ids = [engine.connector.parts.cpu.record(arena_block).block_id for arena_block in blocks]
        assert engine.core.call(Forget(ids, TIMEOUT_S))
        settle(engine)
        after = engine.stats()
    for tier in ("hbm", "cpu"):
        assert after[tier]["removed_blocks"] - before[tier]["removed_blocks"] == len(ids), tier
        assert after[tier]["evicted_blocks"] == before[tier]["evicted_blocks"], tier
    removed = after["store"]["disk_removals"] - before["store"]["disk_removals"]
    assert (removed, after["store"]["disk_evictions"]) == (len(ids), 0)
