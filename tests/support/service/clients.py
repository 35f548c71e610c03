"""Clients that talk to a server, perhaps until it dies, and know afterwards what it has to know.

An acknowledged turn is there for ever; one that was not acknowledged is there whole or not at all; nothing is twice.
"""

import http.client
import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from tests.support.service.server_process import ServerProcess
from tests.support.service.talking import Stream, chat
from tests.support.waiting import TIMEOUT_S

MAX_TURNS = 6  # of one conversation: it stays within the window, so what is cached of it can be told
BROKEN = (OSError, http.client.HTTPException)
QUOTE = "I would like to say something about it that no other conversation says in this way, and then go on."


# -- clients ---------------------------------------------------------------------------------------------------------
class Progress:
    """How many pieces all clients have received, so that a kill comes at a certain one."""

    def __init__(self) -> None:
        self.num_pieces = 0
        self._changed = threading.Condition()

    def add(self) -> None:
        with self._changed:
            self.num_pieces += 1
            self._changed.notify_all()

    def wait(self, num_more: int) -> None:
        with self._changed:
            goal = self.num_pieces + num_more
            assert self._changed.wait_for(lambda: self.num_pieces >= goal, 2 * TIMEOUT_S), "no client gets an answer"


@dataclass
class Attempt:
    """A turn that was asked for and not acknowledged yet. text: what came of its answer."""

    session_id: str | None
    body: dict
    headers: dict[str, str]
    text: str = ""

    @property
    def said(self) -> str:
        return self.body["message"]


@dataclass
class Talk:
    """A conversation as its client was told. num_durable: its tokens whose KV was flushed to disk."""

    turns: list[tuple[str, str]] = field(default_factory=list)
    num_tokens: int = 0
    num_durable: int = 0

    def add(self, said: str, answer: dict) -> None:
        assert answer["turn"] == len(self.turns) + 1, "a turn too many or too few"
        self.turns.append((said, answer["message"]["content"]))
        self.num_tokens = answer["usage"]["total_tokens"]


class Client:
    """Who talks until the server does not answer any more. name: also the seed of all that it draws."""

    def __init__(self, name: str, progress: Progress) -> None:
        self.name, self._progress = name, progress
        self.rng = random.Random(name)
        self._number = 0

    def talk(self, server: ServerProcess) -> None:
        while self.step(server):
            pass

    def step(self, server: ServerProcess) -> bool:
        """One turn; whether it was acknowledged."""
        raise NotImplementedError


