"""Tests of kvstore.disk.codec."""

import random
import struct
import subprocess
import sys

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvstore.blocks.ids import child_block_id, quantised_id, token_bytes
from kvstore.blocks.records import BlockRecord, ReadResult
from kvstore.disk import codec as codec_module
from kvstore.disk.codec import Codec, decode_header, decode_into, encode, is_intact
from kvstore.disk.records import label, pack
from tests.support.waiting import TIMEOUT_S

SIZE = 4096


def record(i: int = 1, **changes: object) -> BlockRecord:
    tokens, parent = token_bytes(range(i, i + 16)), bytes([i]) * 32
    values = {"block_id": child_block_id(parent, tokens), "parent_id": parent, "tokens": tokens,
              "fingerprint": bytes([100 + i]) * 32, "tenant": "tenant ü", "model": "m", "created_s": 12.5}  # fmt: skip
    return BlockRecord(**(values | changes))  # type: ignore[arg-type]


def bf16_payload(seed: int, size: int = SIZE) -> bytes:
    values = np.random.default_rng(seed).standard_normal(size // 2).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def read(value: bytes | memoryview, expected: BlockRecord | None, size: int = SIZE) -> tuple[ReadResult, bytes]:
    into = bytearray(size)
    return decode_into(value, expected, memoryview(into)), bytes(into)


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_round_trip_is_bit_identical(codec, itemsize):
    payload = bf16_payload(3)
    value = encode(record(), payload, codec, itemsize)
    header = decode_header(value)
    assert header.record == record()
    assert header.raw_bytes == SIZE and codec_module._payload_at(value) + header.stored_bytes == len(value)
    assert is_intact(value, header)
    assert read(value, record()) == (ReadResult.OK, payload)
    assert read(bytes(value), None) == (ReadResult.OK, payload)


def test_int8_is_for_copies_alone():
    """Under the id of an exact block nothing is written in it, and nothing read."""
    payload = bf16_payload(3)
    exact, copy = record(), record(block_id=quantised_id(record().block_id))
    assert decode_header(encode(exact, payload, Codec.INT8)).codec is Codec.EXACT12
    value = encode(copy, payload, Codec.INT8)
    header = decode_header(value)
    assert header.codec is Codec.INT8 and header.stored_bytes == SIZE // 64 * 33
    result, lossy = read(value, copy)
    assert result is ReadResult.OK and lossy != payload
    assert bytes(encode(copy, lossy, Codec.INT8)) == bytes(value), "stored again it loses more"
    raw = codec_module.recoded(value, Codec.RAW)
    assert read(raw, copy) == (ReadResult.OK, lossy)
    assert bytes(codec_module.recoded(raw, Codec.INT8)) == bytes(value)
    packed = pack(codec_module.Header(exact, Codec.INT8, 2, SIZE, header.stored_bytes))
    head = struct.pack("<4sI", codec_module.MAGIC, len(packed)) + packed
    body = np.frombuffer(value, np.uint8)[-header.stored_bytes :]
    forged = head + codec_module._checksum(head, body) + body.tobytes()
    assert read(forged, exact)[0] is ReadResult.CORRUPT


@given(st.binary(min_size=1, max_size=300), st.sampled_from(Codec), st.sampled_from([1, 2, 4]))
def test_any_payload_comes_back(payload, codec, itemsize):
    value = encode(record(), payload, codec, itemsize)
    assert read(value, record(), len(payload)) == (ReadResult.OK, payload)


def test_splitting_bytes_compresses_what_zstd_alone_does_not():
    payload = bf16_payload(1, 1 << 16)
    sizes = {codec: decode_header(encode(record(), payload, codec, 2)).stored_bytes for codec in Codec}
    assert sizes[Codec.SPLIT_ZSTD] < 0.85 * sizes[Codec.RAW]
    assert sizes[Codec.SPLIT_ZSTD] < sizes[Codec.EXACT12] < 0.76 * sizes[Codec.RAW]
    assert sizes[Codec.EXACT12] < sizes[Codec.ZSTD]


@pytest.mark.parametrize("codec", Codec)
def test_what_does_not_compress_is_stored_raw(codec):
    assert decode_header(encode(record(), random.Random(1).randbytes(SIZE), codec)).codec is Codec.RAW


def test_a_payload_that_does_not_divide_into_elements_is_stored_raw():
    assert decode_header(encode(record(), b"\0" * 7, Codec.SPLIT_ZSTD, 2)).codec is Codec.RAW


def test_unaligned_and_typed_buffers():
    payload = bf16_payload(5)
    value = encode(record(), memoryview(b"x" + payload)[1:], Codec.SPLIT_ZSTD)
    into = bytearray(SIZE + 1)
    assert decode_into(value, record(), memoryview(into)[1:]) is ReadResult.OK and into[1:] == payload
    typed = memoryview(np.frombuffer(payload, "<u2").copy())
    assert bytes(encode(record(), typed)) == bytes(encode(record(), payload))


@pytest.mark.parametrize("other", [
    record(fingerprint=b"f" * 32), record(tokens=token_bytes(range(2, 18))), record(tokens=token_bytes(range(1, 16))),
    record(parent_id=b"p" * 32), record(block_id=b"i" * 32), record(2),
])  # fmt: skip
def test_another_identity_is_never_served(other):
    assert read(encode(record(), bf16_payload(1)), other)[0] is ReadResult.MISMATCH


def test_another_tenant_label_or_time_is_the_same_content():
    assert read(encode(record(), bf16_payload(1)), record(tenant="", model="", created_s=0.0))[0] is ReadResult.OK


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1, 2 * SIZE, 1])
def test_a_buffer_of_another_size_is_refused(size):
    for codec in Codec:
        assert read(encode(record(), bf16_payload(1), codec), record(), size)[0] is ReadResult.MISMATCH


