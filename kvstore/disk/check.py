"""Checks whether LMDB may open a file: LMDB trusts a file and can crash on a damaged one.

Reads plain bytes, never through LMDB. A file that fails is set aside, not deleted.
"""

import json
import os
import signal
import stat
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from kvstore.disk import walk as disk_walk
from kvstore.errors import StoreError

DATA_FILE, LOCK_FILE, CLEAN_FILE = "data.mdb", "lock.mdb", "clean"
LOCK_NAME, SECRET_NAME, FORMAT_NAME, SOCKET_NAME = "lock", "secret", "format", "control.sock"
FOLDERS = ("blocks", "sessions", "answers")
FILES = (DATA_FILE, LOCK_FILE, CLEAN_FILE, LOCK_NAME, SECRET_NAME, FORMAT_NAME)
LMDB_MAGIC = 0xBEEFC0DE
LMDB_09_VERSION = 1
MIN_PAGE_BYTES, MAX_PAGE_BYTES = 256, 0x8000
VERIFY_BASE_S, VERIFY_S_PER_GIB = 60.0, 60.0
WALKER = disk_walk.__file__
MAX_KEPT_BYTES = 16 << 20
T = TypeVar("T")
STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)

# Of LMDB 0.9 on 64-bit machines: a page header of 16 bytes, then magic, version, (address), map size, page size (in
# the first field of the free list's record), (both databases' records), last page, transaction number.
_META = struct.Struct("=16xII8xQI44x48xQQ")
_META_PAGES = 2


@dataclass(frozen=True, slots=True)
class Meta:
    """The newer of the two meta pages of a data file. map_bytes: how large its last owner let it become."""

    map_bytes: int
    page_bytes: int
    last_page: int
    txn_id: int

    @property
    def needed_bytes(self) -> int:
        """Size up to the file's last page."""
        return (self.last_page + 1) * self.page_bytes


class UnreadableFileError(Exception):
    """Not a data file of LMDB 0.9; the message says why."""


def read_meta(data_file: Path) -> Meta:
    """Raises UnreadableFileError, and OSError."""
    with data_file.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise UnreadableFileError("it is empty")
        first = _parse_meta(file.read(_META.size))
        file.seek(first.page_bytes)
        second = _parse_meta(file.read(_META.size))
    if first.page_bytes != second.page_bytes:
        raise UnreadableFileError("its two meta pages disagree on the page size")
    return first if first.txn_id >= second.txn_id else second


def _parse_meta(page: bytes) -> Meta:
    if len(page) < _META.size:
        raise UnreadableFileError("it ends within its meta pages")
    magic, version, map_bytes, page_bytes, last_page, txn_id = _META.unpack(page)
    if magic != LMDB_MAGIC:
        raise UnreadableFileError("it is not an LMDB file, or was made on another kind of machine")
    if version != LMDB_09_VERSION:
        raise UnreadableFileError(f"its format version is {version}, this program reads {LMDB_09_VERSION}")
    if page_bytes & (page_bytes - 1) or not MIN_PAGE_BYTES <= page_bytes <= MAX_PAGE_BYTES:
        raise UnreadableFileError(f"its page size is {page_bytes}")
    if last_page + 1 < _META_PAGES:
        raise UnreadableFileError("it has no pages")
    return Meta(map_bytes, page_bytes, last_page, txn_id)


def find_problem(directory: Path, verify_below_bytes: int) -> str | None:
    """Why the environment in `directory` must not be opened; None when it may be, or does not exist.

    Its structure is verified in a child process when it was not closed cleanly, when it is smaller than
    `verify_below_bytes`, or when it is shorter than it says: pages at its end may be free and never written.
    """
    data_file = directory / DATA_FILE
    if not data_file.exists():
        return None
    try:
        meta = read_meta(data_file)
    except UnreadableFileError as error:
        return str(error)
    size = data_file.stat().st_size
    is_short = size < meta.needed_bytes
    if size >= verify_below_bytes and not is_short and was_closed_cleanly(directory, meta):
        return None
    return verify_structure(data_file)


def verify_structure(data_file: Path) -> str | None:
    """The first problems in the structure of a data file, None for none. Values are not checked."""
    command = [sys.executable, "-I", WALKER, str(data_file)]
    limit_s = VERIFY_BASE_S + VERIFY_S_PER_GIB * data_file.stat().st_size / 2**30
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        # The machine is stalled, not the file damaged: nothing is set aside.
        raise StoreError(f"checking {data_file} took more than {limit_s:.0f} s; try again when less runs") from None
    if done.returncode == disk_walk.CANNOT:
        raise StoreError("the installed lmdb package cannot verify files; install lmdb>=3.0")
    if done.returncode == 0:
        return None
    if -done.returncode in STOPS:  # of a server that is stopped or short of memory; damage causes other signals
        name = signal.Signals(-done.returncode).name
        raise StoreError(f"checking {data_file} was ended by {name} from outside; nothing was changed, start again")
    return " ".join(done.stdout.split()) or f"checking its structure ended with status {done.returncode}"


