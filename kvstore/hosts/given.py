"""What a host hands over: fields of its objects, and where the files of its model lie on this machine. Imports no host,
and fetches nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError, ModelError


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


def model_folder(name: str, revision: str | None = None, cache: str | None = None) -> Path:
    """The folder itself, or the snapshot that the host has fetched for a hub id. Raises ModelError."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except Exception as error:  # the library raises many kinds of errors; all mean the same here
        raise ModelError(f"the files of {name} were not found on this machine ({type(error).__name__})") from error
