"""Tests of kvstore.remote.object_blocks, in a directory and on an S3 server."""

import time
from dataclasses import replace

import msgspec
import pytest

from kvstore.blocks.records import ReadResult
from kvstore.remote.object_address import parse_object_url
from kvstore.tiers.port import Chain, WriteBatch
from tests.kvstore.remote.chains import NAMES, SIZE, Made, Server, make_chain, make_state
from tests.support.buckets import Directory
from tests.support.faults import before_each_call

pytest.importorskip("obstore")
from kvstore.remote.object_blocks import ObjectBlocks, ObjectSession
from kvstore.remote.object_client import MOST_AT_ONCE, ObjectClient, open_store

TTL_S = 1000.0
GROUP = 64  # blocks of SIZE


@pytest.fixture
def directory(tmp_path):
    return Directory(tmp_path / "objects")


def server_of(bucket, size: int = SIZE, later_s: float = 0.0, states: tuple[int, int] = (0, 1)) -> Server:
    """One that knows nothing of what others have stored. later_s: its clock is so far ahead."""
    at, clock = parse_object_url(bucket.url), lambda: time.time() + later_s
    return Server(ObjectBlocks(at, NAMES, TTL_S, 16, size, clock, *states, ask_s=120.0, transfer_s=120.0), size)


def test_blocks_come_back_bit_by_bit_in_groups(bucket):
    made = make_chain(200)
    with server_of(bucket) as first, server_of(bucket) as second:
        assert first.count(made) == 0
        assert first.put(made) == [None] * 200
        assert set(first.read(made)) == {ReadResult.OK}
        assert set(second.read(made)) == {ReadResult.MISSING}, "it has not asked for this chain"
        assert second.count(made) == 200
        assert set(second.read(made)) == {ReadResult.OK}
        value_bytes = first.tier.value_bytes
    sizes = sorted(len(bucket.get(name)) for name in bucket.names())
    assert sizes == [8 * value_bytes, *[GROUP * value_bytes] * 3]
    assert 0.5e6 < GROUP * value_bytes < 8e6


@pytest.mark.parametrize("size, num_blocks, num_groups", [(300, 300, 5), (1 << 20, 40, 10), (9 << 20, 3, 3)])
def test_groups_have_some_megabytes(directory, size, num_blocks, num_groups):
    made = make_chain(num_blocks)
    with server_of(directory, size) as first, server_of(directory, size) as second:
        first.put(made)
        assert second.count(made) == len(made.records)
        assert set(second.read(made, 0, 10)) == {ReadResult.OK}
    assert len(directory.names()) == num_groups


class Counting(ObjectClient):
    """num_asked: names of objects that it was asked for."""

    num_asked = 0

    async def look_up(self, names):
        self.num_asked += len(names)
        return await super().look_up(names)


def test_a_batch_asks_for_its_own_groups_alone(directory):
    made = make_chain(64)
    with server_of(directory, 2 << 20) as server:
        server.session.close()
        client = Counting(server.tier.address, open_store(server.tier.address))
        server.session = ObjectSession(server.tier, client)
        for first in range(0, 64, 2):
            server.put(made, first, first + 2)
        assert client.num_asked <= 64 + 64 // 2, (
            "its blocks' names, and with the last batch those of the chain's groups"
        )
        assert server.put(made, 10, 12) == [None, None]
    assert len(directory.names()) == 32, "what is there is not stored again"


def test_what_was_stored_turn_by_turn_is_found_by_its_chain_alone(bucket):
    ends = [5, 6, 12, 63, 64, 65, 70, 130, 191]
    for first, end in zip([0, *ends], ends, strict=False):
        with server_of(bucket) as server:
            results = server.session.write(make_chain(end).batch()).stored
            assert [one.num_bytes > 0 for one in results].count(True) == end - first, "the rest was there"
            assert not any(one.error for one in results)
    with server_of(bucket) as other:
        for length in (200, 191, 100, 64, 12, 5):
            made = make_chain(length)
            expected = max(end for end in (*ends, 128) if end <= length)
            assert other.count(made) == expected
            assert set(other.read(made, 0, expected)) == {ReadResult.OK}


