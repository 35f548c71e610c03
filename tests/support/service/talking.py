"""What tests of /chat, /sessions and /v1/responses share: a server with two tenants, streams read event by event."""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.service.serving import Serving, serving
from tests.support.waiting import TIMEOUT_S

LONG = {"max_tokens": 900, "ignore_eos": True, "temperature": 0}
TALKING_ROUTES = ("/chat", "/v1/chat/completions", "/v1/completions", "/v1/responses")
SHORT = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}
SECRET = "Xanthippe_of_4711"
WRONG = [  # bodies that are refused, most of them with the secret
    ("/chat", {"message": SECRET, "temperature": -1}), ("/chat", {"message": SECRET, "session_id": "0" * 32}),
    ("/chat", {"message": SECRET, "session_id": "../x"}), ("/chat", {"message": SECRET, "n": SECRET}),
    ("/chat", {"message": {"role": "king", "content": SECRET}}), ("/chat", {"messages": SECRET}), ("/chat", b"[]"),
    ("/chat", {"message": f"{SECRET} " * 3000, "truncation": "disabled"}), ("/chat", SECRET.encode()), ("/chat", b""),
    ("/chat", {"message": SECRET, "messages": [{"role": "user", "content": SECRET}]}), ("/chat", b"[" * 50_000),
    ("/chat", b'{"message": "' + SECRET.encode()), ("/chat", b'{"message": "' + SECRET.encode() + b'\xff"}'),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": SECRET}]}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"{SECRET} " * 3000}]}),
    ("/v1/chat/completions", {"model": "other", "messages": [{"role": "user", "content": SECRET}]}),
    ("/v1/completions", {"prompt": SECRET, "max_tokens": 0}), ("/v1/completions", {"prompt": [[SECRET]]}),
    ("/v1/completions", {"prompt": [10**9]}), ("/v1/responses", {"input": SECRET, "truncation": SECRET[:3]}),
    ("/v1/responses", {"input": [{"type": "picture", "content": SECRET}]}), ("/tokenize", {"prompt": 5, "x": SECRET}),
    ("/v1/responses", {"input": SECRET, "previous_response_id": "resp_0_1"}), ("/chat", b'{"temperature": 1e999}'),
    ("/sessions", {}), ("/nowhere", {}),
]  # fmt: skip


@contextmanager
def tenants(folder: Path, **options: Any) -> Iterator[tuple[Serving, Serving]]:
    """One server, as two tenants see it."""
    keys = folder / "keys"
    keys.write_text("alice:key-of-alice\nbob:key-of-bob\n")
    keys.chmod(0o600)
    with serving(api_key_file=keys, **options) as server:
        yield replace(server, key="key-of-alice"), replace(server, key="key-of-bob")


def talking_body(path: str, text: str) -> dict[str, Any]:
    """The body of a request that says this, for any route that generates, or as messages for the tokenizer's."""
    if path in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
        return {"messages": [{"role": "user", "content": text}]}
    return {{"/chat": "message", "/v1/completions": "prompt", "/v1/responses": "input"}[path]: text}


class Stream:
    """A streamed answer that is read event by event, and can be left."""

    def __init__(self, server: Serving, path: str, body: dict[str, Any], **headers: str) -> None:
        self._connection = http.client.HTTPConnection(*server.hosts, timeout=TIMEOUT_S)
        sent = {"Content-Type": "application/json", **headers}
        if server.key is not None:
            sent["Authorization"] = f"Bearer {server.key}"
        self._connection.request("POST", path, json.dumps({**body, "stream": True}), sent)
        self._reply = self._connection.getresponse()
        self.status = self._reply.status

    def next(self) -> Any:
        """The next event's data; None at the end."""
        while line := self._reply.readline():
            if line.startswith(b"data: "):
                data = line[6:].strip()
                return "[DONE]" if data == b"[DONE]" else json.loads(data)
        return None

    def rest(self) -> list[Any]:
        events = []
        while (event := self.next()) is not None:
            events.append(event)
        self.leave()
        return events

    def leave(self) -> None:
        self._reply.close()
        self._connection.close()


def chat(server: Serving, message: str, session_id: str | None = None, **body: Any) -> dict[str, Any]:
    """One turn that succeeds."""
    named = {} if session_id is None else {"session_id": session_id}
    reply = server.post("/chat", {"message": message, **SHORT, **named, **body})
    assert reply.status == 200, reply.body
    return reply.json()


def stopped(server: Serving, stream: Stream, session_id: str) -> list[Any]:
    """The events of a turn that are left, which is stopped so that they are few, once it has said something to keep."""
    while not stream.next()["delta"].get("content"):
        pass
    assert server.post(f"/sessions/{session_id}/stop").status == 200
    return stream.rest()


def num_turns(server: Serving, session_id: str) -> int:
    return server.get(f"/sessions/{session_id}").json()["turns"]


def without_ids(messages):
    """What a session shows, as it was said."""
    return [{name: value for name, value in message.items() if name != "id"} for message in messages]
