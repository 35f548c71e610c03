"""Variables `KVSTORE_...` that nothing reads, because they are misspelt."""

import sys
from collections.abc import Mapping

from kvstore.service.settings.config_file import known_keys
from kvstore.service.settings.options import REMOVED, key_of, nearest

OTHERS = {"CONFIG", "FLEET_SECRET", "REDIS_PASSWORD"}  # that are read, beside the flags of a command
CUTOFF = 0.7  # what Kubernetes sets for a service of this name is further from ours


def tell_misspelt(environment: Mapping[str, str]) -> None:
    """One line on stderr for each variable that is nearly the name of one that some command reads."""
    given = {name.removeprefix("KVSTORE_") for name in environment if name.startswith("KVSTORE_")}
    given -= OTHERS | {key.upper() for key in REMOVED}  # which are refused
    if not given or not given - {key.upper() for keys in known_keys().values() for key in keys}:
        return
    from kvstore.service.command.flags_page import commands  # loads every command, hence only now

    options = [one for command in commands() for one in command.options if one.mirrored]
    known = OTHERS | {key_of(flag).upper() for one in options for flag in (one.flag, *one.aliases)}
    for name in sorted(given - known):
        for meant in nearest(name, known, CUTOFF):
            print(f"kvstore: nothing reads KVSTORE_{name}; did you mean KVSTORE_{meant}?", file=sys.stderr)