def test_a_long_chain_is_asked_for_as_far_as_it_is_there(directory):
    made = make_chain(40 * GROUP)
    with server_of(directory, 64) as first, server_of(directory, 64) as second:
        first.session.write(made.batch(0, 30 * GROUP + 7, size=64))
        assert second.count(made) == 30 * GROUP + 7
        directory.delete(NAMES.of(made.chain.ids[20 * GROUP - 1]))
        assert second.count(made) == 19 * GROUP
        assert second.read(made, 20 * GROUP - 1, 20 * GROUP + 1) == [ReadResult.MISSING, ReadResult.OK]


def test_conversations_share_groups_as_far_as_they_are_one(bucket):
    """A prompt of 70 blocks, on which two conversations go on in different ways."""
    prompt = make_chain(70)

    def branch(seed: int) -> Made:
        own = make_chain(30, seed, root=prompt.chain.ids[-1])
        ids = (*prompt.chain.ids, *own.chain.ids)
        return Made(type(own.chain)(prompt.chain.root, ids), (*prompt.records, *own.records))

    one, two = branch(5), branch(6)
    with server_of(bucket) as first, server_of(bucket) as second:
        first.put(prompt)
        first.put(one)
        assert second.count(two) == 70
        second.put(two)
        first.session.write(WriteBatch(deletes=tuple(one.chain.ids[70:])))
        assert (second.count(one), second.count(two)) == (70, 100)
        assert set(second.read(two)) == {ReadResult.OK}


def test_a_group_ends_where_another_conversation_may_go_on(bucket):
    """A system prompt of 70 blocks, and a turn of 5; the conversation that follows them has both in one prompt."""
    made, ends = make_chain(100), (0, 70, 75)
    chain = replace(made.chain, ends=ends)
    with server_of(bucket) as first, server_of(bucket) as second:
        first.session.write(replace(made.batch(), chain=chain))
        for shared in (64, 70, 75, 100):
            assert second.count(make_chain(shared)) == shared
        assert second.count(make_chain(80)) == 75
        assert set(second.read(made, 0, 75)) == {ReadResult.OK}
    assert len(bucket.names()) == 4, "and nowhere else, but after 64"


def test_deleted_blocks_are_gone_also_for_a_server_that_knows_nothing_but_their_ids(bucket):
    with server_of(bucket) as first, server_of(bucket) as second:
        for end in (5, 80, 90):
            first.put(make_chain(end))
        made, other = make_chain(90), make_chain(20, seed=9)
        first.put(other)
        second.session.write(WriteBatch(deletes=tuple(made.chain.ids)))
        assert first.count(made) == 0
        first.session.write(WriteBatch(deletes=tuple(other.chain.ids[7:8])))
        assert first.count(other) == 0, "a group goes as a whole"
    assert bucket.names() == []


@pytest.mark.parametrize(("turn", "most"), [(25, 250), (2, 1300)])
def test_what_was_stored_turn_by_turn_costs_few_questions(directory, turn, most):
    made, asked = make_chain(1200), list[int]()
    with server_of(directory) as first, server_of(directory) as second:
        for end in range(turn, 1201, turn):
            first.put(made, end - turn, end)
        with before_each_call(ObjectClient, "look_up", lambda _, names: asked.append(len(names))):
            assert second.count(made) == 1200
        assert len(directory.names()) <= sum(asked) < most


def test_a_long_deletion_goes_in_parts_for_which_a_slow_bucket_has_time(directory):
    slow_s, names = 0.25, list[str]()

    def fits(client: ObjectClient, some: list[str], timeout_s: float) -> None:
        assert len(some) / MOST_AT_ONCE * slow_s < timeout_s
        names.extend(some)

    tier = ObjectBlocks(parse_object_url(directory.url), NAMES, TTL_S, 16, SIZE)
    with Server(tier) as server, before_each_call(ObjectClient, "remove", fits):
        server.delete(make_chain(4000).chain.ids)
    assert len(names) == 4000


