"""Answers to many GETs for values of one size, received straight to where they go: a few calls of the system for all.

Knows no socket. What does not look like the value before it, as an answer that there is none, is given back as it came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

MOST_BUFFERS = 256  # in one call; the least that systems take is 1024
_END = b"\r\n"


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
