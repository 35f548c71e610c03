"""Tests of kvstore.block_store: the disk tier by itself, as another engine uses it."""

import threading

import pytest

from kvstore.admin.control import ask
from kvstore.admin.offline import OfflineStore
from kvstore.disk.tier import DiskTier
from kvstore.errors import ConfigError, StoreError, StoreLockedError
from kvstore.store.host_blocks import MAX_PREFETCHING
from tests.support.faults import before_each, stuck_disk
from tests.support.page_cache import ColdFile
from tests.support.programs import python
from tests.support.store.host import BLOCK, chain, key, payload
from tests.support.waiting import TIMEOUT_S, wait_until


def test_blocks_come_back_after_a_restart(hosts):
    host = hosts()
    keys = host.stored(chain(1, 20))
    assert host.store.lookup([*keys, key(1, 20)]) == [True] * 20 + [False]
    assert host.has(keys)
    assert host.store.flush() and not host.store.poll()
    host.close()
    again = hosts()
    assert again.store.lookup(keys) == [True] * 20
    result = again.read(keys[7])
    assert (result.ok, result.reason, result.num_bytes) == (True, "", BLOCK) and result.seconds > 0


def test_a_block_is_stored_once_it_is_durable_and_not_before(hosts):
    host = hosts()
    with stuck_disk() as go:
        tickets = host.write(chain(1, 1))
        twice = host.write(chain(1, 1))
        assert host.store.lookup(chain(1, 1)) == [False]
        go.set()
    assert [result.ok for result in host.wait(tickets + twice)] == [True, True]
    assert host.store.lookup(chain(1, 1)) == [True]
    assert host.stored(chain(1, 1)) and host.store.stats()["store"]["written"] == 1


def test_what_cannot_be_read_says_why(hosts):
    host = hosts()
    host.stored(chain(1, 2))
    assert host.read(key(2, 0)).reason == "missing"
    assert host.read(key(1, 0), BLOCK // 2).reason == "mismatch"
    assert host.read(key(1, 0)).ok, "asking for another size cost a block"


def test_another_namespace_hits_nothing(hosts):
    host = hosts()
    keys = host.stored(chain(1, 5))
    host.close()
    other = hosts(namespace=b"other weights")
    assert other.store.lookup(keys) == [False] * 5
    assert [other.read(name).reason for name in keys] == ["missing"] * 5
    other.stored(keys)
    other.close()
    back = hosts()
    assert back.has(keys)


def test_a_second_owner_is_refused_and_told_by_whom(hosts, tmp_path):
    hosts(owner="vLLM's tier")
    child = f"from kvstore import BlockStore; BlockStore({str(tmp_path / 'store')!r}, namespace=b'a', capacity='8MiB')"
    done = python(child)
    assert "StoreLockedError" in done.stderr and "(vLLM's tier); stop it, or give another directory" in done.stderr
    with pytest.raises(StoreLockedError, match="this process"):
        hosts()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"namespace": b""}, "namespace is b''"),
        ({"capacity": "much"}, "capacity is 'much'"),
        ({"capacity": 1000}, "give 4.0 MiB or more"),
        ({"policy": "best"}, "policy is 'best'"),
    ],
)
def test_wrong_arguments_are_refused(hosts, options, said):
    with pytest.raises(ConfigError, match=said):
        hosts(**options)
    hosts()  # and left nothing locked


def test_a_file_in_the_place_of_the_directory_is_refused(hosts, tmp_path):
    (tmp_path / "store").write_text("")
    with pytest.raises(StoreError, match="is a file"):
        hosts()


# -- what stays ------------------------------------------------------------------------------------------------------
def num_stored(host, keys):
    """How many blocks of a chain are stored, which must be its first ones."""
    found = host.store.lookup(keys)
    assert found == sorted(found, reverse=True), "a block stayed and its parent went"
    return sum(found)


def fill(host, chains):
    """More than fits, one conversation after the other."""
    for keys in chains:
        host.stored(keys)
    assert host.store.flush()
    disk = host.store.stats()["disk"]
    assert disk["bytes"] <= disk["capacity_bytes"] and not host.store.is_degraded
    return [num_stored(host, keys) for keys in chains]


