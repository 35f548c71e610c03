"""Blocks with another engine's keys: turns keys into block ids, and facts about blocks into records.

Knows no store and no host. A key is any bytes that identify a block's content by its whole history, as our ids do.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.blocks.ids import BlockId, lineage_root
from kvstore.blocks.records import BlockRecord
from kvstore.errors import ConfigError

MAX_KEY_BYTES = 4096
MAX_POSITION = 2**64 - 1
_FACTS = struct.Struct("<QI")  # position, bytes of the key; then the key, and zeros up to a whole token


@dataclass(frozen=True, slots=True)
class WantedBlock:
    """What is known of a block before it is read. parent_id: None if the index does not have it."""

    block_id: BlockId
    parent_id: BlockId | None
    fingerprint: bytes
    key: bytes

    def same_content(self, other: BlockRecord) -> bool:
        """Whether this is the block's record: stored under this key, in this namespace."""
        mine = (self.block_id, self.parent_id or other.parent_id, self.fingerprint, self.key)
        return mine == (other.block_id, other.parent_id, other.fingerprint, key_in(other))


class Namespace:
    """Turns keys into ids. Another namespace gives other ids, and so does a store with another secret.

    root: the parent of blocks that have none. owner: goes into every record, with a part of the fingerprint, as its
    model's name.
    """

    def __init__(self, secret: bytes, namespace: bytes, owner: str) -> None:
        self.fingerprint = hashlib.sha256(b"kvstore host blocks\0" + namespace).digest()
        self._label = f"{owner} {self.fingerprint.hex()[:12]}"
        self.root = lineage_root(secret, self.fingerprint.hex())
        self._begun = hashlib.sha256(
            b"key" + self.root
        )  # the root has a fixed length and depends on the store's secret

    def block_id(self, key: bytes) -> BlockId:
        """Raises ConfigError if the key is no bytes, which is not looked at before: a host asks for many."""
        named = self._begun.copy()
        try:
            named.update(key)
        except TypeError:
            raise ConfigError("key", repr(key)[:40], "give bytes, or of several keys a list of these") from None
        return named.digest()

    def ids(self, keys: Sequence[bytes]) -> list[BlockId]:
        return [self.block_id(key) for key in keys]

    def record(self, key: bytes, parent: bytes | None, position: int, created_s: float) -> BlockRecord:
        assert 0 < len(key) <= MAX_KEY_BYTES and 0 <= position <= MAX_POSITION
        return BlockRecord(
            block_id=self.block_id(key),
            parent_id=self.root if parent is None else self.block_id(parent),
            tokens=_FACTS.pack(position, len(key)) + key + bytes(-len(key) % 4),
            fingerprint=self.fingerprint,
            model=self._label,
            created_s=created_s,
        )

    def wanted(self, key: bytes, parent_id: BlockId | None) -> WantedBlock:
        return WantedBlock(self.block_id(key), parent_id, self.fingerprint, key)


def key_in(record: BlockRecord) -> bytes | None:
    """The key in a record; None if it holds no key."""
    if len(record.tokens) < _FACTS.size:
        return None
    _, num_bytes = _FACTS.unpack_from(record.tokens)
    return record.tokens[_FACTS.size : _FACTS.size + num_bytes]
