"""The bytes of a store's records: msgspec structs as MessagePack, sealed with a checksum that also covers their place.

Knows no file. Bytes may come from anywhere: what is no record of the wanted kind raises ValueError.
"""

from typing import Any, TypeVar

import msgspec
import xxhash

T = TypeVar("T")
CHECKSUM_BYTES = 16
MAX_LABEL_CHARS = 1024

pack = msgspec.msgpack.Encoder().encode  # raises ValueError for half a surrogate pair, and checks nothing else


_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {kind: msgspec.msgpack.Decoder(kind) for kind in (int, bytes)}


def stored(kind: type[T]) -> type[T]:
    """Decorates what can be unpacked. Its decoder is made at import: msgspec looks into a type at its first use, and
    two threads that do so at once end the process.
    """
    _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return kind


def unpack(kind: type[T], packed: bytes | memoryview) -> T:
    """Raises ValueError."""
    found: T = _decoders[kind].decode(packed)
    return found


def seal(table: str, key: bytes, packed: bytes) -> bytes:
    """Seal a value so that it is valid only under this key of this table."""
    return packed + _checksum(table, key, packed)


def unseal(kind: type[T], table: str, key: bytes, value: bytes) -> T:
    """Check and remove the seal. Raises ValueError, also when the value was sealed for another place."""
    packed = value[:-CHECKSUM_BYTES]
    if value[-CHECKSUM_BYTES:] != _checksum(table, key, packed):
        raise ValueError(f"a record in {table!r} fails its checksum")
    return unpack(kind, packed)


def _checksum(table: str, key: bytes, packed: bytes) -> bytes:
    checksum = xxhash.xxh3_128(table.encode() + b":" + len(key).to_bytes(2, "little") + key)
    checksum.update(packed)
    return checksum.digest()


def label(text: str) -> str:
    """A name in the form that blocks carry: not too long, and always storable."""
    if text.isascii() and len(text) <= MAX_LABEL_CHARS:
        return text
    return text[:MAX_LABEL_CHARS].encode("utf-8", "replace").decode()
