"""A store's directory: its permissions, its owner, and the secret for its block ids.

Knows no LMDB. One owner at a time, held by an `flock` of the directory and one of its lock file, which the kernel
releases however the owner ends. The directory's lock remains when somebody removes the file.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import stat
import struct
import time
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated

import msgspec

from kvstore.disk import check as disk_check
from kvstore.disk.check import FOLDERS, FORMAT_NAME, LOCK_NAME, SECRET_NAME, SOCKET_NAME
from kvstore.errors import StoreError, StoreLockedError
from kvstore.forks import leave_to_parent

SECRET_BYTES = 32
FORMAT = 2  # of all records in it; raised when one changes
MAX_LOCK_BYTES = 8192
MAX_NAME_CHARS = 200  # of an owner
NETWORK_FILE_SYSTEMS = {
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs",
    "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "orangefs", "smb3", "smbfs",
}  # fmt: skip
_LOCK_TRIES, _LOCK_WAIT_S = 4, 0.02
_CONNECT_S = 1.0  # to connect to an existing socket: the kernel answers, not the owner


class LockInfo(msgspec.Struct, frozen=True, rename={"socket_path": "socket"}):
    """A store's current owner; None for what it did not tell. name: the owner's name for itself."""

    pid: Annotated[int, msgspec.Meta(gt=0, lt=2**31)] | None = None
    socket_path: str | None = None
    name: str = ""


_lock_infos = msgspec.json.Decoder(LockInfo)


class StoreDirectory:
    """An owned store directory; `open` it. After a fork the child owns nothing, and every method raises there.

    is_share: it keeps the locks of another one, which names the owner. name: the owner's, for messages to refused
    processes.
    """

    def __init__(
        self, path: Path, fd: int, lock_fd: int, secret: bytes, is_share: bool = False, name: str = ""
    ) -> None:
        self.path = path
        self.secret = secret
        self._name = name
        self._is_share = is_share
        self._fd: int | None = fd
        self._lock_fd: int | None = lock_fd
        self._held = ((path, os.fstat(fd)), (path / LOCK_NAME, os.fstat(lock_fd)))
        self._loss: str | None = None
        _directories.add(self)
        leave_to_parent(self, str(path))

    @classmethod
    def open(cls, path: str | Path, name: str = "") -> StoreDirectory:
        """Create it where it is missing (0700), and become its owner.

        Raises StoreError when it cannot be used, StoreLockedError when somebody else owns it.
        """
        try:
            directory = Path(path).expanduser().absolute()
            _prepare(directory)
            with ExitStack() as opened:
                fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                opened.callback(os.close, fd)
                _wait_for_lock(directory, fd)
                disk_check.check_kinds(directory)
                _check_format(directory)
                lock_fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                opened.callback(os.close, lock_fd)
                _wait_for_lock(directory, lock_fd)
                _refuse_if_answered(directory)
                os.fchmod(lock_fd, 0o600)
                _write_lock_info(lock_fd, None, name)
                owned = cls(directory, fd, lock_fd, _load_secret(directory / SECRET_NAME), name=name)
                opened.pop_all()
                return owned
        except OSError as error:
            raise StoreError(f"store directory {path} cannot be used: {error.strerror or error}") from None
        except (RuntimeError, ValueError) as error:  # no home to expand to; a zero byte in the name
            raise StoreError(f"store directory {path!r} is no path: {error}") from None

    def share(self) -> StoreDirectory:
        """A share for a part that closes by itself: the store stays locked until this object and all its shares are
        closed.
        """
        fd, lock_fd = self.descriptors
        return StoreDirectory(self.path, os.dup(fd), os.dup(lock_fd), self.secret, is_share=True)

    @property
    def descriptors(self) -> tuple[int, int]:
        """Descriptors that carry the locks. A process that inherits them makes its share with `inherited`."""
        assert self._fd is not None and self._lock_fd is not None, "used after close"
        return self._fd, self._lock_fd

    @classmethod
    def inherited(cls, path: str | Path, descriptors: tuple[int, int]) -> StoreDirectory:
        """The share of a process that the owner started with these descriptors. Raises StoreError."""
        for fd in descriptors:
            os.set_inheritable(fd, False)
        try:
            return cls(Path(path), *descriptors, _load_secret(Path(path) / SECRET_NAME), is_share=True)
        except OSError as error:
            raise StoreError(f"store directory {path} cannot be used: {error.strerror or error}") from None

    def announce(self, socket_path: str | Path | None) -> None:
        """Let other processes know where the owner listens."""
        assert self._lock_fd is not None, "announced after close"
        _write_lock_info(self._lock_fd, None if socket_path is None else str(socket_path), self._name)

    def loss(self) -> str | None:
        """Why this process must never write here again: the files that it holds are not those at the path, and somebody
        else may own the store by now.

        None: nothing changed, or it is closed.
        """
        if self._loss is None and self._lock_fd is not None:
            gone = next((path for path, known in self._held if not is_still_at(path, known)), None)
            if gone is not None:
                self._loss = f"{gone} was removed or replaced while the store was open: nothing more is kept; restart"
        return self._loss

    def close(self) -> None:
        """Release it; if there are no shares, another owner may follow at once."""
        if self._lock_fd is not None:
            if not self._is_share:
                os.ftruncate(self._lock_fd, 0)
            self.let_go()

    def let_go(self) -> None:
        """Close the locks' files: a forked child that kept them open would keep the store locked."""
        _directories.discard(self)
        for fd in (self._lock_fd, self._fd):
            if fd is not None:
                os.close(fd)
        self._lock_fd = self._fd = None

    def __enter__(self) -> StoreDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


