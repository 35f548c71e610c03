"""One LMDB environment of a store: a bad file is set aside, and a good one is opened only once, for many threads.

Owns the options that make LMDB durable, the registry of open environments, their handling in a fork, and how they are
reopened, replaced, compacted and closed under threads. Knows no particular table: its user passes the function that
opens them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import lmdb

from kvstore.config import LEAST_DISK_BYTES, format_size
from kvstore.disk import check as disk_check
from kvstore.disk.check import DATA_FILE, LOCK_FILE
from kvstore.disk.directory import StoreDirectory, held_directory, is_still_at
from kvstore.errors import StoreError
from kvstore.forks import leave_to_parent

LOGGER = logging.getLogger("kvstore.store")
VERIFY_BELOW_BYTES = 4 << 30
MAX_READERS, MAX_INSIDE = 126, 64  # places for readers, and threads inside, each of which keeps some
COPY_RECORDS, COPY_BYTES = 4096, 64 << 20  # of one transaction, at most
LOOK_S = 0.5

STRUCTURAL_ERRORS = (
    lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError, lmdb.VersionMismatchError,
    lmdb.IncompatibleError, lmdb.CursorFullError, lmdb.PageFullError, lmdb.BadDbiError,
)  # fmt: skip


class LostFileError(lmdb.Error):
    """New data could not be found again: the data file, or the proof of our ownership, is not in its place.

    The message says which, and what to do.
    """


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_HEAP_BYTES = 32 << 20  # the most that glibc accepts, and where its own adaptation ends
_KEPT_BYTES = 256 << 20

_telling = threading.Lock()
_open_environments: weakref.WeakValueDictionary[str, StoreEnvironment] = weakref.WeakValueDictionary()  # by real path


def _keep_freed_memory() -> None:
    """Let malloc keep what LMDB frees: it allocates every page of a transaction, and returns them after it.

    Values of a few hundred kilobytes would each be mapped and unmapped, at a third of a transaction's time. At most
    _KEPT_BYTES more stay with the process. Does nothing where there is no glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _HEAP_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def is_damage(error: Exception) -> bool:
    """Whether LMDB found the file's structure damaged. PanicError only says that it gave up on a failed write."""
    return isinstance(error, STRUCTURAL_ERRORS) and not isinstance(error, lmdb.PanicError)


class StoreEnvironment:
    """An open environment with the methods of `lmdb.Environment`. After a fork they raise StoreError in the child.

    quarantined: where a damaged predecessor was moved, None if there was none.
    """

    def __init__(self, directory: Path, env: lmdb.Environment, quarantined: Path | None, on_loss: str = "") -> None:
        self.directory = directory
        self.quarantined = quarantined
        self.is_open = True
        self.told_loss: str | None = None
        self._env = env
        self._owned: StoreDirectory | None = held_directory(directory.parent)
        self._on_loss = on_loss
        self._data_file = directory / DATA_FILE
        self._data_status = self._data_file.stat()
        _open_environments[os.path.realpath(directory)] = self
        leave_to_parent(self, str(directory))

    def begin(self, write: bool = False, buffers: bool = False) -> Any:
        """A transaction; raises lmdb.Error. buffers: values are views of the map, valid until the transaction ends.

        write: raises LostFileError when what is written could not be found again.
        """
        if write:
            self.check_in_place()
        return self._env.begin(write=write, buffers=buffers)  # type: ignore[call-overload]

    def open_db(self, key: bytes, txn: Any = None) -> Any:
        return self._env.open_db(key, txn=txn)

    def stat(self) -> dict[str, int]:
        """Statistics of the main database."""
        return cast(dict[str, int], self._env.stat())

    def info(self) -> dict[str, int]:
        return cast(dict[str, int], self._env.info())

    def sync(self) -> None:
        """Make everything committed durable."""
        self._env.sync(True)

    def loss(self) -> str | None:
        """What of this environment is no longer in its place; None: nothing, or it is closed."""
        found = None if self._owned is None else self._owned.loss()
        if found is None and not is_still_at(self._data_file, self._data_status):
            found = f"{self._data_file} was removed or replaced while the store was open{self._on_loss}"
        return found if self.is_open else None  # checked last: an orderly replacement closes the file before

    def is_removed(self) -> bool:
        """Whether the store is still ours, and there is no file in the data file's place."""
        return (self._owned is None or self._owned.loss() is None) and not os.path.lexists(self._data_file)

    def check_in_place(self) -> None:
        """Raises LostFileError."""
        if (loss := self.loss()) is not None:
            raise LostFileError(loss)

    def file_bytes(self) -> int:
        """The data file's size."""
        try:
            return (self.directory / DATA_FILE).stat().st_size
        except OSError:
            return 0

    def close(self, clean: bool = True) -> None:
        """Close it while no transaction is open. clean: sync and mark it as complete, so that the next start need not
        check it.
        """
        if not self.is_open:
            return
        clean = clean and self.loss() is None
        self.is_open = False
        synced = False
        try:
            if clean:
                self._env.sync(True)
                synced = True
        except lmdb.Error:
            pass  # without the mark, the next start checks the file
        finally:
            self._env.close()
            _open_environments.pop(os.path.realpath(self.directory), None)
            if synced:
                disk_check.mark_clean(self.directory)

    def let_go(self) -> None:
        """Release it in a forked child, which may then open it itself."""
        _open_environments.pop(os.path.realpath(self.directory), None)


