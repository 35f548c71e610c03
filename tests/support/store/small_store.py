"""A small real store for tests: two sessions that share the head of their chain, and a chain that no session has."""

import random
import time
from dataclasses import dataclass
from pathlib import Path

from kvstore.blocks.ids import extend_chain, lineage_root, token_bytes
from kvstore.blocks.records import BlockRecord
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.tier import DiskTier
from kvstore.sessions.record import SessionKey, TurnRecord
from kvstore.sessions.store import open_sessions

BLOCK_SIZE, PAYLOAD_BYTES = 16, 8192
CAPACITY_BYTES = 32 << 20
MODELS = ("red-model", "blue-model")
NUM_SHARED, NUM_OWN, NUM_LONE = 3, 2, 4
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class SmallStore:
    path: Path
    shared: list[bytes]
    anna: list[bytes]  # her own blocks, after the shared ones
    bert: list[bytes]
    lone: list[bytes]  # of the other model, last used ten days ago

    @property
    def num_blocks(self) -> int:
        return len(self.shared) + len(self.anna) + len(self.bert) + len(self.lone)


def payload(block_id: bytes) -> bytearray:
    """Bytes derived from the key, which no codec shrinks."""
    return bytearray(random.Random(block_id).randbytes(PAYLOAD_BYTES))


def write_chain(disk: DiskTier, root: bytes, tokens: list[int], model: str) -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, root, tokens, BLOCK_SIZE)
    puts = []
    for index, block_id in enumerate(chain):
        part = token_bytes(tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
        parent = chain[index - 1] if index else root
        record = BlockRecord(block_id, parent, part, b"f" * 32, "", model, time.time())
        puts.append((record, memoryview(payload(block_id))))
    assert disk.write(puts).error is None
    return chain


def make_store(path: Path) -> SmallStore:
    clock = [time.time() - 10 * DAY_S]
    with StoreDirectory.open(path) as directory:
        disk = DiskTier(directory, CAPACITY_BYTES, clock=lambda: clock[0])
        root = lineage_root(directory.secret, "f" * 64)
        lone = write_chain(disk, root, [9] * BLOCK_SIZE * NUM_LONE, MODELS[1])
        clock[0] = time.time()
        head = [1] * BLOCK_SIZE * NUM_SHARED
        chains = {}
        sessions = open_sessions(directory)
        for name, token in (("anna", 2), ("bert", 3)):
            tokens = head + [token] * BLOCK_SIZE * NUM_OWN
            chains[name] = write_chain(disk, root, tokens, MODELS[0])
            said = [{"role": "user", "content": f"I am {name}"}, {"role": "assistant", "content": f"hello {name}"}]
            turn = TurnRecord(number=1, messages=said, token_ids=tokens, chain=chains[name])
            sessions.commit_turn(SessionKey("", name), turn, fingerprint=b"f" * 32, model=MODELS[0]).wait()
        sessions.close()
        disk.close()
    shared = chains["anna"][:NUM_SHARED]
    assert shared == chains["bert"][:NUM_SHARED]
    return SmallStore(path, shared, chains["anna"][NUM_SHARED:], chains["bert"][NUM_SHARED:], lone)


def damage(store: SmallStore, block_id: bytes) -> None:
    """Change one byte of a block's payload in the file, also where a page that is free now still has it."""
    data_file = store.path / "blocks" / "data.mdb"
    part = bytes(payload(block_id)[100:200])
    content = data_file.read_bytes()
    assert part in content
    data_file.write_bytes(content.replace(part, bytes([part[0] ^ 0xFF]) + part[1:]))


def block_ids(store: SmallStore) -> set[bytes]:
    """Of all blocks on disk."""
    with StoreDirectory.open(store.path) as directory:
        disk = DiskTier(directory, CAPACITY_BYTES)
        try:
            return {entry.block_id for batch in disk.scan() for entry in batch}
        finally:
            disk.close()
