"""The table of calls that a front may make to the engine's own process, with the types of what they take and give. What
is not in the table cannot be called.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvstore.blocks.ids import BlockId, Lineage
from kvstore.blocks.records import Evict, Evicted


class Signature:
    """Types of one verb: the tuple of its arguments, and its result."""

    def __init__(self, arguments: Any, result: Any) -> None:
        self.decode_arguments = msgspec.msgpack.Decoder(arguments).decode
        self.decode_result = msgspec.msgpack.Decoder(result).decode


_Ids = list[BlockId]
_Nothing = tuple[()]
_Info = dict[str, Any]

SIGNATURES: dict[str, Signature] = {  # verbs of `Core`
    "root": Signature(tuple[str], bytes),
    "splice": Signature(
        tuple[_Ids, list[int], Lineage, list[tuple[int, int]], str], tuple[_Ids, Lineage] | None
    ),
    "prefetch": Signature(tuple[_Ids, list[int], Lineage, str], None),
    "pin": Signature(tuple[_Ids, float], None),
    "expire": Signature(tuple[_Ids, float | None], None),
    "forget": Signature(tuple[_Ids, float], bool),
    "evict": Signature(tuple[Evict], dict[str, Evicted]),
    "verify": Signature(tuple[bool], _Info),
    "compact": Signature(_Nothing, _Info),
    "flush": Signature(_Nothing, None),
    "stats": Signature(_Nothing, _Info),
}
