"""Tests of kvstore.remote.object_client, against a directory and real servers of S3 and Azure, which are harmed."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.errors import ConfigError, RemoteError
from kvstore.remote.object_address import parse_object_url
from tests.support.buckets import Directory, azure_server, s3_server
from tests.support.programs import python_on_a_tmpfs
from tests.support.redis_server import free_port
from tests.support.tcp_proxy import Proxy
from tests.support.waiting import TIMEOUT_S, wait_until

pytest.importorskip("obstore")
from kvstore.remote.object_client import ByteRange, ObjectClient, open_store


def client_of(url: str) -> ObjectClient:
    address = parse_object_url(url)
    return ObjectClient(address, open_store(address))


@pytest.fixture(params=[s3_server, azure_server])
def server(request, monkeypatch):
    with request.param(monkeypatch) as server:
        yield server


@pytest.fixture
def client(server):
    found = client_of(server.url)
    yield found
    found.close()


def test_what_was_written_is_there(bucket):
    client = client_of(bucket.url)
    client.write("x/one", b"abcdef", TIMEOUT_S)
    client.write("x/two", bytearray(range(100)), TIMEOUT_S)
    begun_s = time.time()
    one, none = client.infos(["x/one", "x/none"], TIMEOUT_S)
    assert (one.num_bytes, none) == (6, None)
    assert abs(one.stored_s - begun_s) < 60
    spans = [
        ByteRange("x/one", 2, 4),
        ByteRange("x/two", 90, 120),
        ByteRange("x/two", 100, 120),
        ByteRange("x/none", 0, 1),
    ]
    found = client.read(spans, TIMEOUT_S)
    assert [None if data is None else bytes(data) for data in found] == [b"cd", bytes(range(90, 100)), b"", None]
    client.look("x", TIMEOUT_S)
    client.look("y", TIMEOUT_S)
    client.remove(["x/one", "x/none"], TIMEOUT_S)
    assert bucket.names() == ["x/two"]
    client.close()


def test_many_at_once(bucket):
    client = client_of(bucket.url)
    client.write("x/one", b"abc", TIMEOUT_S)
    found = client.infos(["x/one", "x/none"] * 150, TIMEOUT_S)
    assert [info is None for info in found] == [False, True] * 150
    client.close()


def test_what_is_renewed_on_a_server_is_there(server, client):
    client.write("x", b"abc", TIMEOUT_S)
    client.renew("x", TIMEOUT_S)
    assert server.get("x") == b"abc"


def test_what_is_renewed_is_as_new(tmp_path):
    bucket = Directory(tmp_path / "objects")
    client = client_of(bucket.url)
    client.write("x", b"abc", TIMEOUT_S)
    bucket.age("x", 5000.0)
    client.renew("x", TIMEOUT_S)
    assert client.infos(["x"], TIMEOUT_S)[0].stored_s > time.time() - 100
    assert bucket.get("x") == b"abc"
    with pytest.raises(RemoteError):
        client.renew("none", TIMEOUT_S)
    client.close()


def test_what_is_deleted_while_it_is_renewed_stays_deleted(server, monkeypatch):
    with Proxy(server.port) as proxy:
        for name, value in server.environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        client = client_of(server.url)
        client.write("x", bytes(1 << 20), TIMEOUT_S)
        proxy.num_asked_bytes, proxy.faults.asks_held_after = 0, 1 << 16
        with ThreadPoolExecutor(1) as threads:
            renewal = threads.submit(client.renew, "x", TIMEOUT_S)
            wait_until(lambda: proxy.num_asked_bytes >= 1 << 16, "it is being stored once more")
            server.delete("x")
            proxy.faults.asks_held_after = None
            assert isinstance(renewal.exception(), RemoteError)
        assert server.names() == []
        client.close()


def test_a_server_that_died(server, client):
    client.write("x", b"abc", TIMEOUT_S)
    server.kill()
    for ask in (
        lambda: client.infos(["x"] * 3, TIMEOUT_S),
        lambda: client.write("x", b"", TIMEOUT_S),
        lambda: client.look("x", TIMEOUT_S),
    ):
        with pytest.raises(RemoteError, match=f"^{server.url}: "):
            ask()
    server.start()
    assert client.infos(["x"], TIMEOUT_S) == [None]


def test_a_server_that_stopped_costs_a_deadline(server, client):
    server.pause()
    for ask in (lambda: client.infos(["x"], 0.2), lambda: client.read([ByteRange("x", 0, 9)] * 80, 0.2)):
        with pytest.raises(RemoteError, match="no answer in time"):
            ask()
    server.resume()
    client.write("x", b"abc", TIMEOUT_S)


def test_a_bucket_that_is_gone(monkeypatch):
    with s3_server(monkeypatch) as server:
        client = client_of(server.url)
        client.write("x", b"abc", TIMEOUT_S)
        server.delete_bucket()
        for ask in (lambda: client.write("x", b"abc", TIMEOUT_S), lambda: client.look("x", TIMEOUT_S)):
            with pytest.raises(RemoteError, match="404"):
                ask()
        assert client.infos(["x"], TIMEOUT_S) == [None]
        client.close()


def test_a_directory_that_is_gone_is_not_made_anew(tmp_path):
    bucket = Directory(tmp_path / "objects")
    client = client_of(bucket.url)
    bucket.folder.rename(tmp_path / "away")
    for ask in (
        lambda: client.infos(["x"], TIMEOUT_S),
        lambda: client.write("x", b"", TIMEOUT_S),
        lambda: client.look("x", TIMEOUT_S),
    ):
        with pytest.raises(RemoteError, match="its directory is gone"):
            ask()
    assert not bucket.folder.exists()
    (tmp_path / "away").rename(bucket.folder)
    client.write("x", b"abc", TIMEOUT_S)
    client.close()


def test_wrong_credentials_are_refused_and_not_shown(monkeypatch, tmp_path):
    with s3_server(monkeypatch, keys=True) as server:
        right = client_of(server.url)
        right.write("x", b"abc", TIMEOUT_S)
        (tmp_path / "keys").touch(0o600)
        (tmp_path / "keys").write_text(f"AWS_ACCESS_KEY_ID={server.key}\nAWS_SECRET_ACCESS_KEY=wr0ngwr0ng\n")
        wrong = client_of(f"{server.url}?credentials_file={tmp_path / 'keys'}")
        for ask in (
            lambda: wrong.infos(["x"], TIMEOUT_S),
            lambda: wrong.write("x", b"", TIMEOUT_S),
            lambda: wrong.look("x", TIMEOUT_S),
        ):
            with pytest.raises(RemoteError, match="403") as refused:
                ask()
            assert not any(word in str(refused.value) for word in ("wr0ng", server.key, server.secret, "Signature"))
        assert bytes(right.read([ByteRange("x", 0, 3)], TIMEOUT_S)[0]) == b"abc"
        right.close()
        wrong.close()


def test_what_cannot_be_opened_is_refused_at_once(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"remote is file:///.*none, which cannot be opened: "):
        client_of(f"file://{tmp_path / 'none'}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "keys").touch(0o600)
    (tmp_path / "keys").write_text("AWS_ACCESS_KEY_ID=AKIAEXAMPLE\n")
    with pytest.raises(ConfigError, match="Missing SecretAccessKey"):
        client_of(f"s3://bucket?credentials_file={tmp_path / 'keys'}")
    (tmp_path / "keys").write_text("AWS_NO_SUCH_THING=s3cret\n")
    with pytest.raises(ConfigError, match="'aws_no_such_thing' is not valid") as refused:
        client_of(f"s3://bucket?credentials_file={tmp_path / 'keys'}")
    assert "s3cret" not in str(refused.value)


def test_a_wrong_key_of_azure_is_refused_and_not_shown(monkeypatch, tmp_path):
    with azure_server(monkeypatch) as server:
        (tmp_path / "keys").touch(0o600)
        (tmp_path / "keys").write_text("AZURE_STORAGE_ACCOUNT_KEY=d3Iwbmc=\n")
        client = client_of(f"{server.url}?credentials_file={tmp_path / 'keys'}")
        for ask in (lambda: client.infos(["x"], TIMEOUT_S), lambda: client.write("x", b"", TIMEOUT_S)):
            with pytest.raises(RemoteError, match="403") as refused:
                ask()
            assert not any(word in str(refused.value) for word in ("d3Iwbmc", server.key, "Signature"))
        client.close()


def test_azure_is_asked_over_the_network_only(tmp_path):
    """What a person's settings say is passed on; nobody listens there."""
    account = f"http://127.0.0.1:{free_port()}/account"
    (tmp_path / "keys").touch(0o600)
    (tmp_path / "keys").write_text(
        f"AZURE_STORAGE_ACCOUNT_NAME=account\nAZURE_STORAGE_ACCOUNT_KEY=c2VjcmV0\nAZURE_STORAGE_ENDPOINT={account}\n"
    )
    azure = client_of(f"az://container/a?credentials_file={tmp_path / 'keys'}")
    with pytest.raises(RemoteError, match=r"^az://container/a: ") as refused:
        azure.infos(["x"], TIMEOUT_S)
    assert "c2VjcmV0" not in str(refused.value)
    azure.close()


def test_a_full_file_system(tmp_path):
    code = (
        "import sys; from tests.kvstore.remote.test_object_client import client_of, ByteRange\n"
        "from kvstore.remote.object_client import NoRoomError\n"
        "client = client_of('file://' + sys.argv[1]); client.write('x', bytes(600_000), 9.0)\n"
        "try: client.write('y', bytes(600_000), 9.0)\n"
        "except NoRoomError as error: print(error)\n"
        "assert client.read([ByteRange('x', 0, 9), ByteRange('y', 0, 9)], 9.0) == [bytes(9), None]; client.close()\n"
    )
    assert "No space left" in python_on_a_tmpfs("size=1m", code, tmp_path)
