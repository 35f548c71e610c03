"""What a store remembers of its own traffic: when requests came and how long they were. No token, no text.

One line of JSON a request, in the `sessions` format of traces, so that `kvstore plan` and the benchmarks can replay it.
Bounded: two files, the older of which is replaced. What was taken by one thread may be written by another; a file that
cannot be written costs lines, never a request.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvstore.blocks.ids import BlockId
from kvstore.policy.conversation import Answer

FILE, OLDER_FILE = "history.jsonl", "history.1.jsonl"
MAX_FILE_BYTES = 32 << 20  # some 200,000 requests in each of the two files
MAX_PENDING = 1 << 16
MAX_TIMESTAMP_S, MAX_TOKENS = 1e12, 1 << 30  # of a line that is sound
SETTLED_S = 5.0  # after its end a request that was only preempted would have come back


@dataclass(slots=True)
class _Entry:
    arrival_s: float
    session: str
    num_prompt_tokens: int
    after: str
    end_s: float | None = None
    num_output_tokens: int = 0
    calls_tool: bool = False
    tip: str = ""


def short_id(block_id: BlockId) -> str:
    """Enough of a block id to link lines by."""
    return block_id[:8].hex()


class History:
    """The requests of one store, in the order in which they ended."""

    def __init__(self, directory: Path, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._path, self._older = directory / FILE, directory / OLDER_FILE
        self._max_file_bytes = max_file_bytes
        self._open: dict[str, _Entry] = {}
        self._ended: dict[str, _Entry] = {}
        self.num_lost = 0

    def arrived(
        self, request_id: str, now_s: float, session: str, num_prompt_tokens: int, after: BlockId | None
    ) -> None:
        """A request was queued; one that had been preempted goes on. after: the tip that it was recognised by.

        now_s: since the epoch, for lines outlive the process. session: a name that no other process gives again.
        """
        entry = self._ended.pop(request_id, None)
        if entry is None:
            entry = _Entry(now_s, session, num_prompt_tokens, "" if after is None else short_id(after))
        self._open[request_id] = entry

    def is_back(self, request_id: str) -> bool:
        """Whether a request of this id has ended a moment ago: it was preempted, or a load for it failed."""
        return request_id in self._ended

    def left(self, request_id: str, now_s: float, answer: Answer, tip: BlockId | None) -> None:
        """It ended or was preempted. answer: so far. tip: the last full block of prompt and answer."""
        entry = self._open.pop(request_id, None)
        if entry is None:
            return
        if len(self._ended) >= MAX_PENDING:
            self.num_lost += 1
            return
        entry.end_s, entry.num_output_tokens = now_s, answer.num_tokens
        entry.tip = "" if tip is None else short_id(tip)
        entry.calls_tool = answer.calls_tool
        self._ended[request_id] = entry

    def take_lines(self, now_s: float, all_of_them: bool = False) -> list[str]:
        """Lines of the requests that have ended for good, to be given to `write`."""
        lines = []
        for request_id, entry in list(self._ended.items()):
            assert entry.end_s is not None
            if not all_of_them and 0 <= now_s - entry.end_s < SETTLED_S:
                break  # they stand in the order of their ends
            del self._ended[request_id]
            lines.append(_line(entry))
        return lines

    def write(self, lines: Iterable[str]) -> None:
        """Append. Does no more than count when the file system refuses."""
        data = "".join(lines).encode()
        if not data:
            return
        try:
            if self._path.exists() and self._path.stat().st_size + len(data) > self._max_file_bytes:
                self._path.replace(self._older)
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            with os.fdopen(handle, "r+b") as file:
                file.write(_after_what_was_cut(file) + data)
        except OSError:
            self.num_lost += data.count(b"\n")


def _after_what_was_cut(file: BinaryIO) -> bytes:
    """What ends the last line, where a crash or a full disk cut it off: it must not take the next one with it."""
    if file.seek(0, os.SEEK_END) == 0:
        return b""
    file.seek(-1, os.SEEK_END)
    return b"" if file.read(1) == b"\n" else b"\n"


def _line(entry: _Entry) -> str:
    found: dict[str, object] = {
        "session": entry.session,
        "timestamp": round(entry.arrival_s, 3),
        "input_length": entry.num_prompt_tokens,
        "output_length": entry.num_output_tokens,
        "tip": entry.tip,
    }
    if entry.calls_tool:
        found["calls_tool"] = True
    if entry.after:
        found["after"] = entry.after
    return json.dumps(found) + "\n"


def history_files(directory: Path) -> list[Path]:
    """The files of a store's history that exist, the older one first."""
    return [path for path in (directory / OLDER_FILE, directory / FILE) if path.is_file()]


def joined(lines: Iterable[str]) -> Iterator[str]:
    """Lines of a history in order of arrival, with one session for what goes on after a restart.

    A line that cannot be read is left out: the last one of a file may have been cut off by a crash.
    """
    session_of: dict[str, str] = {}  # by tip
    first_name: dict[str, str] = {}  # of a session that goes on under another name
    found = []
    for line in lines:
        entry = _entry(line)
        if entry is None:
            continue
        after, tip, session = entry.pop("after", ""), entry.pop("tip", ""), entry["session"]
        if after in session_of and session not in first_name:
            first_name[session] = session_of[after]
        entry["session"] = session = first_name.get(session, session)
        if tip:
            session_of[tip] = session
        found.append(entry)
    found.sort(key=lambda entry: entry["timestamp"])
    return map(json.dumps, found)


def _entry(line: str) -> dict[str, Any] | None:
    """The fields of a line; None when a reader of traces would refuse it."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("session"), str):
        return None
    timestamp, num_prompt, num_output = (entry.get(name) for name in ("timestamp", "input_length", "output_length"))
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
        return None
    if not abs(timestamp) < MAX_TIMESTAMP_S:  # nor is NaN
        return None
    is_sound = _is_count(num_prompt, 1) and _is_count(num_output, 0)
    is_linked = all(isinstance(entry.get(name, ""), str) for name in ("after", "tip"))
    return entry if is_sound and is_linked and isinstance(entry.get("calls_tool", False), bool) else None


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_TOKENS
