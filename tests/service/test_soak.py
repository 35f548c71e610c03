"""Mixed traffic for a while, right and wrong, with clients that leave or do not read: afterwards nothing is left of it.

`--long` makes it minutes. Each client draws what it does from a seed; only how they interleave is chance.
"""

import gc
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from kvstore import Engine
from kvstore.engine.outputs import MOST_ASKED, CachedTokensDetails, Usage
from tests.support.service.clients import Client, HistoryClient, Progress, SessionClient
from tests.support.service.serving import ADMIN, ADMIN_KEY, Reply, Serving, raw_request, read_to_end, serving
from tests.support.service.talking import LONG, SHORT, WRONG, Stream, chat, tenants
from tests.support.waiting import TIMEOUT_S, wait_until

LEAST_EACH = 6
SECONDS, LONG_SECONDS = 2.0, 300.0  # of each of the two parts
DISK_BYTES = 8 * 2**20
TIERS = {"hbm": "4MiB", "cpu": "4MiB", "disk": DISK_BYTES}
GROWTH_BYTES = 100 * 2**20
WORDS = "the sea a long walk in the evening with an old friend who likes to talk about ships and their people".split()
NUM_TURNS = 8
LOOKED_AT = ("kvstore.service", "kvstore.engine", "aiohttp", "asyncio", "_asyncio")


def text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.choice((3, 10, 60))))


def sampled(rng: random.Random) -> dict:
    return {"max_tokens": rng.choice((1, 5, 30)), "temperature": rng.choice((0, 1.5)), "ignore_eos": True}


def raw(server: Serving, body: dict, path: str = "/chat") -> bytes:
    key = f"Bearer {server.key}"
    return raw_request("POST", path, json.dumps(body).encode(), Authorization=key, Connection="close")


