"""Settings and the forms of their values; the tiers' configuration. Built once, checked here; a part receives its own
piece.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.remote.address import parse_prefill_url
from kvstore.remote.names import fleet_secret
from kvstore.remote.object_address import parse_remote_url
from kvstore.sessions.shared.address import parse_session_url

SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
MAX_SAVE_BYTES = 512 << 20  # of activations that a CUDA device keeps until they are saved
SIZE_FORMS = 'a number of bytes, or a number with a unit such as "512MiB", "1.5GiB" or "2GB"'
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter + "b": 1000**_power, _letter + "ib": 1024**_power, _letter: 1024**_power}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]{1,2})?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(value: int | float | str, name: str = "size") -> int:
    """Bytes from a number or a text like "1.5GiB" (1024), "2GB" (1000) or "1e10".

    Raises ConfigError with the accepted forms for anything else, negative numbers included.
    """
    match = _SIZE.fullmatch(str(value)) if not isinstance(value, bool) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(name, repr(value), f"give {SIZE_FORMS}")
    size_bytes = int(float(match[1]) * unit)
    if size_bytes > 2**62:
        raise ConfigError(name, f"{value!r}, more than any memory", f"give {SIZE_FORMS}")
    return size_bytes


def format_size(size_bytes: int | float) -> str:
    """A size for people: "1.5 GiB"."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < (1024 if unit == "B" else 1023.95):  # which would be shown as 1024.0
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


CODEC_NAMES = ("raw", "zstd", "split-zstd", "exact12", "int8")  # `kvstore.disk.codec` says what they are
ROLES = ("prefill", "decode")
SESSION_DURABILITIES = ("always", "everysec", "unchecked")  # `kvstore.sessions.shared.server` says what they ask for


# -- the forms of values ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ValueForm:
    """The values that a setting takes, and how they are written.

    name: what stands for a value in the help; by default the last word of the flag. parse: the value of a text; raises
    ValueError, or a ConfigError that says more. accepts: what to give, in words. low, high: the bounds of a number.
    among: all texts there are. types: of what a program gives; without any, it may give all that `parse` takes.
    is_place: it names something elsewhere, so an empty text comes from a variable that nobody has set.
    """

    name: str = ""
    parse: Callable[[str], Any] = str
    accepts: str = "a text"
    low: float | None = None
    high: float | None = None
    among: tuple[str, ...] = ()
    types: tuple[type, ...] = (str,)
    is_place: bool = False

    def read(self, field: str, text: str) -> Any:
        """The value of a text. Raises ConfigError."""
        try:
            value = self.parse(text)
        except ConfigError as error:
            raise ConfigError(field, error.value, error.remedy) if error.value else error from None
        except ValueError:
            raise self._refusal(field, text) from None
        if not self._fits(value):
            raise self._refusal(field, text)
        return value

    def check(self, field: str, value: Any) -> Any:
        """What is kept of a value that a program gives. Raises ConfigError."""
        if not self.types:
            return self.read(field, value)
        if not isinstance(value, self.types) or isinstance(value, bool) > (bool in self.types) or not self._fits(value):
            raise self._refusal(field, value)
        if self.types == (str,):
            self.read(field, str(value))
        return value

    def _fits(self, value: Any) -> bool:
        if self.among:
            return value in self.among
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def _refusal(self, field: str, value: object) -> ConfigError:
        return ConfigError(field, repr(value), f"give {self.accepts}")


def matching(pattern: str | re.Pattern[str], make: Callable[[str], Any] = str) -> Callable[[str], Any]:
    """A function for `ValueForm.parse`: makes a value of a text that has this pattern."""

    def parse(text: str) -> Any:
        if not re.fullmatch(pattern, text):
            raise ValueError
        return make(text)

    return parse


def whole(low: int, high: int | None = None, name: str = "N") -> ValueForm:
    accepts = f"a whole number from {low}" + (f" to {high}" if high is not None else "")
    return ValueForm(name, matching("-?[0-9]{1,19}", int), accepts, low, high, types=(int,))


def one_of(*known: str) -> ValueForm:
    return ValueForm(accepts=f"one of {', '.join(known)}", among=known)


def checked(parse: Callable[[str], object]) -> ValueForm:
    """A text, such as an address, that `parse` can read. It raises ConfigError."""

    def read(text: str) -> str:
        parse(_place(text))
        return text

    return replace(PLACE, parse=read)


