"""A server that is killed, loses its engine's process, or is ended in the middle of answers: acknowledged turns stay.

A client that is told the end of a turn has it for ever, whoever is killed right then; a turn that it was not told of
is there whole or not at all; nothing is there twice. Many rounds of it: `python -m bench.campaign`.
"""

import os
import pty
import random
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path

import psutil
import pytest

from kvstore import CacheTiers, Engine
from kvstore.disk.directory import StoreDirectory, read_lock_info
from kvstore.engine.sessions.chat import ChatSession
from kvstore.service.app import ROUTES
from kvstore.sessions.store import open_sessions
from tests.support.engines import greedy
from tests.support.service.clients import Clients
from tests.support.service.server_process import ServerProcess, launched, run_command, verify
from tests.support.service.serving import ADMIN, ADMIN_KEY, KEY, Reply, Serving, serving
from tests.support.service.talking import LONG, SHORT, TALKING_ROUTES, Stream, chat, talking_body
from tests.support.waiting import wait_until

HYBRID_ROUNDS = 2
HYBRIDS = ("Qwen3_5Text", "GraniteMoeHybrid", "Lfm2", "FalconH1", "NemotronH", "OlmoHybrid")  # with `--long`, but one
BLOCK = 16
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
SOON = ("--shutdown-timeout", "0.1")
HELLO = "Hello, I am {}, and my dog is called Rex. What is the name of my dog? And what is my name?"
MODEL = {"tokenizer": True, "max_position_embeddings": 2048}
REQUEST_S = 6.0
BODIES = {
    **{path: {**talking_body(path, "Hello"), **SHORT} for path in (*TALKING_ROUTES, "/v1/messages")},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5, 6]},
    "/sessions/{id}/pin": {"ttl": 5},
    "/sessions/{id}/truncate": {"turns": 1},
    "/sessions/{id}/edit": {"edits": [{"type": "replace", "index": 0, "content": "a"}]},
    "/admin/evict": {"all": True},
}


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


def is_gone(process: psutil.Process) -> bool:
    """Dead; perhaps nobody has asked for its exit code yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_server_that_is_killed_keeps_what_was_acknowledged(store):
    """All talk; after a certain piece of their answers the server is dead. The next one ends with its terminal: the
    kernel tells all its processes, and a shell may pass on what the kernel has sent already.
    """
    clients = Clients(seed=1)
    with launched(store) as server:
        clients.check(server)
        clients.begin(server)
        clients.progress.wait(clients.rng.randrange(5, 150))
        server.kill()
        clients.join()
    wait_until(lambda: read_lock_info(store) is None, "the end of its last thread, which holds the locks")
    verify(store)
    ours, theirs = pty.openpty()
    in_terminal = (sys.executable, "-m", "tests.children.within", "terminal", os.ttyname(theirs))

    def hang_up_twice(server: ServerProcess) -> None:
        os.close(ours)
        wait_until(lambda: '"stopping"' in server.log.read_text(), "it ends")
        server.process.send_signal(signal.SIGHUP)

    with launched(store, *SOON, within=in_terminal) as server:
        os.close(theirs)
        clients.check(server)
        num_sessions = server.admin("GET", "/admin/stats").json()["sessions"]["sessions"]
        session_id, said = end_while_it_streams(server, hang_up_twice)
    assert clients.num_acknowledged > 2
    verify(store)
    stored = stored_turns(store)
    assert stored[session_id] == said and len(stored) == num_sessions + 1


def test_a_server_that_is_killed_while_it_forgets_has_the_old_transcript_or_the_new_and_finishes(store):
    """At any moment from the request on; an edit that was acknowledged stays one before its first turn."""
    rng, text = random.Random(3), "A secret matter."
    edits = {"edits": [{"type": "remove", "index": 0}, {"type": "remove", "index": 1}], "reuse": "forget"}
    outcomes, session_id = set[bool](), ""
    for number in range(4):
        with launched(store) as server:
            if number:
                said = [one["content"] for one in server.get(f"/sessions/{session_id}").json()["messages"]]
                outcomes.add(text in said)
                assert said[-2] == "Another one." and len(said) == (4 if text in said else 2)
                assert chat(server, "And now?", session_id, **GREEDY)["turn"] == (3 if text in said else 4)
                wait_until(partial(has_forgotten, server), "the deletion is carried out")
                assert server.request("DELETE", f"/sessions/{session_id}").status == 200
            if number == 3:
                break
            session_id = chat(server, text, **GREEDY)["session_id"]
            chat(server, "Another one.", session_id, **GREEDY)
            server.flush()
            asking = threading.Thread(target=suppressed, args=(server, f"/sessions/{session_id}/edit", edits))
            asking.start()
            asking.join(rng.random() / 50 if number < 2 else None)
            server.kill()
            asking.join()
        wait_until(lambda: read_lock_info(store) is None, "the end of its last thread, which holds the locks")
        verify(store)
    assert False in outcomes


def has_forgotten(server: ServerProcess) -> bool:
    """A list begins the next round of deletions, when it is time for one."""
    assert server.get("/sessions").status == 200
    return server.admin("GET", "/admin/stats").json()["sessions"]["pending_deletions"] == 0


def suppressed(server: ServerProcess, path: str, body: dict) -> None:
    with suppress(OSError, HTTPException):
        server.post(path, body)


def kill_core(server: ServerProcess) -> None:
    core = server.core
    core.kill()
    wait_until(lambda: is_gone(core), "the engine's process is dead")


def kill_in_mid_grammar(server: ServerProcess) -> None:
    """Kill the engine's process while it answers requests that must match something: they may be tried again."""
    body = {**BODIES["/v1/completions"], "guided_regex": "[a-f]{3000}", "max_tokens": 900}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.post, "/v1/completions", body)
        stream = Stream(server, "/v1/completions", body)
        assert set(stream.next()["choices"][0]["text"]) <= set("abcdef")
        kill_core(server)
        *_, error, _ = stream.rest()
        assert error["error"]["code"] == "engine_died"
        reply = asked.result()
    assert (reply.status, reply.error["code"]) == (503, "engine_died") and int(reply.headers["retry-after"]) > 0


