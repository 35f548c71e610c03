"""An engine for tests of the command: no model, and answers that are the message in capitals."""

import os
import signal
from types import SimpleNamespace
from typing import ClassVar

from kvstore.engine.outputs import CachedTokensDetails, Choice, Piece, RequestOutput, Usage
from kvstore.errors import ContextLengthError, DegradedError, ModelError, SessionExistsError


class FakeSession:
    """Answers with the message in capitals, two pieces a word; its prompt grows by ten tokens a turn."""

    def __init__(self, session_id, system, messages=()):
        self.session_id = session_id
        self.messages = list(messages) or ([{"role": "system", "content": system}] if system else [])
        self.last = None
        self.num_turns = sum(message["role"] == "user" for message in self.messages)
        self.closed_early = False
        self.ttls = []

    def set_ttl(self, ttl_s):
        assert self.num_turns
        self.ttls.append(ttl_s)

    def fork(self, session_id, turn):
        if session_id in FakeEngine.stored:
            raise SessionExistsError(f"there is a session {session_id!r} already")
        turns = [self.messages[at : at + 2] for at in range(len(self.messages) % 2, len(self.messages), 2)]
        system = self.messages[: len(self.messages) % 2]
        fork = FakeSession(session_id, None, [*system, *(message for said in turns[:turn] for message in said)])
        FakeEngine.made[-1].sessions[session_id] = fork
        return fork

    def stream(self, said, params):
        text = said if isinstance(said, str) else said[0]["content"]
        self.params = params
        if text == "too long":
            raise ContextLengthError("the prompt has 2,000 tokens, the window 1,024", 2000, 1024)
        if text == "disk full":
            raise DegradedError("not stored, the disk failed")
        words = text.upper().split(" ")
        try:
            for index, word in enumerate(words):
                yield Piece(0, word + " " * (index < len(words) - 1), (index,))
                if text == "slow answer":
                    os.kill(os.getpid(), signal.SIGINT)
        except GeneratorExit:
            self.closed_early = True
            raise
        self.num_turns += 1
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": text.upper()}]
        self.last = make_output(10 * self.num_turns, 10 * (self.num_turns - 1), text.upper())


def make_output(num_prompt, num_cached, text, ttft_s=0.0125):
    usage = Usage(num_prompt, 3, CachedTokensDetails(hbm=num_cached))
    choice = Choice(text=text, token_ids=[1, 2, 3], finish_reason="stop")
    return RequestOutput("request", list(range(num_prompt)), [choice], usage, ttft_s)


class FakeEngine:
    made: ClassVar[list] = []
    stored: ClassVar[dict] = {}  # messages of sessions from before

    def __init__(self, model, **arguments):
        if model == "missing":
            raise ModelError("no model at 'missing': no such directory;\n give a local directory or a hub id")
        self.model, self.arguments = model, arguments
        self.sessions = {}
        self.facts = SimpleNamespace(model_name=model or "builtin", max_model_len=1024)
        FakeEngine.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.closed = True

    def stats(self):
        return {"hbm": {"blocks": 3, "block_bytes": 2**20, "is_auto": True}}

    def chat(self, session_id, tenant="", system=None, truncation="auto", truncation_reuse="reencode"):
        self.sessions[session_id] = FakeSession(session_id, system, self.stored.get(session_id, ()))
        self.truncation = (truncation, truncation_reuse)
        return self.sessions[session_id]
