"""Tests of kvstore.remote.resp, against a Redis."""

import multiprocessing
import os
import socket
import threading
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import RemoteError
from kvstore.remote.address import RedisAddress
from kvstore.remote.resp import RespClient, encode
from kvstore.remote.resp_replies import PART_BYTES, ErrorReply, Landed, Replies
from tests.support.redis_server import RedisServer, certificate
from tests.support.tcp_proxy import Faults, Proxy
from tests.support.waiting import TIMEOUT_S

SIZES = [0, 1, 2, 4095, 4096, 12_288, 65_535, 65_536, 131_072, 2 << 20, (8 << 20) + 3]


@pytest.fixture
def client(redis):
    found = redis.client()
    yield found
    found.close()


def test_a_length_that_is_only_said_takes_no_memory():
    def receive(buffers):
        if said:
            text = said.pop()
            buffers[0][: len(text)] = text
            return len(text)
        raise ConnectionError

    said = [b"$536870912\r\n$"]
    replies = Replies(receive)
    tracemalloc.start()
    try:
        with pytest.raises(ConnectionError):
            replies.to([None], False)
        assert tracemalloc.get_traced_memory()[1] < 3 * PART_BYTES
    finally:
        tracemalloc.stop()


def test_kinds_of_answers(client):
    assert client.call("PING") == b"PONG"
    assert client.call("GET", "nothing") is None
    assert client.call("SET", b"a", "1") == b"OK"
    assert client.call("INCRBY", "a", 41) == 42
    assert client.call("GET", bytearray(b"a")) == b"42"
    assert client.call("EVAL", "return {1, {'x', {}}, false}", 0) == [1, [b"x", []], None]
    with pytest.raises(RemoteError, match="answered: WRONGTYPE"):
        client.call("LPUSH", "a", 1)
    assert client.call("PING") == b"PONG", "an error of the server costs no connection"


def test_each_command_of_a_pipeline_has_its_own_answer(client):
    commands = [("SET", "k", "v"), ("LPUSH", "k", "v"), ("NONSENSE",), ("GET", "k"), ("EXISTS", "k", "k", "j")]
    set_, push, unknown, get, exists = client.pipeline(commands)
    assert (set_, get, exists) == (b"OK", b"v", 2)
    assert isinstance(push, ErrorReply)
    assert push.code == "WRONGTYPE"
    assert isinstance(unknown, ErrorReply)
    assert unknown.code == "ERR"


@pytest.mark.parametrize("size", SIZES)
def test_values_go_from_memory_into_memory(client, size):
    value = memoryview(bytearray(os.urandom(size)))
    assert client.call("SET", b"big", value) == b"OK"
    assert client.call("GET", b"big") == value
    for head in {0, min(7, size), size}:
        into = memoryview(bytearray(size - head))
        assert client.pipeline([("GET", b"big")], [into]) == [Landed(bytes(value[:head]))]
        assert into == value[head:]


def test_what_is_smaller_than_its_place_leaves_it_alone(client):
    client.pipeline([("SET", "a", "abc"), ("SET", "b", "abcdef")])
    place, other = memoryview(bytearray(b"....")), memoryview(bytearray(b"...."))
    replies = client.pipeline([("GET", "a"), ("GET", "none"), ("GET", "b")], [place, place, other])
    assert replies == [b"abc", None, Landed(b"ab")]
    assert (bytes(place), bytes(other)) == (b"....", b"cdef")


