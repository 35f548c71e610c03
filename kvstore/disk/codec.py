"""A block as one value on disk: header, checksum, payload; and back into memory that the caller owns.

Knows no file and no thread. Whatever bytes it is given to read, it raises nothing and allocates no more than a block.
"""

import struct
import threading
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from kvstore.blocks.ids import BLOCK_ID_BYTES
from kvstore.blocks.records import BlockRecord, ReadResult
from kvstore.config import CODEC_NAMES

MAGIC = b"KVbk"
FORMAT_VERSION = 1
CHECKSUM_BYTES = 16
ITEMSIZES = (1, 2, 4)
MAX_LABEL_BYTES = 4096
ZSTD_LEVEL = 1

# magic, format version, codec, itemsize, header bytes, tokens, raw bytes, stored bytes, created, tenant bytes,
# model bytes, fingerprint, block id, parent id; then token ids, tenant, model, the checksum of all but itself, payload.
_FIXED = struct.Struct("<4sHBBIIQQdHH32s32s32s")
_PLANE = struct.Struct("<I")
_local = threading.local()

Bytes = bytes | bytearray | memoryview
Uint8 = npt.NDArray[np.uint8]


class Codec(IntEnum):
    """How a payload is stored. The numbers are the file format.

    SPLIT_ZSTD: all lowest bytes of the elements together, then all next ones: the high bytes of KV compress, the low
    ones are noise that hides it.
    """

    RAW = 0
    ZSTD = 1
    SPLIT_ZSTD = 2


CODECS = dict(zip(CODEC_NAMES, Codec, strict=True))


@dataclass(frozen=True, slots=True)
class Header:
    """What a value says about itself. header_bytes: where the payload begins, the checksum included."""

    record: BlockRecord
    codec: Codec
    itemsize: int
    header_bytes: int
    raw_bytes: int
    stored_bytes: int


# -- writing ---------------------------------------------------------------------------------------------------------
def encode(record: BlockRecord, payload: Bytes, codec: Codec = Codec.RAW, itemsize: int = 2) -> memoryview:
    """The value to store, in memory of its own. itemsize: bytes of one element, for SPLIT_ZSTD.

    What does not get smaller, or does not divide into elements, is stored raw.
    """
    assert len(record.block_id) == len(record.parent_id) == len(record.fingerprint) == BLOCK_ID_BYTES
    assert len(record.tokens) % 4 == 0 and itemsize in ITEMSIZES
    raw = np.frombuffer(payload, np.uint8)
    codec, parts = _compress(raw, codec, itemsize)
    stored_bytes = sum(len(part) for part in parts)
    head = _pack_head(record, codec, itemsize, len(raw), stored_bytes)
    value = np.empty(len(head) + CHECKSUM_BYTES + stored_bytes, np.uint8)
    value[: len(head)] = np.frombuffer(head, np.uint8)
    start = end = len(head) + CHECKSUM_BYTES
    for part in parts:
        begin, end = end, end + len(part)
        np.copyto(value[begin:end], np.frombuffer(part, np.uint8))
    # Over the copy: what was checked is what is written, whatever happens to the source.
    value[len(head) : start] = np.frombuffer(_checksum(head, value[start:]), np.uint8)
    return value.data


def label(text: str) -> bytes:
    """At most so many bytes of UTF-8, cut between characters."""
    encoded = text.encode("utf-8", "surrogatepass")
    if len(encoded) <= MAX_LABEL_BYTES:
        return encoded
    return encoded[:MAX_LABEL_BYTES].decode("utf-8", "ignore").encode()


def _pack_head(record: BlockRecord, codec: Codec, itemsize: int, raw_bytes: int, stored_bytes: int) -> bytes:
    tenant, model = label(record.tenant), label(record.model)
    header_bytes = _FIXED.size + len(record.tokens) + len(tenant) + len(model) + CHECKSUM_BYTES
    fixed = _FIXED.pack(
        MAGIC, FORMAT_VERSION, codec, itemsize, header_bytes, len(record.tokens) // 4, raw_bytes, stored_bytes,
        record.created_s, len(tenant), len(model), record.fingerprint, record.block_id, record.parent_id,
    )  # fmt: skip
    return b"".join((fixed, record.tokens, tenant, model))


def _compress(raw: Uint8, codec: Codec, itemsize: int) -> tuple[Codec, list[bytes | Uint8]]:
    if codec is Codec.RAW or (codec is Codec.SPLIT_ZSTD and len(raw) % itemsize):
        return Codec.RAW, [raw]
    parts: list[bytes | Uint8]
    if codec is Codec.ZSTD:
        parts = [_compressor().compress(raw.data)]
    else:
        frames = [_compressor().compress(plane.data) for plane in _split(raw, itemsize)]
        parts = [b"".join(_PLANE.pack(len(frame)) for frame in frames), *frames]
    return (codec, parts) if sum(map(len, parts)) < len(raw) else (Codec.RAW, [raw])


def _element(itemsize: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype(f"<u{itemsize}")


def _split(raw: Uint8, itemsize: int) -> list[Uint8]:
    """Byte planes, lowest first. Shifts, because a transposed copy of bytes is ten times slower."""
    elements = raw.view(_element(itemsize))
    return [(elements >> (8 * i)).astype(np.uint8) for i in range(itemsize)]


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)  # not to be shared between threads
    return _local.compressor


