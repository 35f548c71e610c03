"""The commands on a store: their arguments and results.

Knows no socket and no tier: `control` transmits them, and the owner or `offline` executes them. Results are plain
dicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import Evict
from kvstore.config import CODEC_NAMES
from kvstore.errors import ConfigError
from kvstore.sessions.record import SessionHead, SessionKey, SessionState

MAX_SESSIONS = 10_000  # of one list


# -- arguments: what a handler is given -----------------------------------------------------------------------------
class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The arguments of a command without arguments."""


class SessionName(Nothing, frozen=True, kw_only=True):
    """On the wire, where the tenant may be left out."""

    session_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,128}\Z")]
    tenant: str = ""

    @property
    def key(self) -> SessionKey:
        return SessionKey(self.tenant, self.session_id)

    @classmethod
    def of(cls, key: SessionKey) -> SessionName:
        return cls(session_id=key.session_id, tenant=key.tenant)


class OneSession(Nothing, frozen=True):
    """Arguments of `sessions.show` and `.delete`."""

    session: SessionName


class OneRequest(Nothing, frozen=True, kw_only=True):
    """Arguments of `why`: a request of a running server."""

    request_id: Annotated[str, Meta(min_length=1, max_length=64)]
    tenant: str = ""


class Sessions(Nothing, frozen=True):
    """Arguments of `sessions`: the list of one tenant, the most recently used first."""

    tenant: str = ""
    limit: Annotated[int, Meta(ge=1, le=MAX_SESSIONS)] = 100


class Verify(Nothing, frozen=True):
    """delete: also delete damaged blocks."""

    delete: bool = False


class Compact(Nothing, frozen=True):
    """codec: that blocks are rewritten in."""

    codec: Annotated[str, Meta(pattern=rf"^({'|'.join(CODEC_NAMES)})\Z")] | None = None


class EvictRequest(Nothing, frozen=True, rename={"everything": "all"}):
    """As `kvstore.blocks.records.Evict`, but a session stands for its blocks that no other one refers to. Without any
    condition it raises ConfigError.
    """

    everything: bool = False
    unused_for_s: Annotated[float, Meta(ge=0, lt=1e18)] | None = None
    session: SessionName | None = None
    model: str | None = None
    to_bytes: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        conditions = (self.unused_for_s, self.session, self.model, self.to_bytes)
        if not self.everything and all(condition is None for condition in conditions):
            raise ConfigError("there is no condition; give all, unused_for_s, session, model or to_bytes")

    def selection(self, block_ids: frozenset[BlockId] | None) -> Evict:
        """For the tiers. block_ids: those of `session`; None when it is not set."""
        assert (block_ids is None) == (self.session is None)
        return Evict(self.everything, self.unused_for_s, self.model, block_ids, self.to_bytes, self.dry_run)


COMMANDS: dict[str, type[Nothing]] = {
    "stats": Nothing, "evict": EvictRequest, "verify": Verify, "compact": Compact, "sessions": Sessions,
    "sessions.show": OneSession, "sessions.delete": OneSession,
    "sessions.accept_loss": Nothing, "why": OneRequest,
}  # fmt: skip
for kind in COMMANDS.values():
    msgspec.json.Decoder(kind)  # `convert` is safe in any thread from now on (see `kvstore.disk.records`)


def read_arguments(command: str, arguments: Mapping[str, Any]) -> Any:
    """The command's arguments as the type in COMMANDS. Raises ConfigError for an unknown command or name, a wrong type
    or a value out of bounds.
    """
    if command not in COMMANDS:
        raise ConfigError(f"unknown command {command[:40]!r}; known are {', '.join(COMMANDS)}")
    try:
        return msgspec.convert(arguments, COMMANDS[command])
    except (msgspec.ValidationError, OverflowError) as error:
        raise ConfigError(f"{command}: {error}") from None


# -- results: what a handler returns --------------------------------------------------------------------------------
def session_info(head: SessionHead) -> dict[str, Any]:
    """Times in seconds since the epoch; expires_s: None when it never expires."""
    return {
        "id": head.key.session_id, "tenant": head.key.tenant, "turns": head.num_turns, "tokens": head.num_tokens,
        "updated_s": head.updated_s, "created_s": head.created_s, "expires_s": head.expires_s,
        "title": head.title, "model": head.model,
    }  # fmt: skip


def transcript(state: SessionState) -> dict[str, Any]:
    """A session and its whole transcript."""
    return {"session": session_info(state.head), "messages": state.messages}