def is_running_again(server: ServerProcess) -> bool:
    reply = server.admin("GET", "/admin/stats")
    if reply.status != 200:
        return False
    process = reply.json()["process"]
    return (process["state"], process["restarts"]) == ("running", 1)


def test_an_engine_s_process_that_is_killed_is_started_again_until_the_server_gives_up(store):
    clients = Clients(seed=2)
    with launched(store, "--engine-restarts", "1", "--engine-timeout", "6") as server:
        clients.check(server)
        clients.begin(server)
        clients.progress.wait(100)
        kill_in_mid_grammar(server)
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
        assert "no sign of life for 6 s); it is not started again: the limit of restarts an hour is 1" in log
    verify(store)
    stored = stored_turns(store)
    for client in clients.sessions:
        for session_id, talk in client.talks.items():
            known = [content for turn in talk.turns for content in turn]
            assert stored[session_id][: len(known)] == known and len(stored[session_id]) <= len(known) + 2
    assert clients.num_acknowledged > 10


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_conversation_with_a_model_that_keeps_states_goes_on_after_every_kill(saved_model, store, request, name):
    """On disk, each turn begins with the state behind the one before; what it says is what an engine without tiers
    below HBM says, which is never killed.
    """
    if name != HYBRIDS[0] and not request.config.getoption("--long"):
        pytest.skip("needs --long")
    model = saved_model(name, tokenizer=True, max_position_embeddings=16384)
    with Engine(model, CacheTiers("32MiB"), device="cpu", dtype="float32") as known:
        expected, session_id, before, unsaved, num_whole = known.chat("known"), None, 0, None, 0
        for number in range(HYBRID_ROUNDS):
            asked = f"And what is {number} and {number}?"
            with launched(store, model, "--dtype", "float32") as server:
                if unsaved is not None:
                    num_whole += goes_on(server, known.chat(f"{number - 1}"), unsaved)
                said = chat(server, asked, session_id, **GREEDY)
                session_id, usage = said["session_id"], said["usage"]
                assert said["message"]["content"] == expected.send(asked, greedy(24)).text
                num_own = usage["prompt_tokens"] - before
                assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] <= num_own + BLOCK
                before = usage["total_tokens"]
                server.flush()
                stream = Stream(server, "/chat", {"session_id": session_id, "message": "More", **LONG})
                assert stream.next() is not None
                unsaved = chat(server, asked, **GREEDY)
                server.kill()
                stream.leave()
            assert unsaved["message"]["content"] == known.chat(f"{number}").send(asked, greedy(24)).text
    wait_until(lambda: read_lock_info(store) is None, "the end of the last server's last thread")
    verify(store)
    print(f"{num_whole} of {HYBRID_ROUNDS - 1} turns whose server was killed right after them came back whole")


