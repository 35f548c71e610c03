"""Two servers that share conversations and KV: they go on where the next request lands, whatever was killed before.

`--long` makes it thirty rounds of kills.
"""

import http.client
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.redis_server import RedisServer
from tests.support.service.server_process import ServerProcess, launch, run_command
from tests.support.service.serving import Reply
from tests.support.service.talking import LONG, SHORT, Stream, chat
from tests.support.shared_sessions import DURABLE, answers_without_a_store, secret_file
from tests.support.waiting import TIMEOUT_S, wait_until

NUM_ROUNDS, NUM_LONG_ROUNDS = 2, 30
MAX_TURNS = 5  # of one conversation
BROKEN = (OSError, http.client.HTTPException)


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


def texts_of(server: ServerProcess, session_id: str) -> list[tuple[str, str]]:
    turns = server.get(f"/sessions/{session_id}").json()["turns_data"]
    return [(turn["messages"][0]["content"], turn["messages"][1]["content"]) for turn in turns]


def refused(reply: Reply) -> tuple[int, str]:
    assert reply.error["message"]
    return reply.status, reply.error["code"]


def test_a_conversation_goes_on_on_the_other_server(fleet):
    """Without a kill, which is below."""
    one, other = fleet.servers
    said = ["My name is Ada.", "I live in Lisbon.", "What is my name?", "Where do I live?"]
    first = chat(one, said[0])
    session_id = first["session_id"]
    answers = [first, chat(other, said[1], session_id), chat(one, said[2], session_id)]
    answers.append(chat(other, said[3], session_id))
    texts = [answer["message"]["content"] for answer in answers]
    assert texts == answers_without_a_store([said], SHORT["max_tokens"])[0]
    assert texts_of(one, session_id) == texts_of(other, session_id) == list(zip(said, texts, strict=True))


def test_of_two_turns_at_once_one_is_busy(fleet):
    one, other = fleet.servers
    session_id = chat(one, "Hello.")["session_id"]
    stream = Stream(one, "/chat", {"message": "Go on.", "session_id": session_id, **LONG})
    stream.next()
    reply = other.post("/chat", {"message": "Me first.", "session_id": session_id, **SHORT})
    assert refused(reply) == (409, "session_busy")
    assert 0 < int(reply.headers["retry-after"]) <= 10 and "x-should-retry" not in reply.headers
    assert stream.rest()[-2]["finish_reason"] == "length"
    assert chat(other, "And now?", session_id)["turn"] == 3


def test_a_session_deleted_on_one_server_is_unknown_on_the_other(fleet):
    one, other = fleet.servers
    session_id = chat(one, "Forget me.")["session_id"]
    assert chat(other, "Really.", session_id)["turn"] == 2
    assert other.request("DELETE", f"/sessions/{session_id}").status == 200
    for server in fleet.servers:
        reply = server.post("/chat", {"message": "Hello?", "session_id": session_id})
        assert refused(reply) == (404, "session_not_found")
    wait_until(lambda: one.admin("GET", "/admin/stats").json()["sessions"]["pending_deletions"] == 0, "carried through")


@pytest.mark.parametrize("is_stopped", [True, False])
def test_without_redis_turns_are_refused_in_time_and_nothing_is_acknowledged(fleet, is_stopped):
    one, other = fleet.servers
    session_id = chat(one, "Hello.")["session_id"]
    stream = Stream(one, "/chat", {"message": "Go on.", "session_id": session_id, **LONG})
    stream.next()
    fleet.redis.pause() if is_stopped else fleet.redis.kill()
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
    fleet.redis.resume() if is_stopped else fleet.redis.start()
    for server in (one, other):  # each asks again half a second after Redis was silent
        wait_until(lambda: server.get(f"/sessions/{session_id}").status == 200, "the sessions are back")  # noqa: B023
    known = len(texts_of(other, session_id))
    again = {"message": "Again.", "session_id": session_id, **SHORT}
    replies: list[Reply] = []

    def is_answered() -> bool:  # the turn that was cut off holds the session until its lease ends
        replies.append(other.post("/chat", again))
        return replies[-1].status == 200

    wait_until(is_answered, "the session is free again")
    assert replies[-1].json()["turn"] == known + 1


