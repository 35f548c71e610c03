"""Blocks on a disk that another process of this machine owns: the side of those that use it, through a Unix socket.

What a value is, and who checks it, is as in `redis_blocks`. There is no time to live: the owner decides what stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import ReadResult
from kvstore.remote.address import RedisAddress
from kvstore.remote.redis_blocks import ASK_S, PIPELINE_KEYS, RespSession, Value, put_missing
from kvstore.remote.resp import RespClient
from kvstore.remote.resp_replies import ErrorReply
from kvstore.tiers.port import Chain, Keeps, ReadJob, Stored, TierSession, WriteBatch, Written

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
        for start in range(0, len(batch.deletes), PIPELINE_KEYS):
            self._client.call("DEL", *batch.deletes[start : start + PIPELINE_KEYS], timeout_s=PUT_S)
        if batch.chain is None:
            return Written()
        there = self._flags("HAS", [job.record.block_id for job in batch.jobs])
        return Written(put_missing(batch.jobs, there, partial(self._store, batch.chain)))

    def _store(self, chain: Chain, values: Sequence[Value]) -> list[Stored]:
        command: list[str | bytes] = ["PUT"]
        for job, value in values:
            before = chain.ids[job.index - 1] if job.index else job.record.parent_id if job.record.is_state else b""
            command += (before, value)
        (reply,) = self._client.pipeline([command], timeout_s=PUT_S)
        if not isinstance(reply, bytes) or len(reply) != len(values):
            why = reply.code if isinstance(reply, ErrorReply) else "no answer to it"
            return [Stored(job.record.block_id, why) for job, _ in values]
        flags = [flag == ord("1") for flag in reply]
        return [
            Stored(job.record.block_id, None if is_stored else "refused", len(value) if is_stored else 0)
            for (job, value), is_stored in zip(values, flags, strict=True)
        ]
