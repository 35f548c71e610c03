"""A conversation as exact token ids: each turn's prompt is the ids so far plus what the template adds.

Knows the engine by its verbs (`submit`, `stream`), and no KV at all: the prefix cache does the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.chat_template import ChatTemplate, Message
from engine.detokenizer import Detokenizer
from engine.outputs import Piece, RequestOutput
from engine.prompts import check_params, check_text
from engine.sampling_params import SamplingParams
from kvstore.errors import ContextLengthError, RequestError

if TYPE_CHECKING:
    from engine.engine import Engine

ANSWER_SHARE = 8  # without max_tokens, a turn keeps a window's 1/8 free for its answer


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn before its answer: its prompt, and how many of the conversation's messages no longer are in it."""

    prompt: list[int]
    num_dropped: int
    truncated_tokens: int = 0


class ChatSession:
    """One conversation; made by `Engine.chat`. One turn at a time.

    messages: the transcript, whole. token_ids: exactly what the model has seen and said, as far as it still is in the
    window. last: the last turn's output. truncated_tokens: how many tokens were dropped to stay within the window.
    """

    def __init__(
        self, engine: Engine, template: ChatTemplate, session_id: str, tenant: str = "", system: str | None = None
    ) -> None:
        self.session_id = session_id
        self.tenant = tenant
        self.messages: list[Message] = []
        self.token_ids: list[int] = []
        self.last: RequestOutput | None = None
        self.truncated_tokens = 0
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages += self._system
        self._num_dropped = 0  # messages after the system prompt that truncation took out of the window
        self._engine = engine
        self._template = template
        self._busy = threading.Lock()

    def send(self, text: str, params: SamplingParams | None = None) -> RequestOutput:
        """One turn: the user's message in, the answer out, both added to the conversation.

        When prompt and answer would exceed the window, the oldest turns go, down to half the window; the system prompt
        stays. What is kept is then tokenized and computed again. Raises RequestError while another turn runs, and
        ContextLengthError when the message alone is too long.
        """
        for _ in self.stream(text, params):
            pass
        assert self.last is not None
        return self.last

    def stream(self, text: str, params: SamplingParams | None = None) -> Iterator[Piece]:
        """`send`, piece by piece; afterwards `last` is the whole output. Leaving early ends the answer there."""
        params = SamplingParams() if params is None else params
        check_params(params)
        check_text(text, "message")
        if params.n != 1:
            raise RequestError(f"n is {params.n}; a turn has one answer", param="n")
        return self._run(text, params)

    def _run(self, text: str, params: SamplingParams) -> Iterator[Piece]:
        if not self._busy.acquire(blocking=False):
            raise RequestError(f"session {self.session_id} is busy with another turn", param="session_id")
        try:
            turn = self._turn(text, params)
            handle = self._engine.submit(turn.prompt, params, self.tenant)
            try:
                yield from self._engine.stream(handle)
            finally:
                if handle.error is None:
                    self.last = handle.output
                    if handle.output.token_ids:
                        self._commit(text, turn, handle.output)
        finally:
            self._busy.release()

    def _turn(self, text: str, params: SamplingParams) -> _Turn:
        """The turn's prompt, truncated where it would not fit."""
        user: Message = {"role": "user", "content": text}
        kept = self._kept(self._num_dropped)
        prompt = self._template.next_ids(self.token_ids, kept, text) if self.token_ids else None
        if prompt is None:
            prompt = self._template.prompt_ids([*kept, user])
        window = self._engine.max_request_tokens
        answer = params.max_tokens or max(1, window // ANSWER_SHARE)
        if len(prompt) + answer <= window:
            return _Turn(prompt, self._num_dropped)
        return self._truncated(user, len(prompt), params.max_tokens or 1, window)

    def _kept(self, num_dropped: int) -> list[Message]:
        return self._system + self.messages[len(self._system) + num_dropped :]

    def _truncated(self, user: Message, num_tokens: int, answer: int, window: int) -> _Turn:
        """Drop whole turns from the oldest on, until half the window is kept at most and the answer fits."""
        total = len(self.messages) - len(self._system)
        for num_dropped in range(min(self._num_dropped + 2, total), total + 1, 2):
            prompt = self._template.prompt_ids([*self._kept(num_dropped), user])
            fits = len(prompt) + answer <= window
            if fits and (len(prompt) <= window // 2 or num_dropped == total):
                return _Turn(prompt, num_dropped, num_tokens - len(prompt))
        needed = len(prompt) + answer
        where = "context window" if window == self._engine.max_model_len else "HBM pool"
        raise ContextLengthError(
            f"system prompt, message and answer need {needed} tokens, but the {where} has {window}", needed, window
        )

    def _commit(self, text: str, turn: _Turn, output: RequestOutput) -> None:
        """The turn becomes part of the conversation: text for people, ids for the next prompt."""
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": output.text}]
        self.token_ids = output.prompt_token_ids + self._answer_ids(output)
        self.truncated_tokens += turn.truncated_tokens
        self._num_dropped = turn.num_dropped

    def _answer_ids(self, output: RequestOutput) -> list[int]:
        """Ids of the answer without its end token, which the template's delta brings, and nothing of a stop string."""
        choice = output.choices[0]
        if choice.finish_reason != "stop":
            return list(choice.token_ids)
        if not isinstance(choice.stop_reason, str):
            return choice.token_ids[:-1]
        said = Detokenizer(self._engine.tokenizer.backend_tokenizer, prompt_token_ids=output.prompt_token_ids)
        count, known = 0, ""
        for number, token_id in enumerate(choice.token_ids, start=1):
            said.append([token_id])
            if not choice.text.startswith(said.text):
                break
            count, known = number, said.text
        return choice.token_ids[:count] + self._template.encode_answer(choice.text[len(known) :])