@pytest.mark.parametrize("keep", [1, -1, -SIZE])
def test_a_group_that_was_cut_off_is_damage_and_stored_anew(bucket, keep):
    made = make_chain(3)
    name = NAMES.of(made.chain.ids[-1])
    with server_of(bucket) as server, server_of(bucket) as other:
        server.put(made)
        bucket.set(name, bucket.get(name)[:keep])
        assert other.count(made) == 0
        num_whole = 2 if keep < 0 else 0
        assert server.read(made) == [ReadResult.OK] * num_whole + [ReadResult.CORRUPT] * (3 - num_whole)
        assert server.put(made) == [None] * 3
        assert other.count(made) == 3
        assert set(other.read(made)) == {ReadResult.OK}


def test_one_that_was_cut_off_between_two_blocks_heals_too(bucket):
    made = make_chain(3)
    name = NAMES.of(made.chain.ids[-1])
    with server_of(bucket) as server, server_of(bucket) as other:
        server.put(made)
        bucket.set(name, bucket.get(name)[: server.tier.value_bytes])
        assert other.session.ask(made.chain) == [False, False, True], "its size says so"
        assert other.read(made) == [ReadResult.MISSING, ReadResult.MISSING, ReadResult.MISMATCH]
        assert other.put(made) == [None] * 3
        assert set(other.read(made)) == {ReadResult.OK}


@pytest.mark.parametrize("ends", [(3, 6), (6,)])
def test_a_place_that_is_out_of_date_is_a_miss_and_harms_no_group(bucket, ends):
    """A group was deleted, and stored anew with another beginning."""
    made = make_chain(6)
    with server_of(bucket) as first, server_of(bucket) as second:
        for begin, end in zip((0, *ends), ends, strict=False):
            first.put(made, begin, end)
        assert second.count(made) == 6
        first.session.write(WriteBatch(deletes=tuple(made.chain.ids)))
        for begin, end in ((0, 6),) if len(ends) > 1 else ((0, 3), (3, 6)):
            first.put(made, begin, end)
        names = bucket.names()
        assert second.read(made, 3) == [ReadResult.MISSING] * 3
        assert bucket.names() == names
        assert set(first.read(made)) == {ReadResult.OK}
        assert second.count(made) == 6
        assert set(second.read(made)) == {ReadResult.OK}


def test_no_object_says_whose_it_is(bucket):
    made = make_chain(3)
    labelled = [msgspec.structs.replace(record, tenant="Ann's company", model="m" * 99) for record in made.records]
    jobs = [replace(job, record=record) for job, record in zip(made.jobs(), labelled, strict=True)]
    with server_of(bucket) as server:
        server.session.write(WriteBatch(tuple(jobs), chain=made.chain))
        assert set(server.read(made)) == {ReadResult.OK}
    assert not any(b"Ann" in bucket.get(name) or b"mmm" in bucket.get(name) for name in bucket.names())


def test_what_is_too_old_is_not_there(bucket):
    made = make_chain(70)
    with server_of(bucket) as now, server_of(bucket, later_s=TTL_S + 60) as later:
        now.put(made)
        assert (now.count(made), later.count(made)) == (70, 0)


def test_a_chain_lives_as_long_as_its_youngest_end(directory):
    made = make_chain(100)
    with server_of(directory) as server:
        server.put(made, 0, 70)
        for name in directory.names():
            directory.age(name, 0.9 * TTL_S)
        server.put(made, 70)
        directory.age(NAMES.of(made.chain.ids[-1]), 0.4 * TTL_S)
        first, second = (NAMES.of(made.chain.ids[i]) for i in (63, 69))
        assert all((directory.folder / name).stat().st_mtime > time.time() - 100 for name in (first, second)), "renewed"
        for name in (first, second):
            directory.age(name, 1.3 * TTL_S)
        assert server.count(made) == 100
        directory.age(NAMES.of(made.chain.ids[-1]), 0.7 * TTL_S)
        assert server.count(made) == 0


# -- states behind blocks ----------------------------------------------------------------------------------------------
ENDS = (20, 90, 200)  # of turns
STATES = [(1, 1), (150, 1), (2, 5)]  # blocks of one, and behind how many blocks a border needs one