def keys_after(txn: Any, db: Any, after: bytes | None, limit: int) -> Iterator[tuple[bytes, Any]]:
    """Up to `limit` keys with their values, beginning behind `after`."""
    cursor = txn.cursor(db)
    found = cursor.first() if after is None else cursor.set_range(after)
    if found and after is not None and bytes(cursor.key()) == after:
        found = cursor.next()
    if found:
        for key, value in islice(cursor.iternext(), limit):
            yield bytes(key), value


def tell_losses(store: Path) -> None:
    """Log which parts of a store's open environments are no longer in their place, once each. By any thread."""
    real, told = os.path.realpath(store), set[str]()
    with _telling:
        for place, env in list(_open_environments.items()):
            loss = env.loss() if os.path.dirname(place) == real else None
            if loss != env.told_loss:
                env.told_loss = loss
                if loss is not None and loss not in told:  # a loss of the whole store is logged once
                    LOGGER.error(loss)
                    told.add(loss)


class LossWatch:
    """Logs losses of a store's open environments, in its own thread."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._over = threading.Event()
        threading.Thread(target=self._look, name="kvstore-files", daemon=True).start()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            tell_losses(self._store)

    def close(self) -> None:
        self._over.set()


def open_environment(
    path: Path, map_bytes: int, max_dbs: int = 4, metasync: bool = False, verify_below_bytes: int = VERIFY_BELOW_BYTES,
    on_loss: str = "",
) -> StoreEnvironment:  # fmt: skip
    """Open or create the environment in the directory `path`; its parent is a StoreDirectory that this process holds.

    A damaged one is moved into quarantine with a warning, and an empty one is opened instead. metasync: a commit
    survives a power loss at once, not only with the next one. on_loss: added to the log message when the file is
    removed or replaced. Raises StoreError when nothing can be opened.
    """
    if map_bytes < LEAST_DISK_BYTES:
        raise StoreError(f"{path} may take {map_bytes} bytes; give at least {format_size(LEAST_DISK_BYTES)}")
    if os.path.realpath(path) in _open_environments:
        raise StoreError(f"{path} is already open in this process; close it first")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        problem = disk_check.find_problem(path, verify_below_bytes)
        if problem is None:
            try:
                return StoreEnvironment(path, _open_lmdb(path, map_bytes, max_dbs, metasync), None, on_loss)
            except STRUCTURAL_ERRORS as error:
                problem = str(error)
            except lmdb.Error as error:
                raise StoreError(f"{path} cannot be opened: {error}; is the disk full or read-only?") from None
        quarantined = disk_check.quarantine(path, problem)
        path.mkdir(mode=0o700)
        try:
            env = _open_lmdb(path, map_bytes, max_dbs, metasync)
        except lmdb.Error as error:
            raise StoreError(f"{path} cannot be created: {error}; is the disk full or read-only?") from None
        return StoreEnvironment(path, env, quarantined, on_loss)
    except OSError as error:
        raise StoreError(f"{path} cannot be opened: {error.strerror or error}") from None


def _open_lmdb(path: Path, map_bytes: int, max_dbs: int, metasync: bool) -> lmdb.Environment:
    _keep_freed_memory()
    _tighten(path)
    disk_check.clear_mark(path)
    # Another run's reader table is void, and a damaged one crashes LMDB; the store's lock is ours.
    (path / LOCK_FILE).unlink(missing_ok=True)
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    env = lmdb.open(
        str(path), map_size=map_bytes // page_bytes * page_bytes, max_dbs=max_dbs, sync=True, metasync=metasync,
        writemap=False, readahead=True, lib_version=0, mode=0o700, max_readers=MAX_READERS, max_spare_txns=4,
        lock=True,
    )  # fmt: skip
    with ExitStack() as undo:
        undo.callback(env.close)
        disk_check.sync_directory(path)
        disk_check.sync_directory(path.parent)
        env.reader_check()
        undo.pop_all()
    return env


def _tighten(path: Path) -> None:
    """Remove other users' permissions from existing files."""
    for one, mode in ((path, 0o700), (path / DATA_FILE, 0o600)):
        if one.exists() and one.stat().st_mode & 0o077:
            one.chmod(mode)


# -- under threads ---------------------------------------------------------------------------------------------------
class OpenTables(Protocol):
    """An open environment and what belongs to it."""

    @property
    def env(self) -> StoreEnvironment: ...


T = TypeVar("T", bound=OpenTables)
# What a copy has instead of a record, by its database, key and value; told what another database of the copy has under
# the same key, if that comes before.
Change = Callable[[str, bytes, memoryview, Callable[[str], memoryview | None]], bytes | bytearray | memoryview]


