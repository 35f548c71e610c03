"""A store without an owner, opened for one command: stats, evict, verify, compact and sessions on its files.

Holds the store's lock meanwhile and creates nothing new. Knows no model and no tier above the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.admin.commands import EvictRequest, Sessions, read_arguments, session_info, transcript
from kvstore.blocks.ids import BlockId, with_quantised
from kvstore.disk import check as disk_check
from kvstore.disk.check import LOCK_NAME, SECRET_NAME
from kvstore.disk.directory import StoreDirectory
from kvstore.errors import DegradedError, StoreError
from kvstore.sessions.check import CheckReport
from kvstore.sessions.marker import SessionMarker
from kvstore.sessions.record import SessionKey, Tombstone

if TYPE_CHECKING:
    from kvstore.disk.index import DiskIndex
    from kvstore.disk.tier import DiskTier
    from kvstore.sessions.store import SessionStore

OnProgress = Callable[[float | None], None]
LEAST_CAPACITY_BYTES = 64 << 20
NO_DISK = {"blocks": 0, "bytes": 0, "file_bytes": 0, "capacity_bytes": 0, "reads": 0, "writes": 0, "failures": {}}
NO_SESSIONS = {"sessions": 0, "turns": 0, "refs": 0, "pending_deletions": 0, "bytes": 0}


class OfflineStore:
    """The files of a store; a context manager. Raises StoreError when there is none, StoreLockedError when it is owned.

    disk, sessions: None where the store has no such part. set_aside: files that were damaged as a whole and were moved
    into quarantine when they were opened, by their place in the store's directory.
    """

    def __init__(self, path: str | Path) -> None:
        place = Path(path).expanduser()
        if not _is_store(place):
            raise StoreError(f"there is no store at {path}; give the directory of one, which `kvstore serve` begins")
        with ExitStack() as opened:
            self.directory = opened.enter_context(StoreDirectory.open(place))
            set_aside = _quarantined(self.directory.path)
            self.disk: DiskTier | None = None
            if (self.directory.path / "blocks").is_dir():
                from kvstore.disk.tier import DiskTier  # imported here, as numpy loads slower than all the rest

                data_file = self.directory.path / "blocks" / disk_check.DATA_FILE
                self.disk = DiskTier(self.directory, stored_capacity(data_file))
                opened.callback(self.disk.close)
            self.sessions: SessionStore | None = None
            self._marker = SessionMarker(self.directory.path)
            self._missing = self._marker.missing_file()
            if (self.directory.path / "sessions").is_dir() and self._missing is None:
                from kvstore.sessions.store import open_sessions

                self.sessions = open_sessions(self.directory)
                opened.callback(self.sessions.close)
            self.set_aside = sorted(_quarantined(self.directory.path) - set_aside)
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> OfflineStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def handle(
        self, command: str, arguments: dict[str, Any], on_progress: OnProgress | None = None
    ) -> Mapping[str, Any]:
        """Answer like a store's owner (see `commands`). Raises ConfigError and StoreError."""
        request = read_arguments(command, arguments)
        if command == "verify":
            return self.verify(request.delete, on_progress)
        if command == "sessions.delete":
            return self.delete_session(request.session.key)
        if command == "sessions.show":
            return self.show_session(request.session.key)
        if command == "sessions":
            return self.list_sessions(request)
        if command == "evict":
            return self.evict(request)
        if command == "why":
            raise StoreError("no server has this store open; only a running one knows its last requests")
        if command == "sessions.accept_loss":
            return {"accepted": self.accept_loss()}
        return self.stats() if command == "stats" else self.compact(request.codec)

    # -- looking -----------------------------------------------------------------------------------------------------
    def stats(self) -> dict[str, Any]:
        """Disk and sessions; under "models", how many blocks of each model, their bytes, and the size of one of them.

        block_size: tokens of a block; block_bytes: of its KV, uncompressed; none where no block can be read.
        """
        disk: dict[str, Any] = dict(NO_DISK)
        if self.disk is not None:
            disk = {**self.disk.stats(), "models": _by_model(self.disk)}
        sessions = NO_SESSIONS if self.sessions is None else self.sessions.stats()
        return {**dict.fromkeys(("model", "hbm", "cpu", "store", "requests", "tokens")), "disk": disk,
                "sessions": dict(sessions)}  # fmt: skip

    def list_sessions(self, request: Sessions) -> dict[str, Any]:
        heads = [] if self.sessions is None else self.sessions.list(request.tenant, request.limit)
        return {"sessions": [session_info(head) for head in heads]}

    def show_session(self, key: SessionKey) -> dict[str, Any]:
        state = None if self.sessions is None else self.sessions.load(key)
        if state is None:
            raise _no_session(key)
        return transcript(state)

    # -- giving up ---------------------------------------------------------------------------------------------------
    def evict(self, request: EvictRequest) -> dict[str, Any]:
        block_ids = None if request.session is None else self._blocks_of(request.session.key)
        chosen: list[BlockId] = []
        num_bytes = 0
        if self.disk is not None:
            index = _index_of(self.disk)
            named = None if block_ids is None else block_ids | _states_behind(self.disk, index, block_ids)
            chosen = index.select(request.selection(named))
            num_bytes = sum(entry.stored_bytes for entry in map(index.get, chosen) if entry is not None)
            if not request.dry_run:
                _delete(self.disk, chosen)
        return {"dry_run": request.dry_run, "tiers": {"disk": {"blocks": len(chosen), "bytes": num_bytes}}}

    def _blocks_of(self, key: SessionKey) -> frozenset[BlockId]:
        if self.sessions is None or not self.sessions.exists(key):
            raise _no_session(key)
        return frozenset(with_quantised(self.sessions.unshared_blocks_of(key)))

    def delete_session(self, key: SessionKey) -> dict[str, Any]:
        """Delete a session: transcript, ids and the KV that no other session refers to."""
        tombstone = None if self.sessions is None else self.sessions.delete(key).wait()
        if self.sessions is None or tombstone is None:
            raise _no_session(key)
        self._carry_out(self.sessions.pending_deletions())  # this one, and those that no server has ended
        return {"deleted": True, "blocks": len(tombstone.block_ids)}

    def _carry_out(self, tombstones: Sequence[Tombstone]) -> None:
        """Delete what is in this store: blocks, and the token ids by which answers are recognised in histories that
        come as text. The next server ends the deletions: it may know of a remote tier.
        """
        if (self.directory.path / "answers").is_dir():
            from kvstore.sessions.answers import open_answers, owner_tag

            with closing(open_answers(self.directory)) as answers:
                for one in tombstones:
                    answers.forget_owner(owner_tag(one.key.tenant, one.key.session_id))
        if self.disk is not None:
            block_ids = [block_id for one in tombstones for block_id in one.block_ids]
            _delete(self.disk, _with_descendants(_index_of(self.disk), with_quantised(block_ids)))
            self.disk.sync()

    # -- upkeep ------------------------------------------------------------------------------------------------------
    def verify(self, delete: bool, on_progress: OnProgress | None = None) -> dict[str, Any]:
        """Verify every block and every session; delete: also delete damaged blocks and those computed after them."""
        report: dict[str, Any] = {"set_aside": self.set_aside}
        if self.disk is not None:
            report |= self._verify_disk(self.disk, delete, on_progress)
        if self.sessions is not None:
            report["sessions"] = asdict(self.sessions.check())
        elif self._missing is not None:
            report["sessions"] = asdict(CheckReport(0, 0, 0, 0, (self._missing,)))
        return report

    def accept_loss(self) -> bool:
        if self.sessions is not None:
            return self.sessions.accept_loss()
        if self._missing is not None:
            self._marker.remove()
        was_missing, self._missing = self._missing is not None, None
        return was_missing

    def _verify_disk(self, disk: DiskTier, delete: bool, on_progress: OnProgress | None) -> dict[str, Any]:
        index = _index_of(disk)

        def note(num_done: int) -> None:
            if on_progress is not None:
                on_progress(num_done / max(num_done, len(index)))

        found = disk.verify(progress=note)
        gone = _with_descendants(index, found.bad_ids) if delete else []
        _delete(disk, gone)
        return {**found.as_dict(), "num_deleted": len(gone)}

    def compact(self, codec: str | None) -> dict[str, Any]:
        if self.sessions is not None:
            self.sessions.compact()
        return {"before_bytes": 0, "after_bytes": 0, "seconds": 0.0} if self.disk is None else (
            self.disk.compact(codec).as_dict()
        )  # fmt: skip