class Trouble(Client):
    """One person with a few sessions, who does something else each time, and much of it wrong."""

    def __init__(self, name: str, progress: Progress) -> None:
        super().__init__(name, progress)
        self._sessions: list[str] = []
        self._responses: list[str] = []

    def step(self, server: Serving) -> bool:
        self._server = server
        (action,) = self.rng.choices(list(ACTIONS), list(ACTIONS.values()))
        action(self)
        return True

    # -- what all actions use ----------------------------------------------------------------------------------------
    def _session(self) -> str | None:
        return self.rng.choice(self._sessions) if self._sessions else None

    def _body(self) -> dict:
        session_id = self._session() if self.rng.random() < 0.7 else None
        named = {} if session_id is None else {"session_id": session_id}
        return {"message": text(self.rng), **sampled(self.rng), **named}

    def _expect(self, reply: Reply, *statuses: int) -> bool:
        """Whether it succeeded. 429 and 503 are the server's right."""
        assert reply.status in (*statuses, 429, 503), (reply.status, reply.body[:500])
        return reply.status in (200, 202)

    def _keep(self, session_id: str) -> None:
        if session_id not in self._sessions:
            self._sessions.append(session_id)

    # -- turns -------------------------------------------------------------------------------------------------------
    def talk(self) -> None:
        """Perhaps twice the same, as a retry."""
        key = {"Idempotency-Key": f"{self.rng.getrandbits(64)}"}
        body, num_times = self._body(), self.rng.choice((1, 1, 1, 2))
        replies = [self._server.request("POST", "/chat", body, key) for _ in range(num_times)]
        succeeded = [self._expect(reply, 200, 409) for reply in replies]
        if all(succeeded):
            assert replies[0].json() == replies[-1].json()
            self._keep(replies[0].json()["session_id"])

    def respond(self) -> None:
        body = {"input": text(self.rng), "max_output_tokens": 16, "truncation": "auto"}
        if self._responses and self.rng.random() < 0.7:
            body["previous_response_id"] = self.rng.choice(self._responses)
        if self.rng.random() < 0.2:
            body["store"] = False
        reply = self._server.post("/v1/responses", body)
        if self._expect(reply, 200, 404) and body.get("store") is None:
            self._responses = [*self._responses[-3:], reply.json()["id"]]

    def complete(self) -> None:
        prompts = [text(self.rng) for _ in range(self.rng.randrange(1, 4))]
        salt, n = self.rng.choice((None, "s")), self.rng.randrange(1, 4)
        body = {"prompt": prompts, "n": n, "cache_salt": salt, **sampled(self.rng)}
        reply = self._server.post("/v1/completions", body)
        if self._expect(reply, 200):
            assert len(reply.json()["choices"]) == len(prompts) * n

    # -- trouble -----------------------------------------------------------------------------------------------------
    def say_nonsense(self) -> None:
        path, body = self.rng.choice(WRONG)
        reply = self._server.request("POST", path, body)
        self._expect(reply, 400, 404, 405)
        assert set(reply.error) == {"message", "type", "param", "code"}

    def leave(self) -> None:
        """In the middle of a stream; the turn is not stored."""
        stream = Stream(self._server, self.rng.choice(("/chat", "/v1/responses")), {**self._body(), "input": "a"})
        for _ in range(self.rng.randrange(4)):
            stream.next()
        stream.leave()

    def leave_before_the_answer(self) -> None:
        """Perhaps before the end of its own request."""
        request = raw(self._server, {**self._body(), "max_tokens": 200})
        with self._server.connect() as wire:
            wire.sendall(request[: self.rng.choice((1, 20, len(request) - 1, len(request)))])
            if self.rng.random() < 0.3:
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset instead of an end

    def read_slowly(self) -> None:
        """Longer than the server waits for a reader."""
        body = {"prompt": text(self.rng), **sampled(self.rng), "max_tokens": 400, "stream": True, "n": 4}
        with self._server.connect(receive_bytes=2048) as wire:
            wire.sendall(raw(self._server, body, "/v1/completions"))
            time.sleep(0.6)
            with suppress(ConnectionError):
                read_to_end(wire)

    def flood(self) -> None:
        """Many at once, of which some are refused."""
        opened = [self._server.connect() for _ in range(12)]
        for wire in opened:
            wire.sendall(raw(self._server, {"message": "Hello", "max_tokens": 2}))
        for wire in opened[::2]:
            wire.recv(1)
        for wire in opened:
            wire.close()

    # -- sessions ----------------------------------------------------------------------------------------------------
    def look(self) -> None:
        for path in ("/health", "/sessions", "/metrics", f"/sessions/{self._session() or 'none'}"):
            self._expect(self._server.get(path), 200, 404)

    def change(self) -> None:
        if (session_id := self._session()) is None:
            return
        verb = self.rng.choice(("fork", "fork", "truncate", "truncate", "prefetch"))
        body = {"turns": self.rng.randrange(3)} if verb == "truncate" else {}
        reply = self._server.post(f"/sessions/{session_id}/{verb}", body)
        if self._expect(reply, 202 if verb == "prefetch" else 200, 404, 409) and verb == "fork":
            self._keep(reply.json()["id"])

    def stop(self) -> None:
        stream = Stream(self._server, "/chat", {**self._body(), "max_tokens": 300})
        if isinstance(event := stream.next(), dict) and "session_id" in event:
            self._expect(self._server.post(f"/sessions/{event['session_id']}/stop"), 200, 404)
        stream.rest()

    def delete(self) -> None:
        if len(self._sessions) > 2:
            session_id = self._sessions.pop(self.rng.randrange(len(self._sessions)))
            self._expect(self._server.request("DELETE", f"/sessions/{session_id}"), 200)
            assert self._server.get(f"/sessions/{session_id}").status == 404


ACTIONS = {
    Trouble.talk: 8, Trouble.respond: 3, Trouble.complete: 2,
    Trouble.say_nonsense: 4, Trouble.leave: 5, Trouble.leave_before_the_answer: 3, Trouble.read_slowly: 1,
    Trouble.flood: 1, Trouble.look: 3, Trouble.change: 5, Trouble.delete: 3, Trouble.stop: 2,
}  # fmt: skip


def run(client: Client, server: Serving, until_s: float) -> None:
    """Until then, and until it has done enough, however slow this machine is."""
    num_done = 0
    while time.monotonic() < until_s or num_done < LEAST_EACH:
        num_done += client.step(server)


def run_all(clients: list[Client], servers: Sequence[Serving], seconds: float) -> None:
    """Every second one is the other tenant's."""
    with ThreadPoolExecutor(len(clients)) as pool:
        until_s = time.monotonic() + seconds
        talking = [pool.submit(run, client, servers[number % 2], until_s) for number, client in enumerate(clients)]
        for one in talking:
            one.result(seconds + 3 * TIMEOUT_S)


class Held:
    """What this process and its children hold while nothing runs; pools grow to their size when they need to."""

    def __init__(self) -> None:
        gc.collect()
        children = psutil.Process().children(recursive=True)
        own = [thread for thread in threading.enumerate() if not thread.name.startswith(("engine-call", "asyncio_"))]
        self.num_threads = len(own) + sum(child.num_threads() for child in children)
        self.num_descriptors = sum(process.num_fds() for process in (psutil.Process(), *children))
        self.memory_bytes = sum(process.memory_info().rss for process in (psutil.Process(), *children))


