"""A conversation as exact token ids: each turn's prompt is the ids so far plus what the template adds.

Knows the engine by its verbs (`submit`, `stream`), and no KV at all: the prefix cache does the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.chat_template import ChatTemplate, Message
from engine.outputs import Piece, RequestOutput
from engine.sampling_params import SamplingParams
from kvstore.errors import ContextLengthError, RequestError

if TYPE_CHECKING:
    from engine.engine import Engine

ANSWER_SHARE = 8  # without max_tokens, a turn keeps a window's 1/8 free for its answer


class ChatSession:
    """One conversation; made by `Engine.chat`. One turn at a time.

    messages: the transcript. token_ids: exactly what the model has seen and said. last: the last turn's output.
    truncated_tokens: how many tokens have been dropped so far to stay within the window.
    """

    def __init__(
        self, engine: Engine, template: ChatTemplate, session_id: str, tenant: str = "", system: str | None = None
    ) -> None:
        self.session_id = session_id
        self.tenant = tenant
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self.token_ids: list[int] = []
        self.last: RequestOutput | None = None
        self.truncated_tokens = 0
        self._has_system = bool(system)
        self._engine = engine
        self._template = template
        self._busy = threading.Lock()

    def send(self, text: str, params: SamplingParams | None = None) -> RequestOutput:
        """One turn: the user's message in, the answer out, both added to the conversation.

        When prompt and answer would exceed the window, the oldest turns go, down to half the window; the system prompt
        stays. Raises RequestError while another turn runs, and ContextLengthError when the message alone is too long.
        """
        for _ in self.stream(text, params):
            pass
        assert self.last is not None
        return self.last

    def stream(self, text: str, params: SamplingParams | None = None) -> Iterator[Piece]:
        """`send`, piece by piece; afterwards `last` is the whole output. Leaving early ends the answer there."""
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"n is {params.n}; a turn has one answer", param="n")
        if not isinstance(text, str):
            raise RequestError("a message must be a text", param="message")
        return self._turn(text, params)

    def _turn(self, text: str, params: SamplingParams) -> Iterator[Piece]:
        if not self._busy.acquire(blocking=False):
            raise RequestError(f"session {self.session_id} is busy with another turn", param="session_id")
        try:
            messages, prompt = self._prompt(text, params)
            handle = self._engine.submit(prompt, params, self.tenant)
            try:
                yield from self._engine.stream(handle)
            finally:
                self._engine.abort(handle)
                if handle.output.token_ids and handle.error is None:
                    self._commit(messages, handle.output, params)
        finally:
            self._busy.release()

    def _prompt(self, text: str, params: SamplingParams) -> tuple[list[Message], list[int]]:
        """The turn's messages and prompt ids, truncated where they would not fit."""
        user: Message = {"role": "user", "content": text}
        messages = [*self.messages, user]
        prompt = None
        if self.token_ids:
            prompt = self._template.next_ids(self.token_ids, self._has_system, text)
        if prompt is None:
            prompt = self._template.prompt_ids(messages)
        window = self._engine.max_model_len
        answer = params.max_tokens or max(1, window // ANSWER_SHARE)
        if len(prompt) + answer <= window:
            return messages, prompt
        return self._truncate(messages, len(prompt), params, window)

    def _truncate(
        self, messages: list[Message], num_tokens: int, params: SamplingParams, window: int
    ) -> tuple[list[Message], list[int]]:
        """Drop whole turns from the oldest on until at most half the window is used, or the last message is alone."""
        system, turns = messages[: self._has_system], messages[self._has_system :]
        while True:
            kept = [*system, *turns]
            prompt = self._template.prompt_ids(kept)
            if len(turns) == 1 or (len(prompt) <= window // 2 and len(kept) < len(messages)):
                break
            turns = turns[2:]
        needed = len(prompt) + (params.max_tokens or 1)
        if needed > window:
            raise ContextLengthError(
                f"system prompt, message and max_tokens need {needed} tokens, but the context window has {window}",
                needed,
                window,
            )
        self.truncated_tokens += num_tokens - len(prompt)
        return kept, prompt

    def _commit(self, messages: list[Message], output: RequestOutput, params: SamplingParams) -> None:
        """The turn becomes part of the conversation: text for people, ids for the next prompt."""
        self.messages = [*messages, {"role": "assistant", "content": output.text}]
        self.token_ids = output.prompt_token_ids + self._answer_ids(output, params)
        self.last = output

    def _answer_ids(self, output: RequestOutput, params: SamplingParams) -> list[int]:
        """Ids of the answer without its end token, which the template's delta brings, or beyond a stop string."""
        choice = output.choices[0]
        if choice.finish_reason != "stop":
            return list(choice.token_ids)
        if not isinstance(choice.stop_reason, str):
            return choice.token_ids[:-1]
        count = len(choice.token_ids)
        while count and not choice.text.startswith(self._template.decode(choice.token_ids[:count])):
            count -= 1
        said = self._template.decode(choice.token_ids[:count])
        return choice.token_ids[:count] + self._template.encode_answer(choice.text[len(said) :])
