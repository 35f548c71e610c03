"""The files of a model, checked before anything is loaded: where they are, and whether the model can be served.

Fetches the files of a hub id into the hub's cache. Reads names and first bytes; loads no torch and no weights.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.engine.builtin import MODEL_DIR
from kvstore.errors import ConfigError, HubError, ModelError, UnsupportedModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
ALL_FILES = [*SMALL_FILES, "*.safetensors"]
OTHER_FORMATS = ["consolidated*", "original/*", "onnx/*"]  # the same weights once more
LFS_POINTER = b"version https://git-lfs"
STATE_SPACE_MODELS = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")  # there is no KV in them
UNPACKED_METHODS = ("mxfp4",)  # transformers turns these into plain weights while it loads
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_CONVERT = (
    "python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{0}').save_pretrained('{0}')\""
)
_NO_TOKENIZER = "{} has no tokenizer (tokenizer.json); give another model's with --tokenizer (in Python, tokenizer=)"
_NO_TEMPLATE = "{}; give a file with one as --chat-template (in Python, chat_template=), or use completions"


def find_model(model: str | Path | None, revision: str | None = None, with_weights: bool = True) -> Path:
    """The directory of a model whose files can be loaded. model: None for the built-in one.

    with_weights: also fetch the weights of a hub id. Raises ModelError, which says what is wrong and what to do, and
    ConfigError if a directory is given a revision.
    """
    if sys.flags.optimize > 1:
        raise ConfigError("PYTHONOPTIMIZE=2 (-OO) strips docstrings, which transformers reads; set it to 1 or unset it")
    if model is None:
        return _without_revision(MODEL_DIR, revision)
    path = local_path(str(model))
    if path is not None:
        _check(path, str(model))
        return _without_revision(path, revision)
    _check_names(_names_on_hub(str(model), revision), str(model))
    path = _fetched(str(model), revision, SMALL_FILES)
    if with_weights:
        _check_config(path, str(model))
        path = _fetched(str(model), revision, ALL_FILES)
        _check(path, str(model))
    return path


def find_tokenizer(source: str) -> Path:
    """The directory of a tokenizer that the user names apart from the model. Raises ModelError."""
    path = local_path(source) or _fetched(source, None, SMALL_FILES)
    if not has_tokenizer(path):
        raise ModelError(f"{source} has no tokenizer; give a directory with tokenizer.json, or a hub id")
    return path


def check_speaks(model: str | Path | None, options: Mapping[str, Any], chats: bool) -> None:
    """Raises ModelError as `find_model` does, and if the model has no tokenizer; with chats also if it has no chat
    template. Raises ConfigError for a window that the model has not.

    For use before torch is loaded. options: those of the engine.
    """
    path, name = find_model(model, options.get("revision"), with_weights=False), str(model)
    window_of(_read_json(path / "config.json", name), options.get("max_model_len"))
    if (tokenizer := options.get("tokenizer")) is not None:
        path, name = find_tokenizer(tokenizer), tokenizer
    if not has_tokenizer(path):
        raise ModelError(why_no_chat(name, has_tokenizer=False))
    if (given := options.get("chat_template")) is not None:
        template_text(given)
    elif chats and not _has_template(path):
        raise ModelError(why_no_chat(name, has_tokenizer=True))


def window_of(config: Mapping[str, Any], asked: int | None) -> int | None:
    """The longest context, in tokens: as asked, or the model's own; None if neither says it. Raises ConfigError.

    config: as the file has it, or transformers, which knows what the file leaves out.
    """
    text = config.get("text_config") or config
    own = text.get("max_position_embeddings")
    if not isinstance(own, int):
        return asked
    ropes = [text.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    kinds = [*ropes, *(kind for rope in ropes for kind in rope.values() if isinstance(kind, dict))]
    longest = int(max(own, *(_stretched(kind, own) for kind in kinds)))
    if asked is not None and asked > longest:
        raise ConfigError("max_model_len", f"{asked}, but the model was made for {longest} tokens", "give at most that")
    return asked or own


def _stretched(rope: Mapping[str, Any], own: int) -> float:
    """The longest context of a rotation that is stretched, in tokens; 0 for others."""
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor") or 1.0
    if kind == "yarn":  # own may have its factor in it
        return float((rope.get("original_max_position_embeddings") or own) * factor)
    return float(own * factor) if kind in ("dynamic", "linear") else 0.0


def why_no_chat(name: str, has_tokenizer: bool, fault: str | None = None) -> str:
    """Why a model cannot chat, and what to do about it. fault: of its chat template; None: it has none."""
    if not has_tokenizer:
        return _NO_TOKENIZER.format(name)
    broken = f"the chat template of {name} is broken ({fault})"
    return _NO_TEMPLATE.format(f"{name} has no chat template" if fault is None else broken)


def template_text(given: str | Path) -> str:
    """The text of a chat template, given as a file or as the text itself. Raises ConfigError."""
    text = str(given)
    if "{{" in text or "{%" in text:
        return text
    try:
        return Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        value = f"{text}, which cannot be read: {why}"
        raise ConfigError("chat_template", value, "give a file, or the template") from None


def local_path(name: str) -> Path | None:
    """The directory of this name; None if the name may be a hub id. Raises ModelError for anything else."""
    if not name:
        raise ModelError("the model's name is empty; give a model's directory or its hub id")
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return path
        is_file = path.exists()
    except RuntimeError as error:  # the home of an unknown user
        raise ModelError(f"{name} is not a directory: {error}") from error
    except OSError as error:
        raise ModelError(f"{name} cannot be read: {error.strerror}; give a directory that this user may read") from None
    if is_file and path.suffix == ".gguf":
        raise ModelError(_gguf(name))
    if is_file or name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        what = "is a file" if is_file else "is not a directory"
        raise ModelError(f"{name} {what}; give a model's directory or its hub id")
    return None


def _without_revision(path: Path, revision: str | None) -> Path:
    if revision is not None:
        raise ConfigError("revision", f"{revision!r}, which is for a hub id", f"{path} is a directory")
    return path


# -- a directory -----------------------------------------------------------------------------------------------------
def has_tokenizer(path: Path) -> bool:
    return any((path / name).is_file() for name in TOKENIZER_FILES)


def _has_template(path: Path) -> bool:
    if any(path.glob("*chat_template*")):
        return True
    file = path / "tokenizer_config.json"
    return file.is_file() and '"chat_template"' in file.read_text(encoding="utf-8", errors="replace")


def _check(path: Path, name: str) -> None:
    try:
        names = {file.name for file in path.iterdir()}
    except OSError as error:
        raise ModelError(f"{name} cannot be read: {error.strerror}; give a directory that this user may read") from None
    if "config.json" in names:
        _check_config(path, name)
    _check_names(names, name)
    for file in sorted(path / one for one in names if one.endswith(".safetensors") or one in TOKENIZER_FILES):
        try:
            with file.open("rb") as content:
                begins = content.read(len(LFS_POINTER))
        except OSError as error:
            raise ModelError(f"{file} cannot be read: {error.strerror}") from None
        if begins == LFS_POINTER:
            raise ModelError(f"{file} is a Git LFS pointer, not the file itself; run `git lfs pull` in {name}")


def _check_names(names: set[str], name: str) -> None:
    suffixes = {Path(one).suffix for one in names}
    if ".safetensors" not in suffixes:
        if ".gguf" in suffixes:
            raise ModelError(_gguf(name))
        if any(one.endswith((".bin", ".pth", ".pt")) for one in names):
            how = _CONVERT.format(name)
            raise ModelError(f"{name} has weights as *.bin, and only safetensors weights are loaded; convert: {how}")
        raise ModelError(f"{name} has no *.safetensors file; only safetensors weights are loaded")
    if "config.json" not in names:
        raise ModelError(f"{name} has no config.json; give the directory of a Hugging Face model")


def _gguf(name: str) -> str:
    return f"{name} is in the GGUF format, which is not loaded; give the model it was made from, as safetensors"


def _check_config(path: Path, name: str) -> None:
    config = _read_json(path / "config.json", name)
    if (kind := config.get("model_type")) in STATE_SPACE_MODELS:
        why = "has no attention and so no KV to keep"
        raise UnsupportedModelError(f"{name} is a {kind}, which {why}; give a decoder with rotary position embeddings")
    text = config.get("text_config") or config  # of a model that sees
    if text.get("kv_lora_rank"):
        raise UnsupportedModelError(
            f"{name} is a {kind}: multi-head latent attention is not served here; under vLLM or SGLang it is"
        )
    found = config.get("quantization_config") or text.get("quantization_config")
    method = found.get("quant_method", "quantized") if isinstance(found, dict) else None
    method = "GPTQ" if (path / "quantize_config.json").is_file() else method
    method = "AWQ" if (path / "quant_config.json").is_file() else method
    if method is not None and method not in UNPACKED_METHODS:
        remedy = "give the model it was made from, with plain weights"
        raise ModelError(f"{name} is quantized ({method.upper()}), which is not supported; {remedy}")


def _read_json(file: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"cannot read the configuration of {name}: {file.name}: {why}") from None
    if not isinstance(found, dict):
        raise ModelError(f"cannot read the configuration of {name}: {file.name} holds no object of JSON")
    return found


# -- the hub ---------------------------------------------------------------------------------------------------------
def _names_on_hub(hub_id: str, revision: str | None) -> set[str]:
    """The names of the files on the hub, or of those in the cache if the hub cannot be reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = HfApi().model_info(hub_id, revision=revision, timeout=10)
        return {one.rfilename for one in info.siblings or ()}
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise _not_fetched(hub_id, revision, error) from error
    except Exception:  # no network, in one of many ways: only the files in the cache can be used
        return {file.name for file in _fetched(hub_id, revision, ALL_FILES).iterdir()}


