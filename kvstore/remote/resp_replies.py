"""Answers in RESP2: parsed from what is received, with values straight into the caller's memory; many of one size in a
few calls of the system.

For one thread at a time. Knows no socket. Raises ValueError for what is no answer. Protocol:
https://redis.io/docs/latest/develop/reference/protocol-spec
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

MOST_BUFFERS = 256  # in one call; the least that systems take is 1024
_END = b"\r\n"
BUFFER_BYTES = 256 << 10
FIRST_BYTES = 32  # of the first of many values: its length; the others are received into their places
MAX_LINE_BYTES = 32 << 10
MAX_VALUE_BYTES = 512 << 20  # what Redis itself allows
PART_BYTES = 4 << 20  # of a value, for which memory is taken at once
MAX_DEPTH = 8
Reply: TypeAlias = "int | bytes | ErrorReply | Landed | list[Reply] | None"


def receive_run(
    places: Sequence[memoryview], head_bytes: int, ahead: bytes, receive: Callable[[Sequence[memoryview]], int]
) -> tuple[list[bytes], bytes]:
    """Heads of the values whose ends are in their places now, and what was received behind these.

    places: of one size; each value is a head of so many bytes, which is kept apart, and what fills its place. ahead:
    what was received already. receive: into these buffers, one after the other, as much as comes; how much that was.
    """
    frame = _END + b"$%d\r\n" % (head_bytes + places[0].nbytes)  # from one value to the next
    gap_bytes, num = len(frame) + head_bytes, len(places)
    gaps = memoryview(bytearray(num * gap_bytes + len(_END)))
    wanted = [one for i, place in enumerate(places) for one in (gaps[i * gap_bytes : (i + 1) * gap_bytes], place)]
    wanted.append(gaps[num * gap_bytes :])
    done, filled, num_good = 0, len(_END) + len(ahead), 0  # whole buffers, bytes of the next one, gaps
    if filled >= gap_bytes:
        return [], ahead
    gaps[:filled] = _END + ahead
    while True:
        for i in range(num_good, done // 2 + 1):
            come = wanted[2 * i].nbytes if 2 * i < done else filled
            if wanted[2 * i][: min(come, len(frame))] != frame[:come]:
                rest = b"".join(wanted[2 * i : done]) + bytes(wanted[done][:filled] if filled else b"")
                if not rest.startswith(_END):
                    raise ValueError("a value of its answer has another length than it says")
                return _heads(wanted[: 2 * i], frame), rest[len(_END) :]
        num_good = done // 2
        if done == len(wanted):
            return _heads(wanted[:-1], frame), b""
        filled += receive([wanted[done][filled:], *wanted[done + 1 : done + MOST_BUFFERS]])
        while done < len(wanted) and filled >= wanted[done].nbytes:
            filled -= wanted[done].nbytes
            done += 1


def _heads(buffers: Sequence[memoryview], frame: bytes) -> list[bytes]:
    return [bytes(gap[len(frame) :]) for gap in buffers[::2]]


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The server's error for one command of a pipeline; the other commands have their own answers."""

    message: str

    @property
    def code(self) -> str:
        """The first word of the message: OOM, NOAUTH, NOSCRIPT, ..."""
        return self.message.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class Landed:
    """A value whose end was written to the memory given for it; `head` is what came before."""

    head: bytes


