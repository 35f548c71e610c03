"""The commands on sessions that servers share, carried out without any of these servers.

Makes nothing that was not there. The KV of what is deleted goes from each server's tiers by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from kvstore.admin.commands import read_arguments, session_info, transcript
from kvstore.errors import ConfigError, StoreError
from kvstore.sessions.record import SessionKey
from kvstore.sessions.shared.address import parse_session_url
from kvstore.sessions.shared.opening import open_shared
from kvstore.sessions.shared.server import Durability
from kvstore.sessions.store import SessionStore


def ask_shared(url: str, command: str, arguments: dict[str, Any]) -> Mapping[str, Any]:
    """As `OfflineStore.handle`, for what is about sessions. Raises ConfigError and StoreError."""
    request = read_arguments(command, arguments)
    if command == "sessions.accept_loss":
        why = "--session-store (KVSTORE_SESSION_STORE) does not tell which sessions were lost"
        raise ConfigError(f"{why}; give --store of a server that runs and shared them, and leave it out")
    shared = open_shared(parse_session_url(url, "--session-store"), Durability("unchecked"), None, None)
    with closing(SessionStore(None, shared=shared)) as sessions:
        if command == "sessions":
            return {"sessions": [session_info(head) for head in sessions.list(request.tenant, request.limit)]}
        return _of_one(sessions, command, request.session.key)


def _of_one(sessions: SessionStore, command: str, key: SessionKey) -> Mapping[str, Any]:
    if command == "sessions.show":
        state = sessions.load(key)
        if state is not None:
            return transcript(state)
    else:
        tombstone = sessions.delete(key).wait()
        if tombstone is not None:
            return {"deleted": True, "blocks": len(tombstone.block_ids)}
    tenant = f" of tenant {key.tenant!r}" if key.tenant else ""
    raise StoreError(f"there is no session {key.session_id!r}{tenant} among the shared ones")
