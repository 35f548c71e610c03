"""How each row of the batch is sampled. Each running request has a row of state; random generators have none.

Knows rows, logits and SamplingParams; must not know requests, blocks or the scheduler.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from llguidance import LLMatcher
from torch import Tensor

from kvstore.engine.model.step.drawing import Drawing, Drawn, SampledTokens
from kvstore.engine.model.step.masks import GrammarMasks, allows_others
from kvstore.engine.sampling_params import SamplingParams
from kvstore.kernels.device import to_device

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_UINT64_MASK = 2**64 - 1
_NO_ROW = -1

_STATE = np.dtype(
    [
        ("temperature", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),  # the vocabulary's size if off
        ("top_p", np.float64),
        ("repetition_penalty", np.float64),
        ("presence_penalty", np.float64),
        ("frequency_penalty", np.float64),
        ("seed", np.uint64),
        ("num_output_tokens", np.int64),
        ("min_tokens", np.int64),  # 0 if there is nothing to forbid
        ("logprobs", np.int64),  # how many alternatives; -1: none
        ("penalty_row", np.int64),  # _NO_ROW if no penalty is on
        ("biased", np.bool_),
    ]
)


def uniforms(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Number `counters` of the random stream `seeds`, in [0, 1); both [R] uint64, result [R] float64.

    SplitMix64: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014; constants of
    Vigna's https://prng.di.unimi.it/splitmix64.c. The seed itself is mixed once, as `split` does there, so that
    neighbouring seeds (choices of one request) do not give neighbouring streams.
    """
    state = _mix64(seeds + np.uint64(_GOLDEN_GAMMA))
    bits = _mix64(state + (counters + np.uint64(1)) * np.uint64(_GOLDEN_GAMMA))
    return (bits >> np.uint64(11)) * 2.0**-53


