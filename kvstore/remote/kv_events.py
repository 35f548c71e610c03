"""KV events: tells routers over ZeroMQ which blocks this server holds, in the messages of vLLM's publisher.

The publisher's thread takes changes from `kvstore.blocks.holdings` and owns the sockets; nobody waits for it. The
messages contain token ids, and whoever connects may read them.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from urllib.parse import quote

import msgspec
import zmq

from kvstore.blocks.holdings import Change, Holdings, Place
from kvstore.blocks.ids import TOKEN_BYTES, BlockId, ids_of
from kvstore.config import parse_endpoint
from kvstore.errors import ConfigError
from kvstore.forks import leave_to_parent

MEDIUM = {Place.HBM: "GPU", Place.CPU: "CPU", Place.DISK: "STORAGE"}
END = (-1).to_bytes(8, "big", signed=True)
BATCH_BLOCKS = 256  # taken at a time, while the tiers wait
TICK_S = 0.05  # changes within this time go into one message
PICTURE_EVERY_S = 5.0  # the whole picture is sent at most this often
REPLAY_BATCHES, REPLAY_BYTES = 10_000, 64 << 20
MOST_QUEUED = REPLAY_BATCHES + 1  # queued for one reader
AT_ONCE = 64  # requests
CLOSE_S = 0.5  # for messages that are still being sent


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks of one chain, each the parent of the next."""

    block_hashes: list[BlockId]
    parent_block_hash: BlockId | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[BlockId]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True):
    """All tiers were emptied."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Event]


def places_of(places: int) -> list[int]:
    return [place for place in MEDIUM if places & place]


def events_of(changes: Iterable[Change]) -> dict[str, list[Event]]:
    """The events of each tenant, with parents stored before their children."""
    found: dict[str, list[Event]] = {}
    stored: dict[tuple[str, int], BlockStored] = {}  # the last event of each tenant and place
    removed: dict[tuple[str, int], BlockRemoved] = {}
    for block_id, parent_id, block, added, gone in changes:
        tenant, events = block.tenant, found.setdefault(block.tenant, [])
        for place in places_of(added):
            last = stored.get((tenant, place))
            if last is None or last.block_hashes[-1] != parent_id:
                last = BlockStored([], parent_id, [], len(block.tokens) // TOKEN_BYTES, None, MEDIUM[place], None)
                stored[tenant, place] = last
                events.append(last)
            last.block_hashes.append(block_id)
            last.token_ids += ids_of(block.tokens)
        for place in places_of(gone):
            if (tenant, place) not in removed:
                removed[tenant, place] = BlockRemoved([], MEDIUM[place])
                events.append(removed[tenant, place])
            removed[tenant, place].block_hashes.append(block_id)
    return found


class PastBatches:
    """The batches published last, bounded in number and bytes."""

    def __init__(self, most: int = REPLAY_BATCHES, most_bytes: int = REPLAY_BYTES) -> None:
        self._batches: deque[tuple[bytes, int, bytes]] = deque()
        self._most, self._most_bytes, self._num_bytes = most, most_bytes, 0

    def add(self, topic: bytes, sequence: int, payload: bytes) -> None:
        self._batches.append((topic, sequence, payload))
        self._num_bytes += len(payload)
        while len(self._batches) > self._most or self._num_bytes > self._most_bytes:
            self._num_bytes -= len(self._batches.popleft()[2])

    def since(self, topic: bytes, sequence: int) -> list[tuple[int, bytes]]:
        return [(one, payload) for of, one, payload in self._batches if of == topic and one >= sequence]


class KVEvents:
    """Publishes at an endpoint from `start` to `close`. On the next port it answers readers that missed something.

    topic: for chains without a tenant, kv@POD@MODEL; a tenant's is kv@POD@TENANT:MODEL, with its own sequence numbers.
    Raises ConfigError if the ports are not available.
    """

    def __init__(
        self, endpoint: str, topic: str, clock: Callable[[], float] = time.time, past: PastBatches | None = None,
        picture_every_s: float = PICTURE_EVERY_S,
    ) -> None:  # fmt: skip
        address, port = parse_endpoint(endpoint)
        self._topic, self._clock, self._past = topic, clock, past or PastBatches()
        self._counts = dict.fromkeys(("batches", "stored", "removed", "pictures", "replays", "bad_replay_requests"), 0)
        self._next: dict[str, int] = {}  # next sequence number of each tenant
        self._lacking: set[bytes] = set()  # prefixes of topics of which somebody lacks the whole picture
        self._picture_every_s, self._picture_s = picture_every_s, -math.inf
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        with ExitStack() as opened:
            context = zmq.Context()
            opened.callback(context.destroy, linger=round(CLOSE_S * 1000))
            self._out = _bound(context.socket(zmq.XPUB), endpoint)
            self._out.setsockopt(zmq.XPUB_VERBOSE, 1)  # shows every new reader, not only the first of a topic
            self._replay = _bound(context.socket(zmq.ROUTER), f"{address}:{port + 1}")
            self._opened = opened.pop_all()
        leave_to_parent(self, "the publisher of KV events", _thread=None)

    def start(self, holdings: Holdings) -> None:
        self._thread = threading.Thread(target=self._publish, args=(holdings,), name="kvstore-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish what has changed until now, and end."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._opened.close()

    def stats(self) -> dict[str, object]:
        return dict(self._counts)

    # -- the publisher's thread --------------------------------------------------------------------------------------
    def _publish(self, holdings: Holdings) -> None:
        self._send("", [AllBlocksCleared()])
        while not self._stopping.is_set():
            self._tick(holdings)
            if not holdings.num_waiting:
                self._replay.poll(round(TICK_S * 1000))
        while changes := holdings.take_changes(BATCH_BLOCKS):
            self._send_changes(changes)

    def _tick(self, holdings: Holdings) -> None:
        # Whoever has subscribed since the last tick, by the prefix of its topics.
        self._lacking |= {one[0][1:] for one in _received(self._out) if one[0][:1] == b"\x01"}
        for one in _received(self._replay):
            self._answer(one)
        self._send_changes(holdings.take_changes(BATCH_BLOCKS))
        now_s = time.monotonic()
        if self._lacking and now_s - self._picture_s >= self._picture_every_s:
            self._picture_s = now_s
            self._send_picture(holdings)

    def _send_picture(self, holdings: Holdings) -> None:
        """Send all that is held to those who have come late, as nothing was kept for them."""
        tenants = {tenant for tenant in self._next if self._name(tenant).startswith(tuple(self._lacking))}
        self._lacking = set()
        for tenant in tenants:
            self._send(tenant, [AllBlocksCleared()])
        told = (change for change in holdings.all_told() if change.block.tenant in tenants)
        while part := list(islice(told, BATCH_BLOCKS)):
            self._send_changes(part)
        self._counts["pictures"] += bool(tenants)

    def _name(self, tenant: str) -> bytes:
        head, at, model = self._topic.rpartition("@")
        return f"{head}{at}{quote(tenant, safe='')}:{model}".encode() if tenant else self._topic.encode()

    def _send_changes(self, changes: Iterable[Change]) -> None:
        for tenant, events in events_of(changes).items():
            self._send(tenant, events)

    def _send(self, tenant: str, events: list[Event]) -> None:
        if tenant not in self._next:  # readers may know what an earlier process of this server had
            self._next[tenant] = 0
            if not isinstance(events[0], AllBlocksCleared):
                events = [AllBlocksCleared(), *events]
        topic, sequence = self._name(tenant), self._next[tenant]
        self._next[tenant] += 1
        payload = msgspec.msgpack.encode(EventBatch(self._clock(), events))
        self._out.send_multipart((topic, sequence.to_bytes(8, "big"), payload))
        self._past.add(topic, sequence, payload)
        self._counts["batches"] += 1
        for event in events:
            if not isinstance(event, AllBlocksCleared):
                self._counts["stored" if isinstance(event, BlockStored) else "removed"] += len(event.block_hashes)

    def _answer(self, request: list[bytes]) -> None:
        """request: reader, empty frame, the first sequence number that it lacks, and a topic if it is a tenant's."""
        if len(request) not in (3, 4) or len(request[2]) != 8:
            self._counts["bad_replay_requests"] += 1
            return
        reader, first = request[0], int.from_bytes(request[2], "big")
        topic = request[3] if len(request) == 4 else self._name("")
        past = self._past.since(topic, first)
        for sequence, payload in past:
            self._replay.send_multipart((reader, b"", topic, sequence.to_bytes(8, "big"), payload))
        self._replay.send_multipart((reader, b"", b"", END, b""))
        self._counts["replays"] += 1
        num_sent = next((num for tenant, num in self._next.items() if self._name(tenant) == topic), 0)
        if first < (past[0][0] if past else num_sent):
            self._lacking.add(topic)  # what it lacks is no longer here


def _bound(socket: zmq.Socket[bytes], endpoint: str) -> zmq.Socket[bytes]:
    socket.setsockopt(zmq.SNDHWM, MOST_QUEUED)  # a reader that falls behind misses messages, and notices
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        value = f"{endpoint}, which cannot be listened at: {error.strerror}"
        raise ConfigError("kv_events", value, "give another port") from None
    return socket


def _received(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """The messages that are waiting, but no more than leaves others their turn."""
    with suppress(zmq.Again):
        for _ in range(AT_ONCE):
            yield socket.recv_multipart(zmq.NOBLOCK)
