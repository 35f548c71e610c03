"""Tiny models whose weights are packed in spite of their size, engines over them, and the forward they are held to.

An engine's answers are compared with transformers' own forward over prompt and answer together, token by token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from kvstore import Engine
from kvstore.engine.model import lean, packing
from kvstore.engine.model.packing import PackedLinear
from kvstore.kernels.cpu import attention as attention_native
from kvstore.kernels.cpu import layer as layer_native
from kvstore.kernels.cpu import native
from tests.support.by_hand import by_hand
from tests.support.engines import greedy, open_engine, tokens
from tests.support.models import make_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUM_LAYERS = 3
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "wide": ("Llama", {"hidden_size": 128, "intermediate_size": 192, "num_key_value_heads": 1, "mlp_bias": True}),
    "odd": ("Llama", {"hidden_size": 72, "intermediate_size": 100, "head_dim": 16, "vocab_size": 163}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {}),
}
TOP = 20  # logits of a token that are compared, the largest; so many an engine reports
# Errors of log probabilities: the root of their mean square over the compared ones of one token, in units of the
# standard deviation over its whole row. A row that belongs to another token is off by 1.4. In 16 bits they are measured
# by those of transformers' own forward: the largest of any token, and the mean.
FLOAT32_LIMIT = 3e-5
LARGEST_EXCESS, MEAN_EXCESS = 1.6, 1.15


@contextmanager
def small_weights_packed() -> Iterator[None]:
    with mock.patch.multiple(packing, MIN_FLOAT32_ELEMENTS=0, MIN_BFLOAT16_ELEMENTS=0):
        yield


def make(name: str, dtype: str, **changes: Any) -> Any:
    architecture, own = MODELS[name]
    return make_model(architecture, dtype=DTYPES[dtype], **{**own, **changes})


def pool_bytes(network: Any, num_blocks: int) -> int:
    """Of so many blocks of 16 tokens."""
    config = network.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return num_blocks * 16 * 2 * NUM_LAYERS * config.num_key_value_heads * head_dim * network.dtype.itemsize


def asking(count: int, **changes: Any) -> Any:
    """Greedy parameters of an answer that can be checked."""
    return greedy(count, logprobs=TOP, **changes)


@torch.inference_mode()
def next_logprobs(network: Any, lines: list[list[int]]) -> torch.Tensor:  # [lines, longest, vocab_size]
    """Log probabilities of what follows each token; lines are filled up at their ends, where nothing looks back to."""
    longest = max(map(len, lines))
    ids = torch.tensor([[*line, *[0] * (longest - len(line))] for line in lines])
    return network(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)


def errors_of(found: torch.Tensor, exact: torch.Tensor, compared: torch.Tensor) -> torch.Tensor:  # [..., tokens]
    """found, exact: log probabilities, [..., tokens, vocab_size]; compared: ids, [..., tokens, TOP]."""
    differences = found.gather(-1, compared) - exact.gather(-1, compared)
    return differences.square().mean(-1).sqrt() / exact.std(-1)


class Reference:
    """What transformers' own forward gives, in the model's dtype and, over the same weights, in float32.

    Collects the errors of all answers that it was shown.
    """

    def __init__(self, network: Any) -> None:
        self.network, self.dtype = network, str(network.dtype).removeprefix("torch.")
        self.exact = network
        if network.dtype != torch.float32:
            self.exact = type(network)(network.config).eval().requires_grad_(False)
            self.exact.load_state_dict(network.state_dict())
        self.errors: list[float] = []
        self.their_errors: list[float] = []
        self.limit = FLOAT32_LIMIT
        if self.exact is not network:
            self.limit = LARGEST_EXCESS * self._largest_error()

    def _largest_error(self) -> float:
        """Of transformers' own forward, over a thousand random tokens."""
        lines = [tokens(900 + i, 150, self.network.config.vocab_size) for i in range(8)]
        theirs, exact = (next_logprobs(network, lines) for network in (self.network, self.exact))
        return float(errors_of(theirs, exact, theirs.topk(TOP).indices).max())

    def check(self, *outputs: Any, is_greedy: bool = True) -> None:
        """Every token of every choice of these outputs, which were asked for with `asking`."""
        pairs = [(output, choice) for output in outputs for choice in output.choices]
        lines = [[*output.prompt_token_ids, *choice.token_ids] for output, choice in pairs]
        theirs, exact = (next_logprobs(network, lines) for network in (self.network, self.exact))
        for (output, choice), *rows in zip(pairs, theirs, exact, strict=True):
            assert len(choice.logprobs) == len(choice.token_ids) > 0
            first = len(output.prompt_token_ids) - 1
            self.check_choice(choice, *(part[first : first + len(choice.token_ids)] for part in rows), is_greedy)

    def check_choice(self, choice: Any, theirs: torch.Tensor, exact: torch.Tensor, is_greedy: bool = True) -> None:
        """theirs, exact: rows of log probabilities from which the choice's tokens were drawn."""
        compared = torch.tensor([list(entry.top) for entry in choice.logprobs])
        values = torch.tensor([list(entry.top.values()) for entry in choice.logprobs])
        errors = errors_of(torch.zeros_like(exact).scatter_(-1, compared, values), exact, compared)
        number = int(errors.argmax())
        assert errors[number] <= self.limit, (
            f"token {number} is off by {float(errors[number]):.2g}, not {self.limit:.2g}"
        )
        assert [entry.token_id for entry in choice.logprobs] == choice.token_ids
        if is_greedy:
            assert [entry.logprob for entry in choice.logprobs] == values.amax(-1).tolist()
        if is_greedy and self.dtype == "float32":  # the best there is; of two that differ by rounding, either
            chosen = exact.gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
            assert bool((exact.amax(-1) - chosen <= self.limit * exact.std(-1)).all())
        self.errors += errors.tolist()
        self.their_errors += errors_of(theirs, exact, compared).tolist()

    def check_precision(self) -> None:
        """Over all that was shown so far: not less exact than transformers in the same dtype."""
        if self.dtype != "float32":
            ours, theirs = sum(self.errors), sum(self.their_errors)
            assert 0 < ours <= MEAN_EXCESS * theirs, f"errors are {ours / theirs:.2f} of those of transformers"


