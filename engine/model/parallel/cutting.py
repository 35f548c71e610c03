"""A network of which this rank holds a part. It is cut while it is empty, and its weights are read in parts.

Then modules are added that make results whole where the plan says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from kvstore.engine.model.parallel.group import Group, Part
from kvstore.engine.model.parallel.linears import GatheredLinear, SummedEmbedding, SummedLinear, sum_outputs
from kvstore.engine.model.parallel.plan import WHOLE_LAYERS, Cut, Division, cut_of, part_of, read_plan, style_of
from kvstore.engine.model.parallel.stages import ONE_STAGE, NoEmbedding, keep_stage, own_layers
from kvstore.errors import UnsupportedModelError

_MERGES = {"MergeModulelist", "Concatenate"}  # of experts' weights, each of which can be cut before it is merged
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def check_divides(config: Any, part: Part) -> None:
    """Check a model before its weights are read.

    Raises UnsupportedModelError if the ranks cannot share its KV, and ConfigError if there are more stages than layers.
    """
    if getattr(config, "quantization_config", None) is not None:
        why = "quantized weights cannot be divided"
        raise UnsupportedModelError(why, WHOLE_LAYERS | ONE_STAGE)
    text = config.get_text_config()
    if part.pipe is not None:
        own_layers(text.num_hidden_layers, part.pipe)
    if part.group is None:
        return
    size = part.group.size
    num_heads = text.num_attention_heads
    part_of(num_heads, 0, size, "attention heads")
    part_of(getattr(text, "num_key_value_heads", None) or num_heads, 0, size, "KV heads")


def load_part(source: str, part: Part, config: Any, dtype: Any, **options: Any) -> tuple[Any, Mapping[str, Any]]:
    """Like transformers' `from_pretrained`, but reads only this rank's part of the files. See `check_divides`."""
    whole = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    plan: dict[str, Division] = {}

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, *args, **kwargs)
        if part.group is not None:
            plan.update(_with_vocabulary_that_divides(self, read_plan(self), part.group))
        if part.pipe is not None:
            keep_stage(self, part.pipe)
        if part.group is not None:
            _cut_shapes(self, plan, part.group)

    # The class keeps the model's name, which is part of fingerprints.
    divided: Any = type(whole.__name__, (whole,), {"__init__": init, "__module__": whole.__module__})
    with torch.device("meta"):
        empty = divided(config)
    with ExitStack() as opened:
        weights = _parts(opened, source, empty, plan, part.group)
        if dtype == "auto" and getattr(config, "dtype", None) is None:
            dtype = next((_DTYPES[w.get_dtype()] for w in weights.values() if w.get_dtype() in _DTYPES), "auto")
        network, report = divided.from_pretrained(None, config=config, state_dict=weights, dtype=dtype, **options)
    if (Path(source) / "generation_config.json").is_file():
        network.generation_config = transformers.GenerationConfig.from_pretrained(source)
    if part.group is not None:
        _make_whole(network, plan, part.group)
    return network, report


# -- shapes ----------------------------------------------------------------------------------------------------------
def _axis(cut: Cut, num_axes: int) -> int:
    return num_axes - 1 if cut is Cut.INPUTS or num_axes == 1 else num_axes - 2


def _with_vocabulary_that_divides(network: Any, plan: dict[str, Division], group: Group) -> dict[str, Division]:
    """Leave embedding and head whole if their rows cannot be divided, or if only one of two tied ones would be cut."""
    names = {module: name for name, module in network.named_modules()}
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    both = {names[module] for module in (embedding, head) if module is not None}
    is_tied = bool(network.config.get_text_config().tie_word_embeddings)
    if embedding.num_embeddings % group.size == 0 and (not is_tied or both <= plan.keys()):
        return plan
    return {pattern: style for pattern, style in plan.items() if pattern not in both}


def _cut_shapes(network: Any, plan: Mapping[str, Division], group: Group) -> None:
    for name, parameter in list(network.named_parameters(remove_duplicate=False)):
        cut = cut_of(plan, name)
        owner, _, leaf = name.rpartition(".")
        module = network.get_submodule(owner)
        if cut is None:
            continue
        shape = list(parameter.shape)
        axis = _axis(cut, len(shape))
        what = f"{'columns' if cut is Cut.INPUTS else 'rows'} of {name}"
        part_of(shape[axis] // (2 if cut is Cut.PACKED else 1), group.rank, group.size, what)
        shape[axis] //= group.size
        module._parameters[leaf] = nn.Parameter(parameter.new_empty(shape), requires_grad=False)
        if isinstance(module, nn.Linear) and leaf == "weight":
            module.out_features, module.in_features = shape


# -- what is read ----------------------------------------------------------------------------------------------------
class PartOfWeight:
    """Looks to transformers' loader like a weight of a file, which the loader reads once, by `[...]`."""

    def __init__(self, weight: Any, cut: Cut, group: Group) -> None:
        self._weight, self._cut, self._group = weight, cut, group
        self.get_dtype = weight.get_dtype

    def __getitem__(self, _: Any) -> Tensor:
        shape = self._weight.get_shape()
        axis = _axis(self._cut, len(shape))
        before: tuple[slice, ...] = (slice(None),) * axis
        if self._cut is not Cut.PACKED:
            return self._weight[(*before, part_of(shape[axis], self._group.rank, self._group.size, "weight"))]
        half = shape[axis] // 2
        own = part_of(half, self._group.rank, self._group.size, "weight")
        halves = (self._weight[(*before, slice(own.start + at, own.stop + at))] for at in (0, half))
        return torch.cat(list(halves), axis)


