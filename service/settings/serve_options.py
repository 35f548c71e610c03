"""Flags of `kvstore serve` beside the engine's, and the checked values that parts of the service receive."""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from kvstore.config import COUNT, FILE, SWITCH, TEXT, ValueForm, matching, one_of, parse_size, setting, several, whole
from kvstore.engine.config import ENGINES, MIN_SILENCE_S
from kvstore.errors import ConfigError
from kvstore.service.settings.options import LIFETIME, TTL

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|\[[0-9a-f:.]+\]", re.IGNORECASE)
DEFAULT_PORTS = {"http": "80", "https": "443"}


def check_key(key: str, where: str) -> None:
    """Raises ConfigError unless the key can be sent in a header. The message does not repeat the key."""
    if not 8 <= len(key) <= 512 or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{where}: a key has 8 to 512 printable ASCII characters without spaces")


def seconds(low: float, high: float = 86400) -> ValueForm:
    return ValueForm(
        "SECONDS", lambda text: float(text.removesuffix("s")), f"seconds from {low:g} to {high:g}", low, high
    )


def _origin(text: str) -> str:
    scheme, _, rest = text.lower().partition("://")
    host, _, port = rest.rpartition(":") if re.search(r":[0-9]{1,5}\Z", rest) else (rest, "", "")
    if scheme not in DEFAULT_PORTS or not HOST_NAME.fullmatch(host):
        raise ValueError
    if port == DEFAULT_PORTS[scheme]:
        raise ConfigError("", repr(text), f"a browser leaves out port {port}: give {scheme}://{host}")
    return text.lower()


def _replica_counts(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9][0-9]{0,3})(?:-([1-9][0-9]{0,3}))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise ValueError
    return int(match[1]), int(match[2] or match[1])


