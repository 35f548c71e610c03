"""Transactions on shared sessions: two servers at once, and a Redis that goes away, comes back, is emptied or full."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from kvstore.disk.records import pack, seal
from kvstore.errors import ConfigError, RemoteError, StoreError, StoreLostError
from kvstore.remote.address import RedisAddress
from kvstore.sessions import storage as transactions
from kvstore.sessions.record import SessionKey
from kvstore.sessions.shared import server as session_server
from kvstore.sessions.shared import storage as session_storage
from kvstore.sessions.shared.address import SessionAddress
from kvstore.sessions.shared.connection import SessionConnection
from kvstore.sessions.shared.opening import open_shared
from kvstore.sessions.shared.server import Durability, SessionServer
from kvstore.sessions.store import SessionStore
from kvstore.sessions.tables import COUNTERS
from tests.children.session_child import TENANT, content, create, expected, make_turn, talk
from tests.support.faults import before_each, constants
from tests.support.redis_server import RedisServer, no_answer_after
from tests.support.shared_sessions import DURABLE, SECRET
from tests.support.tcp_proxy import Proxy
from tests.support.waiting import TIMEOUT_S, together, wait_until

KEY = SessionKey(TENANT, "red")


@pytest.fixture
def servers(redis, share, tmp_path):
    pair = [share(redis, make_folder(tmp_path / name)) for name in ("one", "other")]
    for store in pair:
        store.renew()
    with constants(transactions, MAX_RETRIES=1000):  # a slow one is overtaken as often as others store
        yield pair


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


# -- two servers -----------------------------------------------------------------------------------------------------
def test_what_one_server_stores_another_one_reads(servers):
    one, other = servers
    turns = talk(one, KEY, 3)
    assert content(other.load(KEY)) == expected(turns)
    assert other.turn_of_request(KEY, "request 2") == turns[1]
    talk(other, KEY, 6)
    turns = talk(one, KEY, 7)
    assert content(one.load(KEY)) == content(other.load(KEY)) == expected(turns)
    assert one.list(TENANT) == other.list(TENANT)
    assert other.list("another tenant") == []
    assert other.load(SessionKey("another tenant", "red")) is None
    other.delete(KEY).wait()
    assert one.head(KEY) is None


def test_replies_are_not_waited_for_one_after_the_other(servers):
    """However many turns there are: Redis may be far away."""
    one, other = servers
    talk(one, KEY, 20)
    head = other.head(KEY)

    def num_round_trips(work: Callable[[], object]) -> int:
        asked: list[None] = []
        with before_each(SessionConnection, "pipeline", lambda: asked.append(None)):
            work()
        return len(asked)

    new = SessionKey(TENANT, "new")
    assert num_round_trips(lambda: other.turns(KEY, 0, 100)) == 4  # name, head, turns, and whether all is still so
    assert [turn.number for turn in other.turns(KEY, 15, 3)] == [16, 17, 18]
    assert num_round_trips(lambda: other.fork(KEY, None, new).wait()) <= 9
    turn = make_turn("red", 21)
    assert num_round_trips(lambda: other.commit_turn(KEY, turn, session_number=head.number).wait()) == 2


def test_of_two_servers_one_appends_a_turn(servers):
    outcomes: list[list[object]] = [[], []]

    def append(store: SessionStore, found: list[object]) -> None:
        for number in range(1, 21):
            try:
                found.append(store.commit_turn(KEY, make_turn("red", number)).wait().num_turns)
            except StoreError as error:
                assert "another writer came first" in str(error)
                found.append(None)

    together(*(partial(append, *pair) for pair in zip(servers, outcomes, strict=True)))
    stored = sorted(number for found in outcomes for number in found if number is not None)
    assert stored == list(range(1, len(stored) + 1))  # each turn once
    assert servers[0].head(KEY).num_turns == len(stored) > 0


def test_many_sessions_are_begun_at_once_and_each_has_its_number(servers):
    keys = [SessionKey(TENANT, f"s{i}") for i in range(60)]

    def begin(store: SessionStore, some: list[SessionKey]) -> None:
        for key in some:
            create(store, key).wait()

    together(*(partial(begin, servers[i % 2], keys[i::4]) for i in range(4)))
    heads = servers[0].list(TENANT)
    assert len({head.number for head in heads}) == len(heads) == 60


@contextmanager
def overtaken(store: SessionStore, change: Callable[[], object]) -> Iterator[None]:
    """In here each transaction of this server is overtaken by another's change, right before it is committed."""
    storage = store.transactions.storage

    @contextmanager
    def write(write=storage.write) -> Iterator[object]:
        with write() as view:
            yield view
            change()

    with mock.patch.object(storage, "write", write):
        yield


