"""The owner's socket: round trips, errors, hostile and slow senders, silent owners, forks."""

import json
import os
import socket
import stat
import struct
import tempfile
import threading
import time
from pathlib import Path

import pytest

from kvstore.admin import control
from kvstore.admin.commands import COMMANDS, read_arguments
from kvstore.admin.control import ControlServer, NoOwner, OwnerSilentError, ask
from kvstore.blocks.records import Evict
from kvstore.disk.directory import StoreDirectory, read_lock_info
from kvstore.errors import ConfigError, KVStoreError, RequestError, StoreError, StoreLockedError
from tests.support.forks import in_fork
from tests.support.waiting import TIMEOUT_S, wait_until


class Handler:
    """Echoes; `fail` holds an exception to raise, `gate` what to wait for first. num_over: calls that have ended."""

    def __init__(self):
        self.calls = []
        self.num_over = 0
        self.fail = None
        self.gate = threading.Event()
        self.gate.set()
        self.result = None

    def __call__(self, command, arguments):
        self.calls.append((command, arguments))
        assert self.gate.wait(TIMEOUT_S)
        self.num_over += 1
        if self.fail is not None:
            raise self.fail
        return {"command": command, "arguments": arguments} if self.result is None else self.result


@pytest.fixture
def handler():
    return Handler()


@pytest.fixture
def directory(tmp_path):
    directory = StoreDirectory.open(tmp_path / "store")
    yield directory
    directory.close()


@pytest.fixture
def server(directory, handler):
    server = ControlServer(directory, handler, request_s=TIMEOUT_S, pulse_s=0.05)
    yield server
    handler.gate.set()
    server.close()


def threads_of_control():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvstore-control")]