REPLICAS = ValueForm("N", _replica_counts, "a number such as 2, or the least and the most, such as 1-4")
OTLP = ValueForm(
    "URL", matching(r"https?://[^\s/]+(/\S*)?"), "the URL of a collector, such as http://localhost:4318/v1/traces",
    is_place=True,
)  # fmt: skip
BODY_SIZE = ValueForm("SIZE", parse_size, "1KiB to 1GiB", 1024, 2**30)
SECONDS = seconds(0.001)
HOST = ValueForm(
    parse=matching(HOST_NAME, str.lower), accepts="a host name without scheme and port, such as chat.example.org"
)
ORIGIN = ValueForm(parse=_origin, accepts="scheme, host and port, such as https://chat.example.org")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How the service listens, whom it lets in, and its limits: the flags of `kvstore serve`. Times are in seconds.

    The limits count sequences (see `kvstore.service.http.limits`). Raises ConfigError.
    """

    host: str = setting("127.0.0.1", TEXT, "address to listen on")
    port: int = setting(8000, whole(0, 2**16 - 1, "PORT"), "port to listen on; 0 takes any free one")
    uds: Path | None = setting(
        None, FILE, "Unix socket to listen on instead of a port; its file is open to the user and the group (0660)"
    )
    ssl_certfile: Path | None = setting(None, FILE, "certificate and its chain, PEM: the server speaks HTTPS")
    ssl_keyfile: Path | None = setting(
        None, FILE, "the certificate's private key, PEM; not readable by others", shown="in the certificate's file"
    )
    api_key: str | None = setting(
        None, TEXT, "key that requests must bring (tenant: none); in the list of processes, unlike KVSTORE_API_KEY",
        secret=True,
    )  # fmt: skip
    api_key_file: Path | None = setting(None, FILE, "file with one tenant:key a line; not readable by others")
    admin_key: str | None = setting(
        None, TEXT, "key of the routes below /admin; without one they are closed, and it locks no others", secret=True
    )
    allow_no_key: bool = setting(False, SWITCH, "listen on a public address without a key for users")
    allowed_hosts: tuple[str, ...] = setting(
        (), several(HOST), "host name that a proxy sends, beside localhost and --host; may be given again",
        flag="--allowed-host", repeats=True,
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = setting(
        (), several(ORIGIN), "origin whose pages may call, such as https://chat.example.org; may be given again",
        flag="--allowed-origin", repeats=True,
    )  # fmt: skip
    served_model_name: str | None = setting(None, TEXT, "name of the model in answers", shown="the model's")
    ttl_s: float | None = setting(None, LIFETIME, TTL, shown="none")
    max_connections: int = setting(1024, COUNT, "open connections")
    max_queue: int = setting(512, COUNT, "requests waiting or running before the next gets 503")
    data_parallel_size: int = setting(
        1, ENGINES,
        "engines behind this port, each with the whole model in a process of its own; they share the disk and divide "
        "--cpu, and --hbm and the limits of a batch are of each",
    )  # fmt: skip
    engine_timeout_s: float = setting(
        30.0, seconds(MIN_SILENCE_S),
        "seconds without a sign of life until the engine's process is killed and started again; one step may take ten "
        "times as long",
    )  # fmt: skip
    engine_restarts: int = setting(
        6, whole(0), "how often an hour it is started again before the server ends with exit code 5"
    )
    request_timeout_s: float = setting(
        600.0, SECONDS, "seconds a request may take in all, from its arrival to the last byte of its answer"
    )
    max_body_bytes: int = setting(32 * 2**20, BODY_SIZE, "size of a request's body", shown="32MiB")
    body_timeout_s: float = setting(30.0, SECONDS, "seconds a request's body may take to arrive")
    shutdown_timeout_s: float = setting(5.0, SECONDS, "seconds running requests get when the server ends")
    log_level: str = setting(
        "info", one_of(*LOG_LEVELS),
        "debug, info, warning or error; debug shows polls of /health, /metrics and the like, too",
    )  # fmt: skip
    otlp_traces_endpoint: str | None = setting(
        None, OTLP, "collector of OpenTelemetry that gets a span of each request by OTLP over HTTP, such as "
        "http://localhost:4318/v1/traces; needs the extra otel",
    )  # fmt: skip
    vllm_metrics: bool = setting(False, SWITCH, "show /metrics under vLLM's names, too, for what scrapes vllm:*")
    log_format: str = setting("text", one_of(*LOG_FORMATS), "text or json, one line a request")
    replicas: tuple[int, int] | None = setting(
        None, REPLICAS,
        "servers on this machine's Ray cluster, at one port: N, or MIN-MAX by load; each has a store of its own below "
        "--store", shown="one server, without Ray",
    )  # fmt: skip
    takes_session_names: bool = False  # who sends the requests names new sessions
    header_timeout_s: float = 10.0
    write_timeout_s: float = 30.0
    keep_alive_s: float = 75.0

    def __post_init__(self) -> None:
        if not self.host or any(c.isspace() for c in self.host):
            raise ConfigError("host", repr(self.host), "give an address or a name, such as 127.0.0.1 or 0.0.0.0")
        for key, where in ((self.api_key, "--api-key"), (self.admin_key, "--admin-key")):
            if key is not None:
                check_key(key, where)
        if self.data_parallel_size > 1 and self.replicas is not None:
            value = f"{self.data_parallel_size}, and --replicas starts whole servers"
            raise ConfigError("data_parallel_size", value, "give one of them")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile", f"{self.ssl_keyfile}, without a certificate", "give --ssl-certfile, too")
        if self.uds is not None and self.replicas is not None:
            raise ConfigError("uds", f"{self.uds}, and replicas answer at a port", "give --uds or --replicas")
        has_key = self.api_key is not None or self.api_key_file is not None
        if not self.is_loopback and not self.allow_no_key and not has_key:
            value = f"{self.host}, which others can reach, and there is no key for users"
            remedy = "give --api-key or --api-key-file, or --allow-no-key when everybody may use it"
            raise ConfigError("host", value, remedy)

    def address(self, port: int) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.ssl_certfile is None else 'https'}://{host}:{port}"

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
