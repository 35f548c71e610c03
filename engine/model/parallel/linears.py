"""Layers that have one rank's part of a weight and make their results whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvstore.engine.model.parallel.group import Group
from kvstore.engine.model.parallel.plan import part_of


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
