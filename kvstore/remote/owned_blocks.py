"""Blocks on a disk that another process of this machine owns: the side of those that use it, through a Unix socket.

What a value is, and who checks it, is as in `redis_blocks`. There is no time to live: the owner decides what stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import ReadResult
from kvstore.disk.codec import check_landed, encode_head
from kvstore.disk.io_queue import Read
from kvstore.remote.address import RedisAddress
from kvstore.remote.resp import RespClient
from kvstore.remote.resp_replies import ErrorReply, Landed
from kvstore.remote.shared import BATCH_BYTES, Put, PutResult, Session, SharedChain

ASK_S, READ_S = 2.0, 4.0  # deadlines; no request waits this long
PUT_S = 30.0  # until a batch is durable: only the thread that stores waits for it


@dataclass(frozen=True, slots=True)
class OwnedBlocks:
    """path: of the owner's socket."""

    path: str
    most_read_bytes: ClassVar[int] = 2 << 20

    def __str__(self) -> str:
        return f"unix:{self.path}"

    def session(self) -> Session:
        return OwnedSession(RespClient(RedisAddress(self.path), ASK_S))


class OwnedSession:
    """See `Session`. Commands are those of `kvstore.remote.disk_owner`."""

    def __init__(self, client: RespClient) -> None:
        self._client = client

    def ask(self, chain: SharedChain) -> list[bool]:
        return self._flags("ASK", chain.ids)

    def _flags(self, name: str, block_ids: Sequence[BlockId]) -> list[bool]:
        reply = self._client.call(name, *block_ids, timeout_s=ASK_S)
        assert isinstance(reply, bytes) and len(reply) == len(block_ids)
        return [flag == ord("1") for flag in reply]

    def read(self, reads: Sequence[Read]) -> list[ReadResult]:
        commands = [("GET", read.record.block_id) for read in reads]
        replies = self._client.pipeline(commands, [read.view for read in reads], READ_S)
        results = []
        for read, reply in zip(reads, replies, strict=True):
            if reply is None:
                results.append(ReadResult.MISSING)
            elif isinstance(reply, Landed):
                results.append(check_landed(reply.head, read.view, read.record))
            else:
                results.append(ReadResult.FAILED)
        return results

    def put(self, chain: SharedChain, puts: Sequence[Put]) -> list[PutResult]:
        there = self._flags("HAS", [put.record.block_id for put in puts])
        results: list[PutResult] = []
        batch: list[tuple[BlockId, bytes, bytes]] = []
        size = 0
        for put, is_there in zip(puts, there, strict=True):
            if is_there:
                results.append(PutResult(put.record.block_id))
            elif (payload := put.fetch()) is None:
                results.append(PutResult(put.record.block_id, "gone before it was stored"))
            else:
                before = chain.ids[put.index - 1] if put.index else b""
                batch.append((put.record.block_id, before, encode_head(put.record, payload) + bytes(payload)))
                size += payload.nbytes
            if size >= BATCH_BYTES:
                results += self._store(batch)
                batch, size = [], 0
        return results + self._store(batch)

    def _store(self, batch: Sequence[tuple[BlockId, bytes, bytes]]) -> list[PutResult]:
        if not batch:
            return []
        command: list[str | bytes] = ["PUT"]
        for _, before, value in batch:
            command += (before, value)
        (reply,) = self._client.pipeline([command], timeout_s=PUT_S)
        if not isinstance(reply, bytes) or len(reply) != len(batch):
            why = reply.code if isinstance(reply, ErrorReply) else "no answer to it"
            return [PutResult(block_id, why) for block_id, _, _ in batch]
        return [
            PutResult(block_id, None, len(value)) if flag == ord("1") else PutResult(block_id, "refused")
            for (block_id, _, value), flag in zip(batch, reply, strict=True)
        ]

    def delete(self, block_ids: Sequence[BlockId]) -> None:
        self._client.call("DEL", *block_ids, timeout_s=PUT_S)

    def ping(self) -> None:
        self._client.call("PING", timeout_s=ASK_S)

    def close(self) -> None:
        self._client.close()