def raw(server, sent, end=True):
    """What the server answers to these bytes, up to the end of the connection."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(str(server.path))
        try:
            connection.sendall(sent)
            if end:
                connection.shutdown(socket.SHUT_WR)
        except BrokenPipeError:
            pass
        received = b""
        try:
            while chunk := connection.recv(65536):
                received += chunk
        except ConnectionResetError:
            pass
        return received


def answer(server, sent, end=True):
    received = raw(server, sent, end)
    assert received.endswith(b"\n") and received.count(b"\n") == 1
    return json.loads(received)


def works(server, directory):
    return ask(directory.path, "stats", {}, TIMEOUT_S)["command"] == "stats"


# -- round trips -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", COMMANDS)
def test_what_the_handler_returns_arrives(server, directory, handler, command):
    arguments = {"text": "häß\n\u2028", "number": 2**60, "list": [None, True, 0.5]}
    assert ask(directory.path, command, arguments, TIMEOUT_S) == {"command": command, "arguments": arguments}
    assert handler.calls == [(command, arguments)]


def test_a_large_answer_arrives_whole(server, directory, handler):
    handler.result = {"sessions": ["x" * 1000] * 5000}
    assert ask(directory.path, "sessions", {}, TIMEOUT_S) == handler.result


def test_an_answer_that_is_too_large_is_an_error(server, directory, handler):
    handler.result = {"sessions": "x" * control.MAX_ANSWER_BYTES}
    with pytest.raises(KVStoreError, match="ask for less"):
        ask(directory.path, "sessions", {}, TIMEOUT_S)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("limit is 0;\n give more"), ConfigError),
        (StoreError("the disk is gone"), StoreError),
        (RequestError("there is no session 'x'"), KVStoreError),
        (ZeroDivisionError("a bug"), KVStoreError),
        (RecursionError("deep"), KVStoreError),
    ],
)
def test_an_error_of_the_handler_is_one_line_of_its_kind(server, directory, handler, error, kind):
    handler.fail = error
    with pytest.raises(kind) as caught:
        ask(directory.path, "stats", {}, TIMEOUT_S)
    assert type(caught.value) is kind
    assert " ".join(str(error).split()) in str(caught.value)
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)
    handler.fail = None
    assert works(server, directory)


def test_a_result_that_is_no_json_is_an_error(server, directory, handler):
    handler.result = {"blocks": b"bytes"}
    with pytest.raises(KVStoreError, match="the owner failed: TypeError"):
        ask(directory.path, "stats", {}, TIMEOUT_S)


def test_a_long_command_shows_that_its_owner_lives(server, directory, handler):
    def ask_for_longer_than(timeout_s: float) -> bool:
        handler.gate.clear()
        signs, begun = [], time.monotonic()

        def note(sign) -> None:
            signs.append(sign)
            if time.monotonic() - begun > timeout_s + 0.2:
                handler.gate.set()

        try:
            assert ask(directory.path, "verify", {}, timeout_s, note)["command"] == "verify"
        except OwnerSilentError:
            handler.gate.set()
            return False
        assert len(signs) > 1 and set(signs) == {None}
        return True

    assert any(map(ask_for_longer_than, (1.0, 5.0, 20.0))), "a machine may be silent, too, but not for so long"


# -- the socket ------------------------------------------------------------------------------------------------------
def test_the_socket_is_private_named_in_the_lock_and_gone_afterwards(server, directory):
    assert server.path == directory.path / "control.sock"
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
    assert read_lock_info(directory.path).socket_path == str(server.path)
    server.close()
    server.close()
    assert not server.path.exists()
    wait_until(lambda: threads_of_control() == [], "its threads end")


def test_a_stale_socket_is_replaced_and_a_file_is_not(directory, handler):
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(directory.path / "control.sock"))
    server = ControlServer(directory, handler)
    assert works(server, directory)
    server.close()
    (directory.path / "control.sock").write_text("precious")
    with pytest.raises(StoreError, match="not a socket"):
        ControlServer(directory, handler)
    assert (directory.path / "control.sock").read_text() == "precious"


def test_a_path_too_long_for_a_socket(tmp_path, handler):
    with StoreDirectory.open(tmp_path / ("d" * 60) / ("e" * 60)) as directory:
        server = ControlServer(directory, handler)
        place = server.path.parent
        assert place.parent == Path(tempfile.gettempdir()) and stat.S_IMODE(place.stat().st_mode) == 0o700
        assert works(server, directory)
        server.close()
        assert not place.exists() and directory.path.exists()


def test_close_does_not_wait_for_a_command_for_long(server, directory, handler):
    handler.gate.clear()
    caught = []

    def run():
        try:
            ask(directory.path, "verify", {}, TIMEOUT_S)
        except KVStoreError as error:
            caught.append(error)

    asking = threading.Thread(target=run)
    asking.start()
    wait_until(lambda: handler.calls)
    server.close()
    assert handler.num_over == 0, "the command still runs"
    asking.join()
    assert isinstance(caught[0], OwnerSilentError)


def test_another_user_is_not_answered(server, directory, handler, monkeypatch):
    monkeypatch.setattr(control, "_peer_uid", lambda connection: os.getuid() + 1)
    with pytest.raises(KVStoreError, match="only the store's owner"):
        ask(directory.path, "stats", {}, TIMEOUT_S)
    assert handler.calls == []


def test_a_forked_child_changes_nothing(server, directory):
    listening = server._server.listener.fileno()
    assert "Bad file descriptor" in in_fork(lambda: (server.close(), os.fstat(listening)))
    assert works(server, directory)


# -- hostile and broken senders --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"\n", "not a request"),
        (b"\xff\xfe\n", "not a request"),
        (b"[" * 100_000 + b"\n", "not a request"),
        (b'{"version":1,"command":"stats","arguments":[]}\n', "Expected `object`, got `array` - at `$.arguments`"),
        (b'{"version":2,"command":"stats","arguments":{}}\n', "version 2 is not known here"),
        (b'{"version":1,"command":"stats","arguments":{"x":NaN}}\n', "not a request"),
        (b'{"version":1,"command":"stats","arguments":{"x":' + b"9" * 5000 + b"}}\n", "not a request"),
        (b"x" * (control.MAX_REQUEST_BYTES + 1) + b"\n", "more than 1,048,576 bytes"),
        (b"", "not a request"),
    ],
    ids=range(9),
)
def test_garbage_is_answered_and_harms_nobody(server, directory, handler, sent, words):
    found = answer(server, sent)
    assert found["ok"] is False and words in found["error"] and "\n" not in found["error"]
    assert len(found["error"]) < 600 and found["kind"] == "failure"
    assert handler.calls == []
    assert works(server, directory)


def test_a_slow_sender_is_dropped(directory, handler):
    server = ControlServer(directory, handler, request_s=0.4)
    started = time.monotonic()
    found = answer(server, b'{"version":1,', end=False)
    assert "not complete in time" in found["error"] or "timed out" in found["error"]
    assert time.monotonic() - started > 0.3
    with socket.socket(socket.AF_UNIX) as connection:  # one byte at a time does not help
        connection.connect(str(server.path))
        connection.settimeout(0.05)

        def is_dropped() -> bool:
            try:
                connection.sendall(b" ")
                return bool(connection.recv(1000))
            except TimeoutError:
                return False
            except OSError:  # it was, between these two
                return True

        wait_until(is_dropped, "it is still listened to")
    server.close()


def test_a_sender_that_goes_away(server, directory, handler):
    handler.gate.clear()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(server.path))
        connection.sendall(b'{"version":1,"command":"stats","arguments":{}}\n')
        wait_until(lambda: handler.calls)
    handler.gate.set()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(server.path))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert works(server, directory)


def test_too_many_at_once_are_told_to_come_back(server, directory, handler):
    handler.gate.clear()
    busy = [
        threading.Thread(target=ask, args=(directory.path, "stats", {}, TIMEOUT_S))
        for _ in range(control.MAX_CONNECTIONS)
    ]
    for thread in busy:
        thread.start()
    wait_until(lambda: len(handler.calls) == control.MAX_CONNECTIONS)
    for _ in range(20):
        with pytest.raises(KVStoreError, match="8 commands are running already; try again"):
            ask(directory.path, "stats", {}, TIMEOUT_S)
    handler.gate.set()
    for thread in busy:
        thread.join()
    wait_until(lambda: not server._server.connections)
    assert works(server, directory)


# -- silent owners ---------------------------------------------------------------------------------------------------
def test_no_owner(tmp_path, directory):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(NoOwner):
            ask(path, "stats", {}, 1)
    directory.close()
    with pytest.raises(NoOwner):
        ask(directory.path, "stats", {}, 1)


def test_an_owner_without_a_socket(directory):
    with pytest.raises(OwnerSilentError, match=f"process {os.getpid()}, which takes no commands") as caught:
        ask(directory.path, "stats", {}, 1)
    assert isinstance(caught.value, StoreLockedError) and caught.value.pid == os.getpid()


def test_an_owner_whose_socket_is_gone_or_dead(directory):
    place = directory.path / "gone.sock"
    directory.announce(place)
    with pytest.raises(OwnerSilentError, match="does not answer"):
        ask(directory.path, "stats", {}, 1)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(place))
    with pytest.raises(OwnerSilentError, match="does not answer"):
        ask(directory.path, "stats", {}, 1)
    directory.announce("x" * 300)
    with pytest.raises(OwnerSilentError, match="does not answer"):
        ask(directory.path, "stats", {}, 1)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (None, "silent for 0.3 s"),
        (b"", "ended before it answered"),
        (b"garbage\n", "does not answer"),
        (b'{"ok":true,"result":1}\n', "something else than an answer"),
    ],
)
def test_an_owner_that_is_no_owner_of_ours(directory, sent, words):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory.path / "control.sock"))
        listener.listen()
        directory.announce(directory.path / "control.sock")

        given_up = threading.Event()

        def reply():
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                if sent is None:
                    given_up.wait(TIMEOUT_S)
                else:
                    connection.sendall(sent)

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(OwnerSilentError, match=words):
            ask(directory.path, "stats", {}, 0.3 if sent is None else TIMEOUT_S)
        given_up.set()
        thread.join()


# -- arguments -------------------------------------------------------------------------------------------------------
def test_evict_requests_become_selections():
    ids = frozenset([b"x" * 32])
    arguments = {"session": {"session_id": "s"}, "unused_for_s": 5, "to_bytes": 3, "dry_run": True}
    wanted = read_arguments("evict", arguments)
    assert wanted.selection(ids) == Evict(unused_for_s=5, block_ids=ids, to_bytes=3, dry_run=True)
    assert read_arguments("evict", {"all": True}).selection(None) == Evict(everything=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "no condition"),
        ({"al": True}, "unknown field `al`"),
        ({"all": 1}, "Expected `bool`, got `int` - at `$.all`"),
        ({"unused_for_s": -1}, "$.unused_for_s"),
        ({"unused_for_s": float("nan")}, "unused_for_s"),
        ({"unused_for_s": 10**400}, "evict: "),
        ({"to_bytes": 1.5}, "Expected `int | null`, got `float` - at `$.to_bytes`"),
        ({"to_bytes": 2**70}, "$.to_bytes"),
        ({"session": {}}, "missing required field `session_id` - at `$.session`"),
        ({"session": {"session_id": "../etc"}}, "$.session.session_id"),
        ({"session": {"session_id": "s\n"}}, "session_id"),
        ({"session": {"session_id": "s", "x": 1}}, "unknown field `x` - at `$.session`"),
    ],
)
def test_wrong_evict_arguments_are_named(arguments, words):
    with pytest.raises(ConfigError) as caught:
        read_arguments("evict", arguments)
    assert words in str(caught.value)


def test_the_other_arguments():
    assert not read_arguments("verify", {}).delete and read_arguments("verify", {"delete": True}).delete
    assert read_arguments("sessions", {"tenant": "t"}).limit == 100
    for arguments in ({"limit": 0}, {"limit": True}, {"limit": 10**6}, {"tenant": 1}, {"after": "x"}):
        with pytest.raises(ConfigError):
            read_arguments("sessions", arguments)
    for command, arguments in (("verify", {"delete": "yes"}), ("stats", {"x": 1}), ("sessions.show", {}), ("burn", {})):
        with pytest.raises(ConfigError):
            read_arguments(command, arguments)