def several(form: ValueForm, name: str = "") -> ValueForm:
    """Values of a form, separated by commas."""

    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(dict.fromkeys(form.read("", part.strip()) for part in text.split(",")))
        except ConfigError as error:
            raise ConfigError("", error.value, f"{error.remedy}; several are separated by commas") from None

    return ValueForm(name, parse)


def _plain(text: str) -> str:
    text.encode()  # raises UnicodeEncodeError, which is a ValueError
    return text


def _place(text: str) -> str:
    if not _plain(text).strip():
        raise ValueError
    return text


def _size_or_auto(text: str) -> int | str:
    try:
        return "auto" if text == "auto" else parse_size(text)
    except ConfigError as error:
        raise ConfigError("", error.value, f'{error.remedy}, or "auto"') from None


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError("", f"{text!r}, but there is no such user's home", "give the whole path") from None


def _directory(text: str) -> Path:
    if (place := _path(text)).is_file():
        raise ConfigError("", f"{text!r}, which is a file", "give the directory of the store")
    return place


_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
MOST_TTL_S = 10 * 366 * 86400
COUNT = whole(1)
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
SIZE = ValueForm("SIZE", parse_size, types=())
_duration_s = matching(r"[0-9]{1,9}(\.[0-9]{1,9})?[smhdw]", lambda text: float(text[:-1]) * _UNITS_S[text[-1]])
DURATION = ValueForm("TIME", _duration_s, "a number with a unit, such as 90s, 15m, 2h, 7d or 2w", types=(int, float))
SWITCH = ValueForm(
    parse=matching(f"(?i:{'|'.join(_SWITCH)})", lambda text: _SWITCH[text.lower()]),
    accepts="true or false",
    types=(bool,),
)
TEXT = ValueForm(parse=_plain, accepts="text in this terminal's encoding")
PLACE = ValueForm(parse=_place, accepts="a text, or leave it out", is_place=True)
FILE = ValueForm(parse=_path, accepts="a file", types=(str, Path), is_place=True)
REDIS = checked(parse_session_url)
DIRECTORY = ValueForm("DIR", _directory, "the directory of the store", types=(str, Path), is_place=True)


def setting(default: Any, reads: ValueForm, help: str = "", **about: Any) -> Any:
    """A field of a configuration: its default, the form of its values, and its description for people, without which no
    flag sets it.

    about: what else the command is to know of its flag, as the fields of `kvstore.service.settings.options.Option`.
    """
    return field(default=default, metadata={"reads": reads, "help": help, **about})


def check_settings(config: Any) -> None:
    """Check what each `setting` was given, and keep sizes as numbers. None is allowed where it is the default.

    Raises ConfigError.
    """
    for one in fields(config):
        value = getattr(config, one.name)
        if "reads" in one.metadata and (value is not None or one.default is not None):
            object.__setattr__(config, one.name, one.metadata["reads"].check(one.name, value))


_ENDPOINT = re.compile(r"(tcp://(?:\*|[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])):([0-9]{1,5})")


def parse_endpoint(text: str) -> tuple[str, int]:
    """Split tcp://ADDRESS:PORT into address and port, where PORT + 1 must be a port, too. Raises ConfigError."""
    match = _ENDPOINT.fullmatch(text)
    if match is None or not 1 <= int(match[2]) < 2**16 - 1:
        raise ConfigError("", repr(text), "give tcp://ADDRESS:PORT with a port below 65535, as in tcp://*:5557")
    return match[1], int(match[2])


# -- configurations --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SharedSessions:
    """Sessions that several servers share. url: of their Redis. durability, num_replicas: what it must promise, as in
    `kvstore.sessions.shared.server.Durability`.
    """

    url: str
    durability: str = "always"
    num_replicas: int | None = None
    fleet_secret_file: str | Path | None = None


LEAST_DISK_BYTES = 1 << 20
LEAST_BLOCKS = {"hbm": 1, "cpu": 2, "disk": 4}  # with fewer a tier cannot work


