"""The commands that a store's owner answers, and that run on a store without one: their arguments and their results.

Knows no socket and no tier: `control` carries them, the owner or `offline` carries them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from kvstore.errors import ConfigError, RequestError
from kvstore.session_record import Message, SessionHead, SessionKey, SessionState
from kvstore.session_repair import AsideTurn, Repaired
from kvstore.tier import Evict

if TYPE_CHECKING:
    from kvstore.block import BlockId

COMMANDS = ("stats", "evict", "verify", "compact", "sessions", "sessions.show", "sessions.delete",
            "sessions.repair", "sessions.accept_loss")  # fmt: skip
MAX_SESSIONS = 10_000  # of one list
_LARGEST = 1e18


# -- results: what a handler returns --------------------------------------------------------------------------------
class StatsResult(TypedDict):
    """`Engine.stats()` and "sessions" (`SessionStore.stats()`); a store without owner has disk and sessions only."""

    model: str | None
    hbm: dict[str, Any] | None
    cpu: dict[str, Any] | None
    disk: dict[str, Any] | None
    store: dict[str, Any] | None
    sessions: dict[str, Any] | None
    requests: dict[str, Any] | None
    tokens: dict[str, Any] | None


class TierAmount(TypedDict):
    blocks: int
    bytes: int


class EvictResult(TypedDict):
    """Per tier that there is, "hbm", "cpu" or "disk", what was given up or with dry_run would be."""

    dry_run: bool
    tiers: dict[str, TierAmount]


class VerifyResult(TypedDict, total=False):
    """The disk tier's `VerifyReport` as a dict, none of it without a disk; and `CheckReport` as a dict.

    num_deleted: damaged blocks and those computed after them, taken out. set_aside: files that were damaged as a whole
    and were moved there; only from a store without owner.
    """

    num_ok: int
    num_corrupt: int
    num_orphans: int
    num_heads: int
    num_deleted: int
    bad_ids: list[str]
    is_complete: bool
    set_aside: list[str]
    sessions: dict[str, Any]


class CompactResult(TypedDict, total=False):
    """Bytes of the blocks' file before and after, and how long it took."""

    before_bytes: int
    after_bytes: int
    seconds: float


class SessionInfo(TypedDict):
    """One session; times in seconds since the epoch. expires_s: None when it never ends by itself."""

    id: str
    tenant: str
    turns: int
    tokens: int
    updated_s: float
    created_s: float
    expires_s: float | None
    title: str
    model: str


class SessionsResult(TypedDict):
    """Of one tenant, the most recently used first."""

    sessions: list[SessionInfo]


class AsideInfo(TypedDict):
    """A turn that a repair has set aside; messages: None where they cannot be read."""

    turn: int
    messages: list[Message] | None


class TranscriptResult(TypedDict):
    """A session and all that was said in it, each message with its role and its content; and what was set aside."""

    session: SessionInfo
    messages: list[Message]
    aside: list[AsideInfo]


class RepairedResult(TypedDict):
    """repaired: False when nothing was damaged. turns: of the session now; aside: how many were set aside now."""

    repaired: bool
    turns: int
    aside: int


class DeletedResult(TypedDict):
    """blocks: how many no other session refers to, and so went with it."""

    deleted: bool
    blocks: int


class AcceptedResult(TypedDict):
    """accepted: whether there were sessions to be given up."""

    accepted: bool


def session_info(head: SessionHead) -> SessionInfo:
    return SessionInfo(
        id=head.key.session_id, tenant=head.key.tenant, turns=head.num_turns, tokens=head.num_tokens,
        updated_s=head.updated_s, created_s=head.created_s, expires_s=head.expires_s,
        title=head.title, model=head.model,
    )  # fmt: skip


def transcript(state: SessionState, aside: Sequence[AsideTurn]) -> TranscriptResult:
    left = [AsideInfo(turn=one.number, messages=None if one.messages is None else list(one.messages)) for one in aside]
    return TranscriptResult(session=session_info(state.head), messages=state.messages, aside=left)


def repaired(found: Repaired) -> RepairedResult:
    return RepairedResult(repaired=found.tombstone is not None, turns=found.head.num_turns, aside=found.num_aside)


