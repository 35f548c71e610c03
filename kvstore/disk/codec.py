"""A block as one value on disk: header, checksum, payload; and back into memory that the caller owns.

Knows no file and no thread. Reading raises nothing and allocates at most a block, whatever the bytes.
"""

import struct
import threading
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from kvstore.blocks.ids import BLOCK_ID_BYTES, is_quantised
from kvstore.blocks.records import BlockRecord, Count, Expected, ReadResult, Record
from kvstore.config import CODEC_NAMES
from kvstore.disk import records as disk_records
from kvstore.disk.records import CHECKSUM_BYTES
from kvstore.kernels import exact12, int8

MAGIC = b"KVb2"
ITEMSIZES = (1, 2, 4)
ZSTD_LEVEL = 1

_PREFIX = struct.Struct("<4sI")  # magic, bytes of the header; then the header, the checksum of all but itself, payload
_PLANE = struct.Struct("<I")
_local = threading.local()

Bytes = bytes | bytearray | memoryview
Uint8 = npt.NDArray[np.uint8]


class Codec(IntEnum):
    """How a payload is stored. The numbers are the file format.

    SPLIT_ZSTD: all lowest bytes of the elements together, then all next ones: the high bytes of KV compress, the low
    ones are noise that hides it. EXACT12: see `kvstore.kernels.exact12`; for bfloat16, other types do not get smaller.
    INT8: see `kvstore.kernels.int8`; only under an id that says so (`kvstore.blocks.ids.quantised_id`).
    """

    RAW = 0
    ZSTD = 1
    SPLIT_ZSTD = 2
    EXACT12 = 3
    INT8 = 4


CODECS = dict(zip(CODEC_NAMES, Codec, strict=True))
_OF_BFLOAT16 = {Codec.EXACT12: exact12, Codec.INT8: int8}


@disk_records.stored
class Header(Record, frozen=True):
    """A value's description of itself."""

    record: BlockRecord
    codec: Codec
    itemsize: int
    raw_bytes: Count
    stored_bytes: Count


# -- writing ---------------------------------------------------------------------------------------------------------
def encode(record: BlockRecord, payload: Bytes, codec: Codec = Codec.RAW, itemsize: int = 2) -> memoryview:
    """The value to store, in memory of its own. itemsize: bytes of one element.

    A payload that does not get smaller, or does not divide into elements, is stored raw. INT8 of a block whose id does
    not say so is EXACT12.
    """
    assert len(record.block_id) == len(record.parent_id) == len(record.fingerprint) == BLOCK_ID_BYTES
    assert len(record.tokens) % 4 == 0 and itemsize in ITEMSIZES
    raw = np.frombuffer(payload, np.uint8)
    if codec is Codec.INT8 and not is_quantised(record.block_id):
        codec = Codec.EXACT12
    codec, parts = _compress(raw, codec, itemsize)
    stored_bytes = sum(len(part) for part in parts)
    packed = disk_records.pack(Header(record, codec, itemsize, len(raw), stored_bytes))
    head = _PREFIX.pack(MAGIC, len(packed)) + packed
    value = np.empty(len(head) + CHECKSUM_BYTES + stored_bytes, np.uint8)
    value[: len(head)] = np.frombuffer(head, np.uint8)
    start = end = len(head) + CHECKSUM_BYTES
    for part in parts:
        begin, end = end, end + len(part)
        np.copyto(value[begin:end], np.frombuffer(part, np.uint8))
    # Computed over the copy: what is checked is what is written, whatever happens to the source.
    value[len(head) : start] = np.frombuffer(_checksum(head, value[start:]), np.uint8)
    return value.data


def _compress(raw: Uint8, codec: Codec, itemsize: int) -> tuple[Codec, list[bytes | Uint8]]:
    if codec is Codec.RAW or (codec is Codec.SPLIT_ZSTD and len(raw) % itemsize):
        return Codec.RAW, [raw]
    parts: list[bytes | Uint8]
    if codec in _OF_BFLOAT16:
        packed = _OF_BFLOAT16[codec].encode(raw) if itemsize == 2 else None
        parts = [raw if packed is None else packed]
    elif codec is Codec.ZSTD:
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


def recoded(value: Bytes, codec: Codec) -> Bytes:
    """The same block in this codec; the value itself if it has that already, or is damaged."""
    header = decode_header(value)
    if header is None or header.codec is codec or not is_intact(value, header):
        return value
    raw = memoryview(bytearray(header.raw_bytes))
    if decode_into(value, None, raw) is not ReadResult.OK:
        return value
    return encode(header.record, raw, codec, header.itemsize)


