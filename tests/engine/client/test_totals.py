"""Tests of kvstore.engine.client.several."""

from kvstore.engine.client.several import total, total_stats
from kvstore.stats import Histogram


def test_numbers_are_added_item_by_item():
    one, other = {"a": 1, "b": {"c": 2.5, "d": None}, "e": [1, 2]}, {"a": 4, "b": {"c": 1, "d": 3}, "e": [10, 20]}
    assert total([one, other]) == {"a": 5, "b": {"c": 3.5, "d": 3}, "e": [11, 22]}
    assert total([{"x": 1}, {"y": 2}]) == {"x": 1, "y": 2}, "one has counted what the other has not met"


def test_what_is_no_amount_is_not_added():
    one = {"block_size": 16, "policy": "auto", "is_auto": False, "read_bytes_per_s": 10.0, "degraded": None}
    other = {"block_size": 16, "policy": "auto", "is_auto": True, "read_bytes_per_s": 30.0, "degraded": "no answer"}
    assert total([one, other]) == {
        "block_size": 16, "policy": "auto", "is_auto": True, "read_bytes_per_s": 20.0, "degraded": "no answer",
    }  # fmt: skip
    assert total([{"read_bytes_per_s": None}, {"read_bytes_per_s": 7}]) == {"read_bytes_per_s": 7}


def test_histograms_keep_their_bounds():
    first, second = Histogram(), Histogram()
    first.observe(0.1)
    second.observe(3.0)
    both = total([first.as_dict(), second.as_dict()])
    assert both["bounds"] == first.as_dict()["bounds"]
    assert sum(both["counts"]) == 2 and both["sum"] == 3.1


def test_the_disk_is_counted_once():
    policy = {"evictable": {"cpu": 3, "disk": 0}, "in_force": {"cpu": "return", "disk": "return"}}
    engine = {"hbm": {"blocks": 5}, "store": {"read": 0, "remote_read": 2}, "policy": policy,
              "remote": {"degraded": None}, "lost": None}  # fmt: skip
    disk = {"disk": {"blocks": 9, "degraded": None}, "store": {"read": 4}, "lost": "gone",
            "policy": {"evictable": {"disk": 9}, "in_force": {"disk": "lru"}}}  # fmt: skip
    found = total_stats([engine, {**engine, "remote": {"degraded": "no answer in time"}}], disk)
    assert found["store"] == {"read": 4, "remote_read": 4} and found["hbm"] == {"blocks": 10}
    assert found["disk"] == {"blocks": 9, "degraded": "no answer in time"} and found["lost"] == "gone"
    assert found["policy"]["evictable"] == {"cpu": 6, "disk": 9} and "remote" not in found
    assert total_stats([engine, engine], None)["remote"] == {"degraded": None}