def test_one_that_is_overtaken_every_time_says_so_and_one_that_is_not_stores(servers):
    one, other = servers
    talk(one, KEY, 1)
    times = iter(range(1, 7))

    def change() -> None:
        if (seconds := next(times, None)) is not None:
            other.set_ttl(KEY, 100.0 + seconds).wait()

    with overtaken(one, change):
        with (
            constants(transactions, MAX_RETRIES=3),
            pytest.raises(RemoteError, match="stored: other servers change"),
        ):
            one.set_ttl(KEY, 1e6).wait()
        assert other.head(KEY).ttl_s == 103.0
        one.set_ttl(KEY, 1e6).wait()
    assert next(times, None) is None and one.head(KEY) == other.head(KEY) and one.head(KEY).ttl_s == 1e6


def test_servers_that_begin_sessions_do_not_overtake_each_other(servers):
    one, other = servers
    keys = (SessionKey(TENANT, f"s{i}") for i in range(100))
    for store in servers:  # each takes numbers for some
        create(store, next(keys)).wait()
    before = one.stats()["conflicts"]
    with overtaken(one, lambda: create(other, next(keys)).wait()):
        for _ in range(20):
            create(one, next(keys)).wait()
    assert one.stats()["conflicts"] == before
    assert len({head.number for head in one.list(TENANT)}) == 42


def test_numbers_that_a_failover_gives_twice_are_used_once(servers, redis):
    """The other's latest writes are lost, but not what it knows; and they are ahead of every clock."""
    one, other = servers
    counters = other.transactions.storage.server.names.values(COUNTERS)
    redis.ask("HSET", counters, "session", seal(COUNTERS, b"session", pack(2**60)))
    create(one, SessionKey(TENANT, "before")).wait()
    before = redis.ask("HGET", counters, "session")
    create(other, SessionKey(TENANT, "a")).wait()
    redis.ask("HSET", counters, "session", before)
    for number in range(70):
        create(one, SessionKey(TENANT, f"one{number}")).wait()
    create(other, SessionKey(TENANT, "b")).wait()
    assert len({head.number for head in one.list(TENANT)}) == len(one.list(TENANT)) == 73