class LiveTables(Generic[T]):
    """`with live as tables:` holds them open. They are None after `shut`, and if they could not be reopened.

    Many threads may be inside, or one that is `alone()`, which has priority; LMDB's map must not move under a reader.
    open_tables: called to open them, after the previous ones were closed. Raises whatever it raises.
    """

    def __init__(self, open_tables: Callable[[], T]) -> None:
        self._open_tables = open_tables
        self._changed = threading.Condition(threading.Lock())
        self._num_inside = 0
        self._is_alone = False
        self._tables: T | None = open_tables()

    def __enter__(self) -> T | None:
        with self._changed:
            while self._is_alone or self._num_inside == MAX_INSIDE:
                self._changed.wait()
            self._num_inside += 1
        return self._tables

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._num_inside -= 1
            if self._is_alone or self._num_inside == MAX_INSIDE - 1:
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_alone)
            self._is_alone = True
            self._changed.wait_for(lambda: self._num_inside == 0)
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()

    # -- alone -------------------------------------------------------------------------------------------------------
    def shut(self, clean: bool = True) -> None:
        """Close the environment; clean: mark it as complete. Call it, and all that follow, `alone()`."""
        tables, self._tables = self._tables, None
        if tables is not None:
            tables.env.close(clean)

    def open(self) -> None:
        """Open it again, unless it is open."""
        if self._tables is None:
            self._tables = self._open_tables()

    def close(self, clean: bool = True) -> None:
        with self.alone():
            self.shut(clean)

    # -- compaction --------------------------------------------------------------------------------------------------
    def compact(self, env: StoreEnvironment, databases: Mapping[str, Any], change: Change | None = None) -> None:
        """Copy the records of these databases, in this order, and replace the file by the copy. change: each of them.

        Nobody may write meanwhile. A removed file is restored. A foreign file in its place is not touched:
        LostFileError. After any failure the file is unchanged, and open if it can be opened.
        """
        place = copy_path(env.directory)
        is_removed = env.is_removed()
        if not is_removed:
            env.check_in_place()
        env.directory.mkdir(mode=0o700, exist_ok=True)
        discard_copy(env.directory)
        try:
            _copy_records(env, databases, place, change)
            with self.alone():
                try:
                    self._swap(env.directory, is_removed)
                finally:
                    self.open()
        finally:
            discard_copy(env.directory)

    def _swap(self, directory: Path, is_removed: bool) -> None:
        if not is_removed:  # else its bytes would be lost with the last open descriptor
            self.shut(clean=False)
        os.replace(copy_path(directory) / DATA_FILE, directory / DATA_FILE)
        disk_check.sync_directory(directory)
        self.shut(clean=False)
        disk_check.mark_clean(directory)


def copy_path(directory: Path) -> Path:
    """The path of a compacted copy of this environment."""
    return directory.with_name(directory.name + ".compact")


def discard_copy(directory: Path) -> None:
    """Delete the copy of an interrupted compaction. It may hold the text of sessions deleted since. Raises
    StoreError.
    """
    place = copy_path(directory)
    try:
        if place.is_dir():
            shutil.rmtree(place)
    except OSError as error:
        raise StoreError(f"{place} is left of a compaction and cannot be removed: {error.strerror or error}") from None


def _copy_records(
    env: StoreEnvironment, databases: Mapping[str, Any], place: Path, change: Change | None = None
) -> None:
    """Copy record by record: LMDB's own copy keeps deleted data in the gaps of used pages."""
    place.mkdir(mode=0o700)
    # Synced once at the end: nobody uses it before that.
    copy = lmdb.open(
        str(place), map_size=env.info()["map_size"], max_dbs=len(databases), sync=False, lib_version=0, mode=0o700
    )
    try:
        targets = {name: copy.open_db(name.encode()) for name in databases}
        for name in databases:
            _copy_database(env, databases[name], copy, targets, name, change)
        copy.sync(True)
    finally:
        copy.close()
    disk_check.sync_directory(place)


def _copy_database(
    env: StoreEnvironment, source: Any, copy: lmdb.Environment, targets: Mapping[str, Any], name: str,
    change: Change | None,
) -> None:  # fmt: skip
    last: bytes | None = None
    while True:
        first, num_bytes = last, 0
        with env.begin(buffers=True) as reading, copy.begin(write=True, buffers=True) as writing:
            for key, value in keys_after(reading, source, first, COPY_RECORDS):
                if change is not None:
                    value = change(name, key, value, partial(_found, writing, targets, key))
                writing.put(key, value, append=True, db=targets[name])
                last = key
                num_bytes += len(value)
                if num_bytes >= COPY_BYTES:
                    break
        if last == first:
            return


def _found(txn: Any, databases: Mapping[str, Any], key: bytes, name: str) -> memoryview | None:
    found: memoryview | None = txn.get(key, db=databases[name])
    return found