def check_idle(servers: list[Serving], store: Path) -> None:
    """No count is above zero, and all is well."""
    server = servers[0]
    server.wait_until_idle()
    server.wait_until(lambda: not server.server.connections, "all connections are closed")
    stats = server.request("GET", "/admin/stats", None, ADMIN).json()
    assert stats["requests"]["running"] == stats["requests"]["waiting"] == 0
    assert server.get("/health").json() == {"status": "ok", "reasons": []}
    assert all(not one["running"] for each in servers for one in each.get("/sessions?limit=1000").json()["data"])
    tenants_now = server.request("GET", "/admin/tenants", None, ADMIN).json()["tenants"]
    assert all(one["running"] == 0 for one in tenants_now)
    server.engine.flush()
    assert (store / "blocks" / "data.mdb").stat().st_size <= DISK_BYTES


@pytest.mark.parametrize("kind", ["in this process", "in its own process"])
def test_nothing_is_left_of_mixed_traffic(tmp_path, request, kind):
    """The second part of it costs no more memory, descriptors or threads than the first."""
    is_long, is_remote = request.config.getoption("--long"), kind == "in its own process"
    if is_remote and not is_long:
        pytest.skip("needs --long")
    seconds, store = LONG_SECONDS if is_long else SECONDS, tmp_path / "store"
    engine = {"cache_tiers": {**TIERS, "path": store}, "max_num_seqs": 8}
    factory = (lambda: Engine(device="cpu", process="own", **engine)) if is_remote else None
    limits = {"max_queue": 24, "write_timeout_s": 0.3, "admin_key": ADMIN_KEY}
    with tenants(tmp_path, engine=engine, engine_factory=factory, **limits) as servers:
        kinds, progress = (Trouble, Trouble, SessionClient, HistoryClient, Trouble, Trouble, SessionClient), Progress()
        clients = [kind(f"client {number}", progress) for number, kind in enumerate(kinds)]
        run_all(clients, servers, seconds)
        check_idle(list(servers), store)
        before = Held()
        run_all(clients, servers, seconds)
        check_idle(list(servers), store)
        after = Held()
        assert after.num_threads <= before.num_threads + 2
        assert after.num_descriptors <= before.num_descriptors + 4
        assert after.memory_bytes <= before.memory_bytes + GROWTH_BYTES
        for server in servers:
            while page := server.get("/sessions?limit=1000").json()["data"]:
                for one in page:
                    assert server.request("DELETE", f"/sessions/{one['id']}").status == 200
        check_idle(list(servers), store)
        assert servers[0].engine.sessions.stats()["sessions"] == 0
        assert servers[0].engine.admin.verify()["num_corrupt"] == 0


def counts_by_type() -> Counter[str]:
    """Objects of requests, answers, sessions and tasks, by their types."""
    gc.collect()
    kinds = Counter(type(one) for one in gc.get_objects())
    return Counter({kind.__qualname__: n for kind, n in kinds.items() if str(kind.__module__).startswith(LOOKED_AT)})


def grown_since(before: Counter[str]) -> dict[str, int]:
    return {kind: count for kind, count in (counts_by_type() - before).items() if count >= NUM_TURNS // 2}


def fill_usages(server: Serving) -> None:
    """As if as many requests had ended as it tells of."""
    for number in range(MOST_ASKED):
        server.engine.admin.usages["", f"{number}"] = (Usage(0, 0, CachedTokensDetails(number)),)


def talk(server: Serving) -> None:
    """Sessions of two turns that are deleted, streams that are left, and requests that are refused."""
    for number in range(NUM_TURNS):
        session_id = chat(server, f"I am number {number}")["session_id"]
        chat(server, "Who am I?", session_id)
        stream = Stream(server, "/chat", {"message": "Count.", "session_id": session_id, **LONG})
        stream.next()
        stream.leave()
        assert server.post("/chat", {"message": 5}).status == 400
        assert server.post("/v1/chat/completions", {"messages": [], **SHORT}).status == 400
        assert server.request("DELETE", f"/sessions/{session_id}").status == 200
    server.wait_until_idle()
    server.wait_until(lambda: not server.server.connections)


def test_nothing_grows_with_the_turns(tmp_path, caplog):
    tiers = {"hbm": "8MiB", "cpu": "8MiB", "disk": "32MiB", "path": tmp_path / "store"}
    with serving(engine={"cache_tiers": tiers}) as server:
        fill_usages(server)
        talk(server)  # pools and caches fill
        before = counts_by_type()
        talk(server)
        server.engine.flush()
        assert [record for record in caplog.records if record.levelname == "ERROR"] == []  # nor told of who only left
        wait_until(lambda: not grown_since(before), "nothing grows")
