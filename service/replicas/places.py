"""The store of each replica: a directory below one that all on a machine share.

A replica takes the first directory that no other one has, so that one that is started again finds what the one before
it left. Ray's own names are new each time.
"""

import fcntl
import os
from itertools import count
from pathlib import Path
from typing import Self

from kvstore.errors import StoreError


class ReplicaPlace:
    """A replica's directory, its own until the process ends, however it does. name: "replica-0" and so on."""

    def __init__(self, store: Path, number: int, fd: int) -> None:
        self.number, self.name = number, f"replica-{number}"
        self.path = store / self.name
        self._fd = fd

    @classmethod
    def below(cls, store: Path) -> Self:
        """Raises StoreError where nothing can be made there."""
        store = store.expanduser()
        try:
            store.mkdir(mode=0o700, parents=True, exist_ok=True)
            for number in count():
                fd = os.open(store / f"replica-{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return cls(store, number, fd)
                except BlockingIOError:
                    os.close(fd)
        except OSError as error:
            raise StoreError(f"--store {store} cannot be used: {error.strerror or error}") from None
        raise AssertionError("unreachable")

    def close(self) -> None:
        os.close(self._fd)
