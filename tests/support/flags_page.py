"""docs/flags.md: every flag of every command in one table, made of what the help is made of.

`python -m tests.support.flags_page > docs/flags.md` writes it.
"""

from kvstore.service.command.cli import command_of
from kvstore.service.settings.options import COMMANDS, CONFIG, EPILOG, Option, value_of

HEAD = f"""# Every flag

{EPILOG}

`MODEL` and `SHELL` are no flags: they stand alone. Where a command is not named, the flag has another meaning there,
or none.

| flag | commands | what it is | default |
|---|---|---|---|
"""


def flags_page() -> str:
    owners: dict[tuple[str, str, str], list[str]] = {}
    for command in (command_of(name)[1] for name in COMMANDS):
        for option in (*command.options, CONFIG):
            owners.setdefault(_cells(option), []).append(command.name)
    rows = [
        f"| {shown} | {'all' if len(names) == len(COMMANDS) else ', '.join(names)} | {about} | {default} |\n"
        for (shown, about, default), names in sorted(owners.items())
    ]
    return HEAD + "".join(rows)


def _cells(option: Option) -> tuple[str, str, str]:
    value = "" if option.is_switch or not option.flag.startswith("-") else f" {value_of(option)}"
    help = option.help if option.mirrored else f"{option.help} (from the command line only)"
    older = f", formerly `{option.aliases[0]}`" if option.aliases else ""
    return f"`{option.flag}{value}`{older}", help.replace("|", "\\|"), option.shown_default


if __name__ == "__main__":
    print(flags_page(), end="")
