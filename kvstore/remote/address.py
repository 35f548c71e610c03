"""The addresses of a Redis or Valkey server, with its credentials, and of a server that prefills.

Opens no file but the one with the password.
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from kvstore.errors import ConfigError

PASSWORD_VARIABLE = "KVSTORE_REDIS_PASSWORD"
FORMS = "redis://[user@]host[:6379][/database], or rediss:// for TLS, with ?password_file=FILE and ?ca_file=FILE"
MAX_PRIVATE_BYTES = 2**20
PREFILL_FORMS = "http://host:8000, or https://"
_FILES = ("password_file", "ca_file", "cert_file", "key_file")


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where a server is. str() shows no user and no password, so it may appear in logs.

    host: a name, or the path of a Unix socket, which begins with a slash. ca_file, cert_file, key_file: PEM files for
    TLS. Without a ca_file, the system's authorities are trusted.
    """

    host: str
    port: int = 6379
    database: int = 0
    tls: bool = False
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    @property
    def is_unix(self) -> bool:
        return self.host.startswith("/")

    def __str__(self) -> str:
        if self.is_unix:
            return f"unix:{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis{'s' * self.tls}://{host}:{self.port}/{self.database}"


def parse_redis_url(url: str, name: str = "remote", environment: Mapping[str, str] = os.environ) -> RedisAddress:
    """An address from `FORMS`. A password is read from its file, else from $KVSTORE_REDIS_PASSWORD.

    Raises ConfigError, which never shows a password. A password in the URL is refused, as `ps` and logs would show it.
    """
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
        asked = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise ConfigError(name, "no URL", f"give {FORMS}") from None
    if parts.password is not None:
        hidden = f"{parts.scheme}://...@{host}, which has a password in it"
        raise ConfigError(name, hidden, f"give it in ${PASSWORD_VARIABLE} or ?password_file=")
    database = parts.path.removeprefix("/") or "0"
    is_known = parts.scheme in ("redis", "rediss") and set(asked) <= set(_FILES) and not parts.fragment
    if not is_known or not host or not database.isascii() or not database.isdigit() or port == 0:
        raise ConfigError(name, shown(url), f"give {FORMS}")
    files = {key: asked.get(key) or None for key in _FILES}
    password_file = files.pop("password_file")
    password = environment.get(PASSWORD_VARIABLE) or None
    if password_file is not None:
        password = read_secret(Path(password_file), "password file")
    user = None if parts.username is None else unquote(parts.username)
    if user and password is None:
        value = "an address with a user, but there is no password"
        raise ConfigError(name, value, f"set ${PASSWORD_VARIABLE} or ?password_file=")
    return RedisAddress(host, port or 6379, int(database), parts.scheme == "rediss", user or None, password, **files)


def shown(url: str) -> str:
    """For an error: what is no address, unless what signs in may be in it."""
    return "no such address" if {"@", "?"} & set(url) else repr(url)


@dataclass(frozen=True, slots=True)
class PrefillAddress:
    """Where a server is. base: what its paths begin with behind a proxy."""

    host: str
    port: int
    tls: bool = False
    base: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' * self.tls}://{host}:{self.port}{self.base}"


def parse_prefill_url(url: str, name: str = "prefill_url") -> PrefillAddress:
    """Raises ConfigError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError(name, "no URL", f"give {PREFILL_FORMS}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise ConfigError(name, shown(url), f"give {PREFILL_FORMS}")
    if parts.username is not None or parts.password is not None:
        value = "an address with a user in it, while servers sign in with the fleet's secret"
        raise ConfigError(name, value, f"give {PREFILL_FORMS}")
    tls = parts.scheme == "https"
    return PrefillAddress(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"))


def read_private(path: Path, name: str) -> str:
    """The text of a file with what signs in. Raises ConfigError, which names the file and not its content."""
    try:
        status = path.expanduser().stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_PRIVATE_BYTES:
            raise ConfigError(f"{name} {path} is no file of at most {MAX_PRIVATE_BYTES} bytes")
        if status.st_mode & (stat.S_IROTH | stat.S_IWOTH):
            raise ConfigError(f"{name} {path} can be read or written by everybody; chmod 600 it")
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} {path} cannot be read: {getattr(error, 'strerror', 'not UTF-8')}") from None


def read_secret(path: Path, name: str) -> str:
    """The first line of a private file. Raises ConfigError as `read_private`."""
    line = read_private(path, name).partition("\n")[0].strip()
    if not line:
        raise ConfigError(f"{name} {path} is empty; write the secret into its first line")
    return line
