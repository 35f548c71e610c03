"""The address of a bucket or directory, and what signs in there. Opens nothing but the file of its credentials."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from kvstore.errors import ConfigError
from kvstore.remote.address import RedisAddress, parse_redis_url, read_private, shown

SCHEMES = ("s3", "gs", "az", "file")
FORMS = (
    "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix, with ?credentials_file=FILE, or file:///directory"
)


@dataclass(frozen=True, slots=True)
class ObjectAddress:
    """Where objects are. Its text has nothing in it that signs in.

    bucket: of S3 and GCS, a container of Azure, empty for a directory. prefix: below which everything lies; of a
    directory its path. settings: from the file of credentials, by lower-case name of the environment variable.
    """

    scheme: str
    bucket: str
    prefix: str
    settings: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix.removeprefix('/')}"


def parse_remote_url(url: str) -> tuple[RedisAddress, ...] | ObjectAddress:
    """Of `--remote`: one bucket or directory; or one Redis or several, with commas between. Raises ConfigError."""
    scheme = url.partition("://")[0]
    if scheme in SCHEMES:
        return parse_object_url(url)
    if scheme.partition("+")[2] in ("sentinel", "cluster"):
        value = f"{scheme}://, which only sessions follow"
        raise ConfigError("remote", value, "give several that run alone: redis://one,redis://other")
    if scheme not in ("redis", "rediss"):
        raise ConfigError("remote", shown(url), f"give redis://host:6379/0, several with commas between, {FORMS}")
    found = tuple(parse_redis_url(one) for one in url.split(","))
    if len(set(map(str, found))) < len(found):
        raise ConfigError("remote", "the same Redis twice", "give each once")
    return found


def parse_object_url(url: str, name: str = "remote") -> ObjectAddress:
    """An address from `FORMS`. Raises ConfigError, which shows nothing of who signs in, also without obstore."""
    try:
        parts = urlsplit(url)
        asked = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise ConfigError(name, "no URL", f"give {FORMS}") from None
    if "@" in parts.netloc:
        hidden = f"{parts.scheme}://...@{parts.hostname}, which has credentials in it"
        raise ConfigError(name, hidden, "give them by environment or ?credentials_file=FILE")
    is_directory, path = parts.scheme == "file", unquote(parts.path)
    is_known = parts.scheme in SCHEMES and set(asked) <= {"credentials_file"} and not parts.fragment
    is_absolute = path.startswith("/") and path.strip("/") and not asked
    if not is_known or is_directory == bool(parts.netloc) or (is_directory and not is_absolute):
        raise ConfigError(name, shown(url), f"give {FORMS}")
    if find_spec("obstore") is None:
        raise ConfigError(name, f"{parts.scheme}://, which needs obstore", "pip install obstore")
    settings = _settings(Path(asked["credentials_file"])) if asked else {}
    return ObjectAddress(parts.scheme, parts.netloc, path if is_directory else path.strip("/"), settings)


def _settings(path: Path) -> dict[str, str]:
    """What lines such as AWS_ACCESS_KEY_ID=... say; empty ones and those after a # are nothing."""
    lines = read_private(path, "credentials file").splitlines()
    pairs = [line.partition("=") for line in map(str.strip, lines) if line and not line.startswith("#")]
    if not pairs or not all(key.strip() and equals for key, equals, _ in pairs):
        raise ConfigError(f"credentials file {path} has other lines than NAME=VALUE")
    return {key.strip().lower(): value.strip() for key, _, value in pairs}
