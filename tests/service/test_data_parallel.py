"""`kvstore serve --data-parallel-size 2`: one port, two engines, of which one is killed, and then one hangs."""

import os
import signal

import psutil

from tests.support.service.server_process import ServerProcess, launched, run_command, verify
from tests.support.service.talking import LONG, SHORT, Stream
from tests.support.waiting import wait_until

HELLO = "Hello, I am {}, and my dog is called Rex. What is the name of my dog? And what is my name?"


def engines(server: ServerProcess) -> list[dict]:
    reply = server.admin("GET", "/admin/stats")
    assert reply.status == 200, reply.body
    return reply.json()["replicas"]


def pids(server: ServerProcess) -> list[int]:
    children = psutil.Process(server.process.pid).children()
    return [child.pid for child in children if "kvstore.engine.program" in child.cmdline()]


def say(server: ServerProcess, text: str, session_id: str | None = None) -> dict:
    named = {} if session_id is None else {"session_id": session_id}
    reply = server.post("/chat", {"message": text, **SHORT, **named})
    assert reply.status == 200, reply.body
    return reply.json()


def begin(server: ServerProcess, session_id: str) -> Stream:
    stream = Stream(server, "/chat", {"message": "Tell me more.", "session_id": session_id, **LONG})
    assert stream.status == 200 and stream.next() is not None
    return stream


def hangs_and_is_replaced(server: ServerProcess) -> None:
    os.kill(engines(server)[1]["process"]["pid"], signal.SIGSTOP)
    wait_until(lambda: "replica_down" in server.get("/health").json()["reasons"], "health says so")
    assert server.get("/ready").status == 200 and server.get("/health").json()["status"] == "degraded"
    assert [say(server, HELLO.format(name))["turn"] for name in ("Anna", "Bob", "Carl")] == [1, 1, 1]
    wait_until(lambda: server.get("/health").json()["status"] == "ok", "it was replaced")
    assert [one["process"]["restarts"] for one in engines(server)] == [1, 1]


def test_one_of_two_engines_is_killed_while_both_answer_and_then_one_hangs(tmp_path):
    store, flags = tmp_path / "store", ("--data-parallel-size", "2", "--engine-timeout", "15")
    with launched(store, *flags) as server:
        assert len(pids(server)) == 2
        sessions = [say(server, HELLO.format(name))["session_id"] for name in ("Anna", "Bob")]
        server.flush()
        streams = [begin(server, session_id) for session_id in sessions]
        assert [one["process"]["requests"] for one in engines(server)] == [1, 1]
        killed = engines(server)[0]["process"]["pid"]
        os.kill(killed, signal.SIGSTOP)  # so that it is not started again before we have looked
        os.kill(killed, signal.SIGKILL)
        ends = [stream.rest() for stream in streams]
        failed = [next((event["error"] for event in events if "error" in event), None) for events in ends]
        assert sorted(error is None for error in failed) == [False, True]
        [error] = [error for error in failed if error is not None]
        assert set(error) >= {"message", "type", "param", "code"}
        assert all(events[-1] == "[DONE]" for events in ends)
        assert server.get("/ready").status == 200
        for session_id, error in zip(sessions, failed, strict=True):
            answer = say(server, "And what is my name?", session_id)
            assert answer["turn"] == (3 if error is None else 2)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
        wait_until(lambda: server.get("/health").json() == {"status": "ok", "reasons": []}, "both answer")
        page = server.get("/metrics").body.decode()
        assert 'kvstore:replica_up{replica="0"} 1.0' in page and 'kvstore:replica_requests{replica="1"}' in page
        hangs_and_is_replaced(server)
        shown = run_command("stats", "--store", store)
        assert shown.returncode == 0 and "2 of 2 answer; open requests: 0 and 0" in shown.stdout, shown
        assert run_command("evict", "--store", store, "--all").returncode == 0
        assert server.admin("GET", "/admin/stats").json()["disk"]["blocks"] == 0
        answer = say(server, "And my dog?", sessions[0])
        server.flush()
        server.process.terminate()
        assert server.process.wait(60) == 0 and pids_gone(server)
    verify(store)
    with launched(store) as server:  # one engine again
        again = say(server, "And again?", sessions[0])
        assert again["turn"] == answer["turn"] + 1
        assert again["usage"]["prompt_tokens_details"]["cached_tokens_details"]["disk"] >= 16


def pids_gone(server: ServerProcess) -> bool:
    return not [one for one in psutil.process_iter() if is_child(one, server.process.pid)]


def is_child(process: psutil.Process, parent: int) -> bool:
    try:
        return process.ppid() == parent
    except psutil.NoSuchProcess:
        return False