_directories: weakref.WeakSet[StoreDirectory] = weakref.WeakSet()


def held_directory(path: Path) -> StoreDirectory | None:
    """The open store directory at `path`, if this process owns it."""
    real = os.path.realpath(path)
    return next((one for one in list(_directories) if os.path.realpath(one.path) == real), None)


def is_still_at(path: Path, known: os.stat_result) -> bool:
    """Whether this open file or directory is the one at `path`; True if that cannot be examined."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return (found.st_dev, found.st_ino) == (known.st_dev, known.st_ino)


# -- may it be used --------------------------------------------------------------------------------------------------
def _prepare(directory: Path) -> None:
    if directory.is_symlink() and not directory.exists():
        raise StoreError(f"store directory {directory} is a link to nothing; give a directory")
    if directory.exists() and not directory.is_dir():
        raise StoreError(f"store directory {directory} is a file; give a directory")
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        disk_check.sync_directory(directory.parent)
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise StoreError(f"store directory {directory} belongs to user {status.st_uid}; give one of your own")
    if stat.S_IMODE(status.st_mode) & 0o077:
        directory.chmod(0o700)
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise StoreError(f"store directory {directory} is not writable; change its permissions or give another")
    file_system = file_system_type(directory)
    if file_system in NETWORK_FILE_SYSTEMS:
        raise StoreError(
            f"store directory {directory} is on a network file system ({file_system}), where locks and memory maps "
            "cannot be trusted; give a local one"
        )


def file_system_type(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """Type of the file system that holds `path`; None where the system does not say."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    real, best, found = os.path.realpath(path), -1, None
    for fields in (line.split(" ") for line in lines):
        if len(fields) < 3:
            continue
        point = fields[1].encode("utf-8", "surrogateescape").decode("unicode_escape", "replace").rstrip("/")
        if (real == point or real.startswith(point + "/")) and len(
            point
        ) >= best:  # of equal ones the last is mounted on top
            best, found = len(point), fields[2]
    return found


# -- who owns it -----------------------------------------------------------------------------------------------------
def _wait_for_lock(directory: Path, fd: int) -> None:
    for attempt in range(_LOCK_TRIES):
        if _try_lock(fd, fcntl.LOCK_EX):
            return
        if attempt < _LOCK_TRIES - 1:
            time.sleep(_LOCK_WAIT_S)  # `read_lock_info` holds it for a moment
    raise _locked_error(directory, _who_owns(directory))