def test_a_session_that_is_deleted_while_it_is_read_is_never_half_there(servers):
    one, other = servers
    states = []

    def read() -> None:
        for _ in range(60):
            states.append(other.load(KEY))

    reader = threading.Thread(target=read)
    reader.start()
    while reader.is_alive():
        talk(one, KEY, 4)
        one.delete(KEY).wait()
    reader.join()
    whole = [content(state) for state in states if state is not None]
    assert all(found == expected([make_turn("red", n) for n in range(1, 1 + len(found[0]) // 2)]) for found in whole)


def test_a_session_whose_time_was_over_goes_on_where_another_server_goes_on(servers):
    """It was seen to be over, and had another turn before it was deleted."""
    one, other = servers
    create(one, KEY, ttl_s=5).wait()
    now = one.head(KEY).expires_s
    other.commit_turn(KEY, make_turn("red", 1)).wait()
    for _ in range(10):
        other.set_ttl(KEY, 1000).wait()
    assert one.delete(KEY, now).wait() is None
    claim = other.sharing.leases.acquire(KEY)
    assert one.delete(KEY, 1e12).wait() is None  # a turn of it runs
    other.sharing.leases.release(claim)
    assert one.delete(KEY, 1e12).wait() is not None


# -- a Redis that goes away ------------------------------------------------------------------------------------------
def test_a_short_restart_is_waited_for_and_nothing_is_stored_twice(own_redis, share):
    store = share(own_redis, level="always")
    turns = talk(store, KEY, 2)
    own_redis.kill()
    ticket = store.commit_turn(KEY, make_turn("red", 3))
    with pytest.raises(RemoteError):  # who reads is not kept waiting
        store.load(KEY)
    own_redis.start()
    assert ticket.wait(TIMEOUT_S).num_turns == 3
    assert content(store.load(KEY)) == expected([*turns, make_turn("red", 3)])


def test_a_commit_whose_answer_is_cut_off_is_found_again(own_redis, share):
    with Proxy(own_redis.port) as proxy:
        store = share(proxy.port, level="always")
        create(store, KEY).wait()
        for number in range(1, 16):
            proxy.faults.cut_after = None
            proxy.cut()
            proxy.faults.cut_after = 4500 + 7 * number  # behind what the connection is asked first
            ticket = store.commit_turn(KEY, make_turn("red", number))
            assert not ticket.done or ticket.wait(TIMEOUT_S)
            time.sleep(0.02)
            proxy.faults.cut_after = None
            proxy.cut()
            assert ticket.wait(TIMEOUT_S).num_turns == number
        assert content(store.load(KEY)) == expected([make_turn("red", n) for n in range(1, 16)])


def test_without_redis_turns_are_refused_in_time_and_taken_again_afterwards(own_redis, share):
    store = share(own_redis)
    talk(store, KEY, 1)
    assert store.stats()["sessions"] == 1
    own_redis.pause()
    with no_answer_after(1.0), constants(session_server, OUTAGE_S=2.0):
        with pytest.raises(RemoteError, match=r"not stored: .*(no answer in time|did not answer)"):
            store.commit_turn(KEY, make_turn("red", 2)).wait(TIMEOUT_S)
        with pytest.raises(RemoteError):
            store.head(KEY)
        assert store.stats()["sessions"] == 1  # as it was
        assert store.stats()["unreachable"] == 1
    own_redis.resume()
    head = wait_for_head(store)
    store.commit_turn(KEY, make_turn("red", head.num_turns + 1)).wait()
    assert content(store.load(KEY)) == expected([make_turn("red", n) for n in range(1, head.num_turns + 2)])
    assert store.stats()["unreachable"] == 0


def wait_for_head(store: SessionStore):
    heads = []

    def read() -> bool:
        try:
            heads.append(store.head(KEY))
        except RemoteError:
            return False
        return True

    wait_until(read, "the sessions cannot be read again")
    return heads[-1]


def test_one_that_came_back_empty_is_not_taken_for_the_sessions(own_redis, tmp_path, share):
    folder, second_folder = make_folder(tmp_path / "one"), make_folder(tmp_path / "two")
    store, second = share(own_redis, folder), share(own_redis, second_folder)
    talk(store, KEY, 2)
    own_redis.ask("FLUSHALL")
    for one in (store, second):
        with pytest.raises(StoreLostError, match="accept-loss"):
            one.load(KEY)
        with pytest.raises(StoreLostError):
            one.commit_turn(SessionKey(TENANT, "new"), make_turn("new", 1)).wait()
        assert one.stats()["lost"] == 1
    store.close()
    store = share(own_redis, folder)  # a restart forgets nothing of it
    with pytest.raises(StoreLostError):
        store.list(TENANT)
    assert store.accept_loss()
    assert not store.accept_loss()
    assert store.list(TENANT) == second.list(TENANT) == []  # the others go on, too
    talk(second, KEY, 1)
    assert store.stats()["lost"] == second.stats()["lost"] == 0


def test_one_whose_data_comes_back_is_the_one_that_was_there(own_redis, tmp_path, share):
    store = share(own_redis, make_folder(tmp_path / "one"), level="always")
    turns = talk(store, KEY, 2)
    own_redis.restart()
    assert content(wait_for_head(store) and store.load(KEY)) == expected(turns)


def test_a_full_one_refuses_turns_and_keeps_what_it_has(own_redis, share):
    store = share(own_redis)
    turns = talk(store, KEY, 2)
    own_redis.ask("CONFIG", "SET", "maxmemory", 1)
    with pytest.raises(RemoteError, match=r"not stored: .*OOM"):
        store.commit_turn(KEY, make_turn("red", 3)).wait()
    assert content(store.load(KEY)) == expected(turns)
    store.renew()
    tombstone = store.delete(KEY).wait()
    assert tombstone is not None, "what makes room is taken"
    assert store.head(KEY) is None
    store.finish_deletion(tombstone.number).wait()
    assert store.pending_deletions() == []
    own_redis.ask("CONFIG", "SET", "maxmemory", 0)
    talk(store, KEY, 1)


@contextmanager
def replica_of(redis: RedisServer, folder: Path) -> Iterator[RedisServer]:
    redis.ask("CONFIG", "SET", "repl-diskless-sync-delay", 0)  # it does not wait for more replicas
    with RedisServer(folder, "--replicaof", "127.0.0.1", str(redis.port)) as replica:
        wait_until(lambda: b"state=online" in redis.ask("INFO", "replication"), "no replica")
        yield replica


def test_a_turn_is_acknowledged_once_replicas_have_it(own_redis, tmp_path, share):
    with pytest.raises(RemoteError, match="0 of 1 replicas"):
        share(own_redis, num_replicas=1)
    with replica_of(own_redis, make_folder(tmp_path / "replica")) as replica:
        store = share(own_redis, num_replicas=1)
        with constants(session_storage, WAIT_MS=round(1000 * TIMEOUT_S)):
            assert store.commit_turn(KEY, make_turn("red", 1)).wait().num_turns == 1
        assert replica.ask("HLEN", "kvstore:sessions:turns") == 1
        with pytest.raises(RemoteError, match="is a replica; give the address of its primary"):
            share(replica)
        replica.kill()
        with pytest.raises(RemoteError, match="0 of 1 replicas"):
            store.commit_turn(KEY, make_turn("red", 2)).wait()


def test_nothing_is_acknowledged_without_replicas_again_or_after_a_cut(own_redis, tmp_path, share):
    """A stored turn that answers its request again, and a commit that is looked up, wait for the replicas, too."""
    with (
        replica_of(own_redis, make_folder(tmp_path / "replica")) as replica,
        Proxy(own_redis.port) as proxy,
        constants(session_server, ANSWER_S=TIMEOUT_S),
    ):
        store = share(proxy.port, num_replicas=1)
        talk(store, KEY, 1)
        replica.pause()
        with constants(session_storage, WAIT_MS=100), pytest.raises(RemoteError, match="0 of 1 replicas"):
            store.commit_turn(KEY, make_turn("red", 2)).wait()
        with constants(session_storage, WAIT_MS=round(1000 * TIMEOUT_S)):
            ticket = store.commit_turn(KEY, make_turn("red", 3))
            wait_until(lambda: own_redis.ask("HLEN", "kvstore:sessions:turns") == 3, "Redis has it")
        with constants(session_storage, WAIT_MS=100):
            proxy.cut()
            with pytest.raises(RemoteError, match="0 of 1 replicas"):
                ticket.wait(TIMEOUT_S)
            for number in (2, 3):
                with pytest.raises(RemoteError, match="0 of 1 replicas"):
                    store.turn_of_request(KEY, f"request {number}")
            assert store.head(KEY).num_turns == 3, "it may be stored all the same"
        replica.resume()
        with constants(session_storage, WAIT_MS=round(1000 * TIMEOUT_S)):
            assert store.turn_of_request(KEY, "request 3") == make_turn("red", 3)
        assert replica.ask("HLEN", "kvstore:sessions:turns") == 3


def test_an_answer_to_somebody_else_ends_the_pause_after_silence(own_redis):
    server = SessionServer(SessionAddress((RedisAddress("127.0.0.1", own_redis.port),)), Durability("unchecked"))
    with ThreadPoolExecutor() as threads, constants(session_server, PAUSE_S=3600.0), ExitStack() as ends:
        ends.callback(own_redis.kill)  # before the threads are awaited
        ends.callback(server.close)
        patient = threads.submit(server.ask, ("BLPOP", "something", 0))
        wait_until(lambda: b"blocked_clients:1" in own_redis.ask("INFO", "clients"), "it waits for its answer")
        with constants(session_server, ANSWER_S=0.2), pytest.raises(RemoteError, match="no answer in time"):
            server.ask(("BLPOP", "nothing", 0))
        with pytest.raises(RemoteError, match="a moment ago"):
            server.ask(("PING",))
        own_redis.ask("RPUSH", "something", "said")
        assert patient.result() == [[b"something", b"said"]]
        assert server.ask(("PING",)) == [b"PONG"]
        wait_until(lambda: not server.is_failing)


# -- what is refused at the start ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("level", "settings", "words"),
    [
        ("always", {"appendfsync": "everysec"}, "has appendfsync everysec, .*CONFIG SET appendfsync always"),
        ("always", {"appendonly": "no"}, "has appendonly no, so an acknowledged turn could be lost"),
        ("always", {"no-appendfsync-on-rewrite": "yes"}, "has no-appendfsync-on-rewrite yes"),
        ("everysec", {"appendfsync": "no"}, "has appendfsync no"),
        ("unchecked", {"maxmemory-policy": "allkeys-lru"}, "maxmemory-policy allkeys-lru, which would drop sessions"),
        ("always", {"maxmemory-policy": "volatile-ttl"}, "maxmemory-policy volatile-ttl"),
    ],
)
def test_one_that_may_lose_turns_is_refused_by_name(own_redis, level, settings, words, share):
    for name, value in settings.items():
        own_redis.ask("CONFIG", "SET", name, value)
    with pytest.raises(ConfigError, match=words):
        share(own_redis, level=level)


def test_weaker_promises_are_taken_where_they_are_asked_for(own_redis, share):
    own_redis.ask("CONFIG", "SET", "appendfsync", "everysec")
    share(own_redis, level="everysec")
    own_redis.ask("CONFIG", "SET", "appendonly", "no")
    share(own_redis, level="unchecked")


def test_one_that_does_not_tell_its_settings_is_taken_only_unchecked(tmp_path, share):
    with RedisServer(tmp_path, *DURABLE, "--rename-command", "CONFIG", "") as server:
        with pytest.raises(ConfigError, match=r"does not tell its appendonly.*unchecked"):
            share(server, level="always")
        share(server, level="unchecked")


def test_a_cluster_is_refused_by_the_address_of_a_single_redis(tmp_path, share):
    with (
        RedisServer(tmp_path, *DURABLE, "--cluster-enabled", "yes") as server,
        pytest.raises(ConfigError, match=r"part of a Redis Cluster; give redis\+cluster://"),
    ):
        share(server)


def test_settings_that_get_worse_are_found_at_the_next_connection(own_redis, share):
    store = share(own_redis, level="always")
    talk(store, KEY, 1)
    own_redis.ask("CONFIG", "SET", "appendfsync", "no")
    own_redis.ask("CLIENT", "KILL", "TYPE", "normal")
    with pytest.raises(RemoteError, match="has appendfsync no"):
        store.commit_turn(KEY, make_turn("red", 2)).wait()


def test_a_wrong_password_and_another_fleet_are_refused(own_redis, share):
    share(own_redis)
    with pytest.raises(ConfigError, match="another fleet secret"):
        share(own_redis, secret=b"t" * 32)
    own_redis.ask("CONFIG", "SET", "requirepass", "right")
    with pytest.raises(RemoteError, match=r"it wants a password \(NOAUTH\); set \$KVSTORE_REDIS_PASSWORD"):
        share(own_redis, level="always")
    wrong = SessionAddress((RedisAddress("127.0.0.1", own_redis.port, password="wr0ng"),))
    with pytest.raises(RemoteError, match="WRONGPASS") as refused:
        open_shared(wrong, Durability("unchecked"), SECRET, None)
    assert "wr0ng" not in str(refused.value)
