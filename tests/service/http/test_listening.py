"""HTTPS with a certificate that the test makes, and Unix sockets: what connects, what is refused, what is left."""

import asyncio
import shutil
import socket
import ssl
import stat
import subprocess

import aiohttp
import pytest

from kvstore.errors import ConfigError, KVStoreError
from kvstore.service.api.exchange import EventStream
from kvstore.service.http.errors import Route
from kvstore.service.http.listening import tls_context, unix_socket
from kvstore.service.server import Server
from kvstore.service.settings.serve_options import ServeOptions
from tests.service.test_server import FakeEngine
from tests.support.service.certificates import make_certificate, with_password
from tests.support.service.serving import Plain, raw_request, read_answer, read_to_end, serving
from tests.support.waiting import TIMEOUT_S

LONG = "x" * 2**20


async def stream(request):
    async with EventStream(request, Plain()) as events:
        for number in range(3):
            await events.send({"n": number})
    return events.response


async def long(request):
    async with EventStream(request, Plain()) as events:
        while True:
            await events.send({"text": LONG})


ROUTES = (Route("GET", "/stream", stream, "user", ""), Route("GET", "/long", long, "user", ""))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"))


def secured(server, certificate, receive_bytes=None):
    """A connection whose handshake has verified the server's name."""
    context = ssl.create_default_context(cafile=certificate)
    return context.wrap_socket(server.connect(receive_bytes), server_hostname="127.0.0.1")


# -- HTTPS -----------------------------------------------------------------------------------------------------------
def test_requests_and_streams_come_over_tls(files):
    with serving(engine_factory=FakeEngine, routes=ROUTES, ssl_certfile=files[0], ssl_keyfile=files[1]) as server:
        assert server.server.address == f"https://127.0.0.1:{server.server.port}"
        with secured(server, files[0]) as raw:
            for _ in range(2):  # the connection is kept
                raw.sendall(raw_request("GET", "/stream"))
                assert read_answer(raw).events() == [{"n": 0}, {"n": 1}, {"n": 2}, "[DONE]"]
        with server.connect() as raw:
            raw.sendall(raw_request("GET", "/stream"))
            assert b"HTTP" not in read_to_end(raw)


def test_one_file_may_hold_certificate_and_key(files, tmp_path):
    both = tmp_path / "both.pem"
    both.write_bytes(files[0].read_bytes() + files[1].read_bytes())
    both.chmod(0o600)
    with (
        serving(engine_factory=FakeEngine, routes=ROUTES, ssl_certfile=both) as server,
        secured(server, files[0]) as raw,
    ):
        raw.sendall(raw_request("GET", "/stream"))
        assert read_answer(raw).status == 200


def test_a_reader_over_tls_that_takes_nothing_is_dropped(files):
    options = {"ssl_certfile": files[0], "ssl_keyfile": files[1], "write_timeout_s": 0.2}
    with (
        serving(engine_factory=FakeEngine, routes=ROUTES, **options) as server,
        secured(server, files[0], 4096) as raw,
    ):
        raw.sendall(raw_request("GET", "/long"))
        server.wait_until(lambda: server.context.limits.num_open == 1)
        server.wait_until(lambda: not server.server.connections)


def test_a_handshake_that_does_not_end_is_dropped(files):
    options = {"ssl_certfile": files[0], "ssl_keyfile": files[1], "header_timeout_s": 0.2}
    with serving(engine_factory=FakeEngine, routes=ROUTES, **options) as server, server.connect() as raw:
        assert read_to_end(raw) == b""


def test_bad_files_are_refused_with_2_in_one_line(files, tmp_path, run):
    certificate, key = files
    other, open_to_all, none = make_certificate(tmp_path, "other")[1], tmp_path / "open.key", tmp_path / "none.pem"
    open_to_all.write_bytes(key.read_bytes())
    open_to_all.chmod(0o644)
    none.write_text("no certificate")
    none.chmod(0o600)
    for flags, told in (
        ((tmp_path / "missing", key), "--ssl-certfile .*missing cannot be read: No such file"),
        ((certificate, tmp_path / "missing"), "--ssl-keyfile .*missing cannot be read: No such file"),
        ((none, key), "need a certificate and its key"),
        ((certificate, none), "need a certificate and its key"),
        ((certificate, other), "other.key holds another key than that of the certificate"),
        ((certificate, open_to_all), "open.key can be read or written by everybody"),
        ((certificate, with_password(key)), "without a password"),
    ):
        code, _, said = run("serve", "--disk", "0", "--ssl-certfile", flags[0], "--ssl-keyfile", flags[1])
        assert code == 2 and said.count("\n") == 1, (flags, said)
        with pytest.raises(ConfigError, match=told):
            tls_context(*flags)
    code, _, said = run("serve", "--ssl-keyfile", key)
    assert code == 2 and "give --ssl-certfile, too" in said


# -- a Unix socket ---------------------------------------------------------------------------------------------------
def test_requests_come_over_a_unix_socket(tmp_path):
    path = tmp_path / "http.sock"

    async def asked():
        connector = aiohttp.UnixConnector(str(path))
        async with aiohttp.ClientSession(connector=connector) as client, client.get("http://localhost/stream") as reply:
            return (await reply.text()).count("data: ")

    with serving(engine_factory=FakeEngine, routes=ROUTES, uds=path) as server:
        assert server.server.address == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert asyncio.run(asked()) == 4
        if shutil.which("curl") is not None:
            command = ["curl", "-sS", "--unix-socket", str(path), "http://localhost/stream"]
            assert subprocess.run(command, capture_output=True, timeout=TIMEOUT_S).stdout.endswith(b"[DONE]\n\n")
    assert not path.exists()


def test_https_over_a_unix_socket(files, tmp_path):
    path, context = tmp_path / "http.sock", ssl.create_default_context(cafile=files[0])
    options = {"routes": ROUTES, "ssl_certfile": files[0], "ssl_keyfile": files[1], "uds": path}
    with serving(engine_factory=FakeEngine, **options), socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(path))
        with context.wrap_socket(raw, server_hostname="localhost") as secure:
            secure.sendall(raw_request("GET", "/stream"))
            assert read_answer(secure).status == 200


def test_a_socket_that_a_killed_server_has_left_gives_way(tmp_path):
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
        left.listen()
    with serving(engine_factory=FakeEngine, uds=path), socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(path))


def test_a_socket_in_use_and_a_file_that_is_none_stay(tmp_path, run):
    path, file = tmp_path / "http.sock", tmp_path / "file"
    file.write_text("precious")
    with unix_socket(path) as used:
        used.listen()
        with pytest.raises(KVStoreError, match=r"http\.sock is in use by another program; give another --uds"):
            asyncio.run(Server(ServeOptions(uds=path)).listen())
        assert path.is_socket()
    code, _, said = run("serve", "--disk", "0", "--uds", file)
    assert (code, file.read_text()) == (2, "precious") and "--uds is" in said and "no socket" in said


@pytest.mark.parametrize(("name", "told"), [("nowhere/http.sock", "No such file"), ("x" * 120, "too long")])
def test_a_path_that_cannot_be_a_socket_is_told(tmp_path, name, told):
    with pytest.raises(KVStoreError, match=f"--uds .* cannot be opened: .*{told}"):
        asyncio.run(Server(ServeOptions(uds=tmp_path / name)).listen())
