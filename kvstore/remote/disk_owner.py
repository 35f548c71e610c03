"""Answers other processes of this machine that share a disk: the side of its owner, through a Unix socket.

Knows no LMDB: a `DiskOwner` does what is asked. Requests and answers are RESP2's. Ids are 32 bytes, and a value is a
block's header and payload, as on disk. `ASK id...` and `HAS id...` answer with a 0 or 1 for each id; asking counts as a
use. `GET id` answers with a value or nil. `PUT (id value)...` stores values in the order of their chain, each with the
id of the block before it, empty for the first; it answers with a 0 or 1 for each, once they are durable, or with the
error OOM while nothing can be written. `DEL id...` deletes these and what builds on them. Whatever else is asked, with
ids of another length too, is answered with the error ERR.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from kvstore.blocks.ids import BLOCK_ID_BYTES, BlockId
from kvstore.remote.resp_replies import Replies
from kvstore.remote.unix_server import UnixServer
from kvstore.tiers.port import FULL

Value = tuple[bytes, memoryview]  # header, payload


class DiskOwner(Protocol):
    """Any thread may call it."""

    @property
    def degraded(self) -> str | None:
        """Why nothing can be written at the moment; None if it can."""
        ...

    def has(self, block_ids: Sequence[BlockId], is_use: bool) -> list[bool]: ...

    def read(self, block_id: BlockId) -> Value | None: ...

    def put(self, pairs: Sequence[tuple[bytes, bytes]], is_wanted: Callable[[], bool]) -> list[bool]:
        """Store values, each with the id of the block before it. Returns which are durable.

        is_wanted: False once who asked has ended. A deletion that begins after that must not miss these blocks.
        """
        ...

    def delete(self, block_ids: Sequence[BlockId]) -> None: ...


class OwnerServer:
    """Until `close`. path: of the socket; only this user may enter its folder."""

    def __init__(self, path: Path, owner: DiskOwner) -> None:
        self._owner = owner
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            listener.listen(64)
        except OSError:
            listener.close()
            raise
        self._server = UnixServer("kvstore-owner", listener, self._serve)

    def close(self) -> None:
        """End all connections, and wait a moment for what they do."""
        self._server.close()

    def _serve(self, connection: socket.socket) -> None:
        requests = Replies(lambda buffers: _received(connection, buffers))
        with suppress(OSError, ValueError):  # the other side has gone, or is not understood
            while True:
                [request] = requests.to([None], False)
                if not isinstance(request, list) or not all(isinstance(part, bytes) for part in request):
                    return  # it does not speak the protocol
                given = [part for part in request if isinstance(part, bytes)]
                for part in self._answer(given, partial(_is_there, connection)):
                    connection.sendall(part)

    def _answer(self, request: Sequence[bytes], is_wanted: Callable[[], bool]) -> list[bytes | memoryview]:
        name, *given = request or [b""]
        ids = [one for one in given[::2] if one] if name == b"PUT" else given
        if any(len(one) != BLOCK_ID_BYTES for one in ids):
            return [b"-ERR an id has %d bytes\r\n" % BLOCK_ID_BYTES]
        if name in (b"ASK", b"HAS"):
            return _flags(self._owner.has(given, is_use=name == b"ASK"))
        if name == b"GET" and len(given) == 1:
            found = self._owner.read(given[0])
            if found is None:
                return [b"$-1\r\n"]
            head, payload = found
            return [b"$%d\r\n" % (len(head) + payload.nbytes) + head, payload, b"\r\n"]
        if name == b"PUT" and len(given) % 2 == 0:
            stored = self._owner.put(list(zip(given[::2], given[1::2], strict=True)), is_wanted)
            if not any(stored) and self._owner.degraded is not None:
                return [b"-%s the disk cannot be written\r\n" % FULL.encode()]
            return _flags(stored)
        if name == b"DEL":
            self._owner.delete(given)
            return [b"+OK\r\n"]
        return [b"+PONG\r\n"] if name == b"PING" else [b"-ERR unknown command\r\n"]


def _flags(found: Sequence[bool]) -> list[bytes | memoryview]:
    return [b"$%d\r\n%s\r\n" % (len(found), bytes(b"01"[one] for one in found))]


def _is_there(connection: socket.socket) -> bool:
    """Whether the other side has not closed its end."""
    ends = select.poll()
    ends.register(connection, 0)  # a hang-up is always reported
    return not ends.poll(0)


def _received(connection: socket.socket, buffers: Sequence[memoryview]) -> int:
    num_bytes = connection.recv_into(buffers[0])
    if not num_bytes:
        raise ConnectionError("the connection was closed")
    return num_bytes
