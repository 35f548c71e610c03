"""Blocks as values in a Redis or Valkey: one key each. Chains expire from their tails.

A key's value never changes, so replicas may store the same block twice. When memory is short, the server alone decides
what to evict (`maxmemory-policy volatile-ttl`): what expires soonest, which is a tail, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import ReadResult
from kvstore.disk.codec import check_landed, encode_head
from kvstore.errors import RemoteError
from kvstore.remote.address import RedisAddress
from kvstore.remote.names import BlockNames
from kvstore.remote.resp import RespClient
from kvstore.remote.resp_replies import ErrorReply, Landed, Reply
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

ASK_S, TRANSFER_S = 2.0, 4.0  # deadlines of a pipeline with small answers, and with values; no request waits this long
PIPELINE_KEYS = 4096
TAIL_SHARE = 10  # heads live longer than tails, by up to one such part
Value = tuple[WriteJob, bytes]  # a block to be stored: header and payload


@dataclass(frozen=True, slots=True)
class RedisBlocks:
    """ttl_s: how long a chain's tail lives after it was last asked for or stored."""

    address: RedisAddress
    names: BlockNames
    ttl_s: float
    keeps: ClassVar[Keeps] = Keeps.BELIEVED
    most_read_bytes: ClassVar[int] = 2 << 20

    def __str__(self) -> str:
        return str(self.address)

    def session(self) -> TierSession:
        return RedisSession(RespClient(self.address, ASK_S), self.names, self.ttl_s)


class RespSession:
    """What a `TierSession` does that reads values by commands."""

    def __init__(self, client: RespClient) -> None:
        self._client = client

    def _values(self, commands: Sequence[Sequence[str | bytes]], jobs: Sequence[ReadJob]) -> list[ReadResult]:
        """The value that each command asks for, into the memory of its job."""
        replies = self._client.pipeline(commands, [job.view for job in jobs], TRANSFER_S)
        return [_result(reply, job) for reply, job in zip(replies, jobs, strict=True)]

    def ping(self) -> None:
        self._client.call("PING", timeout_s=ASK_S)

    def close(self) -> None:
        self._client.close()


def put_missing(
    jobs: Sequence[WriteJob], there: Sequence[bool], store: Callable[[Sequence[Value]], list[Stored]]
) -> list[Stored]:
    """Store those blocks that are not there, some megabytes at a time. there: of each job."""
    results, values, size = list[Stored](), list[Value](), 0
    for job, is_there in zip(jobs, there, strict=True):
        payload = None if is_there else job.fetch()
        if payload is None:
            results.append(Stored(job.record.block_id, None if is_there else GONE))
            continue
        values.append((job, encode_head(job.record, payload) + payload))
        size += payload.nbytes
        if size >= CHAIN_BATCH_BYTES:
            results += store(values)
            values, size = [], 0
    return results + (store(values) if values else [])


def _result(reply: Reply, job: ReadJob) -> ReadResult:
    if reply is None:
        return ReadResult.MISSING
    if isinstance(reply, Landed):
        return check_landed(reply.head, job.view, job.record)
    return ReadResult.FAILED if isinstance(reply, ErrorReply) else ReadResult.CORRUPT  # too short


class RedisSession(RespSession):
    """See `TierSession`."""

    def __init__(self, client: RespClient, names: BlockNames, ttl_s: float) -> None:
        super().__init__(client)
        self._names, self._ttl_s = names, ttl_s

    def _ttl_ms(self, index: int) -> int:
        """The time to live, shorter for each block than for the one before it."""
        return int(1000 * self._ttl_s * (1 + 64 / (64 + index) / TAIL_SHARE))

    def ask(self, chain: Chain) -> list[bool]:
        return self._ask(list(enumerate(chain.ids, chain.behind)))

    def _ask(self, blocks: Sequence[tuple[int, BlockId]]) -> list[bool]:
        """blocks: with their numbers. Each is asked for after those behind it: if this is cut off, no head expires
        before its tail.
        """
        commands = [("PEXPIRE", self._names.of(one), self._ttl_ms(number)) for number, one in reversed(blocks)]
        found: list[bool] = []
        for start in range(0, len(commands), PIPELINE_KEYS):
            for reply in self._client.pipeline(commands[start : start + PIPELINE_KEYS], timeout_s=ASK_S):
                if isinstance(reply, ErrorReply):
                    raise RemoteError(f"{self._client.address}: {reply.message}")
                found.append(reply == 1)
        return found[::-1]

    def read(self, jobs: Sequence[ReadJob]) -> list[ReadResult]:
        results = self._values([("GET", self._names.of(job.record.block_id)) for job in jobs], jobs)
        damaged = [job.record.block_id for job, one in zip(jobs, results, strict=True) if one is ReadResult.CORRUPT]
        if damaged:  # else they would keep sound ones from being stored
            with suppress(RemoteError):
                self._delete(damaged)
        return results

    def write(self, batch: WriteBatch) -> Written:
        self._delete(batch.deletes)
        return Written([] if batch.chain is None else self._put(batch.chain, batch.jobs))

    def _put(self, chain: Chain, jobs: Sequence[WriteJob]) -> list[Stored]:
        begun_s = time.monotonic()
        if jobs[-1].index == len(chain.ids) - 1:  # the whole chain lives on with its last batch
            all_there = self.ask(chain)
            there = [all_there[job.index] for job in jobs]
        else:
            there = self._ask([(chain.behind + job.index, job.record.block_id) for job in jobs])

        def store(values: Sequence[Value]) -> list[Stored]:
            # Counted from the beginning: however long this takes, a tail expires before its head.
            late_ms, commands = int(1000 * (time.monotonic() - begun_s)), []
            for job, value in values:
                left_ms = max(1, self._ttl_ms(chain.behind + job.index) - late_ms)
                commands.append(("SET", self._names.of(job.record.block_id), value, "PX", left_ms))
            replies = self._client.pipeline(commands, timeout_s=TRANSFER_S)
            errors = [None if reply == b"OK" else getattr(reply, "code", "no OK") for reply in replies]
            return [
                Stored(job.record.block_id, error, 0 if error else len(value))
                for (job, value), error in zip(values, errors, strict=True)
            ]

        return put_missing(jobs, there, store)

    def _delete(self, block_ids: Sequence[BlockId]) -> None:
        for start in range(0, len(block_ids), PIPELINE_KEYS):
            some = block_ids[start : start + PIPELINE_KEYS]
            reply = self._client.call("UNLINK", *map(self._names.of, some), timeout_s=ASK_S)
            assert isinstance(reply, int)
