"""Sizes and the tiers' configuration. Built once, checked here; a part receives its own piece."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.remote.address import parse_prefill_url
from kvstore.remote.names import fleet_secret
from kvstore.remote.object_address import parse_remote_url

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
        raise ConfigError(f"{name} is {value!r}; give {SIZE_FORMS}")
    size_bytes = int(float(match[1]) * unit)
    if size_bytes > 2**62:
        raise ConfigError(f"{name} is {value!r}, more than any memory; give {SIZE_FORMS}")
    return size_bytes


def format_size(size_bytes: int | float) -> str:
    """A size for people: "1.5 GiB"."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < (1024 if unit == "B" else 1023.95):  # which would be shown as 1024.0
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


CODEC_NAMES = ("raw", "zstd", "split-zstd")  # `kvstore.disk.codec` says what they are
ROLES = ("prefill", "decode")
SESSION_DURABILITIES = ("always", "everysec", "unchecked")  # `kvstore.sessions.shared.server` says what they ask for


def setting(default: Any, help: str, **about: Any) -> Any:
    """A field of a configuration, with its description for people.

    about: `low` and `high` of a whole number, or `among` of a text, which `check_settings` checks; `shown`: the default
    in words, where the value does not say it.
    """
    return field(default=default, metadata={"help": help, **about})


def check_settings(config: Any) -> None:
    """Raises ConfigError for a field outside the bounds of its `setting`; None is allowed where it is the default."""
    for one in fields(config):
        value, about = getattr(config, one.name), one.metadata
        if value is None and one.default is None:
            continue
        if "among" in about and value not in about["among"]:
            raise ConfigError(f"{one.name} is {value!r}; give one of {', '.join(about['among'])}")
        if "low" in about and (type(value) is not int or not about["low"] <= value <= about["high"]):
            raise ConfigError(f"{one.name} is {value!r}; give a whole number from {about['low']} to {about['high']}")


_ENDPOINT = re.compile(r"(tcp://(?:\*|[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])):([0-9]{1,5})")


def parse_endpoint(value: str, name: str) -> tuple[str, int]:
    """Split tcp://ADDRESS:PORT into address and port, where PORT + 1 must be a port, too. Raises ConfigError."""
    match = _ENDPOINT.fullmatch(value) if isinstance(value, str) else None
    if match is None or not 1 <= int(match[2]) < 2**16 - 1:
        raise ConfigError(f"{name} is {value!r}; give tcp://ADDRESS:PORT with a port below 65535, as in tcp://*:5557")
    return match[1], int(match[2])


@dataclass(frozen=True, slots=True)
class SharedSessions:
    """Sessions that several servers share. url: of their Redis. durability, num_replicas: what it must promise."""

    url: str
    durability: str = "always"
    num_replicas: int = 0
    fleet_secret_file: str | Path | None = None


MOST_TTL_S = 10 * 366 * 86400
LEAST_DISK_BYTES = 1 << 20
LEAST_BLOCKS = {"hbm": 1, "cpu": 2, "disk": 4}  # with fewer a tier cannot work


@dataclass(frozen=True, slots=True)
class CacheTiers:
    """Capacity of each tier, in bytes or as a text (see `parse_size`); 0 switches a tier below HBM off."""

    hbm: int | str = setting(
        "auto", "size of the KV block pool, such as 1.5GiB; auto: what a GPU has left, or 1/4 of free RAM"
    )
    cpu: int | str = setting(0, "size of the CPU tier")
    disk: int | str = setting(0, "size of the disk tier")
    path: str | Path | None = setting(None, "directory of the store")
    codec: str = setting(
        "raw", "how KV lies on disk: raw, zstd or split-zstd, which takes 0.7 of the space for bf16", among=CODEC_NAMES
    )
    disk_per_tenant: int | str | None = setting(None, "size of one tenant's KV on disk; more is not written")
    remote: str | None = setting(
        None, "KV that servers share behind their disks: redis://host:6379/0, s3://bucket, gs://, az:// or file:///dir"
    )
    remote_ttl_s: float = setting(7 * 86400.0, "how long KV stays in --remote after it was last of use")
    fleet_secret_file: str | Path | None = setting(
        None, "file with the secret that all servers share, instead of $KVSTORE_FLEET_SECRET"
    )
    role: str | None = setting(
        None, "prefill computes prompts for other servers; decode lets --prefill-url compute its own", among=ROLES
    )
    prefill_url: str | None = setting(None, "server with --role prefill: http://host:8000, or https://")

    def __post_init__(self) -> None:
        for name in ("hbm", "cpu", "disk"):
            value = getattr(self, name)
            if name == "hbm" and value == "auto":
                continue
            object.__setattr__(self, name, parse_size(value, name))
        if self.disk_per_tenant is not None:
            object.__setattr__(self, "disk_per_tenant", parse_size(self.disk_per_tenant, "disk_per_tenant"))
        if not isinstance(self.path, str | Path | None):
            raise ConfigError(f"path is {self.path!r}; give a directory")
        if not isinstance(self.fleet_secret_file, str | Path | None):
            raise ConfigError(f"fleet_secret_file is {self.fleet_secret_file!r}; give a file")
        check_settings(self)
        if self.hbm == 0:
            raise ConfigError('hbm is 0, but the engine computes in it; give "auto" or a size')
        if self.remote is not None:
            parse_remote_url(self.remote)
            fleet_secret(self.fleet_secret_file)
        if self.remote is not None and not (self.cpu or self.disk):
            raise ConfigError("remote is set, but cpu and disk are 0; blocks come to it from there: give one a size")
        self._check_role()
        if not 1 <= self.remote_ttl_s <= MOST_TTL_S:
            raise ConfigError(f"remote_ttl_s is {self.remote_ttl_s!r}; give 1 to {MOST_TTL_S} seconds")
        if self.disk and self.path is None:
            raise ConfigError("disk is set but path is not; give the directory of the disk tier")

    def _check_role(self) -> None:
        if self.role is not None and self.remote is None:
            what = "give remote=URL, by which KV goes from one server to the other"
            raise ConfigError(f"role is {self.role}, but remote is not set; {what}")
        if self.role == "decode" and self.prefill_url is None:
            raise ConfigError("role is decode, but prefill_url is not set; give the address of a server that prefills")
        if self.prefill_url is not None:
            parse_prefill_url(self.prefill_url)
            if self.role != "decode":
                raise ConfigError("prefill_url is set, but role is not decode; give role=decode")

    @classmethod
    def of(cls, value: "CacheTiers | Mapping[str, object] | None") -> "CacheTiers":
        """Accepts a CacheTiers, a mapping with the same names, or None for the defaults."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"cache_tiers is {value!r}; give CacheTiers(...) or a dict of its names")
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
            raise ConfigError(f"disk is {given}; give at least {least}, or 0 to keep nothing there")

    def check_room(self, block_bytes: int) -> None:
        """Raises ConfigError when a tier has no room for blocks of this size."""
        for name, least in LEAST_BLOCKS.items():
            size = getattr(self, name)
            if size not in (0, "auto") and size < least * block_bytes:
                off = "" if name == "hbm" else ", or 0 to switch the tier off"
                raise ConfigError(
                    f"{name} is {format_size(size)}, but one block of this model needs {format_size(block_bytes)}; "
                    f"give {format_size(least * block_bytes)} or more{off}"
                )
