"""Where the Redis is that keeps shared sessions: one server, one that Sentinel names, or a Cluster.

Opens no file but those with passwords.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

from kvstore.errors import ConfigError
from kvstore.remote import address as redis_address
from kvstore.remote.address import RedisAddress, parse_redis_url, read_secret, shown

SENTINEL_PORT = 26379
FORMS = (
    f"{redis_address.FORMS}; redis+sentinel://host[:26379],host/SERVICE[/database] or "
    "redis+cluster://host[:6379],host; rediss+ for TLS"
)


@dataclass(frozen=True, slots=True)
class SessionAddress:
    """servers: one; or those of Sentinel or a Cluster, of which any may answer. service: by which Sentinel knows the
    Redis. str() shows nothing that signs in.
    """

    servers: tuple[RedisAddress, ...]
    service: str | None = None
    is_cluster: bool = False
    sentinel_password: str | None = field(default=None, repr=False)

    @property
    def follows(self) -> bool:
        """Whether another Redis takes over when the one that has the sessions is gone."""
        return self.is_cluster or self.service is not None

    def __str__(self) -> str:
        first = self.servers[0]
        if not self.follows:
            return str(first)
        kind = "cluster" if self.is_cluster else "sentinel"
        hosts = ",".join(str(one).partition("://")[2].rpartition("/")[0] for one in self.servers)
        place = "" if self.is_cluster else f"/{self.service}/{first.database}"
        return f"redis{'s' * first.tls}+{kind}://{hosts}{place}"


def parse_session_url(
    url: str, name: str = "session_store", environment: Mapping[str, str] = os.environ
) -> SessionAddress:
    """An address from `FORMS`. Passwords come as in `parse_redis_url`; ?sentinel_password_file= has that of Sentinel.

    Raises ConfigError, which never shows a password.
    """
    scheme, _, kind = url.partition("://")[0].partition("+")
    if not kind:
        return SessionAddress((parse_redis_url(url, name, environment),))
    try:
        parts = urlsplit(url)
        asked = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise ConfigError(name, "no URL", f"give {FORMS}") from None
    service, _, database = parts.path.removeprefix("/").partition("/")
    is_cluster = kind == "cluster"
    is_place = not parts.path.strip("/") if is_cluster else kind == "sentinel" and bool(service)
    if scheme not in ("redis", "rediss") or not is_place or parts.fragment:
        raise ConfigError(name, shown(url), f"give {FORMS}")
    password_file = None if is_cluster else asked.pop("sentinel_password_file", None)
    user, at, hosts = parts.netloc.rpartition("@")
    servers = []
    for host in hosts.split(","):
        one = parse_redis_url(f"{scheme}://{user}{at}{host}/{database}?{urlencode(asked)}", name, environment)
        if not is_cluster and urlsplit(f"//{host}").port is None:
            one = replace(one, port=SENTINEL_PORT)
        servers.append(one)
    password = None if password_file is None else read_secret(Path(password_file), "password file of Sentinel")
    return SessionAddress(tuple(servers), None if is_cluster else service, is_cluster, password)
