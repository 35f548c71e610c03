"""How a model is divided among ranks: the plan that transformers carries for its family, read as data.

Knows names and numbers; no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvstore.errors import UnsupportedModelError

WHOLE_LAYERS = {"tensor_parallel_size": 1}  # with which any model works
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


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
