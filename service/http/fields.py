"""Unknown fields of a body.

Those that would change the answer and near misses of known names are refused; all others are ignored, as clients of
other servers expect. Knows no body.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import msgspec

from kvstore.service.http.errors import bad_request

_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
# Fields that would change the answer, with the values that leave it as it is. A body that has one reads it itself.
CONSTRAINTS = dict.fromkeys((
    "allowed_token_ids", "audio", "bad_words", "chat_template", "chat_template_kwargs", "continue_final_message",
    "functions", "include_stop_str_in_output", "logits_processors", "logprobs", "lora_request", "structural_tag",
    "structured_outputs", "tools", "top_logprobs", "truncate_prompt_tokens", "use_beam_search",
), _NOTHING) | {
    "add_generation_prompt": (None, True),
    "modalities": (None, [], ["text"]),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none", "auto"),
}  # fmt: skip
GUIDED = "guided_"  # and what follows it: json, regex, choice, grammar
# Fields of other servers that are close to a name of ours but mean something else.
NO_MISSES = {"message_id", "models", "top_a", "top_n"}
MAX_EXAMINED = 64  # of unknown fields
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def check_fields(raw: bytes | bytearray, type_: type[Any]) -> None:
    """Raises ApiError 400 that names the field. raw: an object that could be read as a `type_`.

    REFUSED of the type: further fields that are refused, with what to do.
    """
    known = getattr(type_, "__struct_encode_fields__", ())
    refused = getattr(type_, "REFUSED", {})
    found = {name: value for name, value in _FIELDS.decode(raw).items() if name not in known}
    for name, value in found.items():
        if name in refused and _says_something(value):
            raise bad_request(name, f"{name}: {refused[name]}", "unsupported_parameter")
        if (name in CONSTRAINTS or name.startswith(GUIDED)) and _says_something(value, CONSTRAINTS.get(name, _NOTHING)):
            raise bad_request(name[:64], f"{name[:64]} is not supported here", "unsupported_parameter")
    for name in islice((name for name in found if name not in CONSTRAINTS), MAX_EXAMINED):
        meant = None if name in NO_MISSES else near_miss(name, (*known, *CONSTRAINTS))
        if meant is not None:
            raise bad_request(name[:64], f"{name[:64]}: did you mean {meant}?", "unknown_field")


def _says_something(value: msgspec.Raw, nothing: tuple[Any, ...] = _NOTHING) -> bool:
    return msgspec.json.decode(value) not in nothing


def near_miss(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant: one typing error in a short name, two in a long one.

    Capitals and underscores do not count: maxTokens means max_tokens.
    """
    plain = _plain(name)
    num_slips = 1 if len(plain) < 8 else 2
    alike = [one for one in known if len(one) > 3 and abs(len(_plain(one)) - len(plain)) <= num_slips]
    slips, meant = min(((_distance(plain, _plain(one)), one) for one in alike), default=(num_slips + 1, ""))
    return meant if slips <= num_slips else None


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _distance(one: str, other: str) -> int:
    """The number of letters added, left out, replaced, or swapped with a neighbour (optimal string alignment)."""
    before, last = [0] * (len(other) + 1), list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, against in enumerate(other, 1):
            cost = min(last[j] + 1, row[-1] + 1, last[j - 1] + (letter != against))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == against:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]
