"""A folder for sockets that only this user can enter.

Its owner removes it at the end; after a kill, the next owner does.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from kvstore.forks import leave_to_parent

PREFIX, OWNER = "kvstore-", ".kvstore-owner"


class PrivateFolder:
    """A new one in `parent`, else where temporary files go; those there whose owners have ended are removed.

    The file OWNER in it is locked as long as this process lives.
    """

    def __init__(self, parent: str | None = None) -> None:
        remove_abandoned(Path(parent or tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # 0700
        self._lock = os.open(self.path / OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, f"{os.getpid()}\n".encode())  # now the lock says something
        leave_to_parent(self, str(self.path), _lock=-1)

    def remove(self) -> None:
        """Remove it with all its contents. In a forked child: no effect."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_abandoned(parent: Path) -> None:
    """Remove folders of this user whose lock nobody holds. Other folders, and those in use, stay."""
    for folder in parent.glob(PREFIX + "*"):
        with suppress(OSError):
            found = folder.lstat()
            is_own = found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700
            if not stat.S_ISDIR(found.st_mode) or not is_own:
                continue
            lock = os.open(folder / OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_size:  # else its owner is about to lock it
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
