"""Conversations as their clients were told, and the clients, who ask for each turn until it is acknowledged.

An acknowledged turn is there for ever; one that was not acknowledged is there whole or not at all; nothing is twice.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.campaign.servers import BROKEN, PATIENCE_S, Failure, Node, expect

MAX_TALKS, MAX_PROMPT = 4, 700  # of one client; tokens after which a conversation is left, where none is truncated
RETRY_S = 0.2
TIERS = ("hbm", "cpu", "disk", "remote", "reencoded")
WORDS = (
    "the sea a long walk in the evening with an old friend who likes to talk about ships and their people while it "
    "rains on seven green hills behind our house where nobody lives but two cats and one very small dog called Rex"
).split()
SYSTEMS = (
    None,
    None,
    "You are kind, and you answer in short sentences, whatever you are asked about ships.",
    "You know all cats of this town by their names, and you never tell them to anybody who does not ask.",
)
TOOLS: list[dict[str, Any]] = [{
    "type": "function",
    "function": {
        "name": "weather", "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"], "additionalProperties": False,
        },
    },
}]  # fmt: skip


@dataclass
class Told:
    """A turn: what was asked, and the answer, once it was acknowledged. key: its Idempotency-Key. is_compared: with the
    reference's. edit: the body of an edit, which is a turn without messages.
    """

    said: list[dict[str, Any]]
    max_tokens: int
    must_call: bool
    key: str
    answer: dict[str, Any] = field(default_factory=dict)
    is_reencoded: bool = False
    is_compared: bool = False
    edit: dict[str, Any] | None = None


@dataclass
class Talk:
    """A conversation as its client was told. pending: the turn that was asked for and not acknowledged yet. is_exact:
    whether its answers can be compared with the reference's. num_tokens: in its window.
    """

    name: str
    system: str | None
    reuse: str
    turns: list[Told] = field(default_factory=list)
    pending: Told | None = None
    is_exact: bool = True
    num_tokens: int = 0

    @property
    def transcript(self) -> list[dict[str, Any]]:
        """What `GET /sessions/ID` has to show."""
        messages: list[dict[str, Any]] = []
        for turn in self.turns:
            messages = self.edited(messages, turn.edit) if turn.edit else [*messages, *turn.said, turn.answer]
        return messages

    def edited(self, messages: Sequence[dict[str, Any]], edit: dict[str, Any]) -> list[dict[str, Any]]:
        """These messages, which a system prompt may stand before, after an edit."""
        changes = {one["index"] - bool(self.system): one.get("content") for one in edit["edits"]}
        changed = ({**message, "content": changes[i]} if changes.get(i) else message
                   for i, message in enumerate(messages) if changes.get(i, "") is not None)  # fmt: skip
        return list(changed)

    @property
    def may_be_forked(self) -> bool:
        """Not where a turn was changed later, and for ever."""
        return bool(self.turns) and self.is_exact and not any(
            turn.edit and turn.edit["reuse"] == "forget" for turn in self.turns
        )  # fmt: skip

    def fork(self, name: str, num_turns: int) -> Talk:
        return Talk(name, self.system, self.reuse, self.turns[:num_turns], num_tokens=self.num_tokens)


def talk_of(found: dict[str, Any]) -> Talk:
    """From JSON."""
    pending = found["pending"] and Told(**found["pending"])
    return Talk(**{**found, "turns": [Told(**turn) for turn in found["turns"]], "pending": pending})


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message with what the server or the library does not draw."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {"role": message["role"], "content": message["content"], "calls": calls}


def check_transcript(node: Node, talk: Talk, is_again: bool = False) -> bool:
    """All that was acknowledged is there, and of what was not either all or nothing. is_again: it was perhaps deleted,
    or went on, in a round that did not end. Returns whether it is as it was told.
    """
    status, found = node.ask("GET", f"/sessions/{talk.name}?limit=1000")
    if status == 404 and (is_again or not talk.turns):
        return not talk.turns
    expect(status == 200, f"{node.store.name}: {talk.name} of {len(talk.turns)} turns is {status}: {found}")
    if is_again and found["turns"] > len(talk.turns):
        return False
    there, known, pending = found["messages"], talk.transcript, talk.pending
    if pending is not None and pending.edit and not _is_told(known, there):
        known = talk.edited(known, pending.edit)
    more = there[len(known) :]
    lost = f"{node.store.name}: {talk.name} is {there}, and its client was told {known}; asked for was {pending}"
    expect(_is_told(known, there[: len(known)]), lost)
    is_whole = pending is not None and not pending.edit and len(more) == len(pending.said) + 1
    odd = f"{node.store.name}: {talk.name} goes on with {more}, and {pending} was asked"
    expect(not more or is_whole, odd)
    return not more


def _is_told(known: Sequence[dict[str, Any]], there: Sequence[dict[str, Any]]) -> bool:
    """Whether messages are those that a client knows."""
    same = ({name: message.get(name) for name in one} == one for one, message in zip(known, there, strict=False))
    return len(known) == len(there) and all(same)


class Progress:
    """What all clients have received, and whether a fault lasts: only then may they be refused."""

    def __init__(self) -> None:
        self.num_pieces = self.num_turns = 0
        self.may_fail = False
        self.counts: Counter[str] = Counter()
        self._changed = threading.Condition()

    def add(self, is_turn: bool = False) -> None:
        with self._changed:
            self.num_pieces += 1
            self.num_turns += is_turn
            self._changed.notify_all()

    def count(self, **more: int) -> None:
        with self._changed:
            self.counts.update(more)

    def wait(self, num_pieces: int, num_turns: int, is_over: Callable[[], bool]) -> None:
        """Until so much has come, or nothing more will."""
        with self._changed:
            while not is_over() and (self.num_pieces < num_pieces or self.num_turns < num_turns):
                self._changed.wait(0.05)


class Client:
    """Has conversations of its own, which begin with its name, and draws what it does. nodes: any may answer."""

    def __init__(
        self, name: str, seed: str, nodes: Sequence[Node], talks: list[Talk], progress: Progress, may_truncate: bool
    ) -> None:
        self.rng, self._name, self._nodes, self.talks = random.Random(seed), name, nodes, talks
        self._progress, self._may_truncate, self._number = progress, may_truncate, 0
        self.deleted: list[str] = []  # where that was acknowledged
        self.gone: list[Talk] = []

    def act(self, num_actions: int) -> None:
        """So many actions, or until no server is there."""
        for _ in range(num_actions):
            if not self._do():
                return

    def _do(self) -> bool:
        open_talks = [talk for talk in self.talks if self._may_truncate or talk.num_tokens < MAX_PROMPT]
        drawn = self.rng.random()
        if drawn < 0.07 and (forkable := [talk for talk in open_talks if talk.may_be_forked]):
            return self._fork(self.rng.choice(forkable))
        if drawn > 0.85 and (edits := {talk.name: edit for talk in self.talks if (edit := self._edit_of(talk))}):
            talk = next(talk for talk in self.talks if talk.name in edits)
            talk.pending = Told([], 0, False, "", edit=edits[talk.name])
            return self.settle(talk)
        if len(self.talks) > MAX_TALKS:
            return self._delete(self.rng.choice(self.talks))
        if not open_talks or drawn < 0.2:
            self._number += 1
            reuse = self.rng.choice(("exact", "exact", "reencode"))
            open_talks = [Talk(f"{self._name}-{self._number}", self.rng.choice(SYSTEMS), reuse)]
            self.talks += open_talks
        talk = self.rng.choice(open_talks)
        self.begin(talk)
        if 0.2 < drawn < 0.27:
            self._leave(talk)
        return self.settle(talk, self.rng.random() < 0.6)

    def begin(self, talk: Talk) -> None:
        """The next turn: what a person says, or the results of the calls in the last answer."""
        if talk.pending is not None:
            return
        rng, calls = self.rng, (talk.turns[-1].answer.get("tool_calls") if talk.turns else None) or ()
        said: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": call["id"], "content": " ".join(rng.choices(WORDS, k=3))} for call in calls
        ]
        if not said:
            said = [{"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.choice((3, 12, 40))))}]
        must_call = not calls and not self._may_truncate and rng.random() < 0.15
        talk.pending = Told(said, 120 if must_call else rng.randrange(3, 32), must_call, f"{rng.getrandbits(64):x}")

    def _edit_of(self, talk: Talk) -> dict[str, Any] | None:
        """Takes back a question and its answer, or asks something else in its place; not the last ones. None if there
        are none, or a turn is still to be acknowledged.
        """
        said = talk.transcript
        pairs = [i for i in range(len(said) - 2) if said[i]["role"] == "user" and not said[i + 1].get("tool_calls")]
        if talk.pending is not None or not pairs:
            return None
        index, rng = self.rng.choice(pairs) + bool(talk.system), self.rng
        edits: list[dict[str, Any]] = [{"type": "remove", "index": index}, {"type": "remove", "index": index + 1}]
        if rng.random() < 0.5:
            edits = [{"type": "replace", "index": index, "content": " ".join(rng.choices(WORDS, k=5))}]
        reuse = rng.choice(("exact", "reencode", "forget"))
        return {"edits": edits, "reuse": reuse, "expected_turn": len(talk.turns)}

    # -- a turn ------------------------------------------------------------------------------------------------------
    @staticmethod
    def _body(talk: Talk, turn: Told) -> dict[str, Any]:
        tools = {"tools": TOOLS, "tool_choice": "required"} if turn.must_call else {"ignore_eos": True}
        system = {"system": talk.system} if talk.system and not talk.turns else {}
        return {
            "session_id": talk.name, "create": True, "messages": turn.said, "max_tokens": turn.max_tokens,
            "temperature": 0, "truncation_reuse": talk.reuse, **tools, **system,
        }  # fmt: skip

    def settle(self, talk: Talk, is_streamed: bool = False) -> bool:
        """Ask for the turn, again and again with its key, until it is acknowledged or no server is there."""
        end = time.monotonic() + PATIENCE_S
        while talk.pending is not None:
            node = self.rng.choice(self._nodes)
            try:
                ask = self._edit if talk.pending.edit else self._streamed if is_streamed else self._whole
                answer = ask(node, talk)
            except BROKEN as error:
                self._may_fail(f"{type(error).__name__}: {error}")
                answer = None
            if answer is not None:
                self._acknowledged(talk, answer)
            elif not any(node.is_running for node in self._nodes):
                return False
            else:
                expect(time.monotonic() < end, f"{talk.name} is not answered in {PATIENCE_S:.0f} s: {talk.pending}")
                self._progress.count(refused=1)
                time.sleep(RETRY_S)
        return True

    def _may_fail(self, why: str) -> None:
        if not self._progress.may_fail:
            raise Failure(f"{why}, and no fault lasts")

    def _refused(self, status: int, found: Any) -> None:
        """A session is busy while a turn that was cut off ends, and for the lease of one whose server was killed."""
        if (status, found["error"].get("code")) != (409, "session_busy"):
            expect(status == 503 and found["error"]["code"] != "store_lost", f"refused with {status}: {found}")
            self._may_fail(f"refused with {status}: {found}")

    def _whole(self, node: Node, talk: Talk) -> dict[str, Any] | None:
        turn = talk.pending
        assert turn is not None
        status, found = node.ask("POST", "/chat", self._body(talk, turn), turn.key)
        if status != 200:
            self._refused(status, found)
            return None
        return found

    def _edit(self, node: Node, talk: Talk) -> dict[str, Any] | None:
        """What is told of an edit, also where it was done and nobody heard of it."""
        turn, number = talk.pending, len(talk.turns) + 1
        assert turn is not None and turn.edit is not None
        status, found = node.ask("POST", f"/sessions/{talk.name}/edit", turn.edit)
        if status == 200:
            return found
        if status == 409 and f"has {number} turns" in found["error"]["message"]:
            return {"turn": number, "reuse": turn.edit["reuse"]}
        self._refused(status, found)
        return None

    def _streamed(self, node: Node, talk: Talk) -> dict[str, Any] | None:
        turn, text = talk.pending, ""
        assert turn is not None
        for status, event in node.stream("/chat", self._body(talk, turn), turn.key):
            if status != 200 or "error" in event:
                self._refused(503 if status == 200 else status, event)
                return None
            self._progress.add()
            if event["finish_reason"] is not None:
                content = event["message"]["content"]
                expect(content == text, f"a stream said {text!r}, and at its end {content!r}")
                return event
            text += event["delta"].get("content", "")
        self._may_fail("a stream ends without its last event")
        return None

    def _acknowledged(self, talk: Talk, found: dict[str, Any]) -> None:
        turn = talk.pending
        assert turn is not None
        expect(found["turn"] == len(talk.turns) + 1, f"{talk.name} of {len(talk.turns)} turns: one is twice: {found}")
        if turn.edit:
            turn.is_reencoded = found["reuse"] == "reencode"
            talk.turns.append(turn)
            talk.pending = None
            self._progress.count(edits=1)
            return
        usage = found["usage"]
        details = usage["prompt_tokens_details"]["cached_tokens_details"]
        turn.answer = {name: value for name, value in found["message"].items() if value is not None}
        turn.is_reencoded = details["reencoded"] > 0
        talk.turns.append(turn)
        talk.pending, talk.num_tokens = None, usage["total_tokens"]
        self._progress.count(
            turns=1, calls=turn.must_call, truncations=found["truncated_tokens"] > 0,
            computed=usage["prompt_tokens"] - sum(details[tier] for tier in TIERS),
            **{tier: details[tier] for tier in TIERS},
        )  # fmt: skip
        self._progress.add(is_turn=True)

    def _leave(self, talk: Talk) -> None:
        """Ask, and go away after the first words; it is asked for again afterwards."""
        turn = talk.pending
        assert turn is not None
        events = self.rng.choice(self._nodes).stream("/chat", self._body(talk, turn), turn.key)
        try:
            status, found = next(events)
            if status != 200:
                self._refused(status, found)
        except BROKEN as error:
            self._may_fail(f"{type(error).__name__}: {error}")
        finally:
            events.close()
        self._progress.count(left=1)

    # -- whole conversations -----------------------------------------------------------------------------------------
    def _fork(self, talk: Talk) -> bool:
        """One that nobody was told of is left alone."""
        turn = self.rng.randrange(1, len(talk.turns) + 1)
        status, found = self._asked("POST", f"/sessions/{talk.name}/fork", {"turn": turn})
        if status == 200:
            self.talks.append(talk.fork(found["id"], turn))
            self._progress.count(forks=1)
        return status != 0

    def _delete(self, talk: Talk) -> bool:
        status, _ = self._asked("DELETE", f"/sessions/{talk.name}")
        self.talks.remove(talk)
        self.gone.append(talk)
        if status in (200, 404):
            self.deleted.append(talk.name)
            self._progress.count(deletions=1)
        return status != 0

    def _asked(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON; the status is 0 if no server is there."""
        try:
            status, found = self.rng.choice(self._nodes).ask(method, path, body)
        except BROKEN as error:
            self._may_fail(f"{type(error).__name__}: {error}")
            return 0 if not any(node.is_running for node in self._nodes) else 503, None
        if status not in (200, 404):
            self._refused(status, found)
        return status, found
