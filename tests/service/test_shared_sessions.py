"""Two servers that share conversations and KV: they go on where the next request lands, whatever was killed before."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.sessions.shared.names import Names
from kvstore.sessions.shared.storage import MemberIdentity
from tests.support.redis_server import RedisServer
from tests.support.service.clients import Progress, SessionClient, turns_of
from tests.support.service.server_process import ServerProcess, launch, run_command
from tests.support.service.serving import Reply
from tests.support.service.talking import LONG, SHORT, Stream, chat, stopped
from tests.support.shared_sessions import DURABLE, answers_without_a_store, secret_file
from tests.support.waiting import TIMEOUT_S, wait_until

NUM_ROUNDS = 2
PAUSE_S = 0.2  # after each turn: all of them are looked at in the end


class Fleet:
    """A Redis of conversations, one of KV, and two servers, each of which may be killed and started again. All but the
    KV's have what they had.
    """

    def __init__(self, folder: Path) -> None:
        (folder / "redis").mkdir()
        self.redis, self.kv = RedisServer(folder / "redis", *DURABLE), RedisServer(folder)
        self.flags = ("--session-store", self.redis.url, "--fleet-secret-file", secret_file(folder),
                      "--remote", self.kv.url)  # fmt: skip
        self.stores = [folder / "one", folder / "other"]
        with ThreadPoolExecutor(2) as both:
            self.servers: list[ServerProcess] = list(both.map(self.launch, (0, 1)))

    def launch(self, index: int) -> ServerProcess:
        return launch(self.stores[index], *self.flags)

    def restart(self, index: int) -> None:
        self.servers[index].kill()
        self.servers[index] = self.launch(index)

    def close(self) -> None:
        self.redis.resume()
        for each in (*self.servers, self.redis, self.kv):
            each.kill()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    found = Fleet(tmp_path_factory.mktemp("fleet"))
    yield found
    found.close()


def refused(reply: Reply) -> tuple[int, str]:
    assert reply.error["message"]
    return reply.status, reply.error["code"]


def test_of_two_turns_at_once_one_is_busy(fleet):
    one, other = fleet.servers
    session_id = chat(one, "Hello.")["session_id"]
    stream = Stream(one, "/chat", {"message": "Go on.", "session_id": session_id, **LONG})
    stream.next()
    reply = other.post("/chat", {"message": "Me first.", "session_id": session_id, **SHORT})
    assert refused(reply) == (409, "session_busy")
    assert 0 < int(reply.headers["retry-after"]) <= 10 and "x-should-retry" not in reply.headers
    assert stopped(one, stream, session_id)[-2]["finish_reason"] == "abort"
    assert chat(other, "And now?", session_id)["turn"] == 3


def test_a_name_of_the_client_s_is_one_session_on_both_also_once_it_was_deleted(fleet):
    one, other = fleet.servers
    named = {"session_id": "ada", "create": True}
    stream = Stream(one, "/chat", {"message": "Hello.", **named, **LONG})
    stream.next()
    assert refused(other.post("/chat", {"message": "Me first.", **named, **SHORT})) == (409, "session_busy")
    stopped(one, stream, "ada")
    assert chat(other, "And now?", **named)["turn"] == 2
    assert other.request("DELETE", "/sessions/ada").status == 200
    assert [chat(server, "Hello.", **named)["turn"] for server in fleet.servers] == [1, 2]


def test_a_session_deleted_on_one_server_is_unknown_on_the_other(fleet):
    one, other = fleet.servers
    session_id = chat(one, "Forget me.")["session_id"]
    assert chat(other, "Really.", session_id)["turn"] == 2
    assert other.request("DELETE", f"/sessions/{session_id}").status == 200
    for server in fleet.servers:
        reply = server.post("/chat", {"message": "Hello?", "session_id": session_id})
        assert refused(reply) == (404, "session_not_found")
    wait_until(lambda: one.admin("GET", "/admin/stats").json()["sessions"]["pending_deletions"] == 0, "carried through")


def test_a_server_that_was_away_for_too_long_keeps_nothing_that_may_be_deleted(fleet):
    server = fleet.servers[1]
    chat(server, "A long story, if you please.")
    server.flush()

    def kept() -> tuple[int, int]:
        stats = fleet.servers[1].admin("GET", "/admin/stats").json()
        return stats["disk"]["blocks"], stats["answers"]["answers"]

    assert min(kept()) > 0
    fleet.restart(1)
    assert min(kept()) > 0
    server = fleet.servers[1]
    server.kill()
    fleet.redis.ask("HDEL", Names.of(False).members, MemberIdentity.of(fleet.stores[1]).member)
    fleet.restart(1)
    wait_until(lambda: kept() == (0, 0))


def test_an_edit_on_one_server_holds_on_the_other(fleet):
    """Also in what the other has in memory of the session, and in its tiers."""
    one, other = fleet.servers
    session_id = chat(one, "A secret matter, of which both servers know.")["session_id"]
    chat(other, "Another matter.", session_id)
    before = chat(one, "And what else?", session_id)["usage"]["prompt_tokens"]
    edits = {"edits": [{"type": "remove", "index": 0}, {"type": "remove", "index": 1}], "expected_turn": 3}
    assert refused(other.post(f"/sessions/{session_id}/edit", edits | {"expected_turn": 2})) == (409, "session_busy")
    assert other.post(f"/sessions/{session_id}/edit", edits | {"reuse": "forget"}).json()["turn"] == 4
    assert refused(one.post(f"/sessions/{session_id}/edit", edits)) == (409, "session_busy")
    turn = chat(one, "Go on.", session_id)
    assert turn["turn"] == 5 and turn["usage"]["prompt_tokens"] < before
    for server in fleet.servers:
        assert b"secret" not in server.get(f"/sessions/{session_id}").body
    wait_until(lambda: one.admin("GET", "/admin/stats").json()["sessions"]["pending_deletions"] == 0, "carried through")


def test_without_redis_turns_are_refused_in_time_and_nothing_is_acknowledged(fleet):
    one, other = fleet.servers
    session_id = chat(one, "Hello.")["session_id"]
    stream = Stream(one, "/chat", {"message": "Go on.", "session_id": session_id, **LONG, "max_tokens": 400})
    stream.next()
    fleet.redis.pause()
    events = [event for event in stream.rest() if isinstance(event, dict)]
    assert any("error" in event for event in events), events[-1]
    assert not any(event.get("finish_reason") for event in events)
    reply = other.post("/chat", {"message": "Hello?", "session_id": session_id, **SHORT})
    assert refused(reply) == (503, "session_store_unavailable")
    assert int(reply.headers["retry-after"]) > 0
    whole = other.post("/v1/completions", {"prompt": "Once", **SHORT})
    assert whole.status == 200  # what needs no session goes on
    health = other.get("/health").json()
    assert health["status"] == "degraded" and "session_store_unreachable" in health["reasons"]
    fleet.redis.resume()
    for server in (one, other):  # each asks again half a second after Redis was silent
        wait_until(lambda: server.get(f"/sessions/{session_id}").status == 200, "the sessions are back")  # noqa: B023
    known = len(turns_of(other, session_id))
    again = {"message": "Again.", "session_id": session_id, **SHORT}
    replies: list[Reply] = []

    def is_answered() -> bool:  # the turn that was cut off holds the session until its lease ends
        replies.append(other.post("/chat", again))
        return replies[-1].status == 200

    wait_until(is_answered, "the session is free again")
    assert replies[-1].json()["turn"] == known + 1


def test_the_command_line_looks_at_shared_sessions_without_a_server(fleet):
    session_id = chat(fleet.servers[0], "Hello.")["session_id"]
    listed = run_command("sessions", *fleet.flags[:2], "--json")
    assert session_id in listed.stdout, listed
    assert "Hello." in run_command("sessions", "show", session_id, *fleet.flags[:2]).stdout
    assert run_command("sessions", "delete", session_id, *fleet.flags[:2]).returncode == 0
    assert fleet.servers[1].get(f"/sessions/{session_id}").status == 404
    again = run_command("sessions", "delete", session_id, *fleet.flags[:2])
    assert (again.returncode, "no session" in again.stderr) == (1, True)


def test_a_redis_that_cannot_keep_these_sessions_is_bad_input(fleet, tmp_path):
    """Another fleet's secret, and a policy that drops sessions: no supervisor needs to try again."""
    secret = "another one, of other people, 32 characters"
    flags = ("serve", "--store", tmp_path / "store", "--port", "0", *fleet.flags[:2])
    found = run_command(*flags, KVSTORE_FLEET_SECRET=secret)
    assert (found.returncode, "another fleet secret" in found.stderr.splitlines()[-1]) == (2, True), found
    unfit = RedisServer(tmp_path, *DURABLE, "--maxmemory-policy", "allkeys-lru")
    try:
        found = run_command(*flags[:-1], unfit.url, KVSTORE_FLEET_SECRET=secret)
    finally:
        unfit.kill()
    assert (found.returncode, "allkeys-lru" in found.stderr.splitlines()[-1]) == (2, True), found


