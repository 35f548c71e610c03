"""From a directory or a hub id to a Hugging Face model, its tokenizer and its window.

Every failure is one clear line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from engine.builtin import MODEL_DIR
from engine.sampling_params import SamplingParams
from kvstore.errors import ConfigError, ModelError, RequestError, UnsupportedModelError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_SNAPSHOT_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_QUICK_BYTES = 2**28  # below this no progress bar is shown
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded. tokenizer is None when the directory has none: prompts are then token ids.

    source: the directory, or the hub id. sampling_defaults: what the model's authors recommend where a request says
    nothing, by names of SamplingParams.
    """

    name: str
    source: str
    model: Any  # transformers.PreTrainedModel
    tokenizer: Any  # transformers.PreTrainedTokenizerFast | None
    eos_token_ids: frozenset[int]
    max_model_len: int
    device: torch.device
    sampling_defaults: dict[str, float]


def load(
    model: str | Path | None,
    device: str,
    dtype: str,
    max_model_len: int | None,
    tokenizer_of: str | None = None,
    revision: str | None = None,
) -> Loaded:
    """Load a causal LM from safetensors with eager attention, as its authors wrote it.

    model: None for the built-in one, a local directory, or a hub id. dtype "auto": as stored in the checkpoint.
    tokenizer_of: directory or hub id whose tokenizer is used instead of the model's. revision: of a hub id.
    Raises ModelError, UnsupportedModelError or ConfigError.
    """
    source = _source(model)
    is_local = Path(source).is_dir()
    if revision is not None:
        if is_local:
            raise ConfigError(f"revision is {revision!r}, which is for a hub id; {source} is a directory")
        source = _snapshot(source, revision)
    config = _config(source)
    window = _window(config, max_model_len)
    target = _device(device)
    network = _network(source, config, dtype).to(target).eval().requires_grad_(False)
    tokenizer = _tokenizer(source) if tokenizer_of is None else _other_tokenizer(tokenizer_of, network)
    name = "kvstore-builtin" if model is None else Path(source).resolve().name if is_local else str(model)
    eos, defaults = _eos_token_ids(network, tokenizer), _sampling_defaults(network.generation_config)
    return Loaded(name, source, network, tokenizer, eos, window, target, defaults)


def _sampling_defaults(config: Any) -> dict[str, float]:
    """From generation_config.json: what it says when it says to sample; greedy when it says not to."""
    if config is None or getattr(config, "do_sample", None) is None:
        return {}
    if not config.do_sample:
        return {"temperature": 0.0}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: getattr(config, name, None) for name in names}
    defaults = {name: value for name, value in found.items() if value is not None}
    try:
        SamplingParams(**defaults)
    except RequestError:
        return {}
    return defaults


def _source(model: str | Path | None) -> str:
    if model is None:
        return str(MODEL_DIR)
    if not str(model):
        raise ModelError("the model's name is empty; give a model's directory or its hub id")
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:  # ~nobody
        raise ModelError(f"{model} is not a directory: {error}") from error
    if path.is_dir():
        if not any(path.glob("*.safetensors")):
            raise ModelError(f"{path} has no *.safetensors file; only safetensors weights are loaded")
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json; give the directory of a Hugging Face model")
        return str(path)
    if path.exists() or str(model).startswith((".", "/", "~")) or not _HUB_ID.fullmatch(str(model)):
        raise ModelError(f"{model} is not a directory; give a model's directory or its hub id")
    return str(model)


def _snapshot(hub_id: str, revision: str) -> str:
    """The directory of one revision in the hub's cache, fetched when it is not there: the weights' digest needs it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        found: str = snapshot_download(hub_id, revision=revision, allow_patterns=_SNAPSHOT_FILES)
    except (OSError, ValueError, HFValidationError) as error:
        raise ModelError(f"cannot get revision {revision} of {hub_id}: {_first_line(error)}") from error
    return _source(found)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]


def _config(source: str) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot read the configuration of {source}: {_first_line(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{source} is an encoder-decoder ({config.model_type}); only decoders are served")
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(f"{source} is a {config.model_type}, which is no causal language model")
    return config


def _network(source: str, config: Any, dtype: str) -> Any:
    torch_dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    bar = transformers.utils.logging.is_progress_bar_enabled()
    if _weight_bytes(source) < _QUICK_BYTES:
        transformers.utils.logging.disable_progress_bar()
    try:
        network, report = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=torch_dtype,
            use_safetensors=True,
            trust_remote_code=False,  # never asks, never runs a model's own code
            attn_implementation="eager",
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"cannot load {source}: {_first_line(error)}") from error
    finally:
        if bar:
            transformers.utils.logging.enable_progress_bar()
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelError(f"{source} lacks {len(missing)} weights of {type(network).__name__}, such as {missing[0]}")
    return network


def _weight_bytes(source: str) -> float:
    """Size of a local checkpoint; without end for one that may have to be fetched."""
    if not Path(source).is_dir():
        return float("inf")
    return sum(file.stat().st_size for file in Path(source).glob("*.safetensors"))


def _window(config: Any, asked: int | None) -> int:
    text = config.get_text_config()
    own = getattr(text, "max_position_embeddings", None)
    if own is None:
        if asked is None:
            raise ConfigError("the model does not say how long its window is; give max_model_len")
        return asked
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    stretch = max((r.get("factor") or 1.0 for r in kinds if r.get("rope_type") in ("dynamic", "linear")), default=1.0)
    longest = int(own * max(stretch, 1.0))
    if asked is not None and asked > longest:
        raise ConfigError(f"max_model_len is {asked}, but the model was made for {longest} tokens; give at most that")
    return asked or own


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device is {name}, but torch sees no CUDA device; give device=cpu or auto")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}; give auto, cpu, cuda or cuda:N") from error
    if device.type != "cuda":
        return device
    if device.index is None:  # the current one: of this thread, in others it may be another
        return torch.device("cuda", torch.cuda.current_device())
    if device.index >= torch.cuda.device_count():
        raise ConfigError(f"device is {name}, but torch sees {torch.cuda.device_count()} CUDA devices; give auto")
    return device


def load_tokenizer(model: str | Path | None, tokenizer_of: str | None = None, revision: str | None = None) -> Any:
    """What `load` finds as the tokenizer, alone. Raises ModelError."""
    if tokenizer_of is not None:
        return _tokenizer(_expanded(tokenizer_of))
    source = _source(model)
    return _tokenizer(source if revision is None else _snapshot(source, revision))


def _expanded(source: str) -> str:
    return str(Path(source).expanduser()) if source.startswith("~") else source


def _other_tokenizer(source: str, network: Any) -> Any:
    tokenizer = _tokenizer(_expanded(source))
    if tokenizer is None:
        raise ModelError(f"{source} has no tokenizer; give a directory with tokenizer.json, or a hub id")
    num_rows = network.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > num_rows:
        raise ModelError(f"the tokenizer {source} has {len(tokenizer):,} tokens, but the model knows {num_rows:,}")
    return tokenizer


def _tokenizer(source: str) -> Any:
    if Path(source).is_dir() and not any((Path(source) / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"cannot load the tokenizer of {source}: {_first_line(error)}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"{source} has no fast tokenizer (tokenizer.json), which incremental text needs")
    return tokenizer


def _eos_token_ids(network: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    for owner in (network.generation_config, network.config):
        value = getattr(owner, "eos_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)
