"""What a request says about its conversation: a session's name, pins, a time to live, that it is over.

Comes with the request, in `kv_transfer_params` under "kvstore" or as an action of that type in `kv_hints`. Knows no
host; what is wrong is told and ignored, since a request is not refused for a hint.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

NAME = "kvstore"
Seconds = Annotated[float, Meta(gt=0, le=1e9)]


class Wishes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """session: who talks. pin_s, ttl_s: for so long kept longer than others, and after so long given up first. forget:
    delete what this request's conversation has on disk.
    """

    session: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    pin_s: Seconds | None = None
    ttl_s: Seconds | None = None
    forget: bool = False


NONE = Wishes()


def read_wishes(params: Any, hints: Any) -> tuple[Wishes, str | None]:
    """The wishes, and what was wrong with them. Params count before hints."""
    given = params.get(NAME) if isinstance(params, dict) else None
    if given is None and hints is not None:
        given = next((action.payload for action in hints.actions if action.action_type == NAME), None)
    if given is None:
        return NONE, None
    try:
        return msgspec.convert(given, Wishes), None
    except msgspec.ValidationError as error:
        return NONE, f"what a request says under {NAME!r} is ignored: {error}"
