"""From a directory or a hub id to a Hugging Face model, with its tokenizer and its window.

A digest of its weights, frequencies, configuration and layout is the root of its blocks' lineage: so one store can hold
several models and never mixes them. Every failure is one clear line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from kvstore.engine.model.files import find_model, first_line, window_of
from kvstore.engine.model.parallel.cutting import check_divides, load_part
from kvstore.engine.model.parallel.group import Part
from kvstore.engine.model.text_part import WEIGHT_NAMES, text_part
from kvstore.engine.model.tokenizer import tokenizer_in
from kvstore.engine.sampling_params import SamplingParams
from kvstore.errors import ConfigError, ModelError, RequestError, UnsupportedModelError

if TYPE_CHECKING:
    from kvstore.engine.model.interception import PositionFreeModel
    from kvstore.rope.rotary import Rotation

_QUICK_BYTES = 2**28  # below this no progress bar is shown
LAYOUT_VERSION = 1  # of the arena and of a block's content; raised when the meaning of stored blocks changes
# Where the model came from, who wrote the file, what a forward returns: none of it changes a key or a value. As dtype,
# that of the loaded model counts.
_COSMETIC = {
    "_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "return_dict",
    "output_attentions", "output_hidden_states", "_attn_implementation", "_commit_hash", "id2label", "label2id",
    "problem_type",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded."""

    name: str
    source: str  # the directory
    model: Any  # transformers.PreTrainedModel
    tokenizer: Any  # transformers.PreTrainedTokenizerFast; None if the directory has none: prompts are then token ids
    eos_token_ids: frozenset[int]
    max_model_len: int
    device: torch.device
    sampling_defaults: dict[str, float]  # by name of SamplingParams: the authors' choice where a request makes none


def load(
    model: str | Path | None, device: str, dtype: str, max_model_len: int | None, tokenizer_of: str | None = None,
    revision: str | None = None, chat_template: str | None = None, check: Callable[[Any, Any], None] | None = None,
    part: Part | None = None,
) -> Loaded:  # fmt: skip
    """Load a causal LM from safetensors with eager attention, as its authors wrote it.

    model: None for the built-in one, a local directory, or a hub id. dtype "auto": as stored in the checkpoint.
    tokenizer_of: directory or hub id whose tokenizer is used instead of the model's. revision: of a hub id.
    chat_template: a file, or the text of one, instead of the tokenizer's.
    check: called with the model's configuration and the tokenizer before weights are read; may raise. part: the part of
    the model to load, None for all of it; loading does not need the other ranks.
    The most expensive part comes last. Raises ModelError, UnsupportedModelError or ConfigError.
    """
    directory = find_model(model, revision)
    source = str(directory)
    config = _config(source)
    found = text_part(config)
    if found is None:
        raise UnsupportedModelError(f"{source} is a {config.model_type}, which is no causal language model")
    decoder, config = found
    if part is not None:
        check_divides(config, part)
    window = window_of(config.to_dict(), max_model_len)
    if window is None:
        raise ConfigError("max_model_len", "not set", "give it, as the model does not say how long its window is")
    target = _device(device)
    tokenizer = tokenizer_in(directory, tokenizer_of, chat_template)
    if check is not None:
        check(config, tokenizer)
    network = _network(source, decoder, config, dtype, part).to(target).eval().requires_grad_(False)
    if tokenizer_of is not None:
        _check_vocabulary(tokenizer, tokenizer_of, network)
    is_local = model is not None and Path(model).expanduser().is_dir()
    name = "kvstore-builtin" if model is None else directory.resolve().name if is_local else str(model)
    eos, defaults = _eos_token_ids(network, tokenizer), _sampling_defaults(network.generation_config)
    return Loaded(name, source, network, tokenizer, eos, window, target, defaults)


def _sampling_defaults(config: Any) -> dict[str, float]:
    """The parameters in generation_config.json if it asks for sampling; greedy if it asks for none."""
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


