"""`kvstore stats|evict|verify|compact|sessions|why`: asks the store's owner, or works on the files if there is none.

Knows flags and results; no file and no socket. With --json, stdout holds one JSON object and nothing else.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import sleep
from typing import Any

import msgspec

from kvstore.admin.commands import MAX_SESSIONS, EvictRequest, SessionName
from kvstore.admin.control import NoOwner, ask
from kvstore.config import CODEC_NAMES, DURATION, PLACE, SIZE, SWITCH, TEXT, one_of, whole
from kvstore.engine.progress import tell_in_lines
from kvstore.service.command.progress import progress
from kvstore.service.command.terminal import tolerate_any_text
from kvstore.service.settings.config_file import Told
from kvstore.service.settings.engine_options import ID
from kvstore.service.settings.options import JSON, STORE, Command, Option, UsageError, default_store, suggestion
from kvstore.service.settings.serve_options import seconds
from kvstore.sessions.record import SessionKey

Run = Callable[[Mapping[str, Any], Sequence[str]], int]  # with the flags' values and arguments; returns the exit code
EXIT_OK, EXIT_DAMAGED = 0, 4
SILENCE_S = 10.0  # an owner that works sends a sign of life every second


SESSION_STORE = Option(
    "--session-store", PLACE, None,
    "Redis in which servers share sessions: redis://, redis+sentinel:// or redis+cluster://", "those of --store",
)  # fmt: skip
TENANT = Option("--tenant", TEXT, "", "whose session", shown="the one without a name")
CONDITIONS = (
    Option("--all", SWITCH, False, "everything", mirrored=False),
    Option("--unused-for", DURATION, None, "not used for so long: 90s, 15m, 2h, 7d", mirrored=False),
    Option("--session", ID, None, "only what this session alone refers to", mirrored=False),
    Option("--model", TEXT, None, "computed by this model", mirrored=False),
    Option("--to-size", SIZE, None, "least recently used first, down to so much a tier: 2GiB", mirrored=False),
)
DRY_RUN = Option("--dry-run", SWITCH, False, "only say how much it would be", mirrored=False)
WATCH = Option(
    "--watch", seconds(0.1, 3600), None, "show it again every so many seconds (2, if not given) until Ctrl-C",
    mirrored=False, bare="2",
)  # fmt: skip
DELETE = Option("--delete", SWITCH, False, "take out damaged blocks, and those computed after them", mirrored=False)
CODEC = Option(
    "--codec", one_of(*CODEC_NAMES), None, "also rewrite the blocks in this codec; those in others are read, too",
    mirrored=False,
)  # fmt: skip
LIMIT = Option("--limit", whole(1, MAX_SESSIONS), 100, "how many to list, the last used first")


# -- the commands ----------------------------------------------------------------------------------------------------
def _stats(values: Mapping[str, Any], _: Sequence[str]) -> int:
    if values["watch"] is not None:
        return _watch(values)
    result = carry_out(values, "stats", {}, "reading the store")
    if not _is_printed_as_json(values, result):
        from kvstore.service.command.store_tables import show_stats

        show_stats(result, _tables().console())
    return EXIT_OK


def _watch(values: Mapping[str, Any]) -> int:
    """Run until Ctrl-C, which is no failure here. In a terminal the numbers stay in place."""
    from kvstore.service.command.store_tables import live_stats

    try:
        with live_stats(_tables().console()) as show:
            while True:
                result = ask_or_open(values["store"], "stats", {}, lambda fraction: None)
                if not _is_printed_as_json(values, result):
                    show(result)
                sys.stdout.flush()
                sleep(values["watch"])
    except KeyboardInterrupt:
        return EXIT_OK


def _evict(values: Mapping[str, Any], _: Sequence[str]) -> int:
    if all(values[one.key] is None or values[one.key] is False for one in CONDITIONS):  # 0 is a condition
        flags = ", ".join(one.flag for one in CONDITIONS)
        raise UsageError(f"evict needs to know what: give at least one of {flags}; conditions are combined")
    session = None if values["session"] is None else SessionKey(values["tenant"], values["session"])
    request = EvictRequest(
        everything=values["all"],
        unused_for_s=values["unused_for"],
        session=None if session is None else SessionName.of(session),
        model=values["model"],
        to_bytes=values["to_size"],
        dry_run=values["dry_run"],
    )
    _answer(values, "evict", msgspec.to_builtins(request), "evicting", "show_evicted")
    return EXIT_OK


def _verify(values: Mapping[str, Any], _: Sequence[str]) -> int:
    delete = values["delete"]
    result = _answer(values, "verify", {"delete": delete}, "checking", "show_verified", delete)
    return EXIT_OK if _tables().is_sound(result) else EXIT_DAMAGED


def _compact(values: Mapping[str, Any], _: Sequence[str]) -> int:
    wanted = {} if values["codec"] is None else {"codec": values["codec"]}
    _answer(values, "compact", wanted, "compacting", "show_compacted")
    return EXIT_OK


def _sessions(values: Mapping[str, Any], arguments: Sequence[str]) -> int:
    verb, *ids = arguments or ("list",)
    if verb not in SESSION_VERBS:
        raise UsageError(f"unknown argument {verb!r}{suggestion(verb, SESSION_VERBS)}")
    command, note, show, takes_id = SESSION_VERBS[verb]
    if len(ids) != takes_id:
        raise UsageError(f"sessions {verb} takes {'one ID' if takes_id else 'no ID'}, not {len(ids)}")
    request: dict[str, Any] = {"tenant": values["tenant"], "limit": values["limit"]} if verb == "list" else {}
    if takes_id:
        key = SessionKey(values["tenant"], ID.read("ID", ids[0]))
        request = {"session": msgspec.to_builtins(SessionName.of(key))}
    _answer(values, command, request, note, show, ids[0] if ids else values["tenant"])
    return EXIT_OK


def _why(values: Mapping[str, Any], arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        raise UsageError(f"why takes one REQUEST_ID, not {len(arguments)}; it is the answer's header X-Request-Id")
    wanted = {"request_id": arguments[0], "tenant": values["tenant"]}
    _answer(values, "why", wanted, "asking the server", "show_why")
    return EXIT_OK


# For each verb: the owner's command, the message meanwhile, the function of `store_tables` that shows its result, and
# whether it concerns one session.
SESSION_VERBS = {
    "list": ("sessions", "reading the sessions", "show_sessions", False),
    "show": ("sessions.show", "reading the session", "show_transcript", True),
    "delete": ("sessions.delete", "deleting", "show_deleted", True),
    "accept-loss": ("sessions.accept_loss", "looking at the sessions", "show_accepted", False),
}


def _command(
    name: str, run: Run, options: tuple[Option, ...], examples: str, takes: str = ""
) -> tuple[Callable[[Told], int], Command]:
    def carried_out(given: Told) -> int:
        values = given.values
        values["store"] = values["store"] or STORE.reads.read(STORE.flag, default_store())
        tolerate_any_text()
        tell_in_lines()
        return run(values, given.arguments)

    return carried_out, Command(
        name, {"flags": (STORE, JSON, *options)}, examples, takes and f"[{takes}]", takes, bool(takes)
    )


STORE_COMMANDS = {
    "stats": _command(
        "stats",
        _stats,
        (WATCH,),
        "Beside a running engine, the hits are those since it started; a store that nobody has open counts none.\n\n"
        "examples:\n  kvstore stats --store ~/store\n  kvstore stats --watch\n"
        "  kvstore stats --json | python -m json.tool",
    ),
    "evict": _command(
        "evict",
        _evict,
        (*CONDITIONS, TENANT, DRY_RUN),
        "KV is a cache: what is evicted is computed again when it is needed. Blocks in use stay, and so does a block\n"
        "that others build on. Conversations keep their transcripts. Of several conditions, all have to be met.\n\n"
        "examples:\n  kvstore evict --unused-for 7d\n  kvstore evict --to-size 2GiB --dry-run\n"
        "  kvstore evict --session anna\n  kvstore evict --all",
    ),
    "verify": _command(
        "verify", _verify, (DELETE,),
        "Exit code 4 when damage was found.\n\nexamples:\n  kvstore verify\n  kvstore verify --delete",
    ),
    "compact": _command(
        "compact", _compact, (CODEC,),
        "Needs the size of what is kept in free space, with --codec raw twice that. A server goes on writing in its "
        "own --codec.\n\nexamples:\n  kvstore compact\n  kvstore compact --codec exact12",
    ),
    "sessions": _command(
        "sessions",
        _sessions,
        (SESSION_STORE, TENANT, LIMIT),
        "examples:\n  kvstore sessions\n  kvstore sessions list --tenant acme --limit 10 --json\n"
        "  kvstore sessions show anna\n  kvstore sessions delete anna",
        "list | show ID | delete ID | accept-loss",
    ),
    "why": _command(
        "why",
        _why,
        (TENANT,),
        "REQUEST_ID is the header X-Request-Id of the answer, and request_id in the log; the last 10,000 are known.\n\n"
        "examples:\n  kvstore why 5f0c1e0b7d\n  kvstore why 5f0c1e0b7d --tenant acme --json",
        "REQUEST_ID",
    ),
}  # fmt: skip


# -- how -------------------------------------------------------------------------------------------------------------
def _tables() -> Any:
    """Imported late: it loads rich, which --help does not need."""
    from kvstore.service.command import store_tables

    return store_tables


def _answer(
    values: Mapping[str, Any], command: str, arguments: dict[str, Any], note: str, show: str, *about: object
) -> Mapping[str, Any]:
    """Carry it out, and print the result: as JSON, or for a person by a function of `store_tables`.

    show: its name; about: what it is told before the result.
    """
    result = carry_out(values, command, arguments, note)
    if not _is_printed_as_json(values, result):
        getattr(_tables(), show)(*about, result, _tables().console())
    return result


def _is_printed_as_json(values: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    if values["json"]:
        print(json.dumps(result))
    return bool(values["json"])


def carry_out(values: Mapping[str, Any], command: str, arguments: dict[str, Any], note: str) -> Mapping[str, Any]:
    """Run a command through the owner's socket, or on the files of a store without an owner, with a message when it
    takes long.
    """
    with progress(note, values["json"]) as on_progress:
        if values.get("session_store") is not None:
            from kvstore.admin.shared import ask_shared

            return ask_shared(values["session_store"], command, arguments)
        return ask_or_open(values["store"], command, arguments, on_progress)


def ask_or_open(
    path: Path, command: str, arguments: dict[str, Any], on_progress: Callable[[float | None], None]
) -> Mapping[str, Any]:
    try:
        return ask(path, command, arguments, SILENCE_S, on_progress)
    except NoOwner:
        pass
    from kvstore.admin.offline import OfflineStore

    with OfflineStore(path) as store:
        return store.handle(command, arguments, on_progress)
