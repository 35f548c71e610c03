"""Flags of `kvstore serve` beside the engine's, and the checked values that parts of the service receive."""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from kvstore.engine.config import MIN_SILENCE_S
from kvstore.errors import ConfigError
from kvstore.service.settings.options import choice, count, file, flag, number, plain_text, size, switch, ttl_flag

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|\[[0-9a-f:.]+\]")
MOST_ENGINES = 64
DEFAULT_PORTS = {"http": "80", "https": "443"}


def check_key(key: str, where: str) -> None:
    """Raises ConfigError unless the key can be sent in a header. The message does not repeat the key."""
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
    """Host names in lower case, as in a Host header but without a port."""
    found = tuple(one.strip().lower() for one in text.split(","))
    for one in found:
        if not HOST_NAME.fullmatch(one):
            raise ConfigError(f"{name} is {one!r}; give a host name without scheme and port, such as chat.example.org")
    return found


def origins(name: str, text: str) -> tuple[str, ...]:
    """Origins in lower case, as in a browser's Origin header."""
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


def engine_count(name: str, text: str) -> int:
    value = count(name, text)
    if value > MOST_ENGINES:
        raise ConfigError(f"{name} is {text!r}; give a whole number from 1 to {MOST_ENGINES}")
    return value


def replica_counts(name: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9][0-9]{0,3})(?:-([1-9][0-9]{0,3}))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise ConfigError(f"{name} is {text!r}; give a number such as 2, or the least and the most, such as 1-4")
    return int(match[1]), int(match[2] or match[1])


def body_size(name: str, text: str) -> int:
    value = size(name, text)
    if not 1024 <= value <= 2**30:
        raise ConfigError(f"{name} is {text!r}; give 1KiB to 1GiB")
    return value


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How the service listens, whom it lets in, and its limits: the flags of `kvstore serve`. Times are in seconds.

    The limits count sequences (see `kvstore.service.http.limits`). Raises ConfigError.
    """

    host: str = flag("127.0.0.1", plain_text, "address to listen on")
    port: int = flag(8000, port_number, "port to listen on; 0 takes any free one")
    api_key: str | None = flag(
        None,
        plain_text,
        "key that requests must bring (tenant: none); in the list of processes, unlike KVSTORE_API_KEY",
        secret=True,
    )
    api_key_file: Path | None = flag(None, file, "file with one tenant:key a line; not readable by others")
    admin_key: str | None = flag(
        None,
        plain_text,
        "key of the routes below /admin; without one they are closed, and it locks no others",
        secret=True,
    )
    allow_no_key: bool = flag(False, switch, "listen on a public address without a key for users")
    allowed_hosts: tuple[str, ...] = flag(
        (),
        host_names,
        "host name that a proxy sends, beside localhost and --host; may be given again",
        "allowed_host",
        repeats=True,
    )
    allowed_origins: tuple[str, ...] = flag(
        (),
        origins,
        "origin whose pages may call, such as https://chat.example.org; may be given again",
        "allowed_origin",
        repeats=True,
    )
    served_model_name: str | None = flag(None, plain_text, "name of the model in answers", shown="the model's")
    ttl_s: float | None = ttl_flag()
    max_connections: int = flag(1024, count, "open connections")
    max_queue: int = flag(512, count, "requests waiting or running before the next gets 503")
    data_parallel_size: int = flag(
        1,
        engine_count,
        "engines behind this port, each with the whole model in a process of its own; they share the disk and divide "
        "--cpu, and --hbm and the limits of a batch are of each",
    )
    engine_timeout_s: float = flag(
        30.0,
        engine_timeout,
        "seconds without a sign of life until the engine's process is killed and started again; one step may take ten "
        "times as long",
    )
    engine_restarts: int = flag(
        6, count_or_none, "how often an hour it is started again before the server ends with exit code 5"
    )
    request_timeout_s: float = flag(
        600.0, seconds, "seconds a request may take in all, from its arrival to the last byte of its answer"
    )
    max_body_bytes: int = flag(32 * 2**20, body_size, "size of a request's body", shown="32MiB")
    body_timeout_s: float = flag(30.0, seconds, "seconds a request's body may take to arrive")
    shutdown_timeout_s: float = flag(5.0, seconds, "seconds running requests get when the server ends")
    log_level: str = flag(
        "info",
        choice(*LOG_LEVELS),
        "debug, info, warning or error; debug shows polls of /health, /metrics and the like, too",
    )
    vllm_metrics: bool = flag(False, switch, "show /metrics under vLLM's names, too, for what scrapes vllm:*")
    log_format: str = flag("text", choice(*LOG_FORMATS), "text or json, one line a request")
    replicas: tuple[int, int] | None = flag(
        None,
        replica_counts,
        "servers on this machine's Ray cluster, at one port: N, or MIN-MAX by load; each has a store of its own below "
        "--store",
        shown="one server, without Ray",
    )
    takes_session_names: bool = False  # who sends the requests names new sessions
    header_timeout_s: float = 10.0
    write_timeout_s: float = 30.0
    keep_alive_s: float = 75.0

    def __post_init__(self) -> None:
        if not self.host or any(c.isspace() for c in self.host):
            raise ConfigError(f"--host is {self.host!r}; give an address or a name, such as 127.0.0.1 or 0.0.0.0")
        for key, where in ((self.api_key, "--api-key"), (self.admin_key, "--admin-key")):
            if key is not None:
                check_key(key, where)
        if self.data_parallel_size > 1 and self.replicas is not None:
            raise ConfigError(
                f"--data-parallel-size is {self.data_parallel_size}, and --replicas starts whole servers; give one"
            )
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
