"""What a store remembers of its own traffic: when requests came and how long they were. No tokens, no text.

One line of JSON per request, in the `sessions` format of traces, so that `kvstore plan` and the benchmarks can replay
it. Bounded: there are two files, and the older one is replaced. One thread may take the lines and another write them. A
file that cannot be written loses lines, but never fails a request.

What was learned of the traffic and the machine is kept beside it. If anything is wrong with the files, everything is
learned anew.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from msgspec import Meta

from kvstore.blocks.ids import BlockId
from kvstore.disk.check import read_kept, write_durably
from kvstore.policy.conversation import Answer
from kvstore.policy.planner import Planner
from kvstore.policy.policies import Steering
from kvstore.stats import StoreStats

FILE_NAME = "policy.json"
FILE, OLDER_FILE = "history.jsonl", "history.1.jsonl"
MAX_FILE_BYTES = 32 << 20  # some 200,000 requests in each of the two files
MAX_PENDING = 1 << 16
SETTLED_S = 5.0  # a request that was only preempted would have come back by then
MOST_RATES = 15  # so many other models' rates are remembered


class _Learned(msgspec.Struct):
    """steering, rates: by model; states that the steering and a planner check themselves."""

    steering: Any = None
    rates: dict[str, Any] = {}


class Line(msgspec.Struct, omit_defaults=True):
    """The line of a request. tip: its last full block, by which a later process recognises it. after: the tip by which
    it was recognised itself.
    """

    session: str
    timestamp: Annotated[float, Meta(gt=-1e12, lt=1e12)]
    input_length: Annotated[int, Meta(ge=1, le=1 << 30)]
    output_length: Annotated[int, Meta(ge=0, le=1 << 30)]
    tip: str = ""
    calls_tool: bool = False
    after: str = ""


_lines, _learned = msgspec.json.Decoder(Line), msgspec.json.Decoder(_Learned)


def short_id(block_id: BlockId | None) -> str:
    """Enough of a block id to link lines by."""
    return "" if block_id is None else block_id[:8].hex()


class History:
    """The requests of one store, in the order in which they ended."""

    def __init__(self, directory: Path, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._path, self._older = directory / FILE, directory / OLDER_FILE
        self._max_file_bytes = max_file_bytes
        self._open: dict[str, Line] = {}
        self._ended: dict[str, tuple[Line, float]] = {}  # and when it ended

    def arrived(
        self, request_id: str, now_s: float, session: str, num_prompt_tokens: int, after: BlockId | None
    ) -> None:
        """A request was queued; one that had been preempted goes on. after: the tip that it was recognised by.

        now_s: seconds since the epoch, as lines outlive the process. session: a name that no other process uses.
        """
        if request_id in self._ended:
            self._open[request_id], _ = self._ended.pop(request_id)
        else:
            self._open[request_id] = Line(session, round(now_s, 3), num_prompt_tokens, 0, after=short_id(after))

    def is_back(self, request_id: str) -> bool:
        """Whether a request with this id ended a moment ago: it was preempted, or a load for it failed."""
        return request_id in self._ended

    def left(self, request_id: str, now_s: float, answer: Answer, tip: BlockId | None) -> None:
        """A request ended or was preempted. answer: the answer so far. tip: the last full block of prompt and
        answer.
        """
        line = self._open.pop(request_id, None)
        if line is not None and len(self._ended) < MAX_PENDING:
            line.output_length, line.calls_tool, line.tip = answer.num_tokens, answer.calls_tool, short_id(tip)
            self._ended[request_id] = line, now_s

    def take_lines(self, now_s: float, all_of_them: bool = False) -> list[str]:
        """Take the lines of requests that have ended for good; `write` writes them."""
        lines = []
        for request_id, (line, end_s) in list(self._ended.items()):
            if not all_of_them and 0 <= now_s - end_s < SETTLED_S:
                break  # they are in the order of their ends
            del self._ended[request_id]
            lines.append(_text(line) + "\n")
        return lines

    def write(self, lines: Iterable[str]) -> None:
        """Append the lines, unless the file system refuses."""
        data = "".join(lines).encode()
        if not data:
            return
        with suppress(OSError):
            if self._path.exists() and self._path.stat().st_size + len(data) > self._max_file_bytes:
                self._path.replace(self._older)
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            with os.fdopen(handle, "r+b") as file:
                file.write(_after_what_was_cut(file) + data)


def _after_what_was_cut(file: BinaryIO) -> bytes:
    """A line end, if a crash or a full disk cut off the last line: that must not spoil the next one."""
    if file.seek(0, os.SEEK_END) == 0:
        return b""
    file.seek(-1, os.SEEK_END)
    return b"" if file.read(1) == b"\n" else b"\n"


def _text(line: Line) -> str:
    return msgspec.json.encode(line).decode()


def history_files(directory: Path) -> list[Path]:
    """The files of a store's history that exist, the older one first."""
    return [path for path in (directory / OLDER_FILE, directory / FILE) if path.is_file()]


def joined(lines: Iterable[str]) -> Iterator[str]:
    """The lines of a history in order of arrival. What goes on after a restart keeps its session.

    A line that cannot be read is left out: the last one of a file may have been cut off by a crash.
    """
    session_of: dict[str, str] = {}  # by tip
    first_name: dict[str, str] = {}  # of sessions that go on under another name
    found = [line for line in map(_line, lines) if line is not None]
    for line in found:
        if line.after in session_of and line.session not in first_name:
            first_name[line.session] = session_of[line.after]
        line.session = first_name.get(line.session, line.session)
        if line.tip:
            session_of[line.tip] = line.session
        line.after = line.tip = ""
    return map(_text, sorted(found, key=lambda line: line.timestamp))


def _line(text: str) -> Line | None:
    """The line; None if a reader of traces would refuse it."""
    try:
        return _lines.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class Learned:
    """folder: None if nothing is to outlive the process. model: its name, by which rates are remembered."""

    def __init__(self, folder: Path | None, model: str, stats: StoreStats) -> None:
        self._folder, self._model, self._stats = folder, model, stats
        self.history = None if folder is None else History(folder)
        self._kept = _Learned()
        try:
            if folder is not None:
                self._kept = read_kept(folder / FILE_NAME, _learned) or self._kept
        except (OSError, ValueError):
            stats.policy_file_errors += 1

    @property
    def steering(self) -> object:
        """The steering's state from an earlier process."""
        return self._kept.steering

    def restore(self, planner: Planner) -> None:
        """Restore the rates of this model on this machine."""
        try:
            planner.restore(self._kept.rates.get(self._model))
        except ValueError:
            self._stats.policy_file_errors += 1

    def write(self, steering: Steering, planner: Planner, lock: AbstractContextManager[object]) -> None:
        if self._folder is None:
            return
        try:
            with lock:
                others = [(name, rates) for name, rates in self._kept.rates.items() if name != self._model]
                learned = _Learned(steering.state(), dict(others[-MOST_RATES:]) | {self._model: planner.state()})
            write_durably(self._folder / FILE_NAME, msgspec.json.encode(learned))
        except (OSError, ValueError, TypeError):
            self._stats.policy_file_errors += 1

    def write_history(self, lock: AbstractContextManager[object], is_end: bool = False) -> None:
        if self.history is not None:
            with lock:
                lines = self.history.take_lines(time.time(), is_end)
            self.history.write(lines)
