"""Sessions in a Redis that another one takes over from: with Sentinel, and in a Cluster."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.errors import RemoteError, SessionBusyError, SessionTakenError
from kvstore.remote.address import RedisAddress
from kvstore.sessions.record import SessionKey
from kvstore.sessions.shared import server as session_server
from kvstore.sessions.shared import storage as session_storage
from kvstore.sessions.shared.address import SessionAddress
from kvstore.sessions.shared.names import Names
from tests.children.session_child import TENANT, content, expected, make_turn, talk
from tests.support.faults import constants
from tests.support.redis_server import RedisServer, SentinelServer, certificate
from tests.support.waiting import TIMEOUT_S, wait_until

KEY = SessionKey(TENANT, "red")
PATIENT = {"OUTAGE_S": TIMEOUT_S, "ANSWER_S": TIMEOUT_S}
NUM_SLOTS = 16384


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def server_of(redis: RedisServer) -> RedisAddress:
    return RedisAddress("127.0.0.1", redis.port)


@contextmanager
def with_replica(tmp_path: Path) -> Iterator[tuple[RedisServer, RedisServer, SessionAddress]]:
    """A Redis, its replica, and the address of a Sentinel that knows both."""
    with RedisServer(folder(tmp_path / "primary"), "--repl-diskless-sync-delay", "0") as primary, ExitStack() as more:
        upstream = ("--replicaof", "127.0.0.1", str(primary.port))
        replica = more.enter_context(RedisServer(folder(tmp_path / "replica"), *upstream))
        wait_until(lambda: b"state=online" in primary.ask("INFO", "replication"), "no replica")
        sentinel = more.enter_context(SentinelServer(tmp_path, primary))
        wait_until(lambda: len(sentinel.ask("SENTINEL", "REPLICAS", "sessions")) == 1, "Sentinel knows no replica")
        yield primary, replica, SessionAddress((RedisAddress("nowhere.invalid"), server_of(sentinel)), "sessions")


@pytest.mark.parametrize("is_replicated", [True, False])
def test_a_failover_within_a_turn_loses_no_acknowledged_one_and_lets_no_two_write(tmp_path, share, is_replicated):
    lease = Names.of(False).lease(KEY)
    with with_replica(tmp_path) as (primary, replica, address), constants(session_server, **PATIENT):
        one, other = (share(address, lease_s=3600.0) for _ in range(2))
        with constants(session_storage, WAIT_MS=round(1000 * TIMEOUT_S)):
            turns = talk(one, KEY, 2)
        if not is_replicated:
            primary.ask("ACL", "SETUSER", "default", "-psync", "-sync")
            primary.ask("CLIENT", "KILL", "TYPE", "replica")
        claim = one.sharing.leases.acquire(KEY)
        wait_until(lambda: replica.ask("EXISTS", lease) == is_replicated)
        with pytest.raises(SessionBusyError):
            other.sharing.leases.acquire(KEY)
        primary.kill()
        ticket = one.commit_turn(KEY, make_turn("red", 3), lease=claim)
        if is_replicated:
            assert ticket.wait(TIMEOUT_S).num_turns == 3
            assert content(other.load(KEY)) == expected([*turns, make_turn("red", 3)])
            with pytest.raises(SessionBusyError):
                other.sharing.leases.acquire(KEY)
            one.sharing.leases.release(claim)
        else:
            with pytest.raises(SessionTakenError):
                ticket.wait(TIMEOUT_S)
        other.sharing.leases.release(other.sharing.leases.acquire(KEY))
        assert content(one.load(KEY))[0][: len(expected(turns)[0])] == expected(turns)[0]
        assert replica.ask("HLEN", "kvstore:sessions:turns") == len(turns) + is_replicated


def test_where_another_may_take_over_a_turn_is_acknowledged_once_a_replica_has_it(tmp_path, share):
    with with_replica(tmp_path) as (primary, replica, address):
        store = share(address)
        with constants(session_storage, WAIT_MS=round(1000 * TIMEOUT_S)):
            talk(store, KEY, 1)
        assert replica.ask("HLEN", "kvstore:sessions:turns") == 1
        replica.pause()
        with constants(session_storage, WAIT_MS=100), pytest.raises(RemoteError, match="0 of 1 replicas"):
            store.commit_turn(KEY, make_turn("red", 2)).wait()
        replica.kill()
        wait_until(lambda: b"connected_slaves:0" in primary.ask("INFO", "replication"))
        with constants(session_storage, WAIT_MS=100):
            talk(store, KEY, 3)  # there is none that could take over


def have_met(nodes: list[RedisServer]) -> bool:
    """A handshake that takes too long is forgotten: it is begun again."""
    known: bytes = nodes[0].ask("CLUSTER", "NODES")  # type: ignore[assignment]
    for node in nodes[1:]:
        if b":%d@" % node.port not in known:
            nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port)
    told: list[bytes] = [node.ask("CLUSTER", "INFO") for node in nodes]  # type: ignore[misc]
    return all(b"cluster_state:ok" in info and b"cluster_known_nodes:4" in info for info in told)


@contextmanager
def cluster(tmp_path: Path) -> Iterator[list[RedisServer]]:
    """Three primaries, the sessions' one first, and then its replica."""
    with ExitStack() as nodes:
        options = ("--cluster-enabled", "yes", "--repl-diskless-sync-delay", "0")
        all_of = [nodes.enter_context(RedisServer(folder(tmp_path / str(i)), *options)) for i in range(4)]
        slot = all_of[0].ask("CLUSTER", "KEYSLOT", Names.of(True).prefix)
        bounds = [0, slot // 2, slot, NUM_SLOTS]
        owners = [all_of[1], all_of[2], all_of[0]]
        for node, first, end in zip(owners, bounds, bounds[1:], strict=False):
            node.ask("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        wait_until(lambda: have_met(all_of), "no Cluster")
        all_of[3].ask("CLUSTER", "REPLICATE", all_of[0].ask("CLUSTER", "MYID"))
        wait_until(lambda: b"state=online" in all_of[0].ask("INFO", "replication"), "no replica")
        yield all_of


def test_a_cluster_has_them_under_one_hash_tag_and_a_replica_takes_over(tmp_path, share):
    with cluster(tmp_path) as (owner, second, third, replica), constants(session_server, **PATIENT):
        one, other = (
            share(SessionAddress((server_of(at),), is_cluster=True), lease_s=3600.0) for at in (second, third)
        )
        with constants(session_storage, WAIT_MS=round(1000 * TIMEOUT_S)):
            turns = talk(one, KEY, 2)
        assert content(other.load(KEY)) == expected(turns)
        assert all(name.startswith(b"{kvstore:sessions}:") for name in owner.names())
        assert not second.names() and not third.names()
        claim = one.sharing.leases.acquire(KEY)
        wait_until(lambda: Names.of(True).lease(KEY) in replica.names())
        owner.kill()
        ticket = one.commit_turn(KEY, make_turn("red", 3), lease=claim)
        replica.ask("CLUSTER", "FAILOVER", "TAKEOVER")
        assert ticket.wait(TIMEOUT_S).num_turns == 3
        assert content(other.load(KEY)) == expected([*turns, make_turn("red", 3)])
        with pytest.raises(SessionBusyError):
            other.sharing.leases.acquire(KEY)


def test_tls_and_a_user_of_its_own(tmp_path, share):
    cert, key = certificate(tmp_path)
    files = ["--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert, "--tls-auth-clients", "no"]
    users = tmp_path / "users"
    users.write_text("user default off\nuser ann on >s3cret ~* +@all\n")
    with RedisServer(tmp_path, *files, "--aclfile", str(users), scheme="rediss") as redis:
        ann = RedisAddress("127.0.0.1", redis.port, tls=True, user="ann", password="s3cret", ca_file=cert)
        turns = talk(share(SessionAddress((ann,))), KEY, 1)
        assert content(share(SessionAddress((ann,))).load(KEY)) == expected(turns)
        for wrong, words in (
            ({"ca_file": None}, "(?i)certificate"), ({"ca_file": str(tmp_path / "none")}, "No such file"),
            ({"password": "wr0ng"}, "WRONGPASS"), ({"user": None, "password": None}, "NOAUTH"),
        ):  # fmt: skip
            with pytest.raises(RemoteError, match=words):
                share(SessionAddress((replace(ann, **wrong),)))