def _config(source: str) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"cannot read the configuration of {source}: {first_line(error)}") from error
    except StrictDataclassError as error:  # its first line names the field, the next one says what is wrong
        why = " ".join(str(error).split())[:300]
        raise ModelError(f"cannot read the configuration of {source}: {why}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{source} is an encoder-decoder ({config.model_type}); only decoders are served")
    return config


def _network(source: str, decoder: type[Any], config: Any, dtype: str, part: Part | None) -> Any:
    torch_dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    bar = transformers.utils.logging.is_progress_bar_enabled()
    if sum(file.stat().st_size for file in Path(source).glob("*.safetensors")) < _QUICK_BYTES:
        transformers.utils.logging.disable_progress_bar()
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # otherwise it prints a table of weights that do not fit
    try:
        options = {
            "config": config,
            "dtype": torch_dtype,
            "attn_implementation": "eager",
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,  # reported below, by name
        }
        if part is not None:
            network, report = load_part(source, decoder, part, **options)
        else:
            network, report = decoder.from_pretrained(source, use_safetensors=True, key_mapping=WEIGHT_NAMES, **options)
    except UnsupportedModelError:
        raise
    except Exception as error:  # of the model's own code, too, which may expect anything of its configuration
        _check_weights(source)
        raise ModelError(f"cannot load {source}: {first_line(error)}") from error
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
        if bar:
            transformers.utils.logging.enable_progress_bar()
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelError(f"{source} lacks {len(missing)} weights of {type(network).__name__}, such as {missing[0]}")
    for key, found, wanted in sorted(report["mismatched_keys"]):
        shapes = f"has shape {list(found)}, but config.json asks for {list(wanted)}"
        raise ModelError(f"{source}: the weight {key} {shapes}; they are of two models, or one of them was changed")
    return network


def _check_weights(source: str) -> None:
    """Raises ModelError for a file of weights that is cut short or damaged."""
    for file in sorted(Path(source).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise ModelError(f"{file} is incomplete or damaged; fetch it again ({first_line(error)})") from error


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("device", f"{name}, but torch sees no CUDA device", "give cpu or auto")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("device", repr(name), "give auto, cpu, cuda or cuda:N") from error
    if device.type != "cuda":
        return device
    if device.index is None:  # the current device of this thread; other threads may have another
        return torch.device("cuda", torch.cuda.current_device())
    if device.index >= torch.cuda.device_count():
        raise ConfigError("device", f"{name}, but torch sees {torch.cuda.device_count()} CUDA devices", "give auto")
    return device


def _check_vocabulary(tokenizer: Any, name: str, network: Any) -> None:
    num_rows = network.get_input_embeddings().num_embeddings
    if len(tokenizer) > num_rows:
        raise ModelError(f"the tokenizer {name} has {len(tokenizer):,} tokens, but the model knows {num_rows:,}")


def _eos_token_ids(network: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    for owner in (network.generation_config, network.config):
        value = getattr(owner, "eos_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)


def fingerprint(model: PositionFreeModel, digest: str, block_size: int) -> str:
    """SHA-256, 64 hex digits, of everything that decides the meaning of a block's bytes.

    digest: of the weights, see `kvstore.disk.weights`. The window counts only if frequencies depend on it.
    """
    spec, first = model.spec, model.spec.shapes[0]
    parts = {
        "layout_version": LAYOUT_VERSION,
        "block_size": block_size,
        "dtype": str(spec.dtype),
        "shape": [len(spec.shapes), first.num_kv_heads, first.key_dim, spec.vocab_size],  # others are in the config
        "class": type(model.network).__name__,
        "config": _plain(model.network.config.to_dict()),
        "weights": digest,
        "frequencies": _frequencies(model.network),
        **({} if spec.state is None else {"state": [str(part) for part in spec.state.stored.parts]}),
        **({"windows": spec.windows} if spec.windows else {}),
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
