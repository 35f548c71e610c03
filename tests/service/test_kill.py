"""A server that is killed, loses its engine's process, or is ended in the middle of answers: acknowledged turns stay.

A client that is told the end of a turn has it for ever, whoever is killed right then; a turn that it was not told of
is there whole or not at all; nothing is there twice. `--long` makes it many rounds.
"""

import os
import pty
import signal
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import psutil
import pytest

from kvstore.disk.directory import StoreDirectory
from kvstore.sessions.store import open_sessions
from tests.support.service.clients import Clients
from tests.support.service.server_process import ServerProcess, launch, launched, verify
from tests.support.service.talking import LONG, Stream, chat
from tests.support.waiting import wait_until

NUM_ROUNDS, NUM_LONG_ROUNDS = 2, 60
SOON = ("--shutdown-timeout", "0.1")
WITH_SIGHUP = ("env", "--default-signal=HUP")  # also where the tests were started with it ignored


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


def is_gone(process: psutil.Process) -> bool:
    """Dead; perhaps nobody has asked for its exit code yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def talk_and_kill(clients: Clients, server: ServerProcess, is_long: bool) -> None:
    """All talk; after a certain piece of their answers the server is dead."""
    clients.begin(server)
    clients.progress.wait(clients.rng.randrange(5, 400 if is_long else 150))
    server.kill()
    clients.join()


def test_a_server_that_is_killed_keeps_what_was_acknowledged(store, request):
    """Again and again on one store."""
    is_long = request.config.getoption("--long")
    clients = Clients(seed=1)
    for number in range(NUM_LONG_ROUNDS if is_long else NUM_ROUNDS):
        server = launch(store)
        core = server.core
        try:
            clients.check(server)
            talk_and_kill(clients, server, is_long)
        finally:
            server.kill()
        if number % 2 == 0:  # else the next server waits for the store
            wait_until(partial(is_gone, core), "the engine's process ends with the server")
            verify(store)
    with launched(store, *SOON) as server:
        clients.check(server)
        num_sessions = server.admin("GET", "/admin/stats").json()["sessions"]["sessions"]
        session_id, said = end_while_it_streams(server)
    assert clients.num_acknowledged > 10
    verify(store)
    stored = stored_turns(store)
    assert stored[session_id] == said and len(stored) == num_sessions + 1


def kill_core(server: ServerProcess) -> None:
    core = server.core
    core.kill()
    wait_until(lambda: is_gone(core), "the engine's process is dead")


def is_running_again(server: ServerProcess) -> bool:
    reply = server.admin("GET", "/admin/stats")
    if reply.status != 200:
        return False
    process = reply.json()["process"]
    return (process["state"], process["restarts"]) == ("running", 1)


def test_an_engine_s_process_that_is_killed_is_started_again_until_the_server_gives_up(store):
    clients = Clients(seed=2)
    with launched(store, "--engine-restarts", "1", "--engine-timeout", "10") as server:
        clients.check(server)
        clients.begin(server)
        clients.progress.wait(100)
        kill_core(server)
        clients.join()
        wait_until(lambda: is_running_again(server), "the engine is there again", 300)
        assert server.get("/health").json() == {"status": "ok", "reasons": []}
        clients.check(server)
        for client in clients.histories:  # an answer of the last second is known to this server only
            client.begin_anew()
        clients.begin(server)
        clients.progress.wait(50)
        server.core.send_signal(signal.SIGSTOP)
        assert server.process.wait(300) == 5
        clients.join()
        log = server.log.read_text()
        assert "(signal 9); it is started again in 0 s" in log
        assert "no sign of life for 10 s); it is not started again: the limit of restarts an hour is 1" in log
    verify(store)
    stored = stored_turns(store)
    for client in clients.sessions:
        for session_id, talk in client.talks.items():
            known = [content for turn in talk.turns for content in turn]
            assert stored[session_id][: len(known)] == known and len(stored[session_id]) <= len(known) + 2
    assert clients.num_acknowledged > 10


def terminate(server: ServerProcess) -> None:
    server.process.send_signal(signal.SIGTERM)


def end_while_it_streams(
    server: ServerProcess, end: Callable[[ServerProcess], None] = terminate
) -> tuple[str, list[str]]:
    """In order. The conversation that is left: its id, and what was said and answered in it."""
    kept = chat(server, "Hello, my name is Anna.")
    session_id = kept["session_id"]
    body = {"session_id": session_id, "message": "Count.", **LONG, "max_tokens": 900}
    streams = [Stream(server, "/chat", body), Stream(server, "/chat", {**body, "session_id": None})]
    history = {"messages": [{"role": "user", "content": "Count."}], **LONG, "max_tokens": 900}
    streams.append(Stream(server, "/v1/chat/completions", history))
    for stream in streams:
        assert isinstance(stream.next(), dict)
    core = server.core
    end(server)
    for stream in streams:
        *_, error, done = stream.rest()
        assert (error["error"]["code"], done) == ("stopping", "[DONE]")
    assert server.process.wait(60) == 0
    assert is_gone(core)
    return session_id, ["Hello, my name is Anna.", kept["message"]["content"]]


def test_a_server_that_is_hung_up_twice_says_so_to_its_streams(store):
    """As a shell does that passes on what the kernel has sent already. The test of kills sends SIGTERM."""

    def hang_up_twice(server: ServerProcess) -> None:
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: '"stopping"' in server.log.read_text(), "it ends")
        server.process.send_signal(signal.SIGHUP)

    with launched(store, *SOON, within=WITH_SIGHUP) as server:
        session_id, said = end_while_it_streams(server, hang_up_twice)
    verify(store)
    assert stored_turns(store) == {session_id: said}


def test_a_terminal_that_is_closed_ends_it_in_order(store):
    """The kernel tells all its processes."""
    ours, theirs = pty.openpty()
    in_terminal = ("sh", "-c", 'exec "$@" <"$0"', os.ttyname(theirs))  # what it opens first becomes its terminal
    with launched(store, *SOON, within=(*WITH_SIGHUP, *in_terminal)) as server:
        os.close(theirs)
        session_id, said = end_while_it_streams(server, lambda _: os.close(ours))
    verify(store)
    assert stored_turns(store) == {session_id: said}


def stored_turns(store: Path) -> dict[str, list[str]]:
    """What was said and answered in each session, from a store without owner."""
    with StoreDirectory.open(store) as directory, closing(open_sessions(directory)) as sessions:
        keys = [head.key for head in sessions.list("")]
        return {key.session_id: [message["content"] for message in sessions.load(key).messages] for key in keys}
