"""A router as far as KV events go, written from their schema: what it believes a server holds."""

from collections import defaultdict

import msgspec
import zmq

from tests.support.redis_server import free_port
from tests.support.waiting import wait_until

MEDIA = ("GPU", "CPU", "STORAGE")
ENDED = (-1).to_bytes(8, "big", signed=True)


def free_endpoint() -> str:
    """Of which the next port is free, too."""
    return f"tcp://127.0.0.1:{free_port(2)}"


class Picture:
    """Of one topic: where each block is, and the tokens of its whole chain, by which a router knows it.

    unplaced: blocks that came before their parents; a router drops those.
    """

    def __init__(self) -> None:
        self.places: dict[bytes, set[str]] = defaultdict(set)
        self.tokens: dict[bytes, tuple[int, ...]] = {}
        self.sequences: list[int] = []
        self.unplaced: list[bytes] = []
        self.num_cleared = 0

    def take(self, sequence: int, payload: bytes) -> None:
        self.sequences.append(sequence)
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            kind = event.pop("type")
            getattr(self, f"_{kind}")(**event)

    def _AllBlocksCleared(self) -> None:
        self.num_cleared += 1
        self.places.clear()
        self.tokens.clear()

    def _BlockRemoved(self, block_hashes, medium) -> None:
        for block in block_hashes:
            assert medium in self.places[block] or not self.num_cleared
            self.places[block].discard(medium)

    def _BlockStored(
        self, block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name
    ) -> None:  # fmt: skip
        assert medium in MEDIA and lora_id is None and lora_name is None
        assert len(token_ids) == block_size * len(block_hashes)
        for index, block in enumerate(block_hashes):
            before = () if parent_block_hash is None else self.tokens.get(parent_block_hash)
            if before is None:
                self.unplaced += [block] if self.num_cleared else []  # who has come late waits for the whole picture
                return
            own = tuple(token_ids[index * block_size : (index + 1) * block_size])
            assert self.tokens.setdefault(block, before + own) == before + own
            assert medium not in self.places[block] or not self.num_cleared, "told twice"
            self.places[block].add(medium)
            parent_block_hash = block

    def held(self, medium: str) -> set[tuple[int, ...]]:
        """Token sequences of the blocks there."""
        return {self.tokens[block] for block, places in self.places.items() if medium in places}


class Reader:
    """Subscribes at once. A context manager."""

    def __init__(self, endpoint: str, prefix: str = "") -> None:
        self.pictures: dict[str, Picture] = defaultdict(Picture)
        self._context = zmq.Context()
        self._in, self._ask = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._in.setsockopt(zmq.RCVHWM, 0)
        self._in.connect(endpoint)
        self._in.subscribe(prefix)
        address, _, port = endpoint.rpartition(":")
        self._ask.connect(f"{address}:{int(port) + 1}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._context.destroy(linger=0)

    def read(self) -> None:
        """What has come by now."""
        while self._in.poll(0):
            topic, sequence, payload = self._in.recv_multipart()
            self.pictures[topic.decode()].take(int.from_bytes(sequence, "big"), payload)

    def read_until(self, is_so, what="") -> None:
        wait_until(lambda: self.read() or is_so(), what)

    def ask(self, frames: list[bytes]) -> None:
        self._ask.send_multipart(frames)

    def replay(self, first: int, *topic: bytes) -> list[tuple[int, bytes]]:
        self.ask([b"", first.to_bytes(8, "big"), *topic])
        found = []
        while True:
            assert self._ask.poll(60_000), "no answer"
            *_, sequence, payload = self._ask.recv_multipart()
            if sequence == ENDED:
                return found
            found.append((int.from_bytes(sequence, "big"), payload))