class Conversation:
    """Turns, the last two of which have states."""

    def __init__(self, server: Server, states: tuple[int, int]) -> None:
        self.made, (self.num_blocks, self.span) = make_chain(ENDS[-1]), states
        server.session.write(replace(self.made.batch(), chain=replace(self.made.chain, ends=ENDS)))
        for end in ENDS[1:]:
            for number in self.needed(end):
                server.put(self.state(number))

    def needed(self, end: int) -> range:
        return range(end - self.span, end)

    def state(self, number: int) -> Made:
        return make_state(self.made.chain.ids[number], self.num_blocks)

    def found(self, server: Server, num_blocks: int = 230) -> list[int]:
        """Behind which blocks another server finds states."""
        chain = make_chain(num_blocks).chain
        firsts = tuple(make_state(one, 1).chain.ids[0] for one in chain.ids)
        there = server.session.ask(Chain(chain.root, chain.ids + firsts))
        assert all(there[: min(192, num_blocks)])
        return [number for number, is_there in enumerate(there[num_blocks:]) if is_there]


@pytest.mark.parametrize("states", STATES)
def test_of_states_those_of_the_longest_prefix_are_found_by_its_chain_alone(bucket, states):
    with server_of(bucket, states=states) as first, server_of(bucket, states=states) as second:
        talk = Conversation(first, states)
        assert talk.found(second) == [*talk.needed(200)], "no others, of which it did not look for all"
        for number in talk.needed(200):
            assert set(second.read(talk.state(number))) == {ReadResult.OK}
        assert talk.found(second, 199) == [*talk.needed(90)], "a request that leaves it a block before begins there"


@pytest.mark.parametrize("states", STATES)
def test_a_state_of_which_a_part_is_gone_is_not_there_until_it_is_stored_again(directory, states):
    with server_of(directory, states=states) as first, server_of(directory, states=states) as second:
        talk = Conversation(first, states)
        lost = talk.state(talk.needed(200)[0])
        directory.delete(NAMES.of(lost.chain.ids[min(GROUP, len(lost.chain.ids)) - 1]))
        assert set(talk.needed(90)) <= set(talk.found(second)) and talk.needed(200)[0] not in talk.found(second)
        assert first.put(lost) == [None] * talk.num_blocks
        assert talk.found(second) == [*talk.needed(200)]
        assert set(second.read(lost)) == {ReadResult.OK}


def test_a_state_that_came_in_parts_is_found(directory):
    with server_of(directory, states=(150, 1)) as first, server_of(directory, states=(150, 1)) as second:
        talk = Conversation(first, (150, 1))
        state = talk.state(199)
        first.session.write(WriteBatch(deletes=state.chain.ids))
        assert talk.found(second) == [89]
        for begin, end in ((0, 30), (30, 100), (100, 150)):
            first.put(state, begin, end)
        assert talk.found(second) == [199]
        assert set(second.read(state)) == {ReadResult.OK}


@pytest.mark.parametrize("states", STATES)
def test_deleted_blocks_take_their_states_along(bucket, states):
    """Also one of which the end is gone."""
    with server_of(bucket, states=states) as first, server_of(bucket, states=states) as second:
        talk = Conversation(first, states)
        if states[0] > GROUP:
            bucket.delete(NAMES.of(talk.state(89).chain.ids[-1]))
        second.session.write(WriteBatch(deletes=talk.made.chain.ids))
    assert bucket.names() == []


def test_many_groups_behind_which_there_is_no_state(directory):
    """The chain is asked for from its end on, to its beginning."""
    with server_of(directory, states=(1, 1)) as first, server_of(directory, states=(1, 1)) as second:
        made = make_chain(200)
        for end in range(1, 201):
            first.put(made, end - 1, end)
        first.put(make_state(made.chain.ids[2], 1))
        chain = make_chain(230).chain
        firsts = tuple(make_state(one, 1).chain.ids[0] for one in chain.ids)
        assert second.session.ask(Chain(chain.root, chain.ids + firsts))[230:].index(True) == 2
