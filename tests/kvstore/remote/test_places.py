"""Tests of kvstore.remote.object_blocks."""

from kvstore.remote.object_blocks import GroupPlace, Places


def block(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_the_last_that_was_seen_is_known():
    places = Places()
    places.learn((block(i), GroupPlace("a", i)) for i in range(3))
    places.learn([(block(1), GroupPlace("b", 0))])
    assert places.of([block(i) for i in range(4)]) == [GroupPlace("a", 0), GroupPlace("b", 0), GroupPlace("a", 2), None]
    places.lose([block(0), block(7)])
    assert places.of([block(0)]) == [None]


def test_what_was_not_seen_for_long_goes_first():
    places = Places(most=3)
    places.learn((block(i), GroupPlace("a", i)) for i in range(3))
    places.learn([(block(0), GroupPlace("a", 0)), (block(3), GroupPlace("a", 3))])
    assert [i for i in range(4) if places.of([block(i)]) != [None]] == [0, 2, 3]
