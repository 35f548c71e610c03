"""Access: keys and their tenants, and the browser's Host and Origin.

Knows no handler. Keys are stored and compared as digests, and always all of them, so that timing reveals nothing.
"""

import hmac
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from aiohttp import web

from kvstore.errors import ConfigError
from kvstore.remote.address import read_private
from kvstore.service.http.errors import ApiError, Route
from kvstore.service.settings.serve_options import ServeOptions, check_key

TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST, DELETE",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, Idempotency-Key, X-Api-Key, X-Request-Id",
    "Access-Control-Max-Age": "600",
}
SDK_HEADER = re.compile(r"(x-stainless|openai|anthropic)-[a-z-]{1,40}")  # which clients of these add to their requests
EXPOSED = "Retry-After, X-Request-Id, X-Should-Retry"


@dataclass(frozen=True, slots=True)
class Key:
    """One key. tenant: its requests see this tenant's data."""

    digest: bytes
    tenant: str
    is_admin: bool = False


class Access:
    """The keys of one server and its rules. fleet_key: of other servers; None: there are no routes for them.

    Raises ConfigError for a file of keys that cannot be used.
    """

    def __init__(self, options: ServeOptions, fleet_key: bytes | None = None) -> None:
        self._fleet_digest = None if fleet_key is None else _digest(fleet_key.hex())
        self._options = options
        self.read_keys()
        self._origins = frozenset(options.allowed_origins)
        self._hosts: frozenset[str] | None = None  # any
        if options.is_loopback or options.allowed_hosts:
            own_name = f"[{options.host}]" if ":" in options.host else options.host
            own = {*LOOPBACK_NAMES, own_name.lower(), *options.allowed_hosts}
            self._hosts = frozenset(own | {_without_port(_host_of(origin)) for origin in self._origins})

    def read_keys(self) -> None:
        """Take the keys as their file has them now. Raises ConfigError, and keeps those of before."""
        keys = tuple(_keys(self._options))
        if len({key.digest for key in keys}) < len(keys):
            raise ConfigError("a key is given twice; every tenant needs a key of its own, and so does --admin-key")
        self._keys = keys

    @property
    def needs_key(self) -> bool:
        """Whether users need a key. The administrator's key alone protects only the administrator's routes."""
        return any(not key.is_admin for key in self._keys)

    @property
    def tenants(self) -> tuple[str, ...]:
        """The tenants that have a key; only "" where there are no keys."""
        return tuple(sorted({key.tenant for key in self._keys if not key.is_admin})) or ("",)

    def check(self, request: web.Request, route: Route) -> str:
        """Check a request and return its tenant. Raises ApiError 401 or 403."""
        given = _given_key(request.headers)
        if route.access == "fleet":  # no browser knows that key
            self._check_fleet(given)
            return ""
        self._check_browser(request)
        if route.access == "public":
            return ""
        key = self._known_key(given)
        if route.access == "admin":
            self._check_admin(key)
        if key is None and (self.needs_key or route.access == "admin"):
            raise _unknown_key(bool(given))
        return "" if key is None else key.tenant

    def tenant_of(self, headers: Mapping[str, str]) -> str:
        """Of whoever sends these headers, by names in lower case; "" also for nobody's, which `check` may refuse."""
        key = self._known_key(_given_key(headers))
        return "" if key is None else key.tenant

    def _check_admin(self, key: Key | None) -> None:
        if not any(known.is_admin for known in self._keys):
            raise _forbidden("the server was started without --admin-key: these routes are closed", "admin_closed")
        if key is not None and not key.is_admin:
            raise _forbidden("this needs the administrator's key", "admin_only")

    def _check_fleet(self, given: str) -> None:
        if self._fleet_digest is None or not hmac.compare_digest(self._fleet_digest, _digest(given)):
            raise _unknown_key(bool(given))

    def _known_key(self, given: str) -> Key | None:
        digest = _digest(given)
        found = None
        for key in self._keys:  # compare all, whichever matches
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def _check_browser(self, request: web.Request) -> None:
        """Another site's page must not reach a server on this machine through its visitor's browser."""
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if self._hosts is not None and host and _without_port(host).lower() not in self._hosts:
            said = f"this server does not answer for the host name {host[:80]!r}; behind a proxy, start it with "
            raise _forbidden(said + "--allowed-host", "host_not_allowed")
        if origin is not None and _host_of(origin).lower() != host.lower() and not self._allows(origin):
            said = f"requests from pages of another origin are refused, and this one is of {origin[:80]!r}; where it "
            raise _forbidden(said + "is one's own, start the server with --allowed-origin", "origin_not_allowed")

    # -- pages of other origins ----------------------------------------------------------------------------------------
    def _allows(self, origin: str) -> bool:
        return origin.lower() in self._origins

    def preflight(self, request: web.Request) -> web.Response | None:
        """Answer a browser's preflight request for a page of an allowed origin; None for any other request. A preflight
        carries no key, and the answer says only what such a page may send.
        """
        asked = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or asked is None or not self._allows(request.headers.get("Origin", "")):
            return None
        self._check_browser(request)
        wanted = request.headers.get("Access-Control-Request-Headers", "").lower().split(",")
        names = [name for name in map(str.strip, wanted) if SDK_HEADER.fullmatch(name)]
        allowed = ", ".join([PREFLIGHT["Access-Control-Allow-Headers"], *names])
        return web.Response(status=204, headers={**PREFLIGHT, "Access-Control-Allow-Headers": allowed})

    def shared_with(self, request: web.Request) -> dict[str, str]:
        """CORS headers of every answer: whether the asking page may read it."""
        if not self._origins:
            return {}
        origin = request.headers.get("Origin", "")
        shared = {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": EXPOSED}
        return {"Vary": "Origin"} | (shared if self._allows(origin) else {})


def _unknown_key(was_given: bool) -> ApiError:
    message = "the key is not known" if was_given else "a key is needed: send Authorization: Bearer KEY, or x-api-key"
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, message, type="authentication_error", code="invalid_api_key", headers=headers)


def _forbidden(message: str, code: str) -> ApiError:
    return ApiError(403, message, type="permission_error", code=code)


def _given_key(headers: Mapping[str, str]) -> str:
    """What a request brings as OpenAI's clients do, or else as Anthropic's do; "" for none."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return (bearer.strip() if scheme.lower() == "bearer" else "") or headers.get("x-api-key", "").strip()


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def _host_of(origin: str) -> str:
    """The host, with its port if it has one."""
    return origin.partition("://")[2]


def _without_port(host: str) -> str:
    return re.sub(r":[0-9]*\Z", "", host) if not host.endswith("]") else host


def _keys(options: ServeOptions) -> Iterator[Key]:
    if options.api_key is not None:
        yield Key(_digest(options.api_key), "")
    if options.api_key_file is not None:
        yield from _keys_of_file(options.api_key_file)
    if options.admin_key is not None:
        yield Key(_digest(options.admin_key), "", is_admin=True)


def _keys_of_file(path: Path) -> Iterator[Key]:
    lines = [line.strip() for line in read_private(path, "--api-key-file").splitlines()]
    if not any(line and not line.startswith("#") for line in lines):
        raise ConfigError(f"--api-key-file {path} holds no key; give one tenant:key a line")
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        where = f"--api-key-file {path}, line {number}"
        tenant, colon, key = line.partition(":")
        if not colon or not TENANT.fullmatch(tenant):
            raise ConfigError(f"{where}: give tenant:key; a tenant has 1 to 64 letters, digits, '_', '.' or '-'")
        check_key(key, where)
        yield Key(_digest(key), tenant)
