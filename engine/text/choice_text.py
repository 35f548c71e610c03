"""One choice of a request as its caller sees it: token ids come in, pieces with text go out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.engine.outputs import Piece, RequestOutput, TokenLogprob
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ChoiceText:
    """Choice `index` of an output, which it fills. Without a tokenizer all text is ""."""

    def __init__(self, output: RequestOutput, index: int, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.choice = output.choices[index]
        self._index = index
        self._text = Detokenizer(
            tokenizer if params.detokenize else None,
            params.stop,
            prompt_token_ids=output.prompt_token_ids,
            min_tokens=params.min_tokens,
        )

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it."""
        return self._text.stop_string

    def add_token(self, token_id: int, logprob: TokenLogprob | None, finish_reason: str | None) -> Piece:
        """What a new token brings. finish_reason: what ended the choice with it, unless a stop string does."""
        choice = self.choice
        choice.token_ids.append(token_id)
        if choice.logprobs is not None and logprob is not None:
            choice.logprobs.append(logprob)
        released = "" if finish_reason == "stop" else self._text.append((token_id,))  # an end token has no text
        if finish_reason is not None:
            released += self._text.finish()
        if self.stop_string is not None:
            finish_reason = "stop"
        choice.text += released
        return Piece(self._index, released, (token_id,), finish_reason, None if logprob is None else (logprob,))

    def end(self, finish_reason: str) -> Piece:
        """Its last piece, where it ends without a token."""
        released = self._text.finish()
        self.choice.text += released
        return Piece(self._index, released, (), finish_reason)
