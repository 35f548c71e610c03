"""What a store has learned, between two starts: one small JSON file beside its data. Knows nothing of what is in it."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

FILE_NAME = "policy.json"
MAX_BYTES = 16 << 20


def read_learned(directory: Path) -> object:
    """What was written last, or None when nothing was. Raises OSError or ValueError."""
    path = directory / FILE_NAME
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path} is larger than anything that was written to it")
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except RecursionError as error:  # a forged file
        raise ValueError(f"{path} is nested too deeply") from error


def write_learned(directory: Path, learned: object) -> None:
    """Instead of what was there, all or nothing; only the owner may read it. Raises OSError."""
    path, temporary = directory / FILE_NAME, directory / f"{FILE_NAME}.new"
    text = json.dumps(learned)
    try:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