def test_what_is_read_ahead_is_in_the_page_cache_as_far_as_it_is_stored(hosts, tmp_path):
    host = hosts(capacity="32MiB")
    keys = host.stored(chain(1, 60))
    host.close()
    wanted = [payload(name) for name in keys[:40]]
    file = ColdFile(tmp_path / "store" / "blocks" / "data.mdb", wanted)
    again = hosts(capacity="32MiB")
    assert not all(file.resident(wanted))
    again.store.prefetch([keys[0], keys[39], key(1, 60)])  # the last is stored nowhere
    wait_until(lambda: again.store.stats()["store"]["prefetched"] == 40 and all(file.resident(wanted)))


def test_reading_ahead_is_bounded_and_harms_nothing(hosts):
    host = hosts(capacity="64MiB")
    keys = chain(1, MAX_PREFETCHING + 50)
    for begin in range(0, len(keys), 1000):
        host.wait([host.write_one(keys, index, 64) for index in range(begin, min(begin + 1000, len(keys)))])
    host.store.prefetch(chain(2, 3))
    host.store.prefetch(keys)
    assert host.store.stats()["store"]["prefetched"] == MAX_PREFETCHING
    assert host.has(keys[:100], 64)
    host.store.forget(keys)
    host.store.prefetch(keys)
    assert host.store.flush() and not any(host.store.lookup(keys))
    one, other = (key(3, 0), key(3, 1))
    tickets = [
        host.store.write(name, parent, 0, memoryview(bytes(64))) for name, parent in ((one, other), (other, one))
    ]
    host.wait(tickets)
    host.store.prefetch([one])  # which a host has named as each other's parents


def test_the_least_recently_used_go_from_their_tails(hosts):
    host = hosts(policy="lru", capacity="8MiB")
    chains = [chain(number, 20) for number in range(12)]
    left = fill(host, chains)
    assert left[0] == 0 and left[-1] == 20 and sum(left) < 120
    assert left == sorted(left), "one that was used later lost more"


def test_what_a_request_needs_or_a_pin_holds_goes_last(hosts):
    host = hosts(policy="lru", capacity="8MiB")
    chains = [chain(number, 20) for number in range(12)]
    for keys in chains[:3]:
        host.stored(keys)
    host.store.arrive("request", chains[0])
    host.store.pin(chains[1], None)
    left = fill(host, chains[3:])
    assert [num_stored(host, keys) for keys in chains[:3]] == [20, 20, 0] and left[-1] == 20
    host.store.finish("request")
    host.store.unpin(chains[1])
    host.store.expire(chains[11], 0.0)
    fill(host, [chain(number, 20) for number in range(20, 24)])
    assert num_stored(host, chains[11]) == 0 and num_stored(host, chains[0]) == 20 > num_stored(host, chains[1])


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_conversation_larger_than_the_store_loses_its_end(hosts, at_once):
    host = hosts(capacity="4MiB")
    keys = chain(1, 20)
    for begin in range(0, 20, at_once):
        tickets = [host.write_one(keys, index, 256 << 10) for index in range(begin, begin + at_once)]
        results = host.wait([ticket for ticket in tickets if ticket is not None])
        assert {result.reason for result in results} <= {"", "no_room"}
    assert 5 < num_stored(host, keys) < 16
    assert not host.store.is_degraded


def test_what_is_forgotten_goes_but_not_what_others_build_on(hosts):
    host = hosts()
    shared = host.stored(chain(0, 3))
    mine, theirs = shared + chain(1, 4), shared + chain(2, 4)
    host.stored(mine)
    host.stored(theirs)
    assert host.store.forget(mine[:-1]) == 4, "what was computed after the last one goes, too"
    assert host.store.flush()
    assert [num_stored(host, keys) for keys in (mine, theirs)] == [3, 7]
    assert host.store.forget(theirs) == 7 and host.store.forget(theirs) == 0 and host.store.forget([]) == 0
    assert host.store.flush() and num_stored(host, theirs) == 0 and host.stored(mine)


def test_what_is_being_written_is_forgotten_too(hosts):
    host, entered, go = hosts(), threading.Event(), threading.Event()
    with before_each(DiskTier, "write", lambda: (entered.set(), go.wait(TIMEOUT_S))):
        host.write(chain(2, 1))
        entered.wait(TIMEOUT_S)
        tickets = host.write(chain(1, 4))  # which wait for that one
        host.store.forget(chain(1, 4))
        go.set()
    assert {result.reason for result in host.wait(tickets)} == {"forgotten"}
    assert host.store.flush() and host.store.lookup(chain(1, 4)) == [False] * 4
    host.close()
    assert hosts().store.lookup(chain(1, 4)) == [False] * 4


