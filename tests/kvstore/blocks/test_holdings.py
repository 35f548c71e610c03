"""What others are told of blocks that come and go, in which order, and what waits meanwhile."""

import random

import pytest

from kvstore.blocks.holdings import Holdings, Place
from kvstore.blocks.ids import child_block_id, token_bytes
from kvstore.blocks.records import BlockRecord

ROOTS = {"": b"r" * 32, "ada": b"a" * 32}


def record(parent_id: bytes, token: int, tenant: str = "") -> BlockRecord:
    tokens = token_bytes([token] * 4)
    return BlockRecord(child_block_id(parent_id, tokens), parent_id, tokens, b"f" * 32, tenant)


def chain(length: int, first: int = 0, tenant: str = "", root: bytes | None = None) -> list[BlockRecord]:
    found: list[BlockRecord] = []
    for token in range(first, first + length):
        found.append(record(found[-1].block_id if found else root or ROOTS[tenant], token, tenant))
    return found


def opened(*on_disk: BlockRecord) -> Holdings:
    return Holdings(ROOTS.__getitem__, on_disk)


def told(holdings: Holdings) -> list[tuple[bytes, int, int]]:
    return [(change.block_id, change.added, change.removed) for change in holdings.take_changes(1000)]


def test_what_comes_and_goes_is_told_once():
    holdings, (one,) = opened(), chain(1)
    holdings.stored_record(Place.CPU, one)
    holdings.stored_record(Place.HBM, one)
    assert told(holdings) == [(one.block_id, Place.CPU | Place.HBM, 0)]
    holdings.stored_record(Place.CPU, one)
    assert told(holdings) == []
    holdings.gone(Place.CPU, one.block_id)
    assert told(holdings) == [(one.block_id, 0, Place.CPU)]
    holdings.gone(Place.HBM, one.block_id)
    assert told(holdings) == [(one.block_id, 0, Place.HBM)] and len(holdings) == 0


def test_what_went_before_it_was_told_is_not_told_and_nothing_of_it_is_kept():
    holdings = opened()
    for token in range(1000):
        one = record(ROOTS[""], token)
        holdings.stored_record(Place.HBM, one)
        holdings.gone(Place.HBM, one.block_id)
    assert (len(holdings), holdings.num_waiting, told(holdings)) == (0, 0, [])


def test_a_salted_chain_and_a_splice_are_not_told_nor_what_is_built_on_them():
    holdings, exact = opened(), chain(2)
    salted, spliced = chain(2, root=b"s" * 32), chain(2, root=b"p" * 32, first=7)
    foreign = chain(1, root=ROOTS["ada"])  # of the tenant "", below the root of another
    for one in (*exact, *salted, *spliced, *foreign):
        holdings.stored_record(Place.CPU, one)
    assert [one for one, *_ in told(holdings)] == [one.block_id for one in exact]


def test_what_came_before_its_parent_is_told_behind_it():
    holdings, (one, two, three) = opened(), chain(3)
    for early in (three, two):
        holdings.stored_record(Place.CPU, early)
        assert told(holdings) == []
    holdings.stored_record(Place.CPU, one)
    assert [block_id for block_id, *_ in told(holdings)] == [one.block_id, two.block_id, three.block_id]
    for gone in (three, two, one):
        holdings.gone(Place.CPU, gone.block_id)
    assert len(told(holdings)) == 3
    holdings.stored_record(Place.CPU, two)
    assert told(holdings) == []
    holdings.gone(Place.CPU, two.block_id)
    assert len(holdings) == 0


def test_the_disk_is_told_from_its_roots_whatever_the_order_of_the_scan():
    records = [*chain(50), *chain(50, first=100), *chain(50, first=200, tenant="ada")]
    mixed = random.Random(1).sample(records, len(records))
    order = [one for one, *_ in told(opened(*mixed))]
    assert set(order) == {one.block_id for one in records}
    place = {block_id: index for index, block_id in enumerate(order)}
    assert all(one.parent_id in ROOTS.values() or place[one.parent_id] < place[one.block_id] for one in records)


def test_a_tier_that_is_emptied_is_told_of_each_block():
    holdings, records = opened(), chain(3)
    for one in records:
        holdings.stored_record(Place.DISK, one)
    holdings.stored_record(Place.CPU, records[0])
    told(holdings)
    holdings.emptied(Place.DISK)
    assert sorted(told(holdings)) == sorted((one.block_id, 0, Place.DISK) for one in records)
    assert len(holdings) == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_reader_that_lags_has_the_right_picture_in_the_end(seed):
    """Blocks of a tree come and go at random, and changes are taken now and then, a few at a time."""
    rng, holdings = random.Random(seed), opened()
    records = chain(6)
    for _ in range(40):
        records.append(record(rng.choice(records).block_id, rng.randrange(10_000)))
    now = {one.block_id: 0 for one in records}
    parents = {one.block_id: one.parent_id for one in records}
    believed: dict[bytes, int] = {}

    def read(most: int) -> None:
        for change in holdings.take_changes(most):
            if change.added:
                assert change.parent_id is None or change.parent_id in believed or change.block_id in believed
            places = believed.get(change.block_id, 0)
            assert not places & change.added and places & change.removed == change.removed
            believed[change.block_id] = (places | change.added) & ~change.removed
            if not believed[change.block_id]:
                del believed[change.block_id]

    for _ in range(2000):
        one, place = rng.choice(records), rng.choice((Place.HBM, Place.CPU, Place.DISK))
        has_parent = one.parent_id == ROOTS[""] or now[one.parent_id]
        has_child = any(now[child] for child, parent in parents.items() if parent == one.block_id)
        if not now[one.block_id] & place and has_parent:
            now[one.block_id] |= place
            holdings.stored_record(place, one)
        elif now[one.block_id] & place and (now[one.block_id] != place or not has_child):
            now[one.block_id] &= ~place
            holdings.gone(place, one.block_id)
        if rng.random() < 0.05:
            read(rng.randrange(1, 5))
    read(10_000)
    assert believed == {block_id: places for block_id, places in now.items() if places}
    assert {change.block_id: change.added for change in holdings.all_told()} == believed
    assert len(holdings) == len(believed)
