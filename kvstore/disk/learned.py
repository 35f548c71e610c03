"""What a store has learned, kept between starts: one small JSON file beside its data. Does not know its content."""

from __future__ import annotations

import json
from pathlib import Path

from kvstore.disk.check import write_durably

FILE_NAME = "policy.json"
MAX_BYTES = 16 << 20


def read_learned(directory: Path) -> object:
    """The last written content, or None if there is none. Raises OSError or ValueError."""
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
    """Replace the content. Raises OSError."""
    write_durably(directory / FILE_NAME, json.dumps(learned).encode())
