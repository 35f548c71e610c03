"""What `kvstore plan` replays and what is known about it: a trace's file, or a store with its recorded history.

Knows where numbers come from, not what is done with them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError, StoreError
from kvstore.planning.replay_config import ServiceModel
from kvstore.planning.sizing import KV_BYTES_PER_TOKEN, last_requests
from kvstore.planning.trace_formats import read_session_lines, read_trace
from kvstore.planning.traces import Trace
from kvstore.store.history import history_files, joined

HISTORY_BLOCK_SIZES = (128, 64, 32)  # the largest of which a prompt holds MEAN_BLOCKS, else STORE_BLOCK_SIZE
MEAN_BLOCKS = 32  # on average, so that what is lost by rounding stays at a few per cent
STORE_BLOCK_SIZE = 16  # of the engine, unless it is told otherwise
LEAST_BLOCKS = 64  # on disk; with fewer, file sizes say nothing, as an empty file has pages, too
NO_HISTORY = (
    "the store at {path} has no history yet; it records one while an engine serves with a disk tier there. "
    "Give --trace FILE --format FORMAT to plan from a file"
)


@dataclass(frozen=True, slots=True)
class Source:
    """kv_bytes_per_token: None when it is not known. disk_share: bytes on disk of one byte of KV. hbm_bytes: of the
    engine that owns the store. measured: names of those parts of `service` that the store has measured.
    computed_tokens: of prompts, by that engine; 0: what it knows of computing was measured by an earlier one.
    """

    trace: Trace
    name: str
    kv_bytes_per_token: float | None = None
    disk_share: float = 1.0
    hbm_bytes: int | None = None
    service: ServiceModel = field(default_factory=ServiceModel)
    measured: tuple[str, ...] = ()
    computed_tokens: int = 0


def from_file(path: Path, trace_format: str, block_size: int | None, num_requests: int | None) -> Source:
    trace = read_trace(path, trace_format, block_size)
    return Source(trace if num_requests is None else last_requests(trace, num_requests), path.name)


def from_store(path: Path, stats: Mapping[str, Any], block_size: int | None, num_requests: int | None) -> Source:
    """stats: what `kvstore stats` says of this store. Raises StoreError when it has no history."""
    trace = _history(path, block_size, num_requests)
    service, measured = _measured(stats)
    kv_bytes, disk_share = _kv_bytes(stats)
    hbm = stats.get("hbm") or {}
    hbm_bytes = hbm.get("blocks", 0) * hbm.get("block_bytes", 0) or None
    tokens = stats.get("tokens") or {}
    num_computed = tokens.get("prompt_tokens", 0) - tokens.get("cached_tokens", 0)
    return Source(trace, f"the history of {path}", kv_bytes, disk_share, hbm_bytes, service, measured, num_computed)


# -- the history -----------------------------------------------------------------------------------------------------
def _history(path: Path, block_size: int | None, num_requests: int | None) -> Trace:
    lines = list(joined(_lines(path)))
    if num_requests is not None:
        lines = lines[-num_requests:]
    if not lines:
        raise StoreError(NO_HISTORY.format(path=path))
    trace = read_session_lines(lines, "history", block_size or STORE_BLOCK_SIZE)
    fitting = _fitting_block_size(trace)
    return trace if block_size or fitting == STORE_BLOCK_SIZE else read_session_lines(lines, "history", fitting)


def _lines(path: Path) -> list[str]:
    found = []
    for file in history_files(path):
        try:
            found += file.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            continue  # rotated meanwhile
        except OSError as error:
            raise StoreError(f"the history {file} cannot be read: {error.strerror or error}") from None
    return found


def _fitting_block_size(trace: Trace) -> int:
    """A replay of larger blocks is faster, and blurs what short prompts share."""
    mean_tokens = sum(request.num_tokens for request in trace.requests) / len(trace.requests)
    return next((size for size in HISTORY_BLOCK_SIZES if size * MEAN_BLOCKS <= mean_tokens), STORE_BLOCK_SIZE)


# -- what the store says about itself --------------------------------------------------------------------------------
def _measured(stats: Mapping[str, Any]) -> tuple[ServiceModel, tuple[str, ...]]:
    store, disk = stats.get("store") or {}, stats.get("disk") or {}
    found = {
        "prefill_tokens_per_s": store.get("prefill_tokens_per_s"),
        "load_bytes_per_s": store.get("load_bytes_per_s"),
        "read_bytes_per_s": store.get("read_bytes_per_s") or disk.get("read_bytes_per_s"),
        "write_bytes_per_s": disk.get("write_bytes_per_s"),
    }
    known: dict[str, Any] = {name: rate for name, rate in found.items() if rate and 0 < rate < math.inf}
    return replace(ServiceModel(), **known), tuple(known)


def _kv_bytes(stats: Mapping[str, Any]) -> tuple[float | None, float]:
    """Bytes of a token's KV, from the engine or from the model that has most blocks on disk; and `disk_share`."""
    hbm, disk = stats.get("hbm") or {}, stats.get("disk") or {}
    if hbm.get("block_bytes"):
        num_blocks = disk.get("blocks", 0)
        share = _share(disk.get("bytes", 0), num_blocks if num_blocks >= LEAST_BLOCKS else 0, hbm["block_bytes"])
        return hbm["block_bytes"] / hbm.get("block_size", STORE_BLOCK_SIZE), share
    known = [model for model in (disk.get("models") or {}).values() if model.get("block_size")]
    if not known:
        return None, 1.0
    model = max(known, key=lambda model: model["blocks"])
    share = _share(model["bytes"], model["blocks"], model["block_bytes"])
    return model["block_bytes"] / model["block_size"], share


def _share(stored_bytes: int, num_blocks: int, block_bytes: int) -> float:
    return stored_bytes / (num_blocks * block_bytes) if stored_bytes and num_blocks else 1.0


def needed_kv_bytes(source: Source) -> float:
    """What the source knows. Raises ConfigError with what to give where it does not."""
    if source.kv_bytes_per_token is not None:
        return source.kv_bytes_per_token
    forms = f"give --kv-bytes-per-token, a size or one of {', '.join(KV_BYTES_PER_TOKEN)}"
    raise ConfigError(f"{source.name} does not say how large the KV of a token is; {forms}")