# -- kills -----------------------------------------------------------------------------------------------------------
def talk(fleet: Fleet, client: SessionClient, is_over: threading.Event) -> None:
    """Each turn is asked for until it is acknowledged, wherever that is."""
    while not is_over.is_set():
        client.begin()
        wait_until(lambda: client.ask(client.rng.choice(fleet.servers)), "a server answers", 2 * TIMEOUT_S)
        is_over.wait(PAUSE_S)


def test_whoever_is_killed_no_acknowledged_turn_is_lost_and_no_answer_is_wrong(fleet):
    rng, is_over, progress = random.Random(1), threading.Event(), Progress()
    clients = [SessionClient(name, progress, SHORT) for name in ("Ann", "Ben", "Cleo", "Dan")]
    with ThreadPoolExecutor(len(clients)) as threads:
        talking = [threads.submit(talk, fleet, client, is_over) for client in clients]
        try:
            for number in range(NUM_ROUNDS):
                progress.wait(rng.randrange(3, 20))
                if number % 3 == 1:
                    fleet.redis.restart()
                    fleet.kv.restart()
                else:
                    fleet.restart(number % 3 // 2)
            progress.wait(4)
        finally:
            is_over.set()
        for one in talking:
            one.result()
    talks = [(name, talk) for client in clients for name, talk in client.talks.items()]
    for session_id, told in talks:
        for server in fleet.servers:
            assert turns_of(server, session_id) == told.turns
    expected = answers_without_a_store([[said for said, _ in told.turns] for _, told in talks], SHORT["max_tokens"])
    assert [[answer for _, answer in told.turns] for _, told in talks] == expected
