"""Where values of flags come from: the command line, the environment, a TOML file, defaults; and how they print.

The file's keys are the flags' names: at the top for every command, and under [serve] or [chat] for one command, where
they win.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.service.settings.options import (
    CONFIG,
    DEFAULT,
    REMOVED,
    Command,
    Option,
    OptionValue,
    key_of,
    parse_arguments,
    suggestion,
    variable_of,
)

SECTIONS = ("serve", "chat")
Entries = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file's values by key. sections: the values for one command only."""

    path: Path
    entries: Entries = field(default_factory=dict)
    sections: Mapping[str, Entries] = field(default_factory=dict)

    def lookup(self, command: str, option: Option) -> tuple[str, object] | None:
        """(where, value) of an option for this command; its own section first."""
        section = self.sections.get(command, {})
        for name, entries in ((f" under [{command}]", section), ("", self.entries)):
            for key in map(key_of, (option.flag, *option.aliases)):
                if key in entries:
                    return f"{key} in {self.path}{name}", entries[key]
        return None


@dataclass(frozen=True, slots=True)
class Told:
    """A command's input. settings: by the flags' keys; arguments: the words beside flags."""

    settings: dict[str, OptionValue]
    arguments: tuple[str, ...] = ()

    @property
    def values(self) -> dict[str, Any]:
        return {name: one.value for name, one in self.settings.items()}


def told(command: Command, argv: list[str], environment: Mapping[str, str]) -> Told | None:
    """None after printing the help, if that was asked for.

    Raises UsageError, and ConfigError which names the flag, the variable or the file.
    """
    given = parse_arguments(command, argv)
    if given is None:
        return None
    return Told(effective(command.name, command.options, given, environment), tuple(given.get("arguments") or ()))


def effective(
    command: str, options: Iterable[Option], given: Mapping[str, Any], environment: Mapping[str, str]
) -> dict[str, OptionValue]:
    """The setting of each option by its key: flag, else environment, else file, else default."""
    for key in REMOVED:
        if environment.get(variable_of(key)):
            raise ConfigError(f"{variable_of(key)} is unknown{suggestion(key, ())}")
    config = _config_file(given.get(CONFIG.key), environment)
    return {option.key: _setting(command, option, given.get(option.key), environment, config) for option in options}


def _setting(
    command: str, option: Option, text: str | None, environment: Mapping[str, str], config: ConfigFile | None
) -> OptionValue:
    if text is not None:
        return OptionValue(option, option.reads.read(option.flag, text), text, f"flag {option.flag}")
    if option.mirrored:
        for variable in map(variable_of, (option.flag, *option.aliases)):
            # An empty variable is as good as none, unless it was to name a place, which nobody has set then.
            must_be_set = option.default is None and option.reads.is_place
            if (text := environment.get(variable)) or (text is not None and must_be_set):
                return OptionValue(option, option.reads.read(variable, text), text, f"environment {variable}")
        found = None if config is None else config.lookup(command, option)
        if found is not None:
            where, written = found
            return OptionValue(option, _parse(option, where, written), written, f"file {where.partition(' in ')[2]}")
    return OptionValue(option, option.default, option.default, DEFAULT)


def _parse(option: Option, where: str, written: object) -> object:
    """Read a file's text like a flag's text; any other value must have the type that this makes."""
    if option.repeats and isinstance(written, list) and all(isinstance(one, str) for one in written):
        if not written and option.default == ():
            return ()
        written = text_of(written)
    if not isinstance(written, str | int | float):
        raise ConfigError(where, repr(written), "give one value, a text or a number")
    value = option.reads.read(where, text_of(written))
    is_switch, is_number = isinstance(value, bool), isinstance(value, int | float)
    fits = isinstance(written, str) or (is_switch if isinstance(written, bool) else is_number and not is_switch)
    if not fits:
        kind = "true or false" if is_switch else "a number" if is_number else "a text in quotes"
        raise ConfigError(where, str(written).lower(), f"give {kind}")
    return value


def text_of(value: object) -> str:
    """A value as it stands on the command line."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(int(value) if isinstance(value, bool) else value)


# -- reading ---------------------------------------------------------------------------------------------------------
def _config_file(given: str | None, environment: Mapping[str, str]) -> ConfigFile | None:
    """The named file, which must exist, or the default file if there is one."""
    for name, text in ((CONFIG.flag, given), ("KVSTORE_CONFIG", environment.get("KVSTORE_CONFIG"))):
        if text is not None:
            return read_config(CONFIG.reads.read(name, text))
    base = environment.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    default = Path(base) / "kvstore" / "config.toml"
    return read_config(default) if default.is_file() else None


def read_config(path: Path) -> ConfigFile:
    """Read and check names. Raises ConfigError for a file that is no TOML and for a key or table that is not known."""
    import tomllib  # here, as most commands have no file

    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"the configuration {path} is no valid TOML: {error}") from None
    known = known_keys()
    entries, sections = {}, {}
    for name, value in content.items():
        if isinstance(value, dict):
            if name not in SECTIONS:
                raise ConfigError(f"[{name}] in {path} is unknown{suggestion(name, SECTIONS)}")
            sections[name] = _named(value, known, name, f"{path} under [{name}]")
        else:
            entries[name] = value
    return ConfigFile(path, _named(entries, known, None, str(path)), sections)


def _named(entries: Entries, known: Mapping[str, Iterable[str]], command: str | None, place: str) -> Entries:
    """With underscores in the keys. command None: keys of any command."""
    found: dict[str, object] = {}
    for name, value in entries.items():
        key = name.replace("-", "_")
        owners = [one for one in SECTIONS if key in known[one]]
        if owners and command is not None and command not in owners:
            raise ConfigError(f"{name!r} in {place} is unknown to {command}; put it under [{owners[0]}]")
        if not owners:
            candidates = known[command] if command else {one for keys in known.values() for one in keys}
            raise ConfigError(f"{name!r} in {place} is unknown{suggestion(key, sorted(candidates))}")
        if key in found:
            raise ConfigError(f"{name!r} in {place} stands there twice, with dashes and with underscores")
        found[key] = value
    return found


def known_keys() -> dict[str, set[str]]:
    """The keys that a file may have, by command, with older names."""
    from kvstore.service.settings.engine_options import engine_command

    found = {}
    for command in SECTIONS:
        options = [option for option in engine_command(command).options if option.mirrored]
        found[command] = {key_of(name) for option in options for name in (option.flag, *option.aliases)}
    return found


# -- printing --------------------------------------------------------------------------------------------------------
def as_toml(settings: Iterable[OptionValue]) -> str:
    """A file with the same values, each line with its origin.

    Secrets are left out. Defaults are comments, as commands have different ones, and another command may read the file.
    """
    lines = []
    for one in settings:
        if one.written is None or one.written == ():
            lines.append(f"# {one.option.key}: not set; {one.option.about}")
        elif one.option.secret:
            lines.append(f"# {one.option.key} = {_toml('********')}  # {one.origin}; a secret, not printed")
        else:
            line = f"{one.option.key} = {_toml(one.written)}  # {one.origin}"
            lines.append(f"# {line}" if one.origin == DEFAULT else line)
    return "\n".join(lines)


def _toml(value: object) -> str:
    plain = value if isinstance(value, bool | int | float | list) else str(value)
    return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007F")  # such a value of JSON is one of TOML