def test_a_server_that_is_killed_right_after_each_turn_still_has_a_state(saved_model, store):
    """An older one goes only when a newer one is on disk."""
    model, session_id = saved_model(HYBRIDS[0], tokenizer=True, max_position_embeddings=16384), None
    for number in range(3):
        with launched(store, model) as server:
            said = chat(server, "I am Ada, and I live in Turin. Who are you?", session_id, **GREEDY)
            session_id = said["session_id"]
            if not number:
                server.flush()
            server.kill()
    with launched(store, model) as server:
        usage = chat(server, "And now?", session_id, **GREEDY)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens_details"]["disk"] > 0


def goes_on(server: ServerProcess, expected: ChatSession, last: dict) -> bool:
    """With a turn whose checkpoint was perhaps half written: whole, to the bit, or not at all. Returns which."""
    said, known = chat(server, "And then?", last["session_id"], **GREEDY), expected.send("And then?", greedy(24))
    is_whole = said["usage"]["prompt_tokens_details"]["cached_tokens"] == known.usage.cached_tokens
    assert said["turn"] == 2 and (said["message"]["content"] == known.text or not is_whole)
    return is_whole


def end_while_it_streams(server: ServerProcess, end: Callable[[ServerProcess], None]) -> tuple[str, list[str]]:
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


def stored_turns(store: Path) -> dict[str, list[str]]:
    """What was said and answered in each session, from a store without owner."""
    with StoreDirectory.open(store) as directory, closing(open_sessions(directory)) as sessions:
        keys = [head.key for head in sessions.list("", limit=1000)]
        return {key.session_id: [message["content"] for message in sessions.load(key).messages] for key in keys}


def engines(server: ServerProcess) -> list[dict]:
    reply = server.admin("GET", "/admin/stats")
    assert reply.status == 200, reply.body
    return reply.json()["replicas"]


def begin(server: ServerProcess, session_id: str) -> Stream:
    body = {"message": "Tell me more.", "session_id": session_id, **LONG, "max_tokens": 400}
    stream = Stream(server, "/chat", body)
    assert stream.status == 200 and stream.next() is not None
    return stream


def test_one_of_two_engines_is_killed_while_both_answer(tmp_path):
    store = tmp_path / "store"
    with launched(store, "--data-parallel-size", "2") as server:
        assert len(server.cores) == 2
        sessions = [chat(server, HELLO.format(name))["session_id"] for name in ("Anna", "Bob")]
        server.flush()
        streams = [begin(server, session_id) for session_id in sessions]
        assert [one["process"]["requests"] for one in engines(server)] == [1, 1]
        killed = engines(server)[0]["process"]["pid"]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: "replica_down" in server.get("/health").json()["reasons"], "health says so")
        assert server.get("/ready").status == 200
        ends = [stream.rest() for stream in streams]
        failed = [next((event["error"] for event in events if "error" in event), None) for events in ends]
        assert sorted(error is None for error in failed) == [False, True]
        [error] = [error for error in failed if error is not None]
        assert set(error) >= {"message", "type", "param", "code"}
        assert all(events[-1] == "[DONE]" for events in ends)
        for session_id, error in zip(sessions, failed, strict=True):
            answer = chat(server, "And what is my name?", session_id)
            assert answer["turn"] == (3 if error is None else 2)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
        wait_until(lambda: server.get("/health").json() == {"status": "ok", "reasons": []}, "both answer")
        page = server.get("/metrics").body.decode()
        assert 'kvstore:replica_up{replica="0"} 1.0' in page and 'kvstore:replica_requests{replica="1"}' in page
        assert [one["process"]["restarts"] for one in engines(server)] == [1, 0]
        shown = run_command("stats", "--store", store)
        assert shown.returncode == 0 and "2 of 2 answer; open requests: 0 and 0" in shown.stdout, shown
        processes = server.cores
        server.process.terminate()
        assert server.process.wait(60) == 0 and len(processes) == 2 and all(map(is_gone, processes))
    verify(store)


