"""How one request is sampled and when it stops. Plain data, checked once; no torch."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from kvstore.errors import RequestError

MAX_CHOICES = 16
MAX_BEAM_WIDTH = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
SEED_LIMIT = 2**63
MAX_GRAMMAR_BYTES = 2**16  # of a schema, a regular expression, a list of choices or a grammar
MAX_TAGS_BYTES = 2**20  # of all tags together
MAX_SCHEMA_DEPTH = 32  # objects and lists within each other
MAX_TAGS = 256
MAX_OPTIONAL, MAX_OPTIONAL_OF_TAGS = 1_000, 2_000  # optional properties: 0.1 s of compiling each
MAX_MULTIPLE = 10_000  # a schema's multiples are counted by an automaton with so many states

# A weak model may write white space for ever where it is free. oneOf cannot be compiled, anyOf can.
JSON_OPTIONS = {"whitespace_flexible": False, "coerce_one_of": True}


def _number(name: str, value: object, low: float, high: float, *, integer: bool = False, above: bool = False) -> None:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    fits = low < number <= high if above else low <= number <= high
    if not fits or (integer and not isinstance(value, int)):
        kind = "a whole number" if integer else "a number"
        bound = f"above {low}" if above else f"from {low}"
        raise RequestError(f"{name} is {value!r}; give {kind} {bound} to {high}", param=name)


def _sequence(name: str, value: object, longest: int) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name} is {value!r}; give a list", param=name)
    if len(value) > longest:
        raise RequestError(f"{name} has {len(value)} entries; at most {longest}", param=name)
    return tuple(value)


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """A part of an answer that begins with `begin` and ends with `end`, and what is allowed in between.

    json: a JSON schema; or grammar: Lark, whose first rule is `start`. trigger: the text from which on `begin` must go
    on; it is how `begin` starts, and all of it if it is empty.
    """

    begin: str
    end: str = ""
    json: str | dict[str, Any] | None = None  # as text, once it was checked
    grammar: str | None = None
    trigger: str = ""

    def __post_init__(self) -> None:
        _text("tags", "begin", self.begin)
        if self.end:
            _text("tags", "end", self.end)
        if not self.begin.startswith(self.trigger):
            raise _refused("tags", f"the trigger {self.trigger!r} is not how {self.begin!r} begins")
        if (self.json is None) == (self.grammar is None):
            raise _refused("tags", f"{self.begin!r} needs json or grammar, and only one of them")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text("tags", self.json))
        else:
            _text("tags", "grammar", self.grammar)


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What an answer must match from its first token to its last; names and meanings are those of vLLM. Give one.

    json: a JSON schema, as an object or as text. oneOf counts as anyOf, and there is no white space but in strings.
    regex: a regular expression without look-around. choice: one of these texts. grammar: Lark, or GBNF (with `::=`).
    json_object: any JSON object.
    tags: free text, in which each tag's trigger must go on with what the tag allows. required: no text, but tags; with
    json, that or tags. single: at most one tag, and nothing after it. listing: the texts before, between and after
    tags, which then stand in one list with nothing after it; triggers are ignored.
    reasoning: the texts that open and close reasoning, which is free and may come before all that; if the first is "",
    it is open already. param: what errors name.
    Raises RequestError for what is too large; what cannot be compiled fails when the answer is to begin.
    """

    json: str | dict[str, Any] | None = None  # as text, once it was checked
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    tags: Sequence[StructuralTag] = ()
    required: bool = False
    single: bool = False
    listing: tuple[str, str, str] | None = None
    reasoning: tuple[str, str] | None = None
    param: str = "structured_outputs"

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object", "tags")
        given = [kind for kind in kinds if getattr(self, kind) not in (None, False) and (kind != "tags" or self.tags)]
        if len(given) != 1 and not (self.required and given == ["json", "tags"]):
            said = f"has {' and '.join(given)}" if given else "has nothing to match"
            raise RequestError(f"{self.param} {said}; give one of {', '.join(kinds)}", self.param)
        for kind in given:
            if kind in ("regex", "grammar"):
                _text(kind, "it", getattr(self, kind))
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text("json", self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", self._checked_choice())
        if self.required and not self.tags:
            raise _refused("required", "it is about tags; give some")
        object.__setattr__(self, "tags", self._checked_tags())

    def _checked_choice(self) -> tuple[str, ...]:
        if not isinstance(self.choice, list | tuple) or not all(isinstance(text, str) for text in self.choice):
            raise _refused("choice", "give a list of texts")
        if not self.choice:
            raise _refused("choice", "the list is empty; give one text or more")
        _text("choice", "it", "".join(self.choice))
        return tuple(self.choice)

    def _checked_tags(self) -> tuple[StructuralTag, ...]:
        tags = tuple(self.tags)
        if len(tags) > MAX_TAGS:
            raise _refused("tags", f"there are {len(tags)}; at most {MAX_TAGS}")
        size = sum(len(tag.begin) + len(tag.end) + len(tag.json or tag.grammar or "") for tag in tags)
        if size > MAX_TAGS_BYTES:
            raise _refused("tags", f"they have {size} characters together; at most {MAX_TAGS_BYTES}")
        optional = sum(_num_optional(json.loads(tag.json)) for tag in tags if isinstance(tag.json, str))
        if optional > MAX_OPTIONAL_OF_TAGS:
            raise _refused("tags", f"they have {optional} optional properties; at most {MAX_OPTIONAL_OF_TAGS}")
        return tags


def _refused(kind: str, why: str) -> RequestError:
    return RequestError(f"structured_outputs.{kind}: {why}", "structured_outputs")


def _text(kind: str, name: str, text: object) -> None:
    try:
        size = len(text.encode()) if isinstance(text, str) else 0
    except UnicodeEncodeError:
        raise _refused(kind, f"{name} is not valid Unicode: it holds half a surrogate pair") from None
    if not size:
        raise _refused(kind, f"{name} is {text!r}; give a text that is not empty")
    if size > MAX_GRAMMAR_BYTES:
        raise _refused(kind, f"{name} has {size} bytes; at most {MAX_GRAMMAR_BYTES}")


def _schema_text(kind: str, schema: object) -> str:
    """A JSON schema as text, if its size, depth and multiples are within bounds."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False, separators=(",", ":"))
        _text(kind, "the schema", text)
        parsed = json.loads(text)
    except RecursionError:
        raise _refused(kind, f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise _refused(kind, f"the schema is no JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise _refused(kind, f"the schema is {text[:40]!r}; give an object")
    _check_schema(kind, parsed)
    return text


def _check_schema(kind: str, schema: object) -> None:
    multiple = 1
    for depth, level in enumerate(_levels(schema)):
        if depth == MAX_SCHEMA_DEPTH:
            raise _refused(kind, f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep")
        for item in level:
            step = item.get("multipleOf") if isinstance(item, dict) else None
            if isinstance(step, int | float) and not isinstance(step, bool) and 0 < step < math.inf:
                ratio = Fraction(str(step))
                multiple = math.lcm(multiple, ratio.numerator, ratio.denominator)
        if multiple > MAX_MULTIPLE:
            raise _refused(kind, f"multipleOf: the values come together at {multiple}; at most {MAX_MULTIPLE}")
    if (optional := _num_optional(schema)) > MAX_OPTIONAL:
        raise _refused(kind, f"the schema has {optional} optional properties; at most {MAX_OPTIONAL}")


def _levels(schema: object) -> Iterator[list[dict[str, Any] | list[Any]]]:
    """The objects and lists of a schema, the outermost first."""
    level = [schema]
    while level := [item for item in level if isinstance(item, dict | list)]:
        yield level
        level = [value for item in level for value in (item.values() if isinstance(item, dict) else item)]


def _num_optional(schema: object) -> int:
    """How many properties an object may have or not, over all objects."""
    items = [item for level in _levels(schema) for item in level if isinstance(item, dict)]
    named = [(item["properties"], item.get("required")) for item in items if isinstance(item.get("properties"), dict)]
    return sum(len(set(names).difference(map(str, need if isinstance(need, list) else ()))) for names, need in named)


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
    structured_outputs: what the answer must match. eos is allowed where it may end, and ends it, also with ignore_eos;
    where nothing else is allowed, also before min_tokens. Logprobs are the model's, before anything is forbidden.
    use_beam_search: the n best answers of `kvstore.engine.core.beam_search`, the best first, all at their end.
    beam_width: how many beams there are; None: n. length_penalty: an answer's score is the sum of its logprobs /
    length ** length_penalty. temperature must be 0 or 1 then, which are the same, and whatever else would change
    logits or the end must be off: only max_tokens, ignore_eos and stop_token_ids count.
    kv_exact: compute what is stored only as a quantised copy or as reused at another position (`--codec int8`,
    truncation), so that the answer is the one without a store.
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
    structured_outputs: StructuredOutputsParams | None = None
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    kv_exact: bool = False

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
        for name in ("ignore_eos", "kv_exact", "detokenize", "use_beam_search"):
            if (value := getattr(self, name)) not in (True, False):
                raise RequestError(f"{name} is {value!r}; give True or False", param=name)
            object.__setattr__(self, name, bool(value))
        object.__setattr__(self, "stop_token_ids", _sequence("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS))
        if self.stop and not self.detokenize:
            raise RequestError("stop strings are looked for in the text; detokenize must be True", param="stop")
        for token_id in self.stop_token_ids:
            _number("stop_token_ids", token_id, 0, 2**31, integer=True)
        self._check_logit_bias()
        wanted: object = self.structured_outputs
        if not isinstance(wanted, StructuredOutputsParams | None):
            said = f"structured_outputs is {wanted!r}; give StructuredOutputsParams(...)"
            raise RequestError(said, "structured_outputs")
        self._check_beams()

    def _check_beams(self) -> None:
        _number("length_penalty", self.length_penalty, -10, 10)
        if self.beam_width is not None:
            _number("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH, integer=True)
        if not self.use_beam_search:
            if self.beam_width is not None:
                raise RequestError("beam_width is set, but use_beam_search is not", param="beam_width")
            return
        if self.num_sequences < self.n:
            said = f"beam_width is {self.beam_width}, less than n {self.n}"
            raise RequestError(said, param="beam_width")
        for name, neutral in _OFF_IN_BEAM_SEARCH.items():
            if (value := getattr(self, name)) != neutral:
                param = value.param if isinstance(value, StructuredOutputsParams) else name
                raise RequestError(f"{param} cannot be used with use_beam_search", param=param)
        if self.temperature not in (0, 1):
            said = f"temperature is {self.temperature}; nothing is drawn with use_beam_search, so leave it out"
            raise RequestError(said, param="temperature")
        object.__setattr__(self, "temperature", 0.0)

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
    def num_sequences(self) -> int:
        """How many run at once."""
        return self.n if self.beam_width is None else self.beam_width

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


_OFF_IN_BEAM_SEARCH = {
    "min_tokens": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "logit_bias": {}, "stop": (), "logprobs": None, "structured_outputs": None,
}  # fmt: skip
