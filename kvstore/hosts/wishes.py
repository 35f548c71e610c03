"""What a request says about its conversation: a session's name, pins, a time to live, or that it is over.

Comes with the request, in `kv_transfer_params` under "kvstore", or as an action of that type in `kv_hints`. Knows no
host. Mistakes are reported and ignored: no request is refused because of a hint.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

NAME = "kvstore"
Seconds = Annotated[float, Meta(gt=0, le=1e9)]


class Wishes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """session: the session's name. prefetch: this request is not a turn, but says that one will come soon. pin_s: for
    so long its blocks are kept longer than others. ttl_s: after so long they are evicted first. forget: delete what its
    conversation has on disk.
    """

    session: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    prefetch: bool = False
    pin_s: Seconds | None = None
    ttl_s: Seconds | None = None
    forget: bool = False


NONE = Wishes()
msgspec.json.Decoder(Wishes)  # `convert` is safe in any thread from now on (see `kvstore.disk.records`)


def read_wishes(params: Any, hints: Any) -> tuple[Wishes, str | None]:
    """The wishes, and the mistakes in them. Params come before hints."""
    given = params.get(NAME) if isinstance(params, dict) else None
    if given is None and hints is not None:
        given = next((action.payload for action in hints.actions if action.action_type == NAME), None)
    if given is None:
        return NONE, None
    try:
        return msgspec.convert(given, Wishes), None
    except msgspec.ValidationError as error:
        return NONE, f"what a request says under {NAME!r} is ignored: {error}"
