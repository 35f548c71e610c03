"""Blocks in an object store or a directory: what follows one another in a chain is grouped into one object.

A group is named by its last block, whose id says all that came before, and reaches over no multiple of `group_blocks`
of its chain: so who knows the chain knows the names. It is the values of its blocks one after the other, all of one
size, and so its own size says where it begins. A group never changes, and ends where a system prompt or a turn does:
else a conversation that goes on from there in another way would not know its name.

A state is a chain of its own, built on the block that it stands behind. A turn ends there, and so a group: states are
looked for where the groups end that are found.
"""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import msgspec

from kvstore.blocks.ids import BLOCK_ID_BYTES, BlockId, state_chain
from kvstore.blocks.records import BlockRecord, ReadResult
from kvstore.disk.codec import check_landed, decode_header, encode_head
from kvstore.errors import RemoteError
from kvstore.remote.names import BlockNames
from kvstore.remote.object_address import ObjectAddress
from kvstore.remote.object_client import MOST_AT_ONCE, ByteRange, NoRoomError, ObjectClient, open_store
from kvstore.tiers.port import (
    CHAIN_BATCH_BYTES,
    FULL,
    GONE,
    Chain,
    Keeps,
    ReadJob,
    Stored,
    TierSession,
    WriteBatch,
    WriteJob,
    Written,
    chain_batch_blocks,
)

MOST_PLACES = 1 << 18
MOST_GROUP_BLOCKS = 64  # in so many places of a chain its last group may end, and all are asked for at once
FIRST_GROUPS = 8  # that are asked for at once, then as many as were found
STATES_AT_ONCE = 64
MOST_DELETES, MOST_STATE_DELETES = 1000, 256  # within a deadline
MOST_RENEWALS = 32  # with one put
ASK_S, TRANSFER_S = 2.0, 4.0  # deadlines of questions about a chain, and of groups; no request waits this long


class GroupPlace(NamedTuple):
    """group: name of the object; number: of the block in it."""

    group: str
    number: int