class Watched:
    """An engine over packed weights, with the sizes of the steps that it ran and what of its model was replaced."""

    def __init__(self, engine: Engine) -> None:
        self.engine = by_hand(engine)
        self.model = engine.loop.runner.model
        self.carrier = self.model.network.kvstore_carrier
        self.steps: list[tuple[int, int, int, int]] = []  # tokens, requests, of these with one token, samples
        self._begin = self.model.begin
        self.model.begin = self._watch  # type: ignore[method-assign]

    def _watch(self, token_ids: Any, positions: Any, batch: Any, *others: Any) -> Any:
        self.steps.append((len(token_ids), len(batch.context_lens), batch.num_decodes, len(others[2])))
        return self._begin(token_ids, positions, batch, *others)

    @property
    def num_lean(self) -> int:
        modules = self.model.network.modules()
        return sum(isinstance(module.__dict__.get("forward"), lean.LeanLayer) for module in modules)

    @property
    def num_native(self) -> int:
        """Layers that C computes beside their attention, for steps of few rows."""
        layers = (module.__dict__.get("forward") for module in self.model.network.modules())
        return sum(isinstance(layer, lean.LeanLayer) and layer.native is not None for layer in layers)

    @property
    def num_packed(self) -> int:
        return sum(isinstance(module, PackedLinear) for module in self.model.network.modules())

    @property
    def num_linears(self) -> int:
        return sum(type(module) is torch.nn.Linear for module in self.model.network.modules())

    @property
    def num_chunks_without_samples(self) -> int:
        return sum(not samples for *_, samples in self.steps)

    @property
    def num_mixed(self) -> int:
        """Steps in which some requests decode beside others that prefill."""
        return sum(0 < decodes < requests for _, requests, decodes, _ in self.steps)

    def num_decodes_of(self, size: int) -> int:
        """Steps that are single tokens of so many requests."""
        return sum(step == (size, size, size, size) for step in self.steps)

    def finish(self) -> None:
        """Steps until nothing runs any more."""
        while self.engine.has_work:
            self.engine.step()
        self.engine.check_integrity()

    def answer(self, prompts: list[list[int]], *params: Any) -> list[Any]:
        """Outputs of prompts that run together; `steps` are theirs then. params: one for all, or one each."""
        self.steps.clear()
        outputs = self.engine.generate(prompts, params if len(params) > 1 else params[0])
        self.engine.check_integrity()
        return outputs


@contextmanager
def watched(folder: Path, path: Path | None = None, **options: Any) -> Iterator[Watched]:
    """An engine over the model in `folder`; with `path`, over a store there."""
    with small_weights_packed():
        engine = open_engine(str(folder), path, **options)
    with engine:
        yield Watched(engine)
        engine.check_integrity()


def layer_stays(number: int) -> pytest.MonkeyPatch:
    """From now until it is undone, this layer of a model stays as its authors wrote it."""
    is_plain, patch = lean._is_plain, pytest.MonkeyPatch()
    patch.setattr(lean, "_is_plain", lambda layer: is_plain(layer) and layer.self_attn.layer_idx != number)
    return patch


def without_c() -> pytest.MonkeyPatch:
    """From now until it is undone, no compiler is here."""
    patch = without_tiles()
    patch.setattr(native, "library", lambda: None)
    return patch


def without_tiles() -> pytest.MonkeyPatch:
    """From now until it is undone, oneDNN computes every product."""
    patch = pytest.MonkeyPatch()
    patch.setattr(layer_native, "num_columns", lambda: 0)
    patch.setattr(attention_native, "_library", lambda: None)
    return patch


def has_products() -> bool:
    """In C, by tiles or by vectors."""
    return layer_native.num_columns() > 0


@contextmanager
def counted(owner: Any, name: str) -> Iterator[list[bool]]:
    """One entry for every call of a method of a class, or of a function of a module: whether it did what was asked."""
    did: list[bool] = []
    called = getattr(owner, name)

    def counting(*args: Any) -> Any:
        result = called(*args)
        did.append(result is not None and result is not False)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, counting)
        yield did