class Replies:
    """Of one connection. receive: into these buffers, one after the other, as much as comes; how much that was."""

    def __init__(self, receive: Callable[[Sequence[memoryview]], int]) -> None:
        self._receive = receive
        self._received = bytearray(BUFFER_BYTES)
        self._buffer = memoryview(self._received)
        self._begin = self._end = 0  # where received bytes that were not parsed yet begin and end
        self._ahead_bytes = BUFFER_BYTES  # most bytes to receive beyond those that are needed now

    @property
    def is_empty(self) -> bool:
        """Whether all that was received has been asked for."""
        return self._begin == self._end

    def forget(self) -> None:
        """There is another connection."""
        self._begin = self._end = 0

    def to(self, places: Sequence[memoryview | None], to_many: bool) -> list[Reply]:
        """The answers to as many commands, with memory for each as for `RespClient.pipeline`.

        to_many: whether `receive` takes many buffers.
        """
        sizes = {None if place is None else place.nbytes for place in places}
        is_run = len(places) > 1 and len(sizes) == 1 and None not in sizes and to_many
        self._ahead_bytes = FIRST_BYTES if is_run else BUFFER_BYTES
        replies: list[Reply] = []
        while len(replies) < len(places):
            replies.append(self._next(places[len(replies)]))
            reply, self._ahead_bytes = replies[-1], BUFFER_BYTES
            left = places[len(replies) :]
            if is_run and left and isinstance(reply, Landed) and self._end - self._begin <= FIRST_BYTES:
                ahead = bytes(self._buffer[self._begin : self._end])
                heads, rest = receive_run(left, len(reply.head), ahead, self._receive)  # type: ignore[arg-type]
                replies += map(Landed, heads)
                if len(rest) > len(self._received):
                    self._received = bytearray(rest)
                    self._buffer = memoryview(self._received)
                self._buffer[: len(rest)] = rest
                self._begin, self._end = 0, len(rest)
        return replies

    def _next(self, into: memoryview | None, depth: int = 0) -> Reply:
        line = self._line()
        kind, text = line[:1], line[1:]
        if kind == b"$":
            return self._value(_number(text, MAX_VALUE_BYTES), into)
        if kind == b":":
            return int(text)
        if kind == b"+":
            return text
        if kind == b"-":
            return ErrorReply(text.decode(errors="replace"))
        if kind == b"*" and depth < MAX_DEPTH:
            count = _number(text, 1 << 20)
            return None if count < 0 else [self._next(None, depth + 1) for _ in range(count)]
        raise ValueError(f"its answer is no RESP2: {line[:40]!r}")

    def _value(self, num_bytes: int, into: memoryview | None) -> Reply:
        if num_bytes < 0:
            return None
        if into is None or num_bytes < into.nbytes:
            found: Reply = self._bytes(num_bytes)
        else:
            head = self._bytes(num_bytes - into.nbytes)
            self._fill(into)
            found = Landed(head)
        if self._line():
            raise ValueError("a value of its answer has another length than it says")
        return found

    def _bytes(self, num_bytes: int) -> bytes:
        """Memory is taken as they come: a length that is only said takes none."""
        parts = list[bytearray]()
        while num_bytes:
            parts.append(bytearray(min(num_bytes, PART_BYTES)))
            self._fill(memoryview(parts[-1]))
            num_bytes -= len(parts[-1])
        return b"".join(parts)

    def _line(self) -> bytes:
        found = self._received.find(b"\r\n", self._begin, self._end)
        if found >= 0:  # nearly always
            line = bytes(self._buffer[self._begin : found])
            self._begin = found + 2
            return line
        line = b""
        while len(line) <= MAX_LINE_BYTES:
            found = self._received.find(b"\n", self._begin, self._end)
            end = self._end if found < 0 else found + 1
            line += self._received[self._begin : end]
            self._begin = end
            if line.endswith(b"\r\n"):
                return line[:-2]
            if found >= 0:
                break
            self._begin, self._end = 0, self._receive([self._buffer[: self._ahead_bytes]])
        raise ValueError(f"its answer is no RESP2: {line[:40]!r}")

    def _fill(self, out: memoryview) -> None:
        """From what was received already, then straight from the socket; a short rest goes through the buffer."""
        while missing := out.nbytes:
            begin = self._begin
            if begin == self._end and missing >= min(BUFFER_BYTES // 2, self._ahead_bytes):
                out = out[self._receive([out]) :]
                continue
            if begin == self._end:
                begin, self._end = 0, self._receive([self._buffer[: self._ahead_bytes]])
            end = self._begin = min(begin + missing, self._end)
            out[: end - begin] = self._buffer[begin:end]
            out = out[end - begin :]


def _number(text: bytes, most: int) -> int:
    value = int(text)
    if not -1 <= value <= most:
        raise ValueError(f"its answer says that it has {value} parts")
    return value
