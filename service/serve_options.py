"""Flags of `kvstore serve` beside those of the engine, and the checked values that the service's parts receive."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.pulse import MIN_SILENCE_S
from kvstore.errors import ConfigError
from service.options import TTL, Option, choice, count, file, number, plain_text, size, switch

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|\[[0-9a-f:.]+\]")
DEFAULT_PORTS = {"http": "80", "https": "443"}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How the service listens, whom it lets in, and its limits. Times are in seconds.

    host: not a loopback address needs a key, or allow_no_key. port: 0 takes any free one.
    allowed_hosts: names that it answers for beside its own; allowed_origins: whose pages may call it beside its own.
    api_key: of the tenant ""; api_key_file: one `tenant:key` a line; admin_key: for /admin.
    max_queue: requests waiting or running, of all tenants together; their sequences are bounded with them (see
    `service.limits`). max_concurrent_per_key: sequences of one tenant that run at once, 0 for no limit;
    max_queue_per_key: how many more of it may wait for their turn.
    request_timeout_s: from the request's arrival to the last byte of its answer.
    engine_process: the engine runs in a process of its own. That is killed after engine_timeout_s without a sign of
    life, and started again engine_restarts times an hour at most.
    ttl_s: how long a new session lives after its last turn, where the request says nothing; None: for ever.
    Raises ConfigError.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    api_key_file: Path | None = None
    admin_key: str | None = None
    allow_no_key: bool = False
    served_model_name: str | None = None
    max_connections: int = 1024
    max_queue: int = 512
    max_concurrent_per_key: int = 0
    max_queue_per_key: int = 0
    request_timeout_s: float = 600.0
    queue_timeout_s: float = 60.0
    max_body_bytes: int = 32 * 2**20
    body_timeout_s: float = 30.0
    header_timeout_s: float = 10.0
    write_timeout_s: float = 30.0
    keep_alive_s: float = 75.0
    shutdown_timeout_s: float = 5.0
    log_format: str = "text"
    log_level: str = "info"
    engine_process: bool = True
    engine_timeout_s: float = 30.0
    engine_restarts: int = 6
    ttl_s: float | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.host or any(c.isspace() for c in self.host):
            raise ConfigError(f"--host is {self.host!r}; give an address or a name, such as 127.0.0.1 or 0.0.0.0")
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"--port is {self.port}; give 0 to 65535")
        for key, flag in ((self.api_key, "--api-key"), (self.admin_key, "--admin-key")):
            if key is not None:
                check_key(key, flag)
        has_key = self.api_key is not None or self.api_key_file is not None
        if not self.is_loopback and not self.allow_no_key and not has_key:
            raise ConfigError(
                f"--host is {self.host}, which others can reach, and there is no key for users; give --api-key or "
                "--api-key-file, or --allow-no-key when everybody may use it"
            )

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def check_key(key: str, where: str) -> None:
    """Raises ConfigError unless it can stand in a header. The message does not repeat the key."""
    if not 8 <= len(key) <= 512 or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{where}: a key has 8 to 512 printable ASCII characters without spaces")


def port_number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 5 or int(text) >= 2**16:
        raise ConfigError(f"{name} is {text!r}; give 0 to 65535")
    return int(text)


def count_or_none(name: str, text: str) -> int:
    return 0 if text == "0" else count(name, text)


def seconds(name: str, text: str) -> float:
    value = number(name, text.removesuffix("s"))
    if not 0 < value <= 86400:
        raise ConfigError(f"{name} is {text!r}; give seconds above 0, to 86400")
    return value


def host_names(name: str, text: str) -> tuple[str, ...]:
    """In lower case, as a Host header has them but for the port."""
    found = tuple(one.strip().lower() for one in text.split(","))
    for one in found:
        if not HOST_NAME.fullmatch(one):
            raise ConfigError(f"{name} is {one!r}; give a host name without scheme and port, such as chat.example.org")
    return found


def origins(name: str, text: str) -> tuple[str, ...]:
    """In lower case, as a browser's Origin header has them."""
    found = tuple(one.strip().lower() for one in text.split(","))
    for one in found:
        scheme, _, rest = one.partition("://")
        host, _, port = rest.rpartition(":") if re.search(r":[0-9]{1,5}\Z", rest) else (rest, "", "")
        if scheme not in DEFAULT_PORTS or not HOST_NAME.fullmatch(host):
            raise ConfigError(f"{name} is {one!r}; give scheme, host and port, such as https://chat.example.org")
        if port == DEFAULT_PORTS[scheme]:
            raise ConfigError(f"{name} is {one!r}; a browser leaves out port {port}: give {scheme}://{host}")
    return found


