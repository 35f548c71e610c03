"""Where the histories of sessions end on disk, so that they are read while their requests still wait in the queue.

What a process has learned is kept in a file beside the store. Losing it costs only speed, so its errors are logged and
never raised.

Knows no host. A host asks for blocks only when a request is about to start, and gives no memory to read into before
then.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from kvstore.block_store import BlockStore
from kvstore.disk.check import read_kept, write_durably

logger = logging.getLogger(__name__)
EVERY_S, CLOSE_S = 10.0, 5.0
T = TypeVar("T")
FILE_NAME = "sessions-read-ahead.json"
MAX_SESSIONS = 4096
# By a digest of the session's name: some keys of each chain.
_sessions = msgspec.json.Decoder(dict[str, list[list[bytes]]])


class KeptFile(Generic[T]):
    """decoder: of the value. `found` is what an earlier process has left, or None."""

    def __init__(self, path: Path, decoder: msgspec.json.Decoder[T], every_s: float = EVERY_S) -> None:
        self._path, self._every_s, self._due_s = path, every_s, 0.0
        self._lock = threading.Lock()
        self._value: T | None = None  # to be written
        self._writer: threading.Thread | None = None  # a daemon: nobody's exit waits for a disk that hangs
        self.found: T | None = None
        try:
            self.found = read_kept(path, decoder)
        except (OSError, ValueError) as error:
            logger.warning("%s is not used: %s", path, error)

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due_s

    def keep(self, value: T) -> None:
        """Let a thread write this value over the last one. The caller must not change it afterwards."""
        self._due_s = time.monotonic() + self._every_s
        with self._lock:
            self._value = value
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="kvstore-kept", daemon=True)
                self._writer.start()

    def close(self) -> None:
        """Write what is still waiting; takes a few seconds at most."""
        if (writer := self._writer) is not None:
            writer.join(CLOSE_S)

    def _write(self) -> None:
        while True:
            with self._lock:
                value, self._value = self._value, None
                if value is None:
                    self._writer = None
                    return
            try:
                write_durably(self._path, msgspec.json.encode(value))
            except (OSError, ValueError, TypeError) as error:
                logger.warning("%s was not written: %s", self._path, error)


class ReadAhead:
    """folder: the store's. most: how many sessions are remembered; the least recently used go first. Of each chain a
    few keys are kept, denser towards its end, because blocks that were never stored or have been evicted are at the
    end.
    """

    def __init__(self, store: BlockStore, folder: Path, most: int = MAX_SESSIONS) -> None:
        self._most = most
        self._store = store
        self._file = KeptFile(folder / FILE_NAME, _sessions)
        self._sessions = OrderedDict(list((self._file.found or {}).items())[-most:])  # in order of use

    def arrives(self, session: str) -> None:
        """A request of this session is waiting, or will come soon."""
        for keys in self._sessions.get(_name(session), ()):
            self._store.prefetch(keys)

    def ended(self, session: str, chains: Iterable[Sequence[bytes]]) -> None:
        """chains: those of its request, head first; one for each group of layers."""
        name = _name(session)
        self._sessions[name] = [list(_marks(chain)) for chain in chains if chain]
        self._sessions.move_to_end(name)
        if len(self._sessions) > self._most:
            self._sessions.popitem(last=False)
        if self._file.is_due:
            self._file.keep(dict(self._sessions))

    def forget(self, session: str) -> None:
        if self._sessions.pop(_name(session), None) is not None:
            self._file.keep(dict(self._sessions))

    def close(self) -> None:
        self._file.keep(dict(self._sessions))
        self._file.close()


def _name(session: str) -> str:
    return hashlib.sha256(session.encode()).hexdigest()[:32]


def _marks(chain: Sequence[bytes]) -> Iterator[bytes]:
    """The keys at distances of 0, 1, 3, 7 and so on from the end, head first."""
    distances = [(1 << i) - 1 for i in range(len(chain).bit_length()) if (1 << i) <= len(chain)]
    return (bytes(chain[len(chain) - 1 - one]) for one in reversed(distances))
