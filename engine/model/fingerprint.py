"""What a stored block belongs to: a digest of the model's weights, frequencies, configuration and layout.

Another fingerprint is another lineage root, so that one store can hold several models and never mixes them.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from kvstore.disk.check import write_durably
from kvstore.errors import ModelError

if TYPE_CHECKING:
    import torch

    from kvstore.engine.model.interception import PositionFreeModel
    from kvstore.rope.rotary import Rotation

LAYOUT_VERSION = 1  # of the arena and of what stands in a block; raised when stored blocks change their meaning
_MAX_THREADS = 4
# Where the model came from, who wrote the file, and what a forward returns: nothing that changes a key or a value. The
# dtype that counts is the loaded model's.
_COSMETIC = {
    "_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "return_dict",
    "output_attentions", "output_hidden_states", "_attn_implementation", "_commit_hash", "id2label", "label2id",
    "problem_type",
}  # fmt: skip


def fingerprint(model: PositionFreeModel, digest: str, block_size: int) -> str:
    """SHA-256, 64 hex digits, of everything that decides what the bytes of a block mean.

    digest: of the weights, see `weights_digest`. The window counts only where frequencies depend on it.
    """
    spec = model.spec
    parts = {
        "layout_version": LAYOUT_VERSION,
        "block_size": block_size,
        "dtype": str(spec.dtype),
        "shape": [spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.vocab_size],
        "class": type(model.network).__name__,
        "config": _plain(model.network.config.to_dict()),
        "weights": digest,
        "frequencies": _frequencies(model.network),
        "rotations": [None if rotation is None else _describe(rotation) for rotation in model.rotations],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _plain(value: object) -> object:
    """A configuration as JSON has it, without what is cosmetic."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if key not in _COSMETIC}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _frequencies(network: torch.nn.Module) -> dict[str, object]:
    """By name, the inverse frequencies and the attention scaling that the rotary modules use.

    Taken from the modules because tables are rounded: in bf16 two near frequencies look the same at small positions.
    """
    found: dict[str, object] = {}
    for name, module in network.named_modules():
        if not type(module).__name__.endswith("RotaryEmbedding"):
            continue
        for key, buffer in module.named_buffers(prefix=name):
            found[key] = _digest(buffer)
        for key, value in vars(module).items():
            if key.endswith("attention_scaling"):
                found[f"{name}.{key}"] = float(value)
    return found


def _describe(rotation: Rotation) -> list[object]:
    """Row 1 has every frequency, and its scaling, and exists in a window of any length."""
    row = min(1, len(rotation.cos) - 1)
    rows = [_digest(table[row]) for table in (rotation.cos, rotation.sin)]
    kinds = [rotation.style.name, rotation.upcast, rotation.layout.name, str(rotation.cos.dtype)]
    return [*kinds, rotation.cos.shape[-1], *rows]


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()


# -- weights ---------------------------------------------------------------------------------------------------------
class _FileState(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What changes when a file is written: as long as all of it is the same, its digest holds."""

    path: str  # of the file itself, behind links
    size: int
    mtime_ns: int
    ctime_ns: int  # moves also when the time of modification is put back
    inode: int

    @classmethod
    def of(cls, file: Path) -> _FileState:
        stat = file.stat()
        return cls(str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


class _Cache(msgspec.Struct):
    """Digests, 64 hex digits, by file state."""

    version: Literal[1]
    files: list[tuple[_FileState, Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]]]


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
    """Digest by file state; empty when there is no cache or it is not what this version writes."""
    try:
        return {} if cache is None else dict(msgspec.json.decode(cache.read_bytes(), type=_Cache).files)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return {}


def _write_cache(cache: Path, entries: dict[_FileState, str]) -> None:
    """A place that cannot be written costs the next start's time."""
    with suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(cache, msgspec.json.encode(_Cache(1, list(entries.items()))))
