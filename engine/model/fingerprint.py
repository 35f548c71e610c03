"""What a stored block belongs to: a digest of the model's weights, frequencies, configuration and layout.

Another fingerprint is another lineage root, so that one store can hold several models and never mixes them.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kvstore.engine.model.interception import PositionFreeModel
    from kvstore.rope.rotary import Rotation

LAYOUT_VERSION = 1  # of the arena and of a block's content; raised when the meaning of stored blocks changes
# Where the model came from, who wrote the file, what a forward returns: none of it changes a key or a value. As dtype,
# that of the loaded model counts.
_COSMETIC = {
    "_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "return_dict",
    "output_attentions", "output_hidden_states", "_attn_implementation", "_commit_hash", "id2label", "label2id",
    "problem_type",
}  # fmt: skip


def fingerprint(model: PositionFreeModel, digest: str, block_size: int) -> str:
    """SHA-256, 64 hex digits, of everything that decides the meaning of a block's bytes.

    digest: of the weights, see `kvstore.disk.weights`. The window counts only if frequencies depend on it.
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
    """A configuration as JSON values, without cosmetic entries."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if key not in _COSMETIC}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _frequencies(network: torch.nn.Module) -> dict[str, object]:
    """The inverse frequencies and attention scalings of the rotary modules, by name.

    Tables would not do, because they are rounded: in bf16 two close frequencies look the same at small positions.
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
    """Row 1 contains every frequency and its scaling, and every window has it."""
    row = min(1, len(rotation.cos) - 1)
    rows = [_digest(table[row]) for table in (rotation.cos, rotation.sin)]
    kinds = [rotation.style.name, rotation.upcast, rotation.layout.name, str(rotation.cos.dtype)]
    return [*kinds, rotation.cos.shape[-1], *rows]


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()