def _refuse_if_answered(directory: Path) -> None:
    """Raises StoreLockedError if a process listens on the store's socket: it owns the store, whatever its locks."""
    found, pid = _listener(directory / SOCKET_NAME)
    if found:
        raise _locked_error(directory, LockInfo(pid))


def _listener(path: Path) -> tuple[bool, int | None]:
    """Whether a process listens on this socket, and which."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_CONNECT_S)
            connection.connect(str(path))
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return True, struct.unpack("3i", peer)[0] or None
    except (TimeoutError, BlockingIOError):  # its queue is full
        return True, None
    except (OSError, ValueError):  # none, nobody behind it, or too long a path for one
        return False, None


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _locked_error(directory: Path, owner: LockInfo) -> StoreLockedError:
    if owner.pid == os.getpid():
        who, remedy = "this process", "close the other engine first"
    else:
        who = "another process" if owner.pid is None else f"process {owner.pid}"
        remedy = "stop it, or give another directory"
    name = f" ({owner.name})" if owner.name else ""
    return StoreLockedError(f"store {directory} is in use by {who}{name}; {remedy}", owner.pid)


def _write_lock_info(fd: int, socket_path: str | None, name: str) -> None:
    info = LockInfo(os.getpid(), socket_path, "".join(filter(str.isprintable, name))[:MAX_NAME_CHARS])
    os.ftruncate(fd, 0)
    with suppress(OSError):  # on a full disk the store opens all the same; who asks then goes by the socket
        os.pwrite(fd, msgspec.json.encode(info), 0)


def read_lock_info(path: str | Path) -> LockInfo | None:
    """Who owns the store at `path`; None when nobody does, or when there is no store."""
    directory = Path(path).expanduser()
    for place, flags in ((directory, os.O_DIRECTORY), (directory / LOCK_NAME, os.O_NOFOLLOW)):
        try:
            fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
        except OSError:
            continue
        try:
            if not _try_lock(fd, fcntl.LOCK_SH):
                return _who_owns(directory)
        finally:
            os.close(fd)
    return None


def _who_owns(directory: Path) -> LockInfo:
    """The owner, from the lock file, or from the socket if the lock file was removed."""
    info = LockInfo()
    with suppress(OSError, ValueError, RecursionError):  # no file at all, or nothing that an owner writes
        fd = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(fd, "rb", buffering=0) as file:
            info = _lock_infos.decode(file.read(MAX_LOCK_BYTES) or b"")
    if info.pid is None:
        found, pid = _listener(directory / SOCKET_NAME)
        return LockInfo(pid, str(directory / SOCKET_NAME)) if found else info
    return info


# -- its format ------------------------------------------------------------------------------------------------------
def _check_format(directory: Path) -> None:
    """Write a new store's format into a file; stores of format 1 have none. Refuse other formats."""
    path = directory / FORMAT_NAME
    if path.exists():
        with path.open("rb") as file:
            found = file.read(40).decode(errors="replace").strip()
    elif any((directory / name).exists() for name in (SECRET_NAME, *FOLDERS)):
        found = "1"
    else:
        disk_check.write_durably(path, f"{FORMAT}\n".encode())
        return
    if found != str(FORMAT):
        raise StoreError(
            f"store {directory} has format {found}, and this program reads format {FORMAT}; give another directory, or "
            "move this one away for the program that wrote it"
        )


# -- the secret ------------------------------------------------------------------------------------------------------
def _load_secret(path: Path) -> bytes:
    """Load the secret, or make it once. A damaged one is set aside: blocks stored under it are no longer found, and
    never wrong.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _make_secret(path)
    with open(fd, "rb") as file:
        if stat.S_IMODE(os.fstat(fd).st_mode) & 0o077:
            os.fchmod(fd, 0o600)
        secret = file.read(SECRET_BYTES + 1)
    if len(secret) == SECRET_BYTES and any(secret):
        return secret
    disk_check.quarantine(path, f"it does not hold {SECRET_BYTES} random bytes")
    return _make_secret(path)


def _make_secret(path: Path) -> bytes:
    secret = secrets.token_bytes(SECRET_BYTES)
    disk_check.write_durably(path, secret)
    return secret