@given(st.lists(st.binary(max_size=9000), max_size=30))
def test_any_values_in_one_pipeline(shared_redis, values):
    client = shared_redis.client()
    client.pipeline([("SET", f"v{i}", value) for i, value in enumerate(values)])
    places = [memoryview(bytearray(len(value) // 2)) for value in values]
    replies = client.pipeline([("GET", f"v{i}") for i in range(len(values))], places)
    assert [reply.head + bytes(place) for reply, place in zip(replies, places, strict=True)] == values
    client.close()


def test_more_buffers_than_a_call_of_the_system_takes(client):
    values = [os.urandom(5000) for _ in range(1500)]
    assert set(client.pipeline([("SET", i, value) for i, value in enumerate(values)])) == {b"OK"}
    assert client.pipeline([("GET", i) for i in range(1500)]) == values


def test_large_values_are_not_copied_before_they_are_sent():
    value = memoryview(bytearray(8192))
    assert any(buffer.obj is value.obj for buffer in encode([("SET", "k", value)]))


def test_a_killed_server_is_an_error_and_its_return_is_not(own_redis):
    with own_redis.client() as client:
        assert client.call("PING") == b"PONG"
        own_redis.kill()
        with pytest.raises(RemoteError, match=f"redis://127.0.0.1:{own_redis.port}/0: Connection refused"):
            client.call("PING")
        own_redis.start()
        assert client.call("PING") == b"PONG"
        own_redis.restart()
        assert client.call("PING") == b"PONG", "an old connection is not used"


def test_a_server_that_does_not_answer_costs_the_deadline_alone(own_redis):
    with own_redis.client() as client:
        client.call("SET", "k", "v")
        own_redis.pause()
        with pytest.raises(RemoteError, match="no answer in time"):
            client.call("GET", "k", timeout_s=0.05)
        with pytest.raises(RemoteError, match="no answer in time"):  # a new connection, which the kernel takes
            client.call("SET", "k", bytes(64 << 20), timeout_s=0.05)
        own_redis.resume()
        assert client.call("GET", "k") == b"v", "late answers are nobody's"


def test_wrong_and_right_passwords(tmp_path):
    (tmp_path / "acl").write_text("user default on >s3cret ~* +@all\nuser ann on >hers ~* +@all\n")
    with RedisServer(tmp_path, "--aclfile", str(tmp_path / "acl")) as server:
        with server.client(password="s3cret") as client:
            assert client.call("PING") == b"PONG"
        with server.client(user="ann", password="hers", database=5) as client:
            assert client.call("ACL", "WHOAMI") == b"ann"
        with pytest.raises(RemoteError, match="AUTH was refused: WRONGPASS") as refused:
            server.client(password="s3cret-but-wrong").call("PING")
        assert "s3cret" not in str(refused.value)
        with server.client(database=5) as client, pytest.raises(RemoteError, match=r"set \$KVSTORE_REDIS_PASSWORD, or"):
            client.call("PING")
        with pytest.raises(RemoteError, match="SELECT was refused"):
            server.client(password="s3cret", database=99).call("PING")


def test_who_may_not_ask_about_a_cluster_is_not_asked_for_more(tmp_path):
    (tmp_path / "acl").write_text("user default on nopass ~* +get\n")
    with RedisServer(tmp_path, "--aclfile", str(tmp_path / "acl")) as server, server.client() as client:
        assert client.call("GET", "k") is None


@pytest.mark.parametrize("database", [0, 5])
def test_one_of_a_cluster_is_refused_with_the_way_out(tmp_path, database):
    with RedisServer(tmp_path, "--cluster-enabled", "yes") as server, server.client(database=database) as client:
        for _ in range(2):
            with pytest.raises(RemoteError, match=r"part of a Redis Cluster, .*; give several that run alone"):
                client.call("PING")


@pytest.mark.parametrize("cut", [1, 3, 5, 500, 70_000])
def test_an_answer_that_is_cut(redis, cut):
    redis.ask("SET", "k", bytes(100_000))
    with Proxy(redis.port) as proxy:
        proxy.faults = Faults(cut_after=cut)
        client, place = RespClient(RedisAddress("127.0.0.1", proxy.port), TIMEOUT_S), memoryview(bytearray(100_000))
        with pytest.raises(RemoteError, match=r"closed|reset"):
            client.pipeline([("GET", "k")], [place])
        proxy.faults = Faults()
        assert client.pipeline([("GET", "k")], [place]) == [Landed(b"")]
        client.close()


@pytest.mark.parametrize("lost", [0, 7, 37, 38, 44, 45, 5000])  # the greeting's answer has 37 bytes
def test_an_answer_that_lacks_a_byte_is_no_value(redis, lost):
    redis.ask("SET", "k", bytes(range(256)) * 100)
    with Proxy(redis.port) as proxy:
        proxy.faults = Faults(lost_at=lost)
        client = RespClient(RedisAddress("127.0.0.1", proxy.port), timeout_s=1.0)
        with pytest.raises(RemoteError):
            client.pipeline([("GET", "k"), ("PING",)])
        client.close()


@pytest.mark.parametrize("answer", [
    b"HTTP/1.1 400 Bad Request\r\n", b"$-2\r\n", b"$99999999999999\r\n", b"$x\r\n", b"*3000000\r\n", b"+a\n", b":\r\n",
    b"+" + b"x" * 100_000, b"*1\r\n" * 50, b"$2\r\nabc\r\n", b"\x16\x03\x01\r\n", b":" + b"9" * 5000 + b"\r\n",
])  # fmt: skip
def test_what_is_no_redis(answer):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection = listener.accept()[0]
            connection.recv(100)
            connection.sendall(answer)
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        client = RespClient(RedisAddress("127.0.0.1", listener.getsockname()[1]), timeout_s=TIMEOUT_S)
        with pytest.raises(RemoteError):
            client.call("PING")
        thread.join()
        client.close()


def test_a_host_that_is_not_there():
    with pytest.raises(RemoteError, match=r"redis://nowhere\.invalid:6379/0: "):
        RespClient(RedisAddress("nowhere.invalid")).call("PING")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_says_nothing_on_its_parents_connection(client):
    client.call("SET", "k", "parent")
    child = multiprocessing.get_context("fork").Process(target=client.call, args=("SET", "k", "child"))
    child.start()
    child.join()
    assert child.exitcode == 1, "it was refused"
    assert client.call("GET", "k") == b"parent"


# -- TLS -------------------------------------------------------------------------------------------------------------
def test_tls(tmp_path):
    cert, key = certificate(tmp_path)
    files = ["--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert, "--tls-auth-clients", "no"]
    with RedisServer(tmp_path, *files, scheme="rediss") as server:
        value, place = os.urandom(1 << 20), memoryview(bytearray(1 << 20))
        with server.client(tls=True, ca_file=cert) as client:
            client.call("SET", "k", value)
            assert client.pipeline([("GET", "k"), ("PING",)], [place, None]) == [Landed(b""), b"PONG"]
            assert place == value
            server.restart()
            assert client.call("GET", "k") is None
        with pytest.raises(RemoteError, match="CERTIFICATE_VERIFY_FAILED"):
            server.client(tls=True).call("PING")
        with pytest.raises(RemoteError):
            server.client().call("PING")
        with pytest.raises(RemoteError, match="certificates cannot be read"):
            server.client(tls=True, ca_file=str(tmp_path / "none.pem"))
