"""Blocks on a disk that another process of this machine owns: the side of those that use it, through a Unix socket.

What a value is, and who checks it, is as in `redis_blocks`. There is no time to live: the owner decides what stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import ReadResult
from kvstore.disk.codec import encode_head
from kvstore.remote.address import RedisAddress
from kvstore.remote.redis_blocks import ASK_S, RespSession
from kvstore.remote.resp import RespClient
from kvstore.remote.resp_replies import ErrorReply
from kvstore.tiers.port import (
    CHAIN_BATCH_BYTES,
    GONE,
    Chain,
    Keeps,
    ReadJob,
    Stored,
    TierSession,
    WriteBatch,
    WriteJob,
    Written,
)

PUT_S = 30.0  # until a batch is durable: only the thread that stores waits for it


@dataclass(frozen=True, slots=True)
class OwnedBlocks:
    """path: of the owner's socket."""

    path: str
    keeps: ClassVar[Keeps] = Keeps.BELIEVED
    most_read_bytes: ClassVar[int] = 2 << 20

    def __str__(self) -> str:
        return f"unix:{self.path}"

    def session(self) -> TierSession:
        return OwnedSession(RespClient(RedisAddress(self.path), ASK_S))


class OwnedSession(RespSession):
    """See `TierSession`. Commands are those of `kvstore.owned_disk`."""

    def ask(self, chain: Chain) -> list[bool]:
        return self._flags("ASK", chain.ids)

    def _flags(self, name: str, block_ids: Sequence[BlockId]) -> list[bool]:
        reply = self._client.call(name, *block_ids, timeout_s=ASK_S)
        assert isinstance(reply, bytes) and len(reply) == len(block_ids)
        return [flag == ord("1") for flag in reply]

    def read(self, jobs: Sequence[ReadJob]) -> list[ReadResult]:
        return self._values([("GET", job.record.block_id) for job in jobs], jobs)

    def write(self, batch: WriteBatch) -> Written:
        if batch.deletes:
            self._client.call("DEL", *batch.deletes, timeout_s=PUT_S)
        return Written([] if batch.chain is None else self._put(batch.chain, batch.jobs))

    def _put(self, chain: Chain, jobs: Sequence[WriteJob]) -> list[Stored]:
        there = self._flags("HAS", [job.record.block_id for job in jobs])
        results: list[Stored] = []
        batch: list[tuple[BlockId, bytes, bytes]] = []
        size = 0
        for job, is_there in zip(jobs, there, strict=True):
            if is_there:
                results.append(Stored(job.record.block_id))
            elif (payload := job.fetch()) is None:
                results.append(Stored(job.record.block_id, GONE))
            else:
                before = chain.ids[job.index - 1] if job.index else job.record.parent_id if job.record.is_state else b""
                batch.append((job.record.block_id, before, encode_head(job.record, payload) + bytes(payload)))
                size += payload.nbytes
            if size >= CHAIN_BATCH_BYTES:
                results += self._store(batch)
                batch, size = [], 0
        return results + self._store(batch)

    def _store(self, batch: Sequence[tuple[BlockId, bytes, bytes]]) -> list[Stored]:
        if not batch:
            return []
        command: list[str | bytes] = ["PUT"]
        for _, before, value in batch:
            command += (before, value)
        (reply,) = self._client.pipeline([command], timeout_s=PUT_S)
        if not isinstance(reply, bytes) or len(reply) != len(batch):
            why = reply.code if isinstance(reply, ErrorReply) else "no answer to it"
            return [Stored(block_id, why) for block_id, _, _ in batch]
        return [
            Stored(block_id, None, len(value)) if flag == ord("1") else Stored(block_id, "refused")
            for (block_id, _, value), flag in zip(batch, reply, strict=True)
        ]
