"""Blocks as values in a Redis or Valkey: one key each. Chains expire from their tails.

A key's value never changes, so replicas may store the same block twice. When memory is short, the server alone decides
what to evict (`maxmemory-policy volatile-ttl`): what expires soonest, which is a tail, too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import ReadResult
from kvstore.disk.codec import check_landed, encode_head
from kvstore.disk.io_queue import Read
from kvstore.errors import RemoteError
from kvstore.remote.address import RedisAddress
from kvstore.remote.names import BlockNames
from kvstore.remote.resp import RespClient
from kvstore.remote.resp_replies import ErrorReply, Landed
from kvstore.remote.shared import Put, PutResult, Session, SharedChain

ASK_S, TRANSFER_S = 2.0, 4.0  # deadlines of a pipeline with small answers, and with values; no request waits this long
PIPELINE_BYTES = 4 << 20
PIPELINE_KEYS = 4096
TAIL_SHARE = 10  # heads live longer than tails, by up to one such part


@dataclass(frozen=True, slots=True)
class RedisBlocks:
    """ttl_s: how long a chain's tail lives after it was last asked for or stored."""

    address: RedisAddress
    names: BlockNames
    ttl_s: float
    most_read_bytes: ClassVar[int] = 2 << 20

    def __str__(self) -> str:
        return str(self.address)

    def session(self) -> Session:
        return RedisSession(RespClient(self.address, ASK_S), self.names, self.ttl_s)


class RedisSession:
    """See `Session`."""

    def __init__(self, client: RespClient, names: BlockNames, ttl_s: float) -> None:
        self._client, self._names, self._ttl_s = client, names, ttl_s

    def _ttl_ms(self, index: int) -> int:
        """The time to live, shorter for each block than for the one before it."""
        return int(1000 * self._ttl_s * (1 + 64 / (64 + index) / TAIL_SHARE))

    def ask(self, chain: SharedChain) -> list[bool]:
        # Tail first: if this is cut off, no head expires before its tail.
        commands = [("PEXPIRE", self._names.of(one), self._ttl_ms(i)) for i, one in enumerate(chain.ids)][::-1]
        found: list[bool] = []
        for start in range(0, len(commands), PIPELINE_KEYS):
            for reply in self._client.pipeline(commands[start : start + PIPELINE_KEYS], timeout_s=ASK_S):
                if isinstance(reply, ErrorReply):
                    raise RemoteError(f"{self._client.address}: {reply.message}")
                found.append(reply == 1)
        return found[::-1]

    def read(self, reads: Sequence[Read]) -> list[ReadResult]:
        commands = [("GET", self._names.of(read.record.block_id)) for read in reads]
        replies = self._client.pipeline(commands, [read.view for read in reads], TRANSFER_S)
        results, damaged = [], []
        for read, reply in zip(reads, replies, strict=True):
            if reply is None:
                result = ReadResult.MISSING
            elif isinstance(reply, Landed):
                result = check_landed(reply.head, read.view, read.record)
            else:  # an error, or too short a value
                result = ReadResult.FAILED if isinstance(reply, ErrorReply) else ReadResult.CORRUPT
            if result is ReadResult.CORRUPT:
                damaged.append(read.record.block_id)
            results.append(result)
        if damaged:  # else they would keep sound ones from being stored
            with suppress(RemoteError):
                self.delete(damaged)
        return results

    def put(self, chain: SharedChain, puts: Sequence[Put]) -> list[PutResult]:
        begun_s, there = time.monotonic(), self.ask(chain)
        results: list[PutResult] = []
        batch: list[tuple[BlockId, tuple[str | bytes | memoryview | int, ...], int]] = []
        size = 0
        for put in puts:
            block_id = put.record.block_id
            if there[put.index]:
                results.append(PutResult(block_id))
                continue
            payload = put.fetch()
            if payload is None:
                results.append(PutResult(block_id, "gone before it was stored"))
                continue
            value = encode_head(put.record, payload) + payload
            # Counted from the beginning: however long this takes, a tail expires before its head.
            left_ms = max(1, self._ttl_ms(put.index) - int(1000 * (time.monotonic() - begun_s)))
            batch.append((block_id, ("SET", self._names.of(block_id), value, "PX", left_ms), len(value)))
            size += len(value)
            if size >= PIPELINE_BYTES:
                results += self._set(batch)
                batch, size = [], 0
        return results + self._set(batch)

    def _set(self, batch: Sequence[tuple[BlockId, tuple[str | bytes | memoryview | int, ...], int]]) -> list[PutResult]:
        if not batch:
            return []
        replies = self._client.pipeline([command for _, command, _ in batch], timeout_s=TRANSFER_S)
        return [
            PutResult(one, None, size) if reply == b"OK" else PutResult(one, getattr(reply, "code", "no OK"))
            for (one, _, size), reply in zip(batch, replies, strict=True)
        ]

    def delete(self, block_ids: Sequence[BlockId]) -> None:
        for start in range(0, len(block_ids), PIPELINE_KEYS):
            some = block_ids[start : start + PIPELINE_KEYS]
            reply = self._client.call("UNLINK", *map(self._names.of, some), timeout_s=ASK_S)
            assert isinstance(reply, int)

    def ping(self) -> None:
        self._client.call("PING", timeout_s=ASK_S)

    def close(self) -> None:
        self._client.close()