# -- arguments: what a handler is given -----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class EvictRequest:
    """Arguments of `evict`: as `kvstore.tier.Evict`, but a session stands for its blocks that no other one refers to.

    Raises ConfigError for a value that is wrong, and when no condition is set.
    """

    everything: bool = False
    unused_for_s: float | None = None
    session: SessionKey | None = None
    model: str | None = None
    to_bytes: int | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        conditions = (self.unused_for_s, self.session, self.model, self.to_bytes)
        if not self.everything and all(condition is None for condition in conditions):
            raise ConfigError("evict has no condition; give all, unused_for_s, session, model or to_bytes")
        if self.unused_for_s is not None and not 0 <= self.unused_for_s < _LARGEST:
            raise ConfigError(f"unused_for_s is {self.unused_for_s}; give seconds from 0")
        if self.to_bytes is not None and not 0 <= self.to_bytes < 2**63:
            raise ConfigError(f"to_bytes is {self.to_bytes}; give bytes from 0")

    def to_dict(self) -> dict[str, Any]:
        """The arguments on the wire; what is not set is left out."""
        session = None if self.session is None else session_to_dict(self.session)
        found = {
            "all": self.everything or None, "unused_for_s": self.unused_for_s, "session": session, "model": self.model,
            "to_bytes": self.to_bytes, "dry_run": self.dry_run or None,
        }  # fmt: skip
        return {name: value for name, value in found.items() if value is not None}

    def selection(self, block_ids: frozenset[BlockId] | None) -> Evict:
        """For the tiers. block_ids: those of `session`; None when it is not set."""
        assert (block_ids is None) == (self.session is None)
        return Evict(self.everything, self.unused_for_s, self.model, block_ids, self.to_bytes, self.dry_run)


def evict_from_dict(arguments: Mapping[str, Any]) -> EvictRequest:
    """Raises ConfigError for an unknown name, a wrong type or a value out of bounds."""
    kinds = {
        "all": bool, "unused_for_s": float, "session": dict, "model": str, "to_bytes": int, "dry_run": bool,
    }  # fmt: skip
    found = _checked("evict", arguments, kinds)
    session = found.get("session")
    return EvictRequest(
        everything=found.get("all", False),
        unused_for_s=found.get("unused_for_s"),
        session=None if session is None else _session_key(session),
        model=found.get("model"),
        to_bytes=found.get("to_bytes"),
        dry_run=found.get("dry_run", False),
    )


def verify_from_dict(arguments: Mapping[str, Any]) -> bool:
    """Arguments of `verify`: {"delete": bool}, whether damaged blocks are to be taken out."""
    return bool(_checked("verify", arguments, {"delete": bool}).get("delete", False))


@dataclass(frozen=True, slots=True)
class SessionsRequest:
    """Arguments of `sessions`: the list of one tenant."""

    tenant: str = ""
    limit: int = 100


def sessions_from_dict(arguments: Mapping[str, Any]) -> SessionsRequest:
    """{"tenant": str, "limit": int}. Raises ConfigError as `evict_from_dict`."""
    request = SessionsRequest(**_checked("sessions", arguments, {"tenant": str, "limit": int}))
    if not 1 <= request.limit <= MAX_SESSIONS:
        raise ConfigError(f"limit is {request.limit}; give a whole number from 1 to {MAX_SESSIONS}")
    return request


def one_session_from_dict(command: str, arguments: Mapping[str, Any]) -> SessionKey:
    """Arguments of `sessions.show`, `.delete` and `.repair`: {"session": {"tenant": str, "session_id": str}}."""
    return _session_key(_checked(command, arguments, {"session": dict}, required=("session",))["session"])


def deletion_from_dict(arguments: Mapping[str, Any]) -> SessionKey:
    return one_session_from_dict("sessions.delete", arguments)


def nothing_from_dict(command: str, arguments: Mapping[str, Any]) -> None:
    """Arguments of `stats`, `compact` and `sessions.accept_loss`, which have none."""
    _checked(command, arguments, {})


def session_to_dict(key: SessionKey) -> dict[str, str]:
    return {"tenant": key.tenant, "session_id": key.session_id}


def _session_key(value: dict[str, Any]) -> SessionKey:
    found = _checked("session", value, {"tenant": str, "session_id": str}, required=("session_id",))
    try:
        return SessionKey(found.get("tenant", ""), found["session_id"])
    except RequestError as error:
        raise ConfigError(f"session_id is {found['session_id'][:40]!r}; {error}") from error


def _checked(
    what: str, arguments: Mapping[str, Any], kinds: Mapping[str, type], required: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The arguments, each of its kind; a whole number is a float too, and a bool is no number."""
    for name, value in arguments.items():
        if name not in kinds:
            raise ConfigError(f"{what} has no argument {name[:40]!r}; known: {', '.join(kinds) or 'none'}")
        kind = kinds[name]
        fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool) == isinstance(value, bool)
        if not fits or (kind is float and not -_LARGEST < value < _LARGEST):  # NaN is in no range
            raise ConfigError(f"{what}: {name} is {str(value)[:40]!r}; give a {kind.__name__}")
    for name in required:
        if name not in arguments:
            raise ConfigError(f"{what} lacks {name}")
    return dict(arguments)