def test_what_is_being_written_goes_with_what_it_builds_on_or_keeps_it_for_others(hosts):
    host, entered, go = hosts(), threading.Event(), threading.Event()
    shared = chain(0, 2)
    mine, theirs = shared + chain(1, 4), shared + chain(2, 1)
    host.stored(mine[:4])
    with before_each(DiskTier, "write", lambda: (entered.set(), go.wait(TIMEOUT_S))):
        tickets = [host.write_one(theirs, 2), host.write_one(mine, 4), host.write_one(mine, 5)]
        entered.wait(TIMEOUT_S)
        host.store.forget(mine[:4])
        go.set()
    assert [result.reason for result in host.wait(tickets)] == ["", "forgotten", "forgotten"]
    assert host.store.flush() and host.store.lookup(theirs) == [True] * 3
    assert host.store.lookup(mine) == [True] * 2 + [False] * 4


@pytest.mark.parametrize("is_stored", [False, True])
def test_what_others_build_on_stays_while_they_are_being_written(hosts, is_stored):
    host, entered, go = hosts(), threading.Event(), threading.Event()
    shared = chain(0, 3)
    mine, theirs = shared + chain(1, 4), shared + chain(2, 4)
    if is_stored:
        host.stored(mine)
    with before_each(DiskTier, "write", lambda: (entered.set(), go.wait(TIMEOUT_S))):
        host.write(chain(3, 1))
        entered.wait(TIMEOUT_S)
        tickets = host.write(mine) + host.write(theirs)
        host.store.forget(mine)
        go.set()
    host.wait(tickets)
    assert host.store.flush() and [num_stored(host, keys) for keys in (mine, theirs)] == [3, 7]


def test_what_is_written_again_after_it_was_forgotten_stays(hosts):
    host, entered, go = hosts(), threading.Event(), threading.Event()
    with before_each(DiskTier, "write", lambda: (entered.set(), go.wait(TIMEOUT_S))):
        first = host.write(chain(1, 1))
        entered.wait(TIMEOUT_S)
        host.store.forget(chain(1, 1))
        again = host.write(chain(1, 1))
        go.set()
    assert host.wait(again)[0].ok
    assert host.wait(first) and host.store.flush() and host.has(chain(1, 1))


def test_what_waits_to_be_written_is_evicted_by_hand_too(hosts, tmp_path):
    host, entered, go = hosts(), threading.Event(), threading.Event()
    with before_each(DiskTier, "write", lambda: (entered.set(), go.wait(TIMEOUT_S))):
        host.write(chain(2, 1))
        entered.wait(TIMEOUT_S)
        tickets = host.write(chain(1, 4))
        ask(tmp_path / "store", "evict", {"all": True}, TIMEOUT_S)
        go.set()
    assert not any(result.ok for result in host.wait(tickets))
    assert host.store.flush() and not any(host.store.lookup([*chain(1, 4), *chain(2, 1)]))


def test_all_that_was_stored_is_known_from_the_first_call(hosts):
    host = hosts()
    host.stored(chain(1, 8))
    host.close()
    host = hosts()
    assert host.store.stats()["disk"]["blocks"] == 8
    assert host.store.forget(chain(1, 3)) == 8, "what was computed after the last one goes, too"
    assert host.store.flush() and host.store.lookup(chain(1, 8)) == [False] * 8


def test_returns_are_learned_and_outlive_a_restart(hosts):
    host = hosts()
    keys = chain(1, 6)
    for num_blocks in (2, 4, 6):
        host.store.arrive("ada", keys[:num_blocks])
        host.wait(host.write(keys[:num_blocks], conversation="ada"))
        host.store.finish("ada", keys[:num_blocks])
    assert host.store.stats()["policy"]["num_returns_learned"] == 2
    host.close()
    assert hosts().store.stats()["policy"]["num_returns_learned"] == 2