class Places:
    """Of the blocks that were seen last. What is not known here is asked for again with its chain."""

    def __init__(self, most: int = MOST_PLACES) -> None:
        self._most, self._lock = most, threading.Lock()
        self._places: OrderedDict[BlockId, GroupPlace] = OrderedDict()

    def learn(self, places: Iterable[tuple[BlockId, GroupPlace]]) -> None:
        with self._lock:
            for block_id, place in places:
                self._places[block_id] = place
                self._places.move_to_end(block_id)
            while len(self._places) > self._most:
                self._places.popitem(last=False)

    def of(self, block_ids: Sequence[BlockId]) -> list[GroupPlace | None]:
        with self._lock:
            return [self._places.get(one) for one in block_ids]

    def lose(self, block_ids: Iterable[BlockId]) -> None:
        with self._lock:
            for one in block_ids:
                self._places.pop(one, None)


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Blocks [start, end) of a chain."""

    name: str
    start: int
    end: int
    stored_s: float


class ObjectBlocks:
    """ttl_s: after more of its chain was stored. block_size: tokens of a block; block_bytes: its payload.
    num_state_blocks: of what is kept behind a block beside its KV, 0 for nothing. state_span: behind so many blocks
    before it a border needs that.

    Raises ConfigError when what signs in is missing or wrong as far as that can be seen here.
    """

    keeps = Keeps.BELIEVED

    def __init__(
        self, address: ObjectAddress, names: BlockNames, ttl_s: float, block_size: int, block_bytes: int,
        clock: Callable[[], float] = time.time, num_state_blocks: int = 0, state_span: int = 1,
        ask_s: float = ASK_S, transfer_s: float = TRANSFER_S,
    ) -> None:  # fmt: skip
        self.address, self.names, self.ttl_s, self.clock = address, names, ttl_s, clock
        self.ask_s, self.transfer_s = ask_s, transfer_s
        self.block_size, self.num_state_blocks, self.state_span = block_size, num_state_blocks, state_span
        self.places = Places()
        nothing = BlockRecord(
            bytes(BLOCK_ID_BYTES), bytes(BLOCK_ID_BYTES), bytes(4 * block_size), bytes(BLOCK_ID_BYTES)
        )
        self.head_bytes = len(encode_head(nothing, bytes(block_bytes)))
        self.value_bytes = self.head_bytes + block_bytes
        self.group_blocks = min(chain_batch_blocks(block_bytes), MOST_GROUP_BLOCKS)
        group_bytes = self.group_blocks * block_bytes
        self.most_read_bytes = max(1, CHAIN_BATCH_BYTES // group_bytes) * group_bytes  # a group is one request
        self._store = open_store(address)

    def __str__(self) -> str:
        return str(self.address)

    def session(self) -> TierSession:
        return ObjectSession(self, ObjectClient(self.address, self._store))


class ObjectSession:
    """See `TierSession`."""

    def __init__(self, shared: ObjectBlocks, client: ObjectClient) -> None:
        self._shared, self._client = shared, client
        self._ask_s, self._transfer_s = shared.ask_s, shared.transfer_s

    def close(self) -> None:
        self._client.close()

    def ping(self) -> None:
        self._client.look(self._shared.names.prefix + "none", self._ask_s)

    # -- what is there -----------------------------------------------------------------------------------------------
    def ask(self, chain: Chain) -> Sequence[bool | None]:
        """As of `TierSession`, but only `write` lengthens a life: nothing is stored anew to say that it was of use."""
        return self._client.run(self._ask(chain), self._ask_s)

    async def _ask(self, chain: Chain) -> Sequence[bool | None]:
        if not self._shared.num_state_blocks:
            return _are_in(await self._groups(chain), chain)
        own = Chain(chain.root, chain.ids[: len(chain.ids) // 2])
        groups = await self._groups(own)
        states = await self._find_states(own, [group.end for group in groups])
        return [*_are_in(groups, own), *(states.get(number) for number in range(len(own.ids)))]

    async def _find_states(self, chain: Chain, ends: Sequence[int]) -> dict[int, bool]:
        """Whether there is a state behind blocks, by their numbers, of those that were looked at: all that the longest
        prefix needs that has all of them, and what was seen on the way. ends: of groups, the last one first; a prefix
        that has states ends there.
        """
        shared, there = self._shared, dict[int, bool]()
        for first in range(0, len(ends), STATES_AT_ONCE):
            some = ends[first : first + STATES_AT_ONCE]
            names = [shared.names.of(self._state(chain.ids[end - 1]).ids[-1]) for end in some]
            infos = await self._client.look_up(names)
            there |= {end - 1: False for end, info in zip(some, infos, strict=True) if info is None}
            for end in (end for end, info in zip(some, infos, strict=True) if info is not None):
                needed = range(max(0, end - shared.state_span), end)
                new = [number for number in needed if number not in there]
                found = await asyncio.gather(*(self._has_state(chain.ids[number]) for number in new))
                there |= dict(zip(new, found, strict=True))
                if all(there[number] for number in needed):
                    return there
        return there

    def _state(self, block_id: BlockId) -> Chain:
        """The state behind this block, as a chain of its own."""
        num_blocks = self._shared.num_state_blocks
        return Chain(block_id, tuple(state_chain(block_id, num_blocks, self._shared.block_size)), (num_blocks,))

    async def _has_state(self, block_id: BlockId) -> bool:
        chain = self._state(block_id)
        return all(_are_in(await self._groups(chain), chain))

    async def _groups(self, chain: Chain) -> list[BlockGroup]:
        """Those of a chain that are worth reading, the last one first. All live as long as what was stored last."""
        groups, youngest_s = list[BlockGroup](), 0.0
        for group in await self._find_groups(chain):
            youngest_s = max(youngest_s, group.stored_s)
            if self._shared.clock() - youngest_s <= self._shared.ttl_s:
                groups.append(group)
                self._learn(group.name, chain.ids[group.start : group.end])
        return groups

    def _learn(self, name: str, block_ids: Sequence[BlockId]) -> None:
        self._shared.places.learn((one, GroupPlace(name, number)) for number, one in enumerate(block_ids))

    async def _find_groups(self, chain: Chain) -> list[BlockGroup]:
        most, num_blocks = self._shared.group_blocks, len(chain.ids)
        found: dict[int, BlockGroup] = {}  # by end
        whole = [*range(most, num_blocks + 1, most)]  # ends of groups that can be no longer
        if num_blocks % most and num_blocks in chain.ends:
            whole.append(num_blocks)
        num_whole = 0
        while num_whole < len(whole):  # what follows something that is not there is not asked for
            ends = whole[num_whole:][: max(FIRST_GROUPS, num_whole)]
            found |= await self._look(chain, ends)
            num_new = next((i for i, end in enumerate(ends) if end not in found), len(ends))
            num_whole += num_new
            if num_new < len(ends):
                break
        found |= await self._look(chain, range(most * num_whole + 1, min(most * (num_whole + 1), num_blocks + 1)))
        ends = whole[:num_whole]  # stored turn by turn: where a group begins, the one before it ends
        while ends := [start for end in ends if (start := _start(found, end, most)) < end and start % most]:
            each = max(1, MOST_AT_ONCE // len(ends))
            found |= await self._look(chain, [one for end in ends for one in range(end, end - end % most, -1)[:each]])
        groups = list[BlockGroup]()
        for start in range(most * num_whole, -1, -most):
            end = max((one for one in range(start + 1, start + most + 1) if one in found), default=0)
            while end in found and end > start:
                groups.append(found[end])
                end = found[end].start
        return groups

    async def _look(self, chain: Chain, ends: Sequence[int]) -> dict[int, BlockGroup]:
        """The groups of a chain that end there."""
        names = [self._shared.names.of(chain.ids[end - 1]) for end in ends]
        found: dict[int, BlockGroup] = {}
        for end, name, info in zip(ends, names, await self._client.look_up(names), strict=True):
            count, rest = divmod(0 if info is None else info.num_bytes, self._shared.value_bytes)
            if info is not None and not rest and 1 <= count <= (end - 1) % self._shared.group_blocks + 1:
                found[end] = BlockGroup(name, end - count, end, info.stored_s)  # else it was cut off
        return found

    # -- reading -----------------------------------------------------------------------------------------------------
    def read(self, jobs: Sequence[ReadJob]) -> list[ReadResult]:
        places = self._shared.places.of([job.record.block_id for job in jobs])
        order = sorted((place, i) for i, place in enumerate(places) if place is not None)
        size = self._shared.value_bytes
        spans, results = list[ByteRange](), [ReadResult.MISSING] * len(jobs)
        damaged, doubtful = set[str](), dict[str, list[int]]()  # groups; jobs by their groups
        inside = list[list[int]]()  # which jobs
        for place, i in order:  # what follows one another in a group is one request
            if not spans or (spans[-1].name, spans[-1].end) != (place.group, size * place.number):
                spans.append(ByteRange(place.group, size * place.number, size * place.number))
                inside.append([])
            spans[-1] = ByteRange(place.group, spans[-1].begin, size * (place.number + 1))
            inside[-1].append(i)
        for span, numbers, data in zip(spans, inside, self._client.read(spans, self._transfer_s), strict=True):
            for at, i in enumerate(numbers):
                if data is None:
                    continue
                results[i] = self._checked(data[size * at : size * (at + 1)], jobs[i])
                if results[i] is ReadResult.MISMATCH or size * (at + 1) > len(data):
                    doubtful.setdefault(span.name, []).append(i)
                elif results[i] is ReadResult.CORRUPT:
                    damaged.add(span.name)
        with suppress(RemoteError):
            for name, numbers in doubtful.items():
                if not self._is_whole(name):
                    damaged.add(name)
                    continue
                self._shared.places.lose(jobs[i].record.block_id for i in numbers)
                for i in numbers:
                    results[i] = ReadResult.MISSING
            if damaged:  # else it would be in the way of the whole one
                self._client.remove(list(damaged), self._ask_s)
        return results

    def _is_whole(self, name: str) -> bool:
        """Whether a group ends with the block that it is named by: it was stored anew, with another beginning, since
        its places were learned. Else it was cut off.
        """
        size = self._shared.value_bytes
        (info,) = self._client.infos([name], self._ask_s)
        if info is None or info.num_bytes < size:
            return False
        (value,) = self._client.read([ByteRange(name, info.num_bytes - size, info.num_bytes)], self._transfer_s)
        header = None if value is None else decode_header(value)
        return header is not None and self._shared.names.of(header.record.block_id) == name

    def _checked(self, value: memoryview, job: ReadJob) -> ReadResult:
        if len(value) < self._shared.value_bytes:
            return ReadResult.CORRUPT
        head_bytes = self._shared.head_bytes
        job.view[:] = value[head_bytes:]  # copied first, then checked: what is served is what was checked
        return check_landed(value[:head_bytes], job.view, job.record)

    # -- storing -----------------------------------------------------------------------------------------------------
    def write(self, batch: WriteBatch) -> Written:
        self._delete(batch.deletes)
        return Written([] if batch.chain is None else self._put(batch.chain, batch.jobs))

    def _put(self, chain: Chain, jobs: Sequence[WriteJob]) -> list[Stored]:
        if is_last := jobs[-1].index == len(chain.ids) - 1:  # the whole chain lives on with its last batch
            groups = self._client.run(self._groups(chain), self._ask_s)
        else:
            groups = self._client.run(self._groups_of(chain, jobs), self._ask_s)
        there = _are_in(groups, chain)
        results = [Stored(job.record.block_id) for job in jobs if there[job.index]]
        missing = enumerate(job for job in jobs if not there[job.index])
        most = self._shared.group_blocks

        def group(missing: tuple[int, WriteJob]) -> tuple[int, ...]:
            number, index = missing[0], missing[1].index
            return index - number, index // most, bisect_right(chain.ends, index)

        for _, run in groupby(missing, group):
            results += self._put_run([job for _, job in run])
        if is_last:
            self._renew(groups)
        return results

    async def _groups_of(self, chain: Chain, jobs: Sequence[WriteJob]) -> list[BlockGroup]:
        """The groups in which these blocks are, as far as they still live."""
        most = self._shared.group_blocks
        starts = sorted({job.index - job.index % most for job in jobs})
        ends = [one for start in starts for one in range(start + 1, min(start + most, len(chain.ids)) + 1)]
        found = (await self._look(chain, ends)).values()
        return [group for group in found if self._shared.clock() - group.stored_s <= self._shared.ttl_s]

    def _put_run(self, run: Sequence[WriteJob]) -> list[Stored]:
        """Blocks that follow one another: one group, if none of them is gone."""
        results, values, inside = list[Stored](), bytearray(), list[BlockId]()
        for job in run:
            payload = job.fetch()
            if payload is None:
                results += self._put_group(inside, values)
                results.append(Stored(job.record.block_id, GONE))
                values, inside = bytearray(), []
                continue
            # Without its labels, which say who it was for, the heads of all blocks have one length.
            head = encode_head(msgspec.structs.replace(job.record, tenant="", model=""), payload)
            assert len(head) + payload.nbytes == self._shared.value_bytes
            values += head
            values += payload
            inside.append(job.record.block_id)
        return results + self._put_group(inside, values)

    def _put_group(self, block_ids: Sequence[BlockId], values: bytearray) -> list[Stored]:
        if not block_ids:
            return []
        name = self._shared.names.of(block_ids[-1])
        try:
            self._client.write(name, values, self._transfer_s)
        except NoRoomError:
            return [Stored(one, FULL) for one in block_ids]
        self._learn(name, block_ids)
        return [Stored(one, None, self._shared.value_bytes) for one in block_ids]

    def _renew(self, groups: Sequence[BlockGroup]) -> None:
        """They are to outlive what was stored behind them, for anybody who removes objects by their age."""
        old_s = self._shared.clock() - self._shared.ttl_s / 2
        with suppress(RemoteError):
            for group in [group for group in groups if group.stored_s < old_s][-MOST_RENEWALS:]:
                self._client.renew(group.name, self._transfer_s)

    # -- deleting ----------------------------------------------------------------------------------------------------
    def _delete(self, block_ids: Sequence[BlockId]) -> None:
        """The groups that end with one of these, and those that have one inside, as far as they were seen here; and the
        states behind these.
        """
        places, states = self._shared.places, list[BlockId]()
        for start in range(0, len(block_ids) if self._shared.num_state_blocks else 0, MOST_STATE_DELETES):
            some = block_ids[start : start + MOST_STATE_DELETES]
            states += self._client.run(self._behind(some), self._transfer_s)
        names = [self._shared.names.of(one) for one in (*states, *block_ids)]  # in this order: it may be tried again
        names += {place.group for place in places.of(block_ids) if place}
        for start in range(0, len(names), MOST_DELETES):
            self._client.remove(names[start : start + MOST_DELETES], self._transfer_s)
        places.lose(block_ids)

    async def _behind(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        """The blocks of those states behind these blocks whose beginning or end is there."""
        most, name_of = self._shared.group_blocks, self._shared.names.of
        states = [self._state(one).ids for one in block_ids]
        names = [list(dict.fromkeys((name_of(ids[:most][-1]), name_of(ids[-1])))) for ids in states]
        infos = iter(await self._client.look_up([name for some in names for name in some]))
        there = [any([next(infos) for _ in some]) for some in names]  # noqa: C419 (each of them)
        return [one for ids, is_there in zip(states, there, strict=True) if is_there for one in ids]


def _start(found: Mapping[int, BlockGroup], end: int, most: int) -> int:
    """Where the groups begin that are known to lie one before the other, up to this end."""
    while end in found:
        end = found[end].start
        if not end % most:
            break
    return end


def _are_in(groups: Sequence[BlockGroup], chain: Chain) -> list[bool]:
    there = [False] * len(chain.ids)
    for group in groups:
        there[group.start : group.end] = [True] * (group.end - group.start)
    return there