# -- the mark of a clean stop ----------------------------------------------------------------------------------------
def was_closed_cleanly(directory: Path, meta: Meta) -> bool:
    """Whether the mark exists and names exactly this state of the file."""
    try:
        mark = json.loads((directory / CLEAN_FILE).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(mark, dict) and mark == _mark(directory, meta)


def _mark(directory: Path, meta: Meta) -> dict[str, int]:
    return {"file_bytes": (directory / DATA_FILE).stat().st_size, "txn_id": meta.txn_id}


def mark_clean(directory: Path) -> None:
    """Mark a file whose environment was synced and closed. A failure only costs a check at the next start."""
    try:
        mark = _mark(directory, read_meta(directory / DATA_FILE))
        write_durably(directory / CLEAN_FILE, json.dumps(mark).encode())
    except (OSError, UnreadableFileError):
        (directory / CLEAN_FILE).unlink(missing_ok=True)


def clear_mark(directory: Path) -> None:
    """Remove the mark before the environment is opened for writing."""
    if (directory / CLEAN_FILE).exists():
        (directory / CLEAN_FILE).unlink()
        sync_directory(directory)


# -- kinds -----------------------------------------------------------------------------------------------------------
def check_kinds(store: Path) -> None:
    """Check that files are files (opening a pipe would wait for ever), folders are folders, and data can be written.

    Raises StoreError, and OSError.
    """
    for folder in (store, *(store / name for name in FOLDERS)):
        for entry in folder.iterdir() if folder.is_dir() else ():
            try:
                mode = entry.stat().st_mode
            except FileNotFoundError:  # a link to nothing, or it has just gone
                continue
            expected = stat.S_ISDIR if entry.name in FOLDERS else stat.S_ISREG
            is_free = entry.name not in (*FILES, *FOLDERS) and (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
            if not (expected(mode) or is_free or entry.name == SOCKET_NAME):
                wanted = "a directory" if entry.name in FOLDERS else "a file"
                raise StoreError(f"{entry} is {_kind(mode)} where {wanted} of the store has to be; move it away")
            if entry.name in (DATA_FILE, *FOLDERS) and not os.access(entry, os.R_OK | os.W_OK):
                raise StoreError(f"{entry} is not writable; change its permissions")


def _kind(mode: int) -> str:
    kinds = {"a directory": stat.S_ISDIR, "a file": stat.S_ISREG, "a named pipe": stat.S_ISFIFO}
    return next((name for name, is_one in kinds.items() if is_one(mode)), "no regular file")


# -- files -----------------------------------------------------------------------------------------------------------
def sync_directory(directory: Path) -> None:
    """Make creations and renames in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, content: bytes) -> None:
    """Replace a small file, 0600: afterwards it has the old content or the new. Raises OSError."""
    new = path.with_name(path.name + ".new")
    with ExitStack() as undo:
        undo.callback(new.unlink, missing_ok=True)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(fd)
        os.replace(new, path)
        undo.pop_all()
    sync_directory(path.parent)


def read_kept(path: Path, decoder: msgspec.json.Decoder[T]) -> T | None:
    """The content of a small file of JSON; None if there is none. Raises OSError, and ValueError for anything else."""
    try:
        if path.stat().st_size > MAX_KEPT_BYTES:
            raise ValueError("it is larger than anything that was written to it")
        return decoder.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except RecursionError:  # a forged file
        raise ValueError("it is nested too deeply") from None


def quarantine(path: Path, why: str, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> Path:
    """Move a file or directory of a store into a new directory beside it, with a warning. Returns its new place."""
    stamp = clock().strftime("%Y%m%dT%H%M%SZ")
    for number in range(1, 1000):
        place = path.parent / f"quarantine-{stamp}-{number}"
        try:
            place.mkdir(0o700)
        except FileExistsError:
            continue
        path.rename(place / path.name)
        sync_directory(path.parent)
        warnings.warn(
            f"{path.name} of the store is damaged ({why}); it was moved to {place.name}, and a new one is begun",
            RuntimeWarning, stacklevel=2,
        )  # fmt: skip
        return place / path.name
    raise StoreError(f"{path.parent} has too many quarantine directories; delete those you do not need")
