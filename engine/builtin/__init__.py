"""The built-in chat model: a small Llama trained by `bench.builtin_model` to remember what it is told.

Owns only the location of its files; importing this package imports no torch.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