@pytest.mark.parametrize("codec", Codec)
def test_every_flipped_bit_is_found(codec):
    payload = bf16_payload(2, 512)
    value = bytearray(encode(record(), payload, codec))
    for position in range(len(value)):
        value[position] ^= 1 << position % 8
        assert read(value, record(), 512)[0] is ReadResult.CORRUPT, position
        value[position] ^= 1 << position % 8
    assert read(value, record(), 512) == (ReadResult.OK, payload)


@pytest.mark.parametrize("codec", Codec)
def test_every_truncation_is_found(codec):
    value = bytes(encode(record(), bf16_payload(2, 256), codec))
    for size in range(len(value)):
        assert read(value[:size], record(), 256)[0] is ReadResult.CORRUPT
    assert read(value + b"\0", record(), 256)[0] is ReadResult.CORRUPT


@given(st.binary(max_size=400))
def test_arbitrary_bytes_raise_nothing(value):
    assert read(value, None, 64)[0] is ReadResult.CORRUPT
    assert read(bytes(encode(record(), b"\1" * 64))[:100] + value, None, 64)[0] is ReadResult.CORRUPT


def forged(codec: Codec, stored: bytes, raw_bytes: int, itemsize: int = 2) -> bytes:
    """A value with a right checksum around a payload that a stranger made."""
    packed = pack(codec_module.Header(record(), codec, itemsize, raw_bytes, len(stored)))
    head = codec_module._PREFIX.pack(codec_module.MAGIC, len(packed)) + packed
    return head + codec_module._checksum(head, np.frombuffer(stored, np.uint8)) + stored


def hostile_frames() -> list[bytes]:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    honest = zstandard.ZstdCompressor().compress(bytes(SIZE))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(SIZE))
    return [bomb, unsized, honest[:-3], honest + honest, honest + b"tail", b"no frame", b"\x28\xb5\x2f\xfd", b"\0"]


@pytest.mark.parametrize("number", range(8))
def test_a_hostile_payload_with_a_right_checksum_is_corrupt(number):
    frame = hostile_frames()[number]
    assert read(forged(Codec.ZSTD, frame, SIZE), record())[0] is ReadResult.CORRUPT
    planes = struct.pack("<II", len(frame), len(frame)) + frame * 2
    assert read(forged(Codec.SPLIT_ZSTD, planes, 2 * SIZE), record(), 2 * SIZE)[0] is ReadResult.CORRUPT


@pytest.mark.parametrize("lengths", [(2**32 - 1, 0), (0, 0), (10, 2**31), (1, 1)])
def test_hostile_plane_lengths(lengths):
    stored = struct.pack("<II", *lengths) + b"\x28\xb5\x2f\xfd" * 8
    assert read(forged(Codec.SPLIT_ZSTD, stored, SIZE), record())[0] is ReadResult.CORRUPT


def test_labels_of_any_length_and_kind():
    named = record(tenant=label("x\ud800y"), model=label("ü" * 5000))
    header = decode_header(encode(named, bf16_payload(1)))
    assert header.record.tenant == "x?y" and header.record.model == "ü" * 1024


# -- records as bytes ------------------------------------------------------------------------------------------------
def test_threads_that_use_a_type_for_the_first_time_at_once_end_no_process():
    """Their decoders are made at import."""
    command = [sys.executable, "-m", "tests.children.first_use_child"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stdout.strip() == "{'records': 0, 'bodies': 0, 'commands': 0}", done.stderr