def test_without_the_shared_tier_no_request_fails_and_it_is_said(fleet):
    one = fleet.servers[0]
    session_id = chat(one, "Hello.")["session_id"]
    fleet.kv.kill()
    assert chat(one, "And without it?", session_id)["turn"] == 2
    wait_until(lambda: "remote_degraded" in one.get("/health").json()["reasons"], "it is noticed")
    assert b"kvstore:remote_up 0" in one.get("/metrics").body
    fleet.kv.start()
    wait_until(lambda: "remote_degraded" not in one.get("/health").json()["reasons"], "it is back")
    assert b"kvstore:remote_up 1" in one.get("/metrics").body


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
class Talker:
    """One conversation after the other, each turn asked for until it is acknowledged, wherever that is."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._fleet, self._name = fleet, name
        self._rng = random.Random(name)
        self.talks: list[tuple[str, list[tuple[str, str]]]] = []
        self.num_acknowledged = self.num_asked_again = self.num_remote_tokens = 0

    def talk(self, is_over: threading.Event) -> None:
        session_id, turns = None, []
        while not is_over.is_set():
            said = f"{self._name} says number {self.num_acknowledged}."
            answer = self._answer(said, session_id)
            if session_id is None:
                session_id = answer["session_id"]
                self.talks.append((session_id, turns))
            assert (answer["session_id"], answer["turn"]) == (session_id, len(turns) + 1), "a turn was lost or is twice"
            self.num_remote_tokens += answer["usage"]["prompt_tokens_details"]["cached_tokens_details"]["remote"]
            turns.append((said, answer["message"]["content"]))
            self.num_acknowledged += 1
            if len(turns) == MAX_TURNS:
                session_id, turns = None, []

    def _answer(self, said: str, session_id: str | None) -> dict:
        named = {} if session_id is None else {"session_id": session_id}
        end_s = time.monotonic() + 2 * TIMEOUT_S
        while time.monotonic() < end_s:
            server = self._rng.choice(self._fleet.servers)
            try:
                reply = server.post("/chat", {"message": said, **SHORT, **named}, **{"Idempotency-Key": said})
            except BROKEN:
                reply = None
            if reply is not None and reply.status == 200:
                return reply.json()
            assert reply is None or refused(reply)[0] in (409, 503), reply.body
            self.num_asked_again += 1
            threading.Event().wait(0.1)
        raise AssertionError("no server has answered")


def test_whoever_is_killed_no_acknowledged_turn_is_lost_and_no_answer_is_wrong(fleet, request):
    rng, is_over = random.Random(1), threading.Event()
    talkers = [Talker(fleet, name) for name in ("Ann", "Ben", "Cleo", "Dan")]
    is_long = request.config.getoption("--long")
    num_rounds = NUM_LONG_ROUNDS if is_long else NUM_ROUNDS
    try:
        with ThreadPoolExecutor(len(talkers)) as threads:
            talking = [threads.submit(talker.talk, is_over) for talker in talkers]
            try:
                for number in range(num_rounds):
                    goal = sum(talker.num_acknowledged for talker in talkers) + rng.randrange(3, 20)
                    wait_until(
                        lambda: sum(t.num_acknowledged for t in talkers) >= goal or any(t.done() for t in talking),  # noqa: B023
                        "nobody gets an answer", 2 * TIMEOUT_S,
                    )  # fmt: skip
                    if number % 3 == 1:
                        fleet.redis.restart()
                        fleet.kv.restart()
                    else:
                        fleet.restart(number % 3 // 2)
            finally:
                is_over.set()
            for one in talking:
                one.result()
        talks = [talk for talker in talkers for talk in talker.talks]
        for session_id, turns in talks:
            for server in fleet.servers:
                assert texts_of(server, session_id) == turns
        said = [[text for text, _ in turns] for _, turns in talks]
        expected = answers_without_a_store(said, SHORT["max_tokens"])
        assert [[answer for _, answer in turns] for _, turns in talks] == expected
        num_tokens = sum(talker.num_remote_tokens for talker in talkers)
        assert num_tokens > 0 or not is_long, "nothing came from the shared tier"
        print(num_rounds, "rounds,", sum(t.num_acknowledged for t in talkers), "turns acknowledged,",
              sum(t.num_asked_again for t in talkers), "asked for again,", len(talks), "conversations,",
              num_tokens, "tokens from the shared tier")  # fmt: skip
    finally:
        is_over.set()
