"""A note beside the file of sessions that says which file it is, so that a missing or different one is noticed.

The file has a name of random bytes. The name is stored in the file and in `sessions.id`, which remains if the file is
lost.
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
        """The name of the file that held the sessions; None if there was none yet, or if the marker cannot be read."""
        try:
            name = bytes.fromhex(self._path.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return name if len(name) == NAME_BYTES else None

    def settle(self, name: bytes | None, set_name: Callable[[bytes], None]) -> str | None:
        """Compare the marker with the name in the file; where either has none, give both the same one. name: None if
        the file has none, empty if it is damaged.

        Returns a sentence about what is missing, which is logged too, or None. Raises OSError.
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
        """A sentence about the missing file if there is none at all, else None."""
        if self._data_file.exists() or self.read() is None:
            return None
        return self.say("is missing")

    def begun_anew(self) -> str | None:
        """A sentence about the missing file if the open one has no name, else None."""
        return None if self.read() is None else self.say("was begun anew while the store was open")

    def say(self, what: str) -> str:
        said = (
            f"the sessions that this store held are not there: {self._data_file} {what}; put it back from a copy while "
            "nobody has the store open, or give them up by `kvstore sessions accept-loss`"
        )
        LOGGER.error(said)
        return said

    def remove(self) -> None:
        """Give up what is missing: the next file of sessions becomes the store's."""
        with suppress(FileNotFoundError):
            self._path.unlink()
            disk_check.sync_directory(self._path.parent)
