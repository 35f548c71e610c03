"""The tables of shared sessions: transactions, the name of these sessions, and the fleet that they belong to.

A transaction raises `StaleViewError` if what it has read changed meanwhile; it is then run again.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeVar

from kvstore.disk import check as disk_check
from kvstore.disk.records import pack, seal
from kvstore.errors import RemoteError, StoreError, StoreLostError
from kvstore.sessions import tables
from kvstore.sessions.record import micros
from kvstore.sessions.shared.connection import Reply
from kvstore.sessions.shared.server import Command, RefusedError, SessionServer, UnfitError
from kvstore.sessions.shared.view import COMMIT, SharedView
from kvstore.sessions.sharing import Sharing
from kvstore.sessions.tables import COUNTERS, StaleViewError

T = TypeVar("T")
FILE_NAME = "shared-sessions.id"
NAME_BYTES, MEMBER_BYTES = 16, 8
IN_MEMORY = "memory-"  # begins the name of a member whose KV ends with it
FLEET, NAME = b"fleet", b"name"  # keys of COUNTERS
GIVEN_UP = b"given up "  # and the name of sessions that were lost before these
WAIT_MS = 2000  # for replicas of Redis
MAX_TRIES = 20
LOGGER = logging.getLogger("kvstore.store")


@dataclass(slots=True)
class MemberIdentity:
    """What a server's own store remembers of the sessions that it shares: their name, and its own.

    path: None without a store; the server is then a new member each time, as its KV does not outlive it. name: of the
    sessions; None if it has shared none yet. was_member: it may hold KV of sessions.
    """

    path: Path | None
    name: bytes | None
    member: str
    was_member: bool = False

    @classmethod
    def of(cls, store: Path | None) -> MemberIdentity:
        path = None if store is None else store / FILE_NAME
        try:
            name, member = ("", "") if path is None else path.read_text().split()
            if len(name) == 2 * NAME_BYTES and len(member) == 2 * MEMBER_BYTES:
                return cls(path, bytes.fromhex(name), member, True)
        except (FileNotFoundError, ValueError):
            pass
        return cls(path, None, (IN_MEMORY if path is None else "") + secrets.token_hex(MEMBER_BYTES))

    def keep(self, name: bytes) -> None:
        """Raises OSError."""
        self.name = name
        if self.path is not None:
            disk_check.write_durably(self.path, f"{name.hex()} {self.member}\n".encode())


class SharedTables:
    """Opened with `join`. One thread writes.

    fleet_secret: of the servers that may share them; None for an administrator's command, which only checks that these
    are the known sessions.
    """

    def __init__(self, server: SessionServer, identity: MemberIdentity, fleet_secret: bytes | None) -> None:
        self.server = server
        self.identity = identity
        self.num_conflicts = 0
        self.sharing = Sharing()  # until the fleet is known
        self.on_close: Callable[[], None] = lambda: None
        self._fleet = None if fleet_secret is None else hmac.digest(fleet_secret, b"kvstore shared sessions", "sha256")
        self._place = server.names.prefix + b"commit:" + secrets.token_hex(8).encode()
        self._numbers = count(1)
        self._session_numbers: list[int] = []
        self._loss: str | None = None

    # -- which sessions these are ------------------------------------------------------------------------------------
    def join(self) -> None:
        """Raises UnfitError where these sessions are another fleet's, or Redis is not fit for them; RemoteError.

        Where they are not those that this server knew, every transaction raises StoreLostError until `accept_loss`.
        """
        name, is_fleet = self._transact(self._claimed)
        if not is_fleet:
            raise UnfitError(
                f"the sessions in {self.server.address} are of servers with another fleet secret; give that secret, or "
                "another database of this Redis"
            )
        if name is not None:
            self._keep(name)

    def _claimed(self, view: SharedView) -> tuple[bytes | None, bool]:
        """Their name, None where they are not those that this server knew; and whether they are of its fleet."""
        known, name = self.identity.name, tables.file_name(view)
        if not name and known is None and self._fleet is not None:
            name = secrets.token_bytes(NAME_BYTES)
            tables.set_file_name(view, name)
        if not name or (known not in (None, name) and view.get(COUNTERS, GIVEN_UP + (known or b"")) is None):
            return None, True
        if self._fleet is not None:
            stored = view.get(COUNTERS, FLEET)
            if stored is None:
                view.put(COUNTERS, FLEET, seal(COUNTERS, FLEET, pack(self._fleet)))
            elif stored != seal(COUNTERS, FLEET, pack(self._fleet)):
                return name, False
        return name, True

    def _keep(self, name: bytes) -> None:
        self._loss = None
        if name != self.identity.name:
            try:
                self.identity.keep(name)
            except OSError as error:
                raise StoreError(f"{self.identity.path} cannot be written: {error.strerror or error}") from None

    def accept_loss(self) -> bool:
        """Go on with the sessions that are there; the other servers then do so, too. False if nothing is lost."""

        def give_up(view: SharedView) -> bytes | None:
            name, _ = self._claimed(view)
            known = self.identity.name
            if name is not None or known is None:
                return None
            there = tables.file_name(view) or secrets.token_bytes(NAME_BYTES)
            tables.set_file_name(view, there)
            view.put(COUNTERS, GIVEN_UP + known, b"1")
            return there

        there = self._transact(give_up)
        if there is not None:
            self._keep(there)
            self.join()
        return there is not None

    def is_lost(self) -> bool:
        return self._loss is not None

    def _check_name(self, stored: Reply) -> None:
        """Raises StoreLostError, and StaleViewError where the loss was accepted by another server."""
        known = self.identity.name
        if known is not None and stored == seal(COUNTERS, NAME, pack(known)):
            self._loss = None
            return
        self.join()
        if self.identity.name != known:
            raise StaleViewError
        if self._loss is None:
            LOGGER.error("sessions: %s", self._said_lost())
        self._loss = self._said_lost()
        raise StoreLostError(self._loss)

    def _said_lost(self) -> str:
        return (
            f"the sessions that this server shared are not in {self.server.address}: it was emptied, or is another "
            "one; bring its data back, or give them up by `kvstore sessions accept-loss --store` of a server that runs"
        )

    # -- transactions ------------------------------------------------------------------------------------------------
    @contextmanager
    def read(self) -> Iterator[SharedView]:
        """A consistent view: raises StaleViewError at its end unless all that was read was so at one moment."""
        view = self._view()
        try:
            yield view
        except (RemoteError, StoreLostError):
            raise
        except StoreError:  # a session that was being deleted looks damaged
            self._check_still_so(view)
            raise
        self._check_still_so(view)

    @contextmanager
    def write(self) -> Iterator[SharedView]:
        """A transaction that is committed as a whole, durably, when its context ends. Waits during a short outage."""
        view, number = self._view(), f"{next(self._numbers)}".encode()
        with ExitStack() as failed:
            failed.callback(view.give_back)
            try:
                yield view
                self._commit(view, number)
            except RefusedError:
                raise
            except RemoteError:
                self.server.await_back()
                (last,) = self.server.ask(("GET", self._place))
                if last != number:
                    raise StaleViewError from None
                if self.server.num_awaited:  # they are asked about what a connection has written itself
                    self._eval(SharedView(self.server.ask, self.server.names), number)
            failed.pop_all()

    def _view(self) -> SharedView:
        is_named = False

        def ask(*commands: Command) -> list[Reply]:
            nonlocal is_named
            if is_named:
                return self.server.ask(*commands)
            name, *replies = self.server.ask(("HGET", self.server.names.values(COUNTERS), NAME), *commands)
            self._check_name(name)
            is_named = True
            view.note(COUNTERS, NAME, name if isinstance(name, bytes) else None)
            return replies

        view = SharedView(ask, self.server.names, self._session_numbers, micros(self.server.now()))
        return view

    def _commit(self, view: SharedView, number: bytes) -> None:
        if not view.has_changes:
            self._check_still_so(view)
            return
        view.get(COUNTERS, NAME)  # so that it is compared, also where nothing was read
        self._eval(view, number)

    def _check_still_so(self, view: SharedView) -> None:
        if not view.is_still_so():
            self.num_conflicts += 1
            raise StaleViewError

    def _eval(self, view: SharedView, number: bytes) -> None:
        server, script = self.server, view.script_arguments(number)
        commands: list[Command] = [("EVAL", COMMIT, 2, server.names.prefix, self._place, *script)]
        num_awaited, counts_replicas = server.num_awaited, server.counts_replicas
        if num_awaited:
            commands.append(("WAIT", num_awaited, WAIT_MS))
        if counts_replicas:
            commands.append(("INFO", "replication"))
        is_written, *more = server.ask(*commands)
        if counts_replicas:
            server.note_replicas(more.pop())
            num_awaited = min(num_awaited, server.num_awaited)  # none of those that have gone
        if is_written != 1:
            self.num_conflicts += 1
            raise StaleViewError
        num_have = more[0] if more else 0
        if not isinstance(num_have, int) or num_have < num_awaited:
            raise RefusedError(f"{server.address} has it, but {num_have!r} of {num_awaited} replicas: try again")

    def version(self) -> int:
        """Changes with every commit of any server."""
        (reply,) = self.server.ask(("GET", self.server.names.version))
        return int(reply) if isinstance(reply, bytes) else 0

    def _transact(self, work: Callable[[SharedView], T]) -> T:
        """Run a transaction without comparing the sessions' name."""
        for _ in range(MAX_TRIES):
            view = SharedView(self.server.ask, self.server.names)
            found = work(view)
            try:
                if view.has_changes:
                    self._eval(view, f"{next(self._numbers)}".encode())
                return found
            except StaleViewError:
                continue
        raise RemoteError(f"{self.server.address}: others change the sessions' names all the time")

    # -- the file that it is not -------------------------------------------------------------------------------------
    def compact(self) -> None:
        """Redis rewrites its own files."""

    reopen = compact

    def close(self) -> None:
        self.on_close()
        self.server.close()
