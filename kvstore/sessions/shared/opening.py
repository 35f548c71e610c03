"""Opens the sessions that a fleet shares, for one of its servers or for an administrator's command."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from redis.exceptions import AuthenticationError

from kvstore.config import SharedSessions
from kvstore.disk.directory import StoreDirectory
from kvstore.errors import ConfigError, RemoteError, StoreError
from kvstore.remote.names import fleet_secret
from kvstore.sessions.shared.address import SessionAddress, parse_session_url
from kvstore.sessions.shared.fleet import Fleet
from kvstore.sessions.shared.leases import LEASE_S
from kvstore.sessions.shared.server import Durability, RefusedError, SessionServer, UnfitError
from kvstore.sessions.shared.storage import MemberIdentity, SharedTables
from kvstore.sessions.store import SessionStore


def open_shared_sessions(settings: SharedSessions, directory: StoreDirectory | None) -> SessionStore:
    """A server's shared sessions. Raises ConfigError, and as `open_shared`."""
    address = parse_session_url(settings.url)
    secret = fleet_secret(settings.fleet_secret_file).derived("shared sessions")
    durability = Durability(settings.durability, settings.num_replicas)
    place = None if directory is None else directory.path
    return SessionStore(None, shared=open_shared(address, durability, secret, place))


def open_shared(
    address: SessionAddress,
    durability: Durability,
    fleet_secret: bytes | None,
    directory: Path | None,
    lease_s: float = LEASE_S,
) -> SharedTables:
    """directory: of the server's own store. fleet_secret: None for a command, which creates nothing.

    Raises ConfigError where Redis is not fit for sessions, or holds those of another fleet; StoreError where it cannot
    be reached.
    """
    with ExitStack() as opened:
        storage = SharedTables(SessionServer(address, durability), MemberIdentity.of(directory), fleet_secret)
        opened.callback(storage.close)
        try:
            storage.join()
        except UnfitError as error:
            raise ConfigError(str(error)) from None
        except RemoteError as error:
            if isinstance(error, RefusedError) or isinstance(error.__cause__, AuthenticationError):
                raise
            said = str(error).rstrip(".")
            raise RemoteError(f"{said}; see that this Redis runs, or give the address of one that does") from None
        if storage.identity.name is None:
            raise StoreError(f"there are no shared sessions in {address}; a server with --session-store begins them")
        Fleet(storage, lease_s)
        opened.pop_all()
    return storage
