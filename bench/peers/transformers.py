"""transformers in a worker process: computes a history again, or keeps its cache in memory by hand, or in a file.

Runs in the peer's environment, which needs torch, transformers and safetensors. The loop is leaner than `generate`.
"""

import hashlib
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from bench.peers.embedded import work
from bench.peers.load import Answer


class Transformers:
    def __init__(self, model: Path, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self._folder = folder
        self._kept: dict[str, Any] = {}

    @torch.inference_mode()
    def ask(self, prompts: list[list[int]], max_tokens: int, talk: str) -> list[Answer]:
        """Answer prompts of one length, as one batch."""
        started = time.perf_counter()
        cache = self._cache(talk)
        num_cached = cache.get_seq_length()
        tokens = torch.tensor([prompt[num_cached:] for prompt in prompts])
        chosen, ttft_s = [], 0.0
        for _ in range(max_tokens):
            logits = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            tokens = logits[:, -1].argmax(-1, keepdim=True)
            chosen.append(tokens[:, 0].tolist())
            ttft_s = ttft_s or time.perf_counter() - started
        if talk:
            self._kept[talk] = cache
        end_s = time.perf_counter() - started
        return [Answer(ttft_s, end_s, list(ids), num_cached) for ids in zip(*chosen, strict=True)]

    def _cache(self, talk: str) -> Any:
        if talk in self._kept:
            return self._kept[talk]
        cache = DynamicCache()
        if talk and (path := self._path(talk)).exists():
            stored = load_file(path)
            for layer in range(len(stored) // 2):
                cache.update(stored[f"key.{layer}"], stored[f"value.{layer}"], layer)
        return cache

    def leave(self, talk: str, keep: bool) -> None:
        cache = self._kept.pop(talk)
        if keep:
            stored = {f"key.{number}": layer.keys.contiguous() for number, layer in enumerate(cache.layers)}
            stored |= {f"value.{number}": layer.values.contiguous() for number, layer in enumerate(cache.layers)}
            save_file(stored, self._path(talk))

    def _path(self, talk: str) -> Path:
        return self._folder / f"{hashlib.sha256(talk.encode()).hexdigest()[:16]}.safetensors"

    def close(self) -> None:
        """Nothing to do: everything that must outlive the process is already in files."""


if __name__ == "__main__":
    work(Transformers)