@dataclass(frozen=True, slots=True)
class CacheTiers:
    """Capacity of each tier, in bytes or as a text (see `parse_size`); 0 switches a tier below HBM off."""

    hbm: int | str = setting(
        "auto", ValueForm("SIZE", _size_or_auto, types=()),
        "size of the KV block pool, such as 1.5GiB; auto: what a GPU has left, or 1/4 of free RAM",
    )  # fmt: skip
    cpu: int | str = setting(0, SIZE, "size of the CPU tier")
    disk: int | str = setting(0, SIZE, "size of the disk tier; 0 keeps nothing")
    path: str | Path | None = setting(None, DIRECTORY, "directory of the store", flag="--store", aliases=("--path",))
    codec: str = setting(
        "raw", one_of(*CODEC_NAMES),
        "how KV lies on disk: raw; for bfloat16 exact12, in 0.75 of the space, or int8, in 0.52 and not exact; zstd or "
        "split-zstd, slower, for any",
    )  # fmt: skip
    disk_per_tenant: int | str | None = setting(
        None, SIZE, "size of one tenant's KV on disk; more is not written", flag="--disk-per-key", shown="no limit"
    )
    remote: str | None = setting(
        None, checked(parse_remote_url),
        "KV that servers share behind their disks: redis://host:6379/0, or several with commas between; s3://bucket, "
        "gs://, az:// or file:///dir",
    )  # fmt: skip
    remote_ttl_s: float = setting(
        7 * 86400.0,
        replace(DURATION, accepts="a time of 1s to 3660d, such as 7d (in Python, seconds)", low=1, high=MOST_TTL_S),
        "how long KV stays in --remote after it was last of use", shown="7d",
    )  # fmt: skip
    fleet_secret_file: str | Path | None = setting(
        None, FILE, "file with the secret that all servers share, instead of $KVSTORE_FLEET_SECRET"
    )
    role: str | None = setting(
        None, one_of(*ROLES), "prefill computes prompts for other servers; decode lets --prefill-url compute its own",
        shown="both",
    )  # fmt: skip
    prefill_url: str | None = setting(
        None, checked(parse_prefill_url), "server with --role prefill: http://host:8000, or https://"
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.hbm == 0:
            raise ConfigError("hbm", "0, but the engine computes in it", 'give "auto" or a size')
        if self.remote is not None:
            fleet_secret(self.fleet_secret_file)
            if not (self.cpu or self.disk):
                value = "set, but cpu and disk are 0, from which blocks come to it"
                raise ConfigError("remote", value, "give one of them a size")
        if self.codec == "int8" and self.remote is not None:
            raise ConfigError("codec", "int8, but remote is set, whose servers share exact KV", "give exact12 or raw")
        if self.role is not None and self.remote is None:
            value = f"not set, but KV goes over it from or to a server whose role is {self.role}"
            raise ConfigError("remote", value, "give its URL")
        if self.role == "decode" and self.prefill_url is None:
            raise ConfigError("prefill_url", "not set, but role is decode", "give the server that prefills")
        if self.prefill_url is not None and self.role != "decode":
            raise ConfigError("prefill_url", "set, but role is not decode", {"role": "decode"})
        if self.disk and self.path is None:
            raise ConfigError("path", "not set, but disk is", "give the directory of the disk tier")

    @classmethod
    def of(cls, value: "CacheTiers | Mapping[str, object] | None") -> "CacheTiers":
        """Accepts a CacheTiers, a mapping with the same names, or None for the defaults."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError("cache_tiers", repr(value), "give CacheTiers(...) or a dict of its names")
        known = [one.name for one in fields(cls)]
        unknown = set(value) - set(known)
        if unknown:
            names = ", ".join(sorted(map(str, unknown)))
            raise ConfigError(f"cache_tiers has unknown names: {names}; known are {', '.join(known)}")
        return cls(**value)  # type: ignore[arg-type]

    def check_disk(self) -> None:
        """Raises ConfigError for a size that no disk tier can have, whatever the model."""
        if 0 < int(self.disk) < LEAST_DISK_BYTES:
            given, least = format_size(int(self.disk)), format_size(LEAST_DISK_BYTES)
            raise ConfigError("disk", given, f"give at least {least}, or 0 to keep nothing there")

    def check_room(self, block_bytes: int, num_state_blocks: int = 0) -> None:
        """Raises ConfigError when a tier has no room for blocks of this size. num_state_blocks: below HBM there must be
        room for two states, of so many blocks.
        """
        for name, least in LEAST_BLOCKS.items():
            size, needed = getattr(self, name), f"one block of this model needs {format_size(block_bytes)}"
            if num_state_blocks and name != "hbm":
                least = max(least, 2 * (num_state_blocks + 1))
                needed = f"one state of this model needs {format_size(num_state_blocks * block_bytes)}"
            if size not in (0, "auto") and size < least * block_bytes:
                off = "" if name == "hbm" else ", or 0 to switch the tier off"
                value = f"{format_size(size)}, but {needed}"
                raise ConfigError(name, value, f"give {format_size(least * block_bytes)} or more{off}")
