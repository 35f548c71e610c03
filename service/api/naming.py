"""How clients name a conversation: the headers and fields, in one table, and how they are read. Knows no route.

A name is no proof of anything: it counts only together with a tenant and a salt (`engine/sessions/recall.py`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)  # RecursionError: brackets, thousands deep
_OBJECT = msgspec.json.Decoder(dict[str, Any])


class Naming(msgspec.Struct, kw_only=True):
    """The fields of a body that may name its conversation. A wrong type names none."""

    session_id: Any = None
    conversation: Any = None
    metadata: Any = None
    prompt_cache_key: Any = None


def as_text(value: Any) -> str:
    """A wrong type says nothing."""
    return value if isinstance(value, str) else ""


def _id_of(conversation: Any) -> str:
    return as_text(conversation.get("id") if isinstance(conversation, dict) else conversation)


def _session_of_user(metadata: Any) -> str:
    """Of the JSON in `user_id`."""
    try:
        user = _OBJECT.decode(as_text(metadata.get("user_id") if isinstance(metadata, dict) else None))
    except UNREADABLE:
        return ""
    return as_text(user.get("session_id"))


# The first that is given counts. Headers first; last what several conversations may share.
HEADERS = (
    "x-claude-code-session-id", "session-id", "session_id", "x-session-id", "x-session-affinity", "x-opencode-session",
    "x-amp-thread-id",
)  # fmt: skip
FIELDS: dict[str, Callable[[Any], str]] = {
    "session_id": as_text, "conversation": _id_of, "metadata": _session_of_user, "prompt_cache_key": as_text,
}  # fmt: skip


def name_of(headers: Mapping[str, str], body: Naming) -> str:
    """The client's name of the conversation; "" if it has none. headers: found by names in lower case."""
    given = (*map(headers.get, HEADERS), *(read(getattr(body, field)) for field, read in FIELDS.items()))
    return next(filter(None, given), "")