def _fetched(hub_id: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(hub_id, revision=revision, allow_patterns=patterns, ignore_patterns=OTHER_FORMATS)
        )
    except Exception as error:  # raised by the hub's library, by its HTTP client, or by the disk
        raise _not_fetched(hub_id, revision, error) from error


def _not_fetched(hub_id: str, revision: str | None, error: Exception) -> ModelError:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(f"{hub_id} has no revision {revision} on the hub; give one of its branches, tags or commits")
    if isinstance(error, errors.GatedRepoError):
        return ModelError(f"{hub_id} is gated: accept its terms on its page at the hub, then run `hf auth login`")
    if isinstance(error, errors.RepositoryNotFoundError):
        why = "no directory here, and no model of the hub that you may read"
        return ModelError(f"{hub_id} is {why}; check the name, or run `hf auth login` for a private one")
    if isinstance(error, errors.LocalEntryNotFoundError):
        is_off = constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if is_off else "the hub cannot be reached"
        return (ModelError if is_off else HubError)(
            f"{hub_id} is no directory here and not complete in the hub's cache, and {why}; give a local directory"
        )
    return HubError(f"cannot get {hub_id} from the hub: {first_line(error) or type(error).__name__}")


# -- what others raise -----------------------------------------------------------------------------------------------
def first_line(error: Exception) -> str:
    """What a library's error says, in one line."""
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error).strip().split("\n")[0][:300]
