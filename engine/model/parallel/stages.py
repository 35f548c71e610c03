"""One stage of a model: a network with some consecutive layers, and its forward together with the other stages.

The first stage also has embedding, last norm and head: they may share a weight, and tokens are sampled there.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvstore.engine.model.parallel.group import Group
from kvstore.errors import ConfigError, UnsupportedModelError

ONE_STAGE = {"pipeline_parallel_size": 1}  # with which any model works


class Entry(nn.Module):
    """Stands in for the layers before this stage, and returns the hidden states that have come from them."""

    hidden: Tensor

    def forward(self, *_: Any, **__: Any) -> Tensor:  # [1, num_tokens, hidden_size]
        return self.hidden


class NoEmbedding(nn.Module):
    """Stands in for an embedding whose output an `Entry` replaces."""

    def __init__(self, num_embeddings: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self._width, self._dtype = width, dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        return torch.zeros(1, dtype=self._dtype, device=token_ids.device).expand(*token_ids.shape, self._width)


def own_layers(num_layers: int, pipe: Group) -> range:
    """The layers of a rank. Where shares differ, the first is the smallest, as its rank has embedding and head, too.

    Raises ConfigError.
    """
    if num_layers < pipe.size:
        raise ConfigError("pipeline_parallel_size", f"{pipe.size}, but the model has {num_layers} layers", "give less")
    return range(num_layers * pipe.rank // pipe.size, num_layers * (pipe.rank + 1) // pipe.size)


def _names(network: Any) -> tuple[str, str]:
    """The names of layers and last norm in the base model. Raises UnsupportedModelError without a plan."""
    plan = list(getattr(network.config.get_text_config(), "base_model_pp_plan", None) or ())
    if len(plan) < 2 or not isinstance(getattr(network.base_model, plan[-2], None), nn.ModuleList):
        why = f"{type(network).__name__} has no plan of pipeline parallelism"
        raise UnsupportedModelError(why, ONE_STAGE)
    return plan[-2], plan[-1]


def keep_stage(network: Any, pipe: Group) -> None:
    """Remove from a network without weights what other stages have. Raises UnsupportedModelError."""
    (list_name, norm_name), base = _names(network), network.base_model
    layers: nn.ModuleList = getattr(base, list_name)
    if any(type(module).__name__.endswith("RotaryEmbedding") for module in layers.modules()):
        raise UnsupportedModelError("its layers make their own rotation", ONE_STAGE)
    own = own_layers(len(layers), pipe)
    del layers[own.stop :]
    if pipe.rank == 0:
        return
    entry, embedding = Entry(), network.get_input_embeddings()
    for index in range(own.start):
        layers[index] = entry
    nothing = NoEmbedding(embedding.num_embeddings, embedding.embedding_dim, embedding.weight.dtype)
    network.set_input_embeddings(nothing)
    network.set_output_embeddings(nn.Identity())
    setattr(base, norm_name, nn.Identity())
    network.all_tied_weights_keys = {}


class Pipeline:
    """The forward of this rank's stage, together with the other stages."""

    def __init__(self, network: Any, pipe: Group) -> None:
        self._network, self._pipe = network, pipe
        config = network.config.get_text_config()
        self.layers = own_layers(config.num_hidden_layers, pipe)
        self._width, self._dtype = config.hidden_size, network.dtype
        self._trial: Tensor | None = None
        self._coming = deque[Callable[[], Tensor]]()  # on the first stage: the rows of forwards that have not ended
        first = getattr(network.base_model, _names(network)[0])[0]
        self._entry = first if isinstance(first, Entry) else Entry()
        self.assemble()

    def assemble(self) -> None:
        """Put the forwards together; to be called again when modules of the network have been replaced."""
        network, base = self._network, self._network.base_model
        list_name, norm_name = _names(network)
        self._body: Any = _with(base, {norm_name: nn.Identity()})
        self._given = Entry()
        embedding = {
            name: NoEmbedding(child.num_embeddings, self._width, self._dtype)
            for name, child in base.named_children()
            if child is network.get_input_embeddings()
        }
        base = _with(base, {list_name: nn.ModuleList([self._given]), **embedding})
        self._ending: Any = _with(network, {network.base_model_prefix: base})

    @property
    def is_first(self) -> bool:
        return self._pipe.rank == 0

    @property
    def _is_last(self) -> bool:
        return self._pipe.rank == self._pipe.size - 1

    def begin(self, token_ids: Tensor, positions: Tensor, samples: Tensor, is_pruned: bool = False) -> Tensor:
        """Compute this stage of a forward. Returns its hidden states of `samples`, [num_samples, hidden_size].

        is_pruned: the last layer computes only these.
        """
        if not self.is_first:
            self._entry.hidden = self._receive(self._pipe.rank - 1, len(token_ids))()
        hidden = self._computed(token_ids, positions)
        if not self._is_last:
            self._pipe.send(self._pipe.rank + 1, hidden)
        if not is_pruned:
            hidden = hidden[:, samples]
        if self._is_last and len(samples):
            self._pipe.send(0, hidden)
        if self.is_first and len(samples):  # at once: the last stage must not wait for this one
            self._coming.append(self._receive(self._pipe.size - 1, len(samples)))
        return hidden[0]

    def end(self, num_samples: int) -> Tensor:
        """On the first stage, the logits of the oldest forward that has not ended, [num_samples, vocab_size]."""
        device = self._network.device
        if not num_samples:
            return torch.empty(0, self._network.get_input_embeddings().num_embeddings, device=device)
        self._given.hidden = self._coming.popleft()()
        ids = torch.zeros(1, num_samples, dtype=torch.int64, device=device)
        logits: Tensor = self._ending(input_ids=ids, position_ids=ids, use_cache=False).logits[0]
        return logits

    def first(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Run a forward with the network's own attention. Returns the logits; on later stages, their hidden states."""
        if self.is_first:
            self._check_layers(token_ids, positions)
        hidden = self.begin(token_ids, positions, positions)
        if self.is_first:
            return self.end(len(positions))
        self._trial = self._entry.hidden
        return hidden

    def run_alone(self, token_ids: Tensor, positions: Tensor, samples: Tensor, is_pruned: bool = False) -> Tensor:
        """Like `begin`, without the other stages: on the hidden states that came in `first`, and for all tokens."""
        if self._trial is not None:
            self._entry.hidden = self._trial
        return self._computed(token_ids, positions)

    def _receive(self, rank: int, count: int) -> Callable[[], Tensor]:
        empty = torch.empty(1, count, self._width, dtype=self._dtype, device=self._network.device)
        return self._pipe.receive(rank, empty)

    def _computed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        ids, places = token_ids.unsqueeze(0), positions.unsqueeze(0)
        hidden: Tensor = self._body(input_ids=ids, position_ids=places, use_cache=False).last_hidden_state
        return hidden

    def _check_layers(self, token_ids: Tensor, positions: Tensor) -> None:
        """Check that layers pass on hidden states only, and get nothing else that depends on tokens or other layers."""
        shape = (1, len(token_ids), self._width)
        seen = [self._seen(ids, positions) for ids in (token_ids, token_ids.flip(0))]
        for (hidden, beside, out), (_, others, _) in zip(*seen, strict=True):
            if any(not isinstance(t, Tensor) or t.shape != shape or t.dtype != self._dtype for t in (hidden, out)):
                raise UnsupportedModelError("its layers hand on more than hidden states", ONE_STAGE)
            if not _is_same(beside, others):
                why = "its layers are given more than hidden states and positions"
                raise UnsupportedModelError(why, ONE_STAGE)

    def _seen(self, token_ids: Tensor, positions: Tensor) -> list[tuple[Any, tuple[Any, ...], Any]]:
        """Run this stage. Returns each layer's first argument, its other arguments, and its output."""
        seen: list[tuple[Any, tuple[Any, ...], Any]] = []

        def note(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
            seen.append((args[0], (*args[1:], *kwargs.values()), out))

        layers = getattr(self._body, _names(self._network)[0])
        hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
        try:
            self.run_alone(token_ids, positions, positions)
        finally:
            for hook in hooks:
                hook.remove()
        return seen


def _is_same(one: Any, other: Any) -> bool:
    """Whether two arguments are equal. False for containers, in which a layer could leave something for another."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_is_same, one, other))
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    return isinstance(one, bool | int | float | str | None) and one == other


def _with(module: Any, children: Mapping[str, nn.Module]) -> Any:
    """A twin of a module that has other children; everything else is shared."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    for name, child in children.items():
        setattr(twin, name, child)
    return twin
