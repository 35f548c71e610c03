"""Turns that are over leave nothing behind: as many objects after twice as many of them.

The tables of `kvstore` that remember blocks and conversations have bounds of their own, and fill.
"""

import gc
from collections import Counter

from tests.support.service.serving import Serving, serving
from tests.support.service.talking import LONG, SHORT, Stream, chat
from tests.support.waiting import wait_until

NUM_TURNS = 12
LOOKED_AT = ("kvstore.service", "kvstore.engine", "aiohttp", "asyncio", "_asyncio")


def held() -> Counter[str]:
    """Objects of requests, answers, sessions and tasks, by their types."""
    gc.collect()
    kinds = Counter(type(one) for one in gc.get_objects())
    return Counter({kind.__qualname__: n for kind, n in kinds.items() if str(kind.__module__).startswith(LOOKED_AT)})


def grown_since(before: Counter[str]) -> dict[str, int]:
    return {kind: count - before[kind] for kind, count in held().items() if count - before[kind] >= NUM_TURNS // 2}


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
    server.wait_until(lambda: not server.server.connections.open)


def test_nothing_grows_with_the_turns(tmp_path):
    tiers = {"hbm": "8MiB", "cpu": "8MiB", "disk": "32MiB", "path": tmp_path / "store"}
    with serving(engine={"cache_tiers": tiers}) as server:
        talk(server)  # pools and caches fill
        before = held()
        talk(server)
        server.engine.flush()
        wait_until(lambda: not grown_since(before), "nothing grows")