def _mix64(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Sampler:
    """Sampling state of the persistent batch: one row per running request, arrays reused from step to step.

    A row's tokens depend only on its own logits, parameters, seed and number of output tokens, not on the batch.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._clear = np.array((0, 0, vocab_size, 1, 1, 0, 0, 0, 0, 0, -1, _NO_ROW, False), _STATE)
        self._state = np.full(max_rows, self._clear)
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # row -> token ids, biases
        self._stops: dict[int, np.ndarray] = {}  # row -> token ids that min_tokens forbids
        self._penalties = _Penalties(max_rows, vocab_size, device)
        self._masks = GrammarMasks(vocab_size, device)
        self._edited = torch.empty(0, vocab_size, device=device)

    def set_row(
        self, row: int, params: SamplingParams, seed: int, stop_token_ids: Sequence[int], prompt_token_ids: np.ndarray,
        output_token_ids: np.ndarray, matcher: LLMatcher | None = None,
    ) -> None:  # fmt: skip
        """Let a request join at `row`; if it is resumed, it has output tokens. stop_token_ids: eos and stop ids, which
        min_tokens forbids. Ids beyond the vocabulary are ignored in stop_token_ids and logit_bias. matcher: of its
        grammar; whoever owns it lets it consume what is sampled before the next draw."""
        self.clear_row(row)
        stops = self._known(np.asarray(stop_token_ids, np.int64))
        bias_ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        biases = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        if params.min_tokens and len(stops):
            self._stops[row] = stops
        if params.logit_bias:
            self._biases[row] = (self._known(bias_ids), biases[bias_ids < self._vocab_size])
        if matcher is not None:
            self._masks.matchers[row] = matcher
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        penalty_row = _NO_ROW
        if penalties != (1, 0, 0):
            penalty_row = self._penalties.acquire(prompt_token_ids, output_token_ids)
        self._state[row] = (
            params.temperature, params.min_p, min(params.top_k or self._vocab_size, self._vocab_size), params.top_p,
            *penalties, seed & _UINT64_MASK, len(output_token_ids), params.min_tokens if len(stops) else 0,
            -1 if params.logprobs is None else params.logprobs, penalty_row, bool(params.logit_bias),
        )  # fmt: skip

    def move_row(self, src: int, dst: int) -> None:
        """Move the request at row `src` to `dst`, whose request is forgotten. Row `src` is then free."""
        if src == dst:
            return
        self.clear_row(dst)
        self._state[dst] = self._state[src]
        if src in self._biases:
            self._biases[dst] = self._biases.pop(src)
        if src in self._stops:
            self._stops[dst] = self._stops.pop(src)
        if src in self._masks.matchers:
            self._masks.matchers[dst] = self._masks.matchers.pop(src)
        self._state[src] = self._clear

    def clear_row(self, row: int) -> None:
        """Clear the row of a request that has left. The row may be clear already."""
        penalty_row = int(self._state["penalty_row"][row])
        if penalty_row != _NO_ROW:
            self._penalties.release(penalty_row)
        self._biases.pop(row, None)
        self._stops.pop(row, None)
        self._masks.matchers.pop(row, None)
        self._state[row] = self._clear

    def is_constrained(self, rows: np.ndarray) -> bool:
        """Whether a grammar must have consumed the last token of one of these rows before the next one is drawn."""
        return len(self._masks.constrained(rows)) > 0

    def append(self, rows: np.ndarray, token_ids: np.ndarray | Tensor) -> None:
        """Note that token_ids[i] is the next output token of rows[i]; both [R]. A row may occur repeatedly, in order.

        Does not wait for tokens that only the device knows. A row whose token is below 0 will be set anew.
        """
        np.add.at(self._state["num_output_tokens"], rows, 1)
        penalty_rows = self._state["penalty_row"][rows]
        penalised = np.flatnonzero(penalty_rows != _NO_ROW)
        if len(penalised):
            tokens = self._tensor(token_ids) if isinstance(token_ids, np.ndarray) else token_ids
            self._penalties.add(self._tensor(penalty_rows[penalised]), tokens[self._tensor(penalised)].clamp_(min=0))

    def sample(self, logits: Tensor, rows: np.ndarray, choice_offsets: np.ndarray | None = None) -> SampledTokens:
        """Sample one token from each row of logits [R, V] of any float dtype, which do not change; rows [R].

        A row may occur several times with different choice_offsets [R], which are added to its seed. Logits without a
        usable number give a token, too: the argmax after nan_to_num.
        """
        drawn = self.draw(logits, rows, choice_offsets)
        return drawn.read(drawn.tokens.cpu().numpy())

    def draw(self, logits: Tensor, rows: np.ndarray, choice_offsets: np.ndarray | None = None) -> Drawn:
        """Like `sample`, but does not wait on CUDA: some tokens may have to be looked at again."""
        assert logits.shape == (len(rows), self._vocab_size), (logits.shape, len(rows), self._vocab_size)
        state = self._state[rows]
        raw = logits.detach()
        drawing = Drawing(raw, self._edit(raw, rows, state), state)
        if drawing.is_greedy:
            return Drawn(drawing.best(), drawing)
        seeds = state["seed"] if choice_offsets is None else state["seed"] + choice_offsets.astype(np.uint64)
        return Drawn(drawing.draw(uniforms(seeds, state["num_output_tokens"].astype(np.uint64))), drawing)

    def _known(self, token_ids: np.ndarray) -> np.ndarray:
        return token_ids[token_ids < self._vocab_size]

    def _tensor(self, values: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(values.copy()), self._device)

    def _edit(self, raw: Tensor, rows: np.ndarray, state: np.ndarray) -> Tensor:
        """Bias, min_tokens, penalties and grammars, in this order, on a copy; `raw` itself when no row wants any.

        min_tokens does not hold back the end of an answer to which nothing more can be added.
        """
        biased = np.flatnonzero(state["biased"])
        held = np.flatnonzero(state["num_output_tokens"] < state["min_tokens"])
        penalised = np.flatnonzero(state["penalty_row"] != _NO_ROW)
        constrained = self._masks.constrained(rows)
        if not (len(biased) or len(held) or len(penalised) or len(constrained)):
            return raw
        masks = self._masks.masks(rows[constrained]) if len(constrained) else np.empty((0, 0), np.int32)
        if len(constrained) == len(rows) and not (len(biased) or len(held) or len(penalised)):
            return self._masks.added(masks).add_(raw)  # without a copy of the logits
        if len(constrained) and len(held):
            masked = dict(zip(constrained.tolist(), masks, strict=True))
            kept = [i for i in held.tolist() if i not in masked or allows_others(masked[i], self._stops[rows[i]])]
            held = np.array(kept, np.int64)
        logits = self._copied(raw)
        if len(biased):
            ids, biases = zip(*(self._biases[row] for row in rows[biased].tolist()), strict=True)
            where = self._positions(biased, ids)
            logits.index_put_(where, self._tensor(np.concatenate(biases)), accumulate=True)
        if len(held):
            where = self._positions(held, [self._stops[row] for row in rows[held].tolist()])
            logits.index_put_(where, logits.new_full((), -torch.inf))
        if len(penalised):
            self._penalties.apply(logits, penalised, state[penalised])
        if len(constrained):
            logits.index_add_(0, self._tensor(constrained), self._masks.added(masks))
        return logits

    def _copied(self, raw: Tensor) -> Tensor:
        """A copy in float32; on a CPU where the last one was, because new pages cost more than the copy."""
        if raw.device.type != "cpu":
            return raw.to(torch.float32, copy=True)
        if len(self._edited) < len(raw):
            self._edited = torch.empty(raw.shape, dtype=torch.float32)
        return self._edited[: len(raw)].copy_(raw)

    def _positions(self, indices: np.ndarray, ids: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """An index into logits: every id of ids[i] in row indices[i]."""
        return self._tensor(np.repeat(indices, [len(some) for some in ids])), self._tensor(np.concatenate(ids))


class _Penalties:
    """Token counts of the rows that use penalties, in a pool of dense rows that grows when it must."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)  # in the prompt or the answer
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # in the answer
        self._free: list[int] = []

    def acquire(self, prompt_token_ids: np.ndarray, output_token_ids: np.ndarray) -> int:
        if not self._free:
            self._grow()
        row = self._free.pop()
        output = torch.from_numpy(np.asarray(output_token_ids, np.int64))
        prompt = torch.from_numpy(np.unique(np.asarray(prompt_token_ids, np.int64)))
        counts = torch.bincount(output, minlength=self._vocab_size).to(self._counts.dtype)
        self._counts[row] = to_device(counts, self._counts.device)
        self._seen[row] = self._counts[row] > 0
        self._seen[row].index_fill_(0, to_device(prompt, self._seen.device), True)
        return row

    def release(self, row: int) -> None:
        self._free.append(row)

    def add(self, rows: Tensor, token_ids: Tensor) -> None:
        one = torch.ones((), dtype=torch.int32, device=self._counts.device)
        self._counts.index_put_((rows, token_ids), one, accumulate=True)
        self._seen.index_put_((rows, token_ids), one.bool())

    def apply(self, logits: Tensor, indices: np.ndarray, state: np.ndarray) -> None:
        """Penalise the tokens that were seen in rows `indices` [P] of logits float32, whose state is `state` [P]."""
        names = ("penalty_row", "repetition_penalty", "frequency_penalty", "presence_penalty")
        columns = np.stack([indices, *(state[name] for name in names)]).astype(np.float64)
        packed = to_device(torch.from_numpy(columns), logits.device)
        rows, penalty_rows, factors = packed[0].long(), packed[1].long(), packed[2:].float()
        if logits.device.type == "cuda":  # over the whole vocabulary: finding the seen tokens would wait
            values = logits[rows]
            changed = _penalised(values, self._counts[penalty_rows], *factors.unsqueeze(-1))
            logits[rows] = torch.where(self._seen[penalty_rows], changed, values)
            return
        # One entry per distinct token, few compared with V.
        which, ids = self._seen[penalty_rows].nonzero(as_tuple=True)
        values = logits[rows[which], ids]
        logits[rows[which], ids] = _penalised(values, self._counts[penalty_rows[which], ids], *factors[:, which])

    def _grow(self) -> None:
        old = len(self._counts)
        new = min(max(2 * old, 4), self._max_rows)
        assert new > old, "more rows with penalties than rows"
        self._seen = F.pad(self._seen, (0, 0, 0, new - old))
        self._counts = F.pad(self._counts, (0, 0, 0, new - old))
        self._free.extend(range(new - 1, old - 1, -1))


def _penalised(values: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    """Penalties as in vLLM: repetition is a factor that makes the logit smaller; then come frequency and presence."""
    values = torch.where(values > 0, values / repetition, values * repetition)
    return values - frequency * counts - presence * (counts > 0)
