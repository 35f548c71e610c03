"""A model's weights as one digest, kept between starts, so that other weights under the same name never hit.

Reads the files as bytes and knows no tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvstore.disk.check import read_kept, write_durably
from kvstore.errors import ModelError

_MAX_THREADS = 4


class _FileState(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A file's identity and times: while these stay the same, its digest holds."""

    path: str  # of the file itself, with links resolved
    size: int
    mtime_ns: int
    ctime_ns: int  # changes even when the modification time is set back
    inode: int

    @classmethod
    def of(cls, file: Path) -> _FileState:
        stat = file.stat()
        return cls(str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


class _Cache(msgspec.Struct):
    """Digests, 64 hex digits, by file state."""

    version: Literal[1]
    files: list[tuple[_FileState, Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]]]


_caches = msgspec.json.Decoder(_Cache)


def weights_digest(directory: str | Path, cache: Path | None = None) -> str:
    """SHA-256, 64 hex digits, over names, sizes and contents of a model's safetensors files.

    cache: a JSON file that keeps each file's digest by path, size, times and inode; when it is damaged or cannot be
    written, files are read again.
    Raises ModelError when there are no such files or they cannot be read.
    """
    try:
        files = sorted(Path(directory).glob("*.safetensors"))
        if not files:
            raise ModelError(f"{directory} has no *.safetensors file; only safetensors weights are loaded")
        digests = _file_digests(files, cache)
        sizes = [file.stat().st_size for file in files]
    except OSError as error:
        raise ModelError(f"cannot read the weights of {directory}: {error}") from error
    named = [[file.name, size, digest] for file, size, digest in zip(files, sizes, digests, strict=True)]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def _file_digests(files: list[Path], cache: Path | None) -> list[str]:
    """Each file's SHA-256, several at a time: hashlib works without the interpreter's lock."""
    states = [_FileState.of(file) for file in files]
    known = _read_cache(cache)
    missing = [(file, state) for file, state in zip(files, states, strict=True) if state not in known]
    if not missing:
        return [known[state] for state in states]
    with ThreadPoolExecutor(min(len(missing), _MAX_THREADS, os.cpu_count() or 1)) as threads:
        fresh = dict(zip([s for _, s in missing], threads.map(_hash_file, [f for f, _ in missing]), strict=True))
    settled = {state: fresh[state] for file, state in missing if _FileState.of(file) == state}
    if cache is not None and settled:
        paths = {state.path for state in states}
        kept = {state: digest for state, digest in known.items() if state in states or state.path not in paths}
        _write_cache(cache, kept | settled)
    return [(known | fresh)[state] for state in states]


def _hash_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_cache(cache: Path | None) -> dict[_FileState, str]:
    """Digests by file state; empty without a cache in this version's form."""
    with suppress(OSError, ValueError):
        found = None if cache is None else read_kept(cache, _caches)
        return {} if found is None else dict(found.files)
    return {}


def _write_cache(cache: Path, entries: dict[_FileState, str]) -> None:
    """Write the cache. A failure only makes the next start slower."""
    with suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(cache, msgspec.json.encode(_Cache(1, list(entries.items()))))
