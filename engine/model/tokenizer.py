"""The tokenizer of a model, from a directory or a hub id. Loads no torch; transformers does, where it finds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstore.engine.model.files import find_model, find_tokenizer, first_line, has_tokenizer, template_text
from kvstore.errors import ConfigError, ModelError


def load_tokenizer(
    model: str | Path | None, tokenizer_of: str | None = None, revision: str | None = None,
    chat_template: str | None = None,
) -> Any:  # fmt: skip
    """The tokenizer that `loading.load` would find. Fetches no weights. Raises ModelError and ConfigError."""
    return tokenizer_in(find_model(model, revision, with_weights=False), tokenizer_of, chat_template)


def tokenizer_in(directory: Path, tokenizer_of: str | None, chat_template: str | None) -> Any:
    """The tokenizer of a model's directory, or the one given instead; None if it has none.

    Raises ModelError and ConfigError.
    """
    given = None if chat_template is None else template_text(chat_template)
    tokenizer = _tokenizer(directory if tokenizer_of is None else find_tokenizer(tokenizer_of))
    if given is None:
        return tokenizer
    if tokenizer is None:
        raise ConfigError("tokenizer", "not set, and the model has none for this chat template", "give one, too")
    tokenizer.chat_template = given
    return tokenizer


def _tokenizer(directory: Path) -> Any:
    if not has_tokenizer(directory):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"cannot load the tokenizer of {directory}: {first_line(error)}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"{directory} has no fast tokenizer (tokenizer.json), which incremental text needs")
    tokenizer.backend_tokenizer.no_truncation()  # its file may ask for it, and only some calls undo that
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer
