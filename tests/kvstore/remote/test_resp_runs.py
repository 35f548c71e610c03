"""Tests of kvstore.remote.resp_replies: whatever comes in whatever pieces, as a plain parser would have it."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.remote.resp_replies import receive_run

SIZE, HEAD = 100, 40


def value(number: int) -> bytes:
    return bytes((number + i) % 251 for i in range(HEAD + SIZE))


def told(answers: Sequence[bytes | None]) -> bytes:
    return b"".join(b"$-1\r\n" if one is None else b"$%d\r\n%s\r\n" % (len(one), one) for one in answers)


def stream(data: bytes, pieces: Sequence[int]) -> Callable[[Sequence[memoryview]], int]:
    """What a socket does: fills buffers one after the other with what has come."""
    left, sizes = bytearray(data), list(pieces)

    def receive(buffers: Sequence[memoryview]) -> int:
        assert left, "it waits for what nobody sends"
        come = min(len(left), sum(map(len, buffers)), sizes.pop(0) if sizes else 1 << 20)
        piece = bytes(left[:come])
        del left[:come]
        for buffer in buffers:
            here, piece = piece[: len(buffer)], piece[len(buffer) :]
            buffer[: len(here)] = here
        return come

    return receive


answers = st.lists(st.sampled_from([value(1), value(2), value(3), None, b"", b"short", value(4)[:-1]]), max_size=12)


@given(st.integers(1, 12), answers, st.integers(0, 34), st.lists(st.integers(1, 400), max_size=40))
def test_a_run_ends_where_values_are_other_ones(num_alike, others, num_ahead, pieces):
    alike = [value(i) for i in range(num_alike)]
    everything = told([*alike, *others])
    places = [memoryview(bytearray(SIZE)) for _ in [*alike, *others]]
    num_ahead = min(num_ahead, len(everything))
    heads, rest = receive_run(places, HEAD, everything[:num_ahead], stream(everything[num_ahead:], pieces))
    expected = [*alike, *others]
    num = next((i for i, one in enumerate(expected) if one is None or len(one) != HEAD + SIZE), len(expected))
    assert heads == [one[:HEAD] for one in expected[:num]]
    assert [bytes(place) for place in places[:num]] == [one[HEAD:] for one in expected[:num]]
    assert told(expected[num:]).startswith(rest)
    assert len(rest) > 0 or num == len(expected)


def test_nothing_more_is_received_than_belongs_to_it():
    everything = told([value(1), value(2)])
    heads, rest = receive_run([memoryview(bytearray(SIZE))] * 2, HEAD, b"", stream(everything + b"+OK\r\n", []))
    assert (len(heads), rest) == (2, b"")


def test_more_ahead_than_a_frame_has_is_left_alone():
    everything = told([value(1)])
    assert receive_run([memoryview(bytearray(SIZE))], HEAD, everything, stream(b"", [])) == ([], everything)


def test_a_value_of_another_length_than_it_says_is_an_error():
    everything = told([value(1), value(2)]).replace(b"\r\n$", b"..$", 1)
    with pytest.raises(ValueError, match="another length"):
        receive_run([memoryview(bytearray(SIZE))] * 2, HEAD, b"", stream(everything, []))