def engine_timeout(name: str, text: str) -> float:
    value = seconds(name, text)
    if value < MIN_SILENCE_S:
        raise ConfigError(f"{name} is {text!r}; give seconds from {MIN_SILENCE_S:g} to 86400")
    return value


def body_size(name: str, text: str) -> int:
    value = size(name, text)
    if not 1024 <= value <= 2**30:
        raise ConfigError(f"{name} is {text!r}; give 1KiB to 1GiB")
    return value


SERVE_OPTIONS = (
    Option("--host", plain_text, "127.0.0.1", "address to listen on (default: 127.0.0.1)"),
    Option("--port", port_number, 8000, "port to listen on (default: 8000)"),
    Option(
        "--api-key",
        plain_text,
        None,
        "key that requests must bring (tenant: none); in the list of processes, unlike KVSTORE_API_KEY",
        secret=True,
    ),
    Option("--api-key-file", file, None, "file with one tenant:key a line; not readable by others"),
    Option(
        "--admin-key",
        plain_text,
        None,
        "key of the routes below /admin; without one they are closed, and it locks no others",
        secret=True,
    ),
    Option("--allow-no-key", switch, False, "listen on a public address without a key for users", switch=True),
    Option(
        "--allowed-host",
        host_names,
        None,
        "host name that a proxy sends, beside localhost and --host; may be given again",
        repeats=True,
    ),
    Option(
        "--allowed-origin",
        origins,
        None,
        "origin whose pages may call, such as https://chat.example.org; may be given again",
        repeats=True,
    ),
    Option("--served-model-name", plain_text, None, "name of the model in answers (default: the model's)"),
    TTL,
    Option("--max-connections", count, 1024, "open connections (default: 1024)"),
    Option("--max-queue", count, 512, "requests waiting or running before the next gets 503 (default: 512)"),
    Option(
        "--max-concurrent-per-key",
        count_or_none,
        0,
        "sequences (prompts times n) of one tenant at once; 0: no limit (default: 0)",
    ),
    Option("--max-queue-per-key", count_or_none, 0, "sequences of one tenant that wait beyond those (default: 0)"),
    Option(
        "--engine-process",
        choice("on", "off"),
        "on",
        "on runs the engine in a process of its own, beside the one that answers (default: on)",
    ),
    Option(
        "--engine-timeout",
        engine_timeout,
        30.0,
        "seconds without a sign of life until the engine's process is killed and started again; one step may take ten "
        "times as long (default: 30)",
    ),
    Option(
        "--engine-restarts",
        count_or_none,
        6,
        "how often an hour it is started again before the server ends with exit code 5 (default: 6)",
    ),
    Option("--request-timeout", seconds, 600.0, "seconds a request may take in all (default: 600)"),
    Option("--queue-timeout", seconds, 60.0, "seconds a request may wait for its tenant's turn (default: 60)"),
    Option("--max-body", body_size, 32 * 2**20, "size of a request's body (default: 32MiB)"),
    Option("--body-timeout", seconds, 30.0, "seconds a request's body may take to arrive (default: 30)"),
    Option("--shutdown-timeout", seconds, 5.0, "seconds running requests get when the server ends (default: 5)"),
    Option(
        "--log-level",
        choice(*LOG_LEVELS),
        "info",
        "debug, info, warning or error; debug shows polls of /health, /ready and /metrics, too (default: info)",
    ),
    Option("--log-format", choice(*LOG_FORMATS), "text", "text or json, one line a request (default: text)"),
)
_FIELDS = {
    "allowed_host": "allowed_hosts",
    "allowed_origin": "allowed_origins",
    "ttl": "ttl_s",
    "engine_timeout": "engine_timeout_s",
    "request_timeout": "request_timeout_s",
    "queue_timeout": "queue_timeout_s",
    "max_body": "max_body_bytes",
    "body_timeout": "body_timeout_s",
    "shutdown_timeout": "shutdown_timeout_s",
}


def serve_options(values: Mapping[str, object]) -> ServeOptions:
    """From the values of SERVE_OPTIONS, by their keys; other keys are left alone. Raises ConfigError."""
    found = {_FIELDS.get(option.key, option.key): values[option.key] for option in SERVE_OPTIONS}
    found["engine_process"] = found["engine_process"] == "on"
    found |= {name: found[name] or () for name in ("allowed_hosts", "allowed_origins")}
    return ServeOptions(**found)  # type: ignore[arg-type]
