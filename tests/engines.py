"""Saved tiny models and the plain greedy loop that engines are compared with."""

from functools import cache
from pathlib import Path

import torch
from models import make_model

from engine.builtin import MODEL_DIR


def save_model(folder: Path, name: str = "Llama", tokenizer: bool = False, **changes: object) -> str:
    """A tiny random model on disk; with `tokenizer`, it gets the built-in one and a vocabulary of its size."""
    if tokenizer:
        import transformers

        known = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
        known.save_pretrained(folder)
        changes = {"vocab_size": len(known) + 16, "eos_token_id": known.eos_token_id, **changes}
    make_model(name, **changes).save_pretrained(folder)
    return str(folder)


class Greedy:
    """transformers' own greedy generation, one prompt at a time, remembered."""

    def __init__(self, **changes: object) -> None:
        self.network = make_model(**changes)
        self.continue_ = cache(self._continue)

    def __call__(self, token_ids, count: int) -> list[int]:
        return list(self.continue_(tuple(token_ids), count))

    @torch.inference_mode()
    def _continue(self, token_ids: tuple[int, ...], count: int) -> list[int]:
        ids = torch.tensor([token_ids])
        out = self.network.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        return out[0, len(token_ids) :].tolist()
