"""Where a request goes: to the replica that has seen its session or its history, or to all. Knows no Ray.

What cannot be read here goes to any replica, whose answer says what is wrong with it. What concerns all replicas is
asked of each, and told in one answer: health, metrics, the administrator's routes.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvstore.service.api.naming import UNREADABLE, Naming, as_text, name_of
from kvstore.service.api.openai.responses import RESPONSE_ID
from kvstore.service.api.openai.responses import ROUTE as RESPONSES
from kvstore.service.api.sessions.turns import ID_BYTES
from kvstore.service.api.sessions.turns import ROUTE as CHAT
from kvstore.service.http.errors import unavailable
from kvstore.service.replicas.replica import Head, Whole, refusal

SESSION_PATH = re.compile(r"/sessions/([^/?]+)")
RESPONSE_PATH = re.compile(r"/v1/responses/(?!compact$)([^/?]+)")
WHY_PATH = re.compile(r"/requests/[^/?]+/why")  # which one knows a request, only they can tell
COMPACT = f"{RESPONSES}/compact"
NEW_ON = (CHAT, RESPONSES)  # where a request that names no session begins one
MAX_OPENING = 8  # messages up to the first that a user has sent
Answer = tuple[Head, bytes]
_HEALTH = ("/health", "/healthz", "/livez", "/ping")
_STATES = (*_HEALTH, "/ready")  # a 503 of these has the body of a 200
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?( .*)")


@dataclass(frozen=True, slots=True)
class Affinity:
    """key: requests with the same one go to the same replica; "" goes to any. new_session: the id of a session that the
    request begins.
    """

    key: str = ""
    new_session: str | None = None


class _Body(Naming):
    """What says whose request it is. Wrong types are the server's to refuse."""

    previous_response_id: Any = None
    store: Any = None
    user: Any = None
    messages: msgspec.Raw = msgspec.Raw(b"[]")
    input: msgspec.Raw = msgspec.Raw(b"[]")


class _Said(msgspec.Struct):
    role: Any = None


_bodies, _lists, _said = (
    msgspec.json.Decoder(_Body),
    msgspec.json.Decoder(list[msgspec.Raw]),
    msgspec.json.Decoder(_Said),
)


def affinity_of(
    method: str, path: str, headers: Mapping[str, str], body: bytes, tenant: str = "", naming_key: bytes | None = None
) -> Affinity:
    """headers: by their names in lower case. tenant: whose request it is. naming_key: what ids of new sessions are made
    with, the same in every front; None: servers choose them.
    """
    if (found := SESSION_PATH.match(path)) is not None:
        return Affinity(found[1])
    if (found := RESPONSE_PATH.match(path)) is not None:
        return Affinity(_session_of(found[1]))
    try:
        said = _bodies.decode(body) if method == "POST" else None
    except UNREADABLE:
        said = None
    if said is None:
        return Affinity(_of_tenant(name_of(headers, Naming()), tenant))
    session = as_text(said.session_id) if path == CHAT else _session_of(as_text(said.previous_response_id))
    if path in (RESPONSES, COMPACT) and not session:
        session = name_of({}, Naming(conversation=said.conversation))
    if session:
        return Affinity(session)
    if path in NEW_ON and said.store is not False and naming_key is not None:
        new = _new_session(path, headers.get("idempotency-key"), tenant, naming_key)
        return Affinity(new, new)
    return Affinity(_of_tenant(name_of(headers, said) or as_text(said.user), tenant) or _opening(said, tenant))


def _of_tenant(name: str, tenant: str) -> str:
    """A digest of a client's name; "" for none."""
    return hashlib.sha256(f"{tenant}\0{name}".encode("utf-8", "surrogatepass")).hexdigest() if name else ""


def _session_of(response_id: str) -> str:
    found = RESPONSE_ID.fullmatch(response_id)
    return "" if found is None else found[1]


def _new_session(path: str, request_key: str | None, tenant: str, naming_key: bytes) -> str:
    """A random id; with an Idempotency-Key, an id that only this tenant's request leads to, whichever key it has."""
    if request_key is None:
        return secrets.token_hex(ID_BYTES)
    return hmac.digest(naming_key, "\0".join((path, tenant, request_key)).encode(), "sha256")[:ID_BYTES].hex()


def _opening(said: _Body, tenant: str) -> str:
    """A digest of a history up to the user's first message, which all requests of the conversation have in common."""
    digest = hashlib.sha256(tenant.encode())
    for history in (said.messages, said.input):
        try:
            for message in _lists.decode(history)[:MAX_OPENING]:
                digest.update(message)
                if _said.decode(message).role == "user":
                    return digest.hexdigest()
        except UNREADABLE:  # a text, or nothing that a server takes
            continue
    return ""


def concerns_everyone(path: str) -> bool:
    return path in _JOINED or path.startswith("/admin/") or WHY_PATH.fullmatch(path) is not None


def joined(path: str, answers: Sequence[Whole]) -> Answer:
    """One answer of all. What is no 200 of some replica is the answer, but for a 503 of `_STATES`; of a request, what
    the replica says that had it.
    """
    if not answers:
        return refusal(unavailable("no replica is ready", "starting"))
    answers = sorted(answers, key=lambda one: one.name)
    if WHY_PATH.fullmatch(path) is not None:
        one = min(answers, key=lambda one: one.head.status)
        return one.head, one.body
    told = (200, 503) if path in _STATES else (200,)
    other = next((one for one in answers if one.head.status not in told), None)
    return _JOINED.get(path, _by_name)(answers) if other is None else (other.head, other.body)


def _health(answers: Sequence[Whole]) -> Answer:
    """ok where all are, failed where none answers; reasons are those of any."""
    told = {one.name: msgspec.json.decode(one.body) for one in answers}
    states = {one["status"] for one in told.values()}
    is_up = any(one.head.status == 200 for one in answers)
    status = states.pop() if len(states) == 1 else "degraded" if is_up else "failed"
    reasons = sorted({reason for one in told.values() for reason in one["reasons"]})
    return _json(answers[0], 200 if is_up else 503, {"status": status, "reasons": reasons, "replicas": told})


def _ready(answers: Sequence[Whole]) -> Answer:
    is_ready = any(one.head.status == 200 for one in answers)
    return _json(answers[0], 200 if is_ready else 503, {"ready": is_ready})


def _metrics(answers: Sequence[Whole]) -> Answer:
    """Every sample with a label that names its replica, those of a metric below one another."""
    families: dict[str, list[str]] = {}
    for one in answers:
        family = ""
        for line in one.body.decode().splitlines():
            if line.startswith("#"):
                family = " ".join(line.split(" ", 3)[:3])
                families.setdefault(family, [line])
            elif (sample := _SAMPLE.fullmatch(line)) is not None:
                labels = ",".join(filter(None, (f'replica="{one.name}"', sample[2])))
                families[family].append(f"{sample[1]}{{{labels}}}{sample[3]}")
    lines = [line for family in families.values() for line in family]
    return answers[0].head, ("\n".join(lines) + "\n").encode()


def _by_name(answers: Sequence[Whole]) -> Answer:
    told = {one.name: msgspec.json.decode(one.body) for one in answers}
    return _json(answers[0], 200, {"replicas": told})


def _json(like: Whole, status: int, body: Any) -> Answer:
    return Head(status, like.head.headers), msgspec.json.encode(body)


_JOINED: dict[str, Callable[[Sequence[Whole]], Answer]] = {
    **dict.fromkeys(_HEALTH, _health), "/ready": _ready, "/metrics": _metrics,
}  # fmt: skip
