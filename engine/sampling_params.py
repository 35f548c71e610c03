"""How one request is sampled and when it stops. Plain data, checked once; no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import RequestError

MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
SEED_LIMIT = 2**63


def _number(name: str, value: object, low: float, high: float, *, integer: bool = False, above: bool = False) -> None:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    fits = low < number <= high if above else low <= number <= high
    if not fits or (integer and not isinstance(value, int)):
        kind = "a whole number" if integer else "a number"
        bound = f"above {low:g}" if above else f"from {low:g}"
        raise RequestError(f"{name} is {value!r}; give {kind} {bound} to {high:g}", param=name)


def _sequence(name: str, value: object, longest: int) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name} is {value!r}; give a list", param=name)
    if len(value) > longest:
        raise RequestError(f"{name} has {len(value)} entries; at most {longest}", param=name)
    return tuple(value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request; names and meanings are those of vLLM and of the OpenAI API.

    max_tokens: an upper bound; None, or more than that, means the rest of the context window.
    temperature: 0 is greedy (argmax; ties go to the lowest id).
    top_k: 0 is off. top_p: 1 is off. min_p: keep tokens with at least min_p times the best one's probability; 0 is off.
    repetition_penalty: over prompt and answer, 1 is off. presence_penalty, frequency_penalty: over the answer only.
    seed: the same seed gives the same tokens, whatever else is in the batch; choice i of n uses seed + i.
    logit_bias: token id -> added to its logit (-100 to 100).
    stop: strings that end the answer and are not part of it. stop_token_ids: ids that do, likewise.
    logprobs: None, or how many alternatives to report beside each sampled token (0: only its own).
    detokenize: False leaves the text empty; there can be no stop strings then.
    Raises RequestError naming the field and its bounds.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    detokenize: bool = True

    def __post_init__(self) -> None:
        _number("n", self.n, 1, MAX_CHOICES, integer=True)
        _number("min_tokens", self.min_tokens, 0, 2**31, integer=True)
        if self.max_tokens is not None:
            _number("max_tokens", self.max_tokens, 1, 2**31, integer=True)
            if self.min_tokens > self.max_tokens:
                said = f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}"
                raise RequestError(said, param="min_tokens")
        _number("temperature", self.temperature, 0, 100)
        _number("top_k", self.top_k, 0, 2**31, integer=True)
        _number("top_p", self.top_p, 0, 1, above=True)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, 0, 100, above=True)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            _number("seed", self.seed, -SEED_LIMIT, SEED_LIMIT - 1, integer=True)
        if self.logprobs is not None:
            _number("logprobs", self.logprobs, 0, MAX_LOGPROBS, integer=True)
        object.__setattr__(self, "stop", self._checked_stop())
        object.__setattr__(self, "ignore_eos", bool(self.ignore_eos))
        object.__setattr__(self, "stop_token_ids", _sequence("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS))
        if self.stop and not self.detokenize:
            raise RequestError("stop strings are looked for in the text; detokenize must be True", param="stop")
        for token_id in self.stop_token_ids:
            _number("stop_token_ids", token_id, 0, 2**31, integer=True)
        self._check_logit_bias()

    def _checked_stop(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else _sequence("stop", self.stop, MAX_STOP_STRINGS)
        for text in stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise RequestError(f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters", param="stop")
        return stop

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, dict):
            raise RequestError("logit_bias must map token ids to numbers", param="logit_bias")
        if (size := len(self.logit_bias)) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias has {size} entries; at most {MAX_LOGIT_BIAS}", param="logit_bias")
        for token_id, bias in self.logit_bias.items():
            _number("logit_bias", token_id, 0, 2**31, integer=True)
            _number("logit_bias", bias, -100, 100)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0
