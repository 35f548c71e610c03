"""Unknown fields of a body.

Those that would change the answer and near misses of known names are refused; all others are ignored, as clients of
other servers expect. Knows no body.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import msgspec

from kvstore.service.http.errors import bad_request
from kvstore.service.settings.options import nearest

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
        for meant in near_misses(name, (*known, *CONSTRAINTS)):
            raise bad_request(name[:64], f"{name[:64]}: did you mean {meant}?", "unknown_field")


def _says_something(value: msgspec.Raw, nothing: tuple[Any, ...] = _NOTHING) -> bool:
    return msgspec.json.decode(value) not in nothing


def near_misses(name: str, known: Iterable[str]) -> list[str]:
    """The known name that was probably meant, if any: one typing error in a short name, two in a long one."""
    if name in NO_MISSES:
        return []
    return nearest(name[:64], (one for one in known if len(one) > 3), 0.75 if len(name) < 6 else 0.86)