# -- reading ---------------------------------------------------------------------------------------------------------
def decode_header(value: Bytes) -> Header | None:
    """The header, or None when these bytes are not a value of this format. The checksum is not looked at."""
    if len(value) < _FIXED.size + CHECKSUM_BYTES:
        return None
    (magic, version, codec, itemsize, header_bytes, num_tokens, raw_bytes, stored_bytes, created_s, tenant_bytes,
     model_bytes, fingerprint, block_id, parent_id) = _FIXED.unpack_from(value)  # fmt: skip
    if magic != MAGIC or version != FORMAT_VERSION or codec not in iter(Codec) or itemsize not in ITEMSIZES:
        return None
    tokens_end = _FIXED.size + 4 * num_tokens
    labels_end = tokens_end + tenant_bytes + model_bytes
    if header_bytes != labels_end + CHECKSUM_BYTES or len(value) != header_bytes + stored_bytes:
        return None
    if codec == Codec.RAW and raw_bytes != stored_bytes:
        return None
    try:
        tenant = bytes(value[tokens_end : tokens_end + tenant_bytes]).decode("utf-8", "surrogatepass")
        model = bytes(value[labels_end - model_bytes : labels_end]).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
    tokens = bytes(value[_FIXED.size : tokens_end])
    record = BlockRecord(block_id, parent_id, tokens, fingerprint, tenant, model, created_s)
    return Header(record, Codec(codec), itemsize, header_bytes, raw_bytes, stored_bytes)


def decode_into(value: Bytes, expected: BlockRecord | None, into: memoryview) -> ReadResult:
    """Check everything, and put the raw payload into `into`, which must have exactly its size.

    OK, CORRUPT or MISMATCH; unless it is OK `into` may hold anything. expected None: whatever block it is. A value of
    another identity is a mismatch only if it is sound: otherwise its identity is what was damaged.
    """
    header = decode_header(value)
    if header is None:
        return ReadResult.CORRUPT
    if expected is not None and not header.record.same_content(expected):
        return ReadResult.MISMATCH if is_intact(value, header) else ReadResult.CORRUPT
    if header.raw_bytes != into.nbytes:
        return ReadResult.CORRUPT
    stored, out = _payload(value, header), np.frombuffer(into, np.uint8)
    if header.codec is Codec.RAW:
        # Copied first, then checked: what is served is what was checked, and the pages are touched only once.
        np.copyto(out, stored)
        return ReadResult.OK if _matches(value, header, out) else ReadResult.CORRUPT
    if not _matches(value, header, stored):
        return ReadResult.CORRUPT
    return ReadResult.OK if _decompress(stored, header.codec, header.itemsize, out) else ReadResult.CORRUPT


def is_intact(value: Bytes, header: Header) -> bool:
    """Whether the checksum of a value matches, whose header is this."""
    return _matches(value, header, _payload(value, header))


def _payload(value: Bytes, header: Header) -> Uint8:
    return np.frombuffer(value, np.uint8, count=header.stored_bytes, offset=header.header_bytes)


def _checksum(head: Bytes, payload: Uint8) -> bytes:
    state = xxhash.xxh3_128(head)
    state.update(payload.data)
    return state.digest()


def _matches(value: Bytes, header: Header, payload: Uint8) -> bool:
    end = header.header_bytes - CHECKSUM_BYTES
    return _checksum(value[:end], payload) == bytes(value[end : header.header_bytes])


def _decompress(stored: Uint8, codec: Codec, itemsize: int, out: Uint8) -> bool:
    """Undo `_compress` into `out`; False when these bytes do not decompress to exactly its size."""
    try:
        if codec is Codec.ZSTD:
            raw = _decompress_frame(stored, len(out))
            if raw is None:
                return False
            np.copyto(out, raw)
            return True
        return _join(stored, itemsize, out)
    except zstandard.ZstdError:
        return False


def _decompress_frame(frame: Uint8, raw_bytes: int) -> Uint8 | None:
    # The decompressor allocates what the frame claims, so the claim is checked before.
    if len(frame) == 0 or zstandard.frame_content_size(frame.data) != raw_bytes:
        return None
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    raw = np.frombuffer(_local.decompressor.decompress(frame.data, allow_extra_data=False), np.uint8)
    return raw if len(raw) == raw_bytes else None


def _join(stored: Uint8, itemsize: int, out: Uint8) -> bool:
    end = itemsize * _PLANE.size
    if len(stored) < end or len(out) % itemsize:
        return False
    elements = out.view(_element(itemsize))
    for i in range(itemsize):
        (frame_bytes,) = _PLANE.unpack_from(stored.data, i * _PLANE.size)
        begin, end = end, end + frame_bytes
        plane = _decompress_frame(stored[begin:end], len(elements)) if end <= len(stored) else None
        if plane is None:
            return False
        if i == 0:
            np.copyto(elements, plane)
        else:
            elements |= plane.astype(elements.dtype) << (8 * i)
    return end == len(stored)
