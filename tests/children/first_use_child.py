"""Forks processes in which four threads read something of a kind for the first time at once; prints how many were
killed by a signal.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from kvstore.admin.commands import read_arguments
from kvstore.blocks.records import BlockRecord
from kvstore.disk.codec import Codec, Header
from kvstore.disk.records import pack, unpack
from kvstore.service.api.schema import parse
from kvstore.service.app import ROUTES
from kvstore.service.http.errors import ApiError
from kvstore.sessions.record import SessionHead, SessionKey, Tombstone, TurnRecord

NUM_PROCESSES = 40  # of each kind; where decoders are made late, one in seven is killed
ID, KEY = b"\1" * 32, SessionKey("", "ada")
RECORDS: list[tuple[type, bytes]] = [
    (Header, pack(Header(BlockRecord(ID, ID, b"", ID), Codec.RAW, 2, 1, 1))),
    (SessionHead, pack(SessionHead(KEY, 1, 0.0, 0.0, 1, "", ({"role": "system", "content": ""},)))),
    (TurnRecord, pack(TurnRecord(1, [{"role": "user", "content": ""}], [1], [ID], usage={"prompt_tokens": 1}))),
    (Tombstone, pack(Tombstone(1, KEY, (ID,)))),
]
BODIES = [(route.body, field) for route in ROUTES if route.body for field in msgspec.structs.fields(route.body)]
USES: dict[str, list[Callable[[], object]]] = {
    "records": [partial(unpack, *one) for one in RECORDS],
    "bodies": [partial(parse, msgspec.json.encode({field.encode_name: [{}]}), body) for body, field in BODIES],
    "commands": [partial(read_arguments, "sessions.show", {"session": {"session_id": ""}})],
}  # most of these values are refused; the types are looked into all the same


def use_at_once(uses: Sequence[Callable[[], object]]) -> None:
    barrier = threading.Barrier(4)

    def use() -> None:
        barrier.wait()
        for one in uses:
            with suppress(ValueError, ApiError):
                one()

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def num_killed(uses: Sequence[Callable[[], object]]) -> int:
    killed = 0
    for _ in range(NUM_PROCESSES):
        if (child := os.fork()) == 0:
            use_at_once(uses)
            os._exit(0)
        killed += os.waitpid(child, 0)[1] != 0
    return killed


if __name__ == "__main__":
    sys.setswitchinterval(1e-6)
    print({kind: num_killed(uses) for kind, uses in USES.items()})