def _parts(
    opened: ExitStack, source: str, empty: Any, plan: Mapping[str, Division], group: Group | None
) -> dict[str, Any]:
    """This rank's weights by their names in the files, or objects that read its part of them."""
    found: dict[str, Any] = {}
    mapping = get_model_conversion_mapping(empty)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    shapes = empty.state_dict()
    for file in _files(Path(source)):
        content = opened.enter_context(safe_open(file, framework="pt"))
        for key in content.keys():  # noqa: SIM118 (it is no dict)
            weight = content.get_slice(key)
            name, pattern = rename_source_key(key, renamings, converters, empty.base_model_prefix, shapes)
            if name not in shapes:
                continue
            cut = cut_of(plan, name)
            if cut is not None and pattern is not None:
                cut = _cut_of_source(cut, name, pattern, converters)
            found[key] = weight if cut is None or group is None else PartOfWeight(weight, cut, group)
    return found


def _cut_of_source(cut: Cut, name: str, pattern: str, converters: Iterable[WeightConverter]) -> Cut:
    """How to cut a weight that is merged into the parameter `name` with others. Halves are not packed yet there."""
    merge = next(one for one in converters if pattern in one.source_patterns)
    kinds = {type(operation).__name__ for operation in merge.operations}
    if not kinds <= _MERGES or len(merge.target_patterns) != 1:
        why = f"the files have {name} in another form ({', '.join(sorted(kinds))}), which cannot be divided here"
        raise UnsupportedModelError(why, WHOLE_LAYERS)
    return Cut.OUTPUTS if cut is Cut.PACKED and len(merge.source_patterns) == 2 else cut


def _files(source: Path) -> list[Path]:
    index = source / "model.safetensors.index.json"
    if index.is_file():
        return sorted({source / name for name in json.loads(index.read_text())["weight_map"].values()})
    return [source / "model.safetensors"]


# -- what makes it whole -----------------------------------------------------------------------------------------------
def _make_whole(network: Any, plan: Mapping[str, Division], group: Group) -> None:
    for name, module in list(network.named_modules()):
        style = style_of(plan, name)
        if style is None or isinstance(module, nn.Identity | NoEmbedding):
            continue
        if isinstance(module, nn.Embedding):
            network.set_submodule(name, SummedEmbedding(module, group))
        elif isinstance(module, nn.Linear) and (style.sums or style.gathers):
            network.set_submodule(name, SummedLinear(module, group) if style.sums else GatheredLinear(module, group))
        elif style.cut is None and style.sums:
            sum_outputs(module, group)
        elif style.cut is not None and not isinstance(module, nn.Linear):
            kind = type(module).__name__
            raise UnsupportedModelError(f"the plan divides {name}, a {kind}", WHOLE_LAYERS)
