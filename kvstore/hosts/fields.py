"""What is read of the objects that a host hands over. Imports no host."""

from __future__ import annotations

from typing import Any

from kvstore.errors import ConfigError


def field(of: Any, path: str, host: str) -> Any:
    """What a host's object has there, by names with dots between. Raises ConfigError if it has no such field: what a
    version of the host has renamed must not drop out of what KV depends on.
    """
    for name in path.split("."):
        if not hasattr(of, name):
            raise ConfigError(
                f"this {host} has no {path} where kvstore looks for it: {type(of).__name__} has no field {name}; take "
                f"a version that docs/{host.lower()}.md names, or a kvstore that knows this one"
            )
        of = getattr(of, name)
    return of