def ask(server: Serving, route, session_id: str, deleted: str) -> tuple[str, Reply]:
    """What a client of this route gets. DELETE names a conversation of its own: an answer's deletion would be first."""
    path = route.path.replace("{id:.+}", "{id}")
    body = BODIES.get(path, {}) if route.method == "POST" else None
    named = f"resp_{session_id}_1" if "responses" in path else session_id
    named = deleted if (route.method, path) == ("DELETE", "/sessions/{id}") else named
    reply = server.request(route.method, path.replace("{id}", named), body, ADMIN if route.access == "admin" else None)
    return f"{route.method} {path}", reply


def chat_once(server: Serving, message: str) -> dict:
    """A turn that is answered in time, which on a busy machine may need some tries."""
    for _ in range(30):
        reply = server.post("/chat", {"message": message, **SHORT})
        if reply.status != 504:
            break
    assert reply.status == 200, reply.body
    return reply.json()


def test_every_route_answers_within_its_deadline_and_all_is_well_once_the_engine_goes_on(model, tmp_path):
    """Also what waits for the engine to say that it has let go: a stream, a turn and a call that began before."""

    def opened():
        tiers = {"hbm": "2MiB", "cpu": "2MiB", "disk": "32MiB", "path": tmp_path / "store"}
        return Engine(model, tiers, device="cpu", silence_s=600.0, process="own")

    with serving(engine_factory=opened, request_timeout_s=REQUEST_S, api_key=KEY, admin_key=ADMIN_KEY) as server:
        known, deleted = (chat_once(server, "Hello")["session_id"] for _ in range(2))
        long = {"message": "Hello", "max_tokens": 1900, "ignore_eos": True}
        stream = Stream(server, "/chat", long)
        assert "session_id" in stream.next()
        os.kill(server.engine.core.pid, signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(64) as clients:
                beside = [route for route in ROUTES if route.path != "/admin/drain"]  # drained, it refuses all others
                asked = [clients.submit(ask, server, route, known, deleted) for route in beside]
                streamed = clients.submit(stream.rest)
                begun = Stream(server, "/v1/chat/completions", BODIES["/v1/chat/completions"])  # while all others ask
                found = dict(one.result() for one in asked)
                *_, error, done = streamed.result()
            assert (error["error"]["code"], done) == ("request_timeout", "[DONE]")
            begun.leave()
            assert begun.status == 504
            late = {name: reply for name, reply in found.items() if reply.status == 504}
            codes = {reply.error.get("code", reply.error["type"]) for reply in late.values()}
            assert codes == {"request_timeout", "timeout_error"}
            waits = {"POST /chat", "POST /v1/messages", "POST /v1/completions", "POST /v1/responses",
                     "DELETE /sessions/{id}", "POST /admin/flush", "GET /admin/stats"}  # fmt: skip
            assert waits <= late.keys()
            answered = {name for name, reply in found.items() if reply.status == 200}
            assert {"GET /metrics", "GET /v1/models", "GET /health", "POST /tokenize", "GET /"} <= answered
            busy = (409, "session_busy")  # the engine has not let go of what another route began in this conversation
            odd = {name: reply for name, reply in found.items() if reply.status not in (200, 400, 404, 503, 504)}
            assert all((reply.status, reply.error["code"]) == busy for reply in odd.values()), odd
            for method in ("POST", "DELETE"):
                assert server.request(method, "/admin/drain", None, ADMIN).status == 200
            server.wait_until(lambda: server.engine.core.silent_s > 5.0, "the silence is noticed")
            assert server.get("/health").json() == {"status": "degraded", "reasons": ["engine_not_answering"]}
            assert server.get("/ready").status == 503
            assert b"kvstore:engine_up 0.0" in server.get("/metrics").body
        finally:
            os.kill(server.engine.core.pid, signal.SIGCONT)
        server.wait_until_idle()
        assert server.get("/ready").status == 200 and server.engine.core.pid is not None
        assert chat_once(server, "Hello again")["turn"] == 1