def _is_store(place: Path) -> bool:
    try:
        return any(os.path.lexists(place / name) for name in (LOCK_NAME, SECRET_NAME))
    except OSError as error:
        raise StoreError(f"the store at {place} cannot be used: {error.strerror or error}") from None


def _quarantined(directory: Path) -> set[str]:
    return {f"{place.parent.name}/{place.name}" for place in directory.glob("quarantine-*/*")}


def stored_capacity(data_file: Path) -> int:
    """The map size that the last owner gave a data file; a smaller one would evict at opening."""
    try:
        meta = disk_check.read_meta(data_file)
    except (OSError, disk_check.UnreadableFileError):
        return LEAST_CAPACITY_BYTES  # there is nothing that could be evicted
    return max(meta.needed_bytes, meta.map_bytes)


def _no_session(key: SessionKey) -> StoreError:
    tenant = f" of tenant {key.tenant!r}" if key.tenant else ""
    return StoreError(f"there is no session {key.session_id!r}{tenant}; `kvstore sessions` lists them")


def _by_model(disk: DiskTier) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    samples: dict[str, BlockId] = {}
    for batch in disk.scan():
        for entry in batch:
            amount = found.setdefault(entry.model, {"blocks": 0, "bytes": 0})
            amount["blocks"] += 1
            amount["bytes"] += entry.stored_bytes
            samples.setdefault(entry.model, entry.block_id)
    for model, block_id in samples.items():
        header = disk.header(block_id)
        if header is not None:
            found[model] |= {"block_size": len(header.record.tokens) // 4, "block_bytes": header.raw_bytes}
    return found


def _index_of(disk: DiskTier) -> DiskIndex:
    from kvstore.disk.index import DiskIndex

    return DiskIndex.build(disk.scan())


def _states_behind(disk: DiskTier, index: DiskIndex, block_ids: Iterable[BlockId]) -> set[BlockId]:
    children = {child for block_id in block_ids for child in index.links.children(block_id)}
    headers = {child: disk.header(child) for child in children.difference(block_ids)}
    firsts = [child for child, header in headers.items() if header is not None and header.record.is_state]
    return {piece for first in firsts for piece in index.links.descendants(first)}


def _with_descendants(index: DiskIndex, block_ids: Sequence[BlockId]) -> list[BlockId]:
    """These blocks and all stored blocks computed after them, tails first: nobody could use those."""
    found = dict.fromkeys(below for block_id in block_ids for below in index.links.descendants(block_id))
    return list(found)[::-1]


def _delete(disk: DiskTier, block_ids: Sequence[BlockId]) -> None:
    """Raises DegradedError when a transaction fails; earlier ones stay committed."""
    if (error := disk.delete(block_ids)) is not None:
        raise DegradedError(f"{disk.file.path} could not be written ({error}); look at its disk and try again")
