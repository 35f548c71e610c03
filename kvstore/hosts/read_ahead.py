"""Where the histories of sessions end on disk, so that they are read while their requests still wait in the queue.

Knows no host. A host asks for blocks only when a request is about to start, and gives no memory to read into before
then.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvstore.block_store import BlockStore
from kvstore.hosts.kept import KeptFile

FILE_NAME = "sessions-read-ahead.json"
MAX_SESSIONS = 4096
# By a digest of the session's name: some keys of each chain.
_sessions = msgspec.json.Decoder(dict[str, list[list[bytes]]])


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
