"""Where the files of a model lie on this machine. Fetches nothing."""

from __future__ import annotations

from pathlib import Path

from kvstore.errors import ModelError


def model_folder(name: str, revision: str | None = None, cache: str | None = None) -> Path:
    """The folder itself, or the snapshot that the host has fetched for a hub id. Raises ModelError."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except Exception as error:  # the library raises many kinds of errors; all mean the same here
        raise ModelError(f"the files of {name} were not found on this machine ({type(error).__name__})") from error