class SessionClient(Client):
    """Talks on /chat, one turn after the other. sampled: how, if it is not drawn; each turn has a key then."""

    def __init__(self, name: str, progress: Progress, sampled: dict | None = None) -> None:
        super().__init__(name, progress)
        self._sampled = sampled
        self.talks: dict[str, Talk] = {}
        self.current: str | None = None
        self.attempt: Attempt | None = None

    def step(self, server: ServerProcess) -> bool:
        self.begin()
        return self.ask(server)

    def ask(self, server: ServerProcess) -> bool:
        """For the turn that was begun, perhaps again; whether it is acknowledged."""
        attempt = self.attempt
        assert attempt is not None
        try:
            answer = self._asked(server, attempt)
        except BROKEN:
            return False
        if answer is not None:
            self._acknowledged(answer)
        return answer is not None

    def begin(self) -> None:
        """Its next turn."""
        rng = self.rng
        if self.current is not None and len(self.talks[self.current].turns) >= MAX_TURNS:
            self.current = None
        self._number += 1
        said = f"{self.name} says number {self._number}. "
        if self._sampled is not None:
            body, has_key = {"message": said, "stream": False, **self._sampled}, True
        else:
            sampled = {"max_tokens": rng.randrange(4, 40), "ignore_eos": True, "temperature": rng.choice((0, 1.0))}
            body = {"message": said + QUOTE[: rng.randrange(len(QUOTE))], "stream": rng.random() < 0.6, **sampled}
            has_key = rng.random() < 0.6
        if self.current is not None:
            body["session_id"] = self.current
        headers = {"Idempotency-Key": f"{self.name} {self._number}"} if has_key else {}
        self.attempt = Attempt(self.current, body, headers)

    def _asked(self, server: ServerProcess, attempt: Attempt) -> dict | None:
        """The acknowledged answer; None when the server says that it failed."""
        if attempt.body["stream"]:
            return self._streamed(server, attempt)
        reply = server.request("POST", "/chat", attempt.body, attempt.headers)
        assert reply.status in (200, 429, 503) or (self._sampled and reply.status == 409), reply.body
        if reply.status != 200:
            return None
        self._progress.add()
        return reply.json()

    def _streamed(self, server: ServerProcess, attempt: Attempt) -> dict | None:
        """It ends early where the server is full, says that it failed, or dies."""
        stream = Stream(server, "/chat", attempt.body, **attempt.headers)
        try:
            assert stream.status in (200, 429, 503), stream.next()
            while stream.status == 200 and isinstance(event := stream.next(), dict):
                self._progress.add()
                if "error" in event:
                    assert event["error"]["type"] == "server_error", event
                    return None
                attempt.session_id = event["session_id"]
                if event["finish_reason"] is not None:
                    assert event["message"]["content"] == attempt.text
                    return event
                attempt.text += event["delta"]["content"]
        finally:
            stream.leave()
        return None

    def _acknowledged(self, answer: dict) -> None:
        attempt, self.attempt = self.attempt, None
        self.current = answer["session_id"]
        self.talks.setdefault(self.current, Talk()).add(attempt.said, answer)

    # -- after the kill ----------------------------------------------------------------------------------------------
    def check(self, server: ServerProcess) -> None:
        """All that was acknowledged is there, and of what was not either all or nothing."""
        for session_id, talk in self.talks.items():
            self._check_talk(session_id, talk.turns, turns_of(server, session_id))
        attempt = self.attempt
        if attempt is not None and attempt.session_id is not None and attempt.session_id not in self.talks:
            self._check_talk(attempt.session_id, [], turns_of(server, attempt.session_id))

    def _check_talk(self, session_id: str, known: list[tuple[str, str]], found: list[tuple[str, str]]) -> None:
        assert found[: len(known)] == known and len(found) <= len(known) + 1
        if len(found) > len(known):
            said, answer = found[-1]
            assert self.attempt is not None and self.attempt.session_id == session_id, "nobody asked for this"
            assert said == self.attempt.said
            assert answer.startswith(self.attempt.text), "the client has read something else"

    def settle(self, server: ServerProcess, tier: str | None) -> None:
        """What was not acknowledged is asked for again, or looked for; then comes the next turn."""
        if self.attempt is not None and not self.attempt.headers:
            self._adopt(server, self.attempt)
        elif self.attempt is not None and self._retry(server, self.attempt, tier):
            tier = None  # its KV is in HBM now
        self._go_on(server, tier)

    def _retry(self, server: ServerProcess, attempt: Attempt, tier: str | None) -> bool:
        """The same request gives one turn, now or before. Returns whether it was computed now."""
        before = turns_of(server, attempt.session_id)
        was_stored = any(said == attempt.said for said, _ in before)
        attempt.text = ""
        answers = [self._retried(server, attempt) for _ in range(2)]
        assert answers[0] == answers[1], "a retry changes nothing"
        found = turns_of(server, answers[0]["session_id"])
        assert [said for said, _ in found].count(attempt.said) == 1
        assert not was_stored or found == before
        if not was_stored and self.current in self.talks:
            check_cached(answers[0], self.talks[self.current].num_durable, tier)
        self._acknowledged(answers[0])
        return not was_stored

    @staticmethod
    def _retried(server: ServerProcess, attempt: Attempt) -> dict:
        reply = server.request("POST", "/chat", {**attempt.body, "stream": False}, attempt.headers)
        assert reply.status == 200, reply.body
        return reply.json()

    def _adopt(self, server: ServerProcess, attempt: Attempt) -> None:
        """A client without a key looks whether its turn is there; a new session that it was not told of is nobody's."""
        self.attempt = None
        found = turns_of(server, attempt.session_id)
        if attempt.session_id is not None and found:
            self.current = attempt.session_id
            self.talks.setdefault(attempt.session_id, Talk()).turns = found

    def _go_on(self, server: ServerProcess, tier: str | None) -> None:
        if self.current is None:
            return
        talk = self.talks[self.current]
        answer = chat(server, f"{self.name} is back.", self.current, max_tokens=4)
        talk.add(f"{self.name} is back.", answer)
        check_cached(answer, talk.num_durable, tier)

    def note_flush(self) -> None:
        if self.current is not None:  # whose KV this server has, computed or loaded
            talk = self.talks[self.current]
            talk.num_durable = max(talk.num_tokens - 1, 0)  # the last token was never computed