def encode_head(record: BlockRecord, payload: Bytes, itemsize: int = 2) -> bytes:
    """The bytes before a raw payload, when both are sent without a copy. The payload must not change meanwhile."""
    raw = np.frombuffer(payload, np.uint8)
    packed = disk_records.pack(Header(record, Codec.RAW, itemsize, len(raw), len(raw)))
    head = _PREFIX.pack(MAGIC, len(packed)) + packed
    return head + _checksum(head, raw)


# -- reading ---------------------------------------------------------------------------------------------------------
def decode_header(value: Bytes, num_bytes: int | None = None) -> Header | None:
    """The header, or None when these bytes are not a value of this format.

    Does not check the checksum. num_bytes: of the whole value, if only its head is given.
    """
    if len(value) < _PREFIX.size:
        return None
    magic, header_bytes = _PREFIX.unpack_from(value)
    payload_at = _PREFIX.size + header_bytes
    try:
        header = disk_records.unpack(Header, memoryview(value)[_PREFIX.size : payload_at])
    except ValueError:
        return None
    num_bytes = len(value) if num_bytes is None else num_bytes
    if magic != MAGIC or header.itemsize not in ITEMSIZES:
        return None
    if num_bytes != payload_at + CHECKSUM_BYTES + header.stored_bytes:
        return None
    if header.codec == Codec.RAW and header.raw_bytes != header.stored_bytes:
        return None
    if header.codec == Codec.INT8 and not is_quantised(header.record.block_id):
        return None
    return header


def _payload_at(value: Bytes) -> int:
    return int(_PREFIX.unpack_from(value)[1]) + _PREFIX.size + CHECKSUM_BYTES


def decode_into(value: Bytes, expected: Expected | None, into: memoryview) -> ReadResult:
    """Check everything, and put the raw payload into `into`, which must have exactly its size.

    Returns OK, CORRUPT or MISMATCH; unless it is OK, `into` may hold anything. expected None: any block. A value of
    another identity or size is a mismatch only if it is intact; otherwise it is corrupt.
    """
    header = decode_header(value)
    if header is None:
        return ReadResult.CORRUPT
    is_expected = expected is None or expected.same_content(header.record)
    if not is_expected or header.raw_bytes != into.nbytes:
        return ReadResult.MISMATCH if is_intact(value, header) else ReadResult.CORRUPT
    stored, out = _payload(value, header), np.frombuffer(into, np.uint8)
    if header.codec is Codec.RAW:
        # Copied first, then checked: what is served is what was checked, and pages are touched only once.
        np.copyto(out, stored)
        return ReadResult.OK if _matches(value, out) else ReadResult.CORRUPT
    if not _matches(value, stored):
        return ReadResult.CORRUPT
    return ReadResult.OK if _decompress(stored, header.codec, header.itemsize, out) else ReadResult.CORRUPT


def check_landed(head: Bytes, payload: memoryview, expected: Expected) -> ReadResult:
    """Check a raw value whose payload is already in place: OK, CORRUPT or MISMATCH, as `decode_into`."""
    header = decode_header(head, len(head) + payload.nbytes)
    start = len(head) - CHECKSUM_BYTES
    if header is None or header.codec is not Codec.RAW or header.stored_bytes != payload.nbytes:
        return ReadResult.CORRUPT
    state = xxhash.xxh3_128(head[:start])
    state.update(payload)
    if state.digest() != head[start:]:
        return ReadResult.CORRUPT
    return ReadResult.OK if expected.same_content(header.record) else ReadResult.MISMATCH


def is_intact(value: Bytes, header: Header) -> bool:
    """Whether the checksum of a value with this header matches."""
    return _matches(value, _payload(value, header))


def _payload(value: Bytes, header: Header) -> Uint8:
    return np.frombuffer(value, np.uint8, count=header.stored_bytes, offset=_payload_at(value))


def _checksum(head: Bytes, payload: Uint8) -> bytes:
    state = xxhash.xxh3_128(head)
    state.update(payload.data)
    return state.digest()


def _matches(value: Bytes, payload: Uint8) -> bool:
    start = _payload_at(value)
    return _checksum(value[: start - CHECKSUM_BYTES], payload) == bytes(value[start - CHECKSUM_BYTES : start])


def _decompress(stored: Uint8, codec: Codec, itemsize: int, out: Uint8) -> bool:
    """Undo `_compress` into `out`; False when these bytes do not decompress to exactly its size."""
    if codec in _OF_BFLOAT16:
        return _OF_BFLOAT16[codec].decode(stored, out)
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