# -- the border ------------------------------------------------------------------------------------------------------
def test_a_queue_that_is_full_refuses_and_counts(hosts):
    host = hosts(capacity="4MiB")
    keys = [key(number, 0) for number in range(30)]
    with stuck_disk() as go:
        tickets = [host.write([name])[0] for name in keys]
        go.set()
    refused = tickets.count(None)
    assert 0 < refused < 30 and host.store.stats()["store"]["refused_writes"] == refused
    assert all(result.ok for result in host.wait([ticket for ticket in tickets if ticket is not None]))
    host.stored(keys[-5:])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda store: store.write(b"", None, 0, memoryview(b"x")), "a key has 0 bytes"),
        (lambda store: store.write("k", None, 0, memoryview(b"x")), "key is 'k'; give 1 to 4,096 bytes"),
        (lambda store: store.write(b"k", "j", 0, memoryview(b"x")), "key is 'j'; give bytes"),
        (lambda store: store.write(b"k", None, 0, b"abc"), "type bytes; give a memoryview"),
        (lambda store: store.lookup("abc"), "key is 'a'; give bytes"),
        (lambda store: store.write(b"k" * 5000, None, 0, memoryview(b"x")), "a key has 5,000 bytes"),
        (lambda store: store.write(b"k", b"k", 0, memoryview(b"x")), "its own parent"),
        (lambda store: store.write(b"k", None, -1, memoryview(b"x")), "position is -1"),
        (lambda store: store.write(b"k", None, 0, memoryview(b"")), "0 bytes"),
        (lambda store: store.write(b"k", None, 0, memoryview(b"xyz")[::2]), "in pieces"),
        (lambda store: store.write(b"k", None, 0, memoryview(bytes(3 << 20))), "16.0 MiB; give 24.0 MiB or more"),
        (lambda store: store.read_into(b"k", memoryview(b"xyz")), "read-only"),
    ],
)
def test_bad_blocks_are_refused(hosts, call, said):
    host = hosts()
    with pytest.raises(ConfigError, match=said):
        call(host.store)
    host.stored(chain(1, 2))


def test_a_closed_store_says_so(hosts):
    host = hosts()
    host.close()
    host.close()
    for call in (lambda: host.store.lookup([b"k"]), host.store.poll, lambda: host.write(chain(1, 1))):
        with pytest.raises(StoreError, match="was closed"):
            call()


@pytest.mark.parametrize("size", [1000, 512 << 10])
def test_the_least_capacity_holds_blocks_of_every_allowed_size(hosts, size):
    host = hosts(capacity="4MiB")
    for conversation in range(10):
        tickets = [host.write_one(chain(conversation, 2), index, size) for index in range(2)]
        assert all(result.ok for result in host.wait(tickets)), conversation
    assert host.has(chain(9, 2), size)


def test_blocks_of_any_sizes_lie_side_by_side(hosts):
    host = hosts()
    sizes = [1, 100, 5000, 1 << 20, 3]
    for number, size in enumerate(sizes):
        host.wait(host.write([key(number, 0)], size=size))
    assert all(host.read(key(number, 0), size).ok for number, size in enumerate(sizes))
    tensor = memoryview(bytearray(64)).cast("f")
    assert host.wait([host.store.write(b"floats", None, 0, tensor)])[0].num_bytes == 64


def test_commands_of_other_processes(hosts, tmp_path):
    place = tmp_path / "store"

    def ask_owner(command, **arguments):
        return ask(place, command, arguments, TIMEOUT_S)

    def ask_files(command, **arguments):
        with OfflineStore(place) as store:
            return store.handle(command, arguments)

    host = hosts(owner="an engine")
    keys = host.stored(chain(1, 10))
    assert ask_owner("stats")["model"] == "an engine" and ask_owner("stats")["disk"]["blocks"] == 10
    for asked in (ask_owner, ask_files):
        assert asked("verify")["num_ok"] == 10
        assert asked("evict", all=True, dry_run=True)["tiers"]["disk"]["blocks"] == 10
        assert asked("evict", model="another")["tiers"]["disk"]["blocks"] == 0
        assert asked("compact")["after_bytes"] > 0 and asked("compact", codec="zstd")["after_bytes"] > 0
        assert asked("verify")["num_ok"] == 10 and asked("sessions") == {"sessions": []}
        if asked is ask_owner:
            with pytest.raises(StoreError, match="an engine for blocks alone"):
                ask_owner("evict", session={"session_id": "ada"})
            host.close()
    (model,) = ask_files("stats")["disk"]["models"]
    assert model.startswith("an engine ")
    assert ask_files("evict", model=model)["tiers"]["disk"]["blocks"] == 10
    assert hosts().store.lookup(keys) == [False] * 10
