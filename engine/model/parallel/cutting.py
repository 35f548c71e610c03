"""A network of which this rank holds a part. It is cut while it is empty, and its weights are read in parts.

The plan is the one that transformers carries for the family, read as data. Then modules are added that make results
whole where it says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from kvstore.engine.model.parallel.group import Group, Part
from kvstore.engine.model.parallel.stages import ONE_STAGE, NoEmbedding, keep_stage, own_layers
from kvstore.engine.model.states import keeps_states
from kvstore.engine.model.text_part import WEIGHT_NAMES
from kvstore.errors import UnsupportedModelError

WHOLE_LAYERS = {"tensor_parallel_size": 1}  # with which any model works
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_MERGES = {"MergeModulelist", "Concatenate"}  # of experts' weights, each of which can be cut before it is merged
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Cut(Enum):
    """Along which axis a weight, [..., outputs, inputs], is divided."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"
    PACKED = "packed"  # the outputs of two products: each is divided


@dataclass(frozen=True, slots=True)
class Division:
    """What a plan says about a module or a parameter."""

    cut: Cut | None = None
    gathers: bool = False  # the whole output is wanted
    sums: bool = False  # the ranks' outputs are added up


STYLES = {
    "colwise": Division(Cut.OUTPUTS),
    "colwise_gather_output": Division(Cut.OUTPUTS, gathers=True),
    "packed_colwise": Division(Cut.PACKED),
    "rowwise": Division(Cut.INPUTS, sums=True),
    "rowwise_split_input": Division(Cut.INPUTS, sums=True),
    "embedding_rowwise": Division(Cut.OUTPUTS, sums=True),  # rows of its weight: some of the vocabulary
    "moe_tp_experts": Division(sums=True),
    "all_reduce": Division(sums=True),
    "replicated_with_grad_allreduce": Division(),
}


def read_plan(network: Any) -> dict[str, Division]:
    """The divisions by pattern, in which `*` stands for a number. Raises UnsupportedModelError."""
    name, plan = type(network).__name__, getattr(network, "tp_plan", None) or {}
    if not any(pattern.startswith(f"{network.base_model_prefix}.") for pattern in plan):
        raise UnsupportedModelError(f"{name} has no plan of tensor parallelism", WHOLE_LAYERS)
    for pattern, style in plan.items():
        if style not in STYLES or pattern.endswith("bias"):
            why = f"the plan of {name} divides {pattern} as {style}, which is not known here"
            raise UnsupportedModelError(why, WHOLE_LAYERS)
    if any(getattr(network.config.get_text_config(), "activation_sparsity_pattern", None) or ()):
        raise UnsupportedModelError(f"{name} cuts activations off by the spread of all of a layer", WHOLE_LAYERS)
    return {pattern: STYLES[style] for pattern, style in plan.items()}


def style_of(plan: Mapping[str, Division], name: str) -> Division | None:
    """The division of a module or a parameter; None if the plan does not mention it."""
    return plan.get(_NUMBER.sub(".*", name))


def cut_of(plan: Mapping[str, Division], parameter: str) -> Cut | None:
    """How a parameter is divided. A bias is divided as its weight, unless it is added to a sum: then it stays whole."""
    own = style_of(plan, parameter)
    if own is not None:
        return own.cut
    module, _, leaf = parameter.rpartition(".")
    style = style_of(plan, module)
    if style is None or leaf not in ("weight", "bias") or (leaf == "bias" and style.cut is Cut.INPUTS):
        return None
    return style.cut


def part_of(count: int, rank: int, size: int, what: str) -> slice:
    """This rank's share of `count` things. Raises UnsupportedModelError if they cannot be divided equally."""
    if count % size:
        why = f"{count} {what} cannot be divided among {size} ranks"
        raise UnsupportedModelError(why, {"tensor_parallel_size": max(n for n in range(1, size) if count % n == 0)})
    return slice(count // size * rank, count // size * (rank + 1))


class SummedLinear(nn.Module):
    """A linear layer of which each rank has some inputs. The results are summed, then the bias is added once.

    Takes this rank's part of the input, or the whole input.
    """

    def __init__(self, linear: nn.Linear, group: Group) -> None:
        super().__init__()
        self._group, self.bias = group, linear.bias
        linear.bias = None
        self.part = linear

    def forward(self, x: Tensor) -> Tensor:
        width = self.part.in_features
        if x.shape[-1] != width:
            x = x[..., part_of(x.shape[-1], self._group.rank, self._group.size, "inputs")]
        summed = self._group.sum(self.part(x))
        return summed if self.bias is None else summed.add_(self.bias)


class GatheredLinear(nn.Module):
    """A linear layer of which each rank has some outputs; returns all."""

    def __init__(self, linear: nn.Linear, group: Group) -> None:
        super().__init__()
        self.part, self._group = linear, group

    def forward(self, x: Tensor) -> Tensor:
        return self._group.gather(self.part(x))


class SummedEmbedding(nn.Module):
    """An embedding of which each rank has some tokens, with zeros for the others; the results are summed."""

    def __init__(self, embedding: nn.Embedding, group: Group) -> None:
        super().__init__()
        self.part, self._group = embedding, group
        embedding.padding_idx = None  # the padding token may be another rank's
        num_own = len(embedding.weight)
        self._first = num_own * group.rank
        self.num_embeddings = num_own * group.size

    @property
    def weight(self) -> Tensor:
        return self.part.weight

    def forward(self, token_ids: Tensor) -> Tensor:
        own = token_ids - self._first
        is_own = (own >= 0) & (own < len(self.weight))
        found = self.part(torch.where(is_own, own, 0))
        return self._group.sum(found.masked_fill_(~is_own.unsqueeze(-1), 0))


def sum_outputs(module: nn.Module, group: Group) -> None:
    """Sum the outputs of a module that has a part of its parameters and whose forward returns one tensor."""
    forward = module.forward

    def summed(*args: Any, **kwargs: Any) -> Tensor:
        return group.sum(forward(*args, **kwargs))

    module.__dict__["forward"] = summed


def check_divides(config: Any, part: Part) -> None:
    """Check a model before its weights are read.

    Raises UnsupportedModelError if the ranks cannot share its KV, and ConfigError if there are more stages than layers.
    """
    if getattr(config, "quantization_config", None) is not None:
        why = "quantized weights cannot be divided"
        raise UnsupportedModelError(why, WHOLE_LAYERS | ONE_STAGE)
    text = config.get_text_config()
    if text.to_dict().get("per_layer_config"):
        raise UnsupportedModelError("its layers have different shapes", WHOLE_LAYERS | ONE_STAGE)
    if keeps_states(config):
        raise UnsupportedModelError("it keeps states beside its KV, which are not divided", WHOLE_LAYERS | ONE_STAGE)
    if part.pipe is not None:
        own_layers(text.num_hidden_layers, part.pipe)
    if part.group is None:
        return
    size = part.group.size
    num_heads = text.num_attention_heads
    part_of(num_heads, 0, size, "attention heads")
    part_of(getattr(text, "num_key_value_heads", None) or num_heads, 0, size, "KV heads")


def load_part(
    source: str, whole: type[Any], part: Part, config: Any, dtype: Any, **options: Any
) -> tuple[Any, Mapping[str, Any]]:
    """Like `from_pretrained` of the class `whole`, but reads only this rank's part of the files."""
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
        options |= {"config": config, "state_dict": weights, "dtype": dtype, "key_mapping": WEIGHT_NAMES}
        network, report = divided.from_pretrained(None, **options)
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
    mapping = get_model_conversion_mapping(empty, WEIGHT_NAMES)
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
