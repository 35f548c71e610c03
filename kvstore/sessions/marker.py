"""Which file holds a store's sessions, told beside it: one that is missing, or another one, is never begun in silence.

The file has a name of random bytes. It stands in the file, and in `sessions.id`, which stays when the file goes.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvstore.disk import check as disk_check

MARKER_NAME = "sessions.id"
NAME_BYTES = 16
LOGGER = logging.getLogger("kvstore.store")


class SessionMarker:
    """The marker of the store in the directory `store`."""

    def __init__(self, store: Path) -> None:
        self._path = store / MARKER_NAME
        self._data_file = store / "sessions" / disk_check.DATA_FILE

    def read(self) -> bytes | None:
        """The name of the file that held the sessions; None: there was none yet, or the marker is none."""
        try:
            name = bytes.fromhex(self._path.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return name if len(name) == NAME_BYTES else None

    def settle(self, name: bytes | None, set_name: Callable[[bytes], None]) -> str | None:
        """Compare with the name in the file, None where it has none, empty where it is damaged; else both get one.

        Returns what is missing, a sentence that is logged, too. Raises OSError.
        """
        known = self.read()
        if known is not None and name != b"":
            return None if name == known else self.say("is missing, or another one stands in its place")
        if not name:
            name = known or secrets.token_bytes(NAME_BYTES)
            set_name(name)
        if name != known:
            disk_check.write_durably(self._path, name.hex().encode())
        return None

    def missing_file(self) -> str | None:
        """What is missing where there is no file at all."""
        if self._data_file.exists() or self.read() is None:
            return None
        return self.say("is missing")

    def begun_anew(self) -> str | None:
        """What is missing where the file that is open has no name."""
        return None if self.read() is None else self.say("was begun anew while the store was open")

    def say(self, what: str) -> str:
        said = (
            f"the sessions that this store held are not there: {self._data_file} {what}; put it back from a copy while "
            "nobody has the store open, or give them up by `kvstore sessions accept-loss`"
        )
        LOGGER.error(said)
        return said

    def remove(self) -> None:
        """What was missing is given up: the next file of sessions is the store's."""
        with suppress(FileNotFoundError):
            self._path.unlink()
            disk_check.sync_directory(self._path.parent)