class HistoryClient(Client):
    """Talks on /v1/chat/completions, with the whole history in each request."""

    def __init__(self, name: str, progress: Progress) -> None:
        super().__init__(name, progress)
        self.begin_anew()

    def begin_anew(self) -> None:
        self.messages: list[dict[str, str]] = []
        self.num_tokens = self.num_durable = 0

    def step(self, server: ServerProcess) -> bool:
        if len(self.messages) >= 2 * MAX_TURNS:
            self.begin_anew()
        self._number += 1
        asked = [*self.messages, {"role": "user", "content": f"{self.name} asks {self._number}. {QUOTE}"}]
        body = {"messages": asked, "max_tokens": self.rng.randrange(4, 40), "ignore_eos": True}
        try:
            reply = server.post("/v1/chat/completions", body)
        except BROKEN:
            return False
        self._progress.add()
        assert reply.status in (200, 429, 503), reply.body
        if reply.status == 200:
            self.messages = [*asked, reply.json()["choices"][0]["message"]]
            self.num_tokens = reply.json()["usage"]["total_tokens"]
        return reply.status == 200

    def check(self, server: ServerProcess) -> None:
        """Its history is its own: the server keeps none."""

    def settle(self, server: ServerProcess, tier: str | None) -> None:
        """What was flushed of its history, which comes as text, is found as the ids that it was."""
        asked = [*self.messages, {"role": "user", "content": f"{self.name} is back."}]
        reply = server.post("/v1/chat/completions", {"messages": asked, "max_tokens": 4, "temperature": 0})
        assert reply.status == 200, reply.body
        check_cached(reply.json(), self.num_durable, tier)
        if reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] < (self.num_tokens - 1) // 16 * 16:
            self.num_tokens = self.num_durable  # its last answer is text from now on: its ids were not durable yet

    def note_flush(self) -> None:
        self.num_durable = max(self.num_tokens - 1, 0)


def check_cached(answer: dict, num_durable: int, tier: str | None) -> None:
    """All blocks of so many tokens were found, in that tier but for the first one, which others may share."""
    details, wanted = answer["usage"]["prompt_tokens_details"], num_durable // 16 * 16
    assert details["cached_tokens"] >= wanted, f"{details} of {num_durable} tokens"
    if tier is not None and wanted >= 32:
        assert details["cached_tokens_details"][tier] >= wanted - 16, details


def turns_of(server: ServerProcess, session_id: str | None) -> list[tuple[str, str]]:
    """What was said and answered; nothing for a session that does not exist."""
    if session_id is None:
        return []
    reply = server.get(f"/sessions/{session_id}?limit=1000")
    assert reply.status in (200, 404), reply.body
    if reply.status == 404:
        return []
    contents = [message["content"] for message in reply.json()["messages"]]
    return list(zip(contents[::2], contents[1::2], strict=True))


class Clients:
    """All who talk to one store, whichever server runs on it."""

    def __init__(self, seed: int) -> None:
        self.progress = Progress()
        self.rng = random.Random(seed)
        self.sessions = [SessionClient(f"client {seed}-{number}", self.progress) for number in range(4)]
        self.histories = [HistoryClient(f"reader {seed}-{number}", self.progress) for number in range(2)]
        self.all = [*self.sessions, *self.histories]
        self._lost: set[str] = set()  # turns of sessions that their client was never told of
        self._talking: list[Future[None]] = []

    def begin(self, server: ServerProcess) -> None:
        """All talk at once until the server ends."""
        pool = ThreadPoolExecutor(len(self.all))
        self._talking = [pool.submit(client.talk, server) for client in self.all]
        pool.shutdown(wait=False)

    def join(self) -> None:
        for one in self._talking:
            one.result(2 * TIMEOUT_S)

    def check(self, server: ServerProcess, tier: str | None = "disk") -> None:
        """After a restart, with nobody talking. tier: where flushed KV has to be."""
        for client in self.all:
            client.check(server)
        self._check_all_sessions(server)
        for client in self.all:
            client.settle(server, tier)
        server.flush()
        for client in self.all:
            client.note_flush()

    def _check_all_sessions(self, server: ServerProcess) -> None:
        """No session that nobody asked for, and no turn twice."""
        listed = [one["id"] for one in server.get("/sessions?limit=1000").json()["data"]]
        said = [text for session_id in listed for text, _ in turns_of(server, session_id) if " is back" not in text]
        assert len(said) == len(set(said)), "a turn is there twice"
        known = {text for client in self.sessions for talk in client.talks.values() for text, _ in talk.turns}
        tried = {client.attempt.said for client in self.sessions if client.attempt is not None} | self._lost
        assert {text for text in known if " is back" not in text} <= set(said) <= known | tried
        self._lost |= tried

    @property
    def num_acknowledged(self) -> int:
        return sum(len(talk.turns) for client in self.sessions for talk in client.talks.values())
