"""Turns logits into tokens: one row of sampling state per running request, and no state in random generators.

Knows rows, logits and SamplingParams; must not know requests, blocks or the scheduler.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from kvstore.engine.model.step.draw import BROKEN, TOP_WIDTHS, UNSURE, argmax, argmax_of_usable, draw_all, draw_cut
from kvstore.engine.outputs import TokenLogprob
from kvstore.engine.sampling_params import SamplingParams
from kvstore.kernels.device import to_device

# Stands for log 0, as in the OpenAI API: JSON has no infinity.
LOWEST_LOGPROB = -9999.0

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_UINT64_MASK = 2**64 - 1
_NO_SLOT = -1

_STATE = np.dtype(
    [
        ("temperature", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),  # the vocabulary's size when off
        ("top_p", np.float64),
        ("repetition_penalty", np.float64),
        ("presence_penalty", np.float64),
        ("frequency_penalty", np.float64),
        ("seed", np.uint64),
        ("num_output_tokens", np.int64),
        ("min_tokens", np.int64),  # 0 when nothing would be forbidden
        ("logprobs", np.int64),  # -1 when not asked
        ("penalty_slot", np.int64),  # _NO_SLOT when no penalty is on
        ("biased", np.bool_),
    ]
)


@dataclass(slots=True)
class _Source:
    """What tokens are drawn from. state [R]; scaled and cuts [S] are of the rows `random` [S] alone."""

    raw: torch.Tensor
    edited: torch.Tensor
    state: np.ndarray
    random: np.ndarray
    scaled: torch.Tensor | None = None
    cuts: Sequence[torch.Tensor] = ()


@dataclass(slots=True)
class Drawn:
    """tokens [R] int64, where the logits are; UNSURE or BROKEN for rows that are to be looked at again.

    source: for that, None when the logits were given up.
    """

    tokens: torch.Tensor
    source: _Source | None


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """token_ids [R] int64; logprobs: None when no row asked, else one entry per row (None where it did not ask)."""

    token_ids: np.ndarray
    logprobs: list[TokenLogprob | None] | None


def uniforms(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Number `counters` of the random stream `seeds`, in [0, 1); both [R] uint64, result [R] float64.

    SplitMix64: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014; constants of
    Vigna's https://prng.di.unimi.it/splitmix64.c. The seed is mixed once by itself, as `split` does there, so that the
    streams of neighbouring seeds (choices of one request) do not lie beside each other.
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

    A row's tokens depend on its own logits, parameters, seed and number of output tokens only, not on the batch.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._state = np.zeros(max_rows, _STATE)
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # row -> token ids, biases
        self._stops: dict[int, np.ndarray] = {}  # row -> token ids that min_tokens forbids
        self._penalties = _Penalties(max_rows, vocab_size, device)
        for row in range(max_rows):
            self._reset(row)

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        stop_token_ids: Sequence[int],
        prompt_token_ids: np.ndarray,
        output_token_ids: np.ndarray,
    ) -> None:
        """A request joins at `row`, maybe resumed with output tokens. stop_token_ids: eos and stop ids, which
        min_tokens forbids. Ids beyond the vocabulary are ignored in stop_token_ids and logit_bias."""
        self.clear_row(row)
        stops = self._known(np.asarray(stop_token_ids, np.int64))
        bias_ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        biases = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        state = self._state
        state["temperature"][row] = params.temperature
        state["min_p"][row] = params.min_p
        state["top_k"][row] = min(params.top_k or self._vocab_size, self._vocab_size)
        state["top_p"][row] = params.top_p
        state["seed"][row] = seed & _UINT64_MASK
        state["num_output_tokens"][row] = len(output_token_ids)
        state["logprobs"][row] = -1 if params.logprobs is None else params.logprobs
        if params.min_tokens and len(stops):
            state["min_tokens"][row] = params.min_tokens
            self._stops[row] = stops
        if params.logit_bias:
            state["biased"][row] = True
            self._biases[row] = (self._known(bias_ids), biases[bias_ids < self._vocab_size])
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            state["repetition_penalty"][row] = params.repetition_penalty
            state["presence_penalty"][row] = params.presence_penalty
            state["frequency_penalty"][row] = params.frequency_penalty
            state["penalty_slot"][row] = self._penalties.acquire(prompt_token_ids, output_token_ids)

    def move_row(self, src: int, dst: int) -> None:
        """The request at `src` is at `dst` from now on; who was at `dst` is forgotten and `src` is free."""
        if src == dst:
            return
        self.clear_row(dst)
        self._state[dst] = self._state[src]
        if src in self._biases:
            self._biases[dst] = self._biases.pop(src)
        if src in self._stops:
            self._stops[dst] = self._stops.pop(src)
        self._reset(src)

    def clear_row(self, row: int) -> None:
        """The request at `row` left. A row that is clear already stays so."""
        slot = int(self._state["penalty_slot"][row])
        if slot != _NO_SLOT:
            self._penalties.release(slot)
        self._biases.pop(row, None)
        self._stops.pop(row, None)
        self._reset(row)

    def append(self, rows: np.ndarray, token_ids: np.ndarray | torch.Tensor) -> None:
        """Token token_ids[i] was accepted as the next output token of rows[i]; both [R]. A row may repeat, in order.

        What only the device knows is not waited for; a row without a token, below 0, is going to be set anew.
        """
        np.add.at(self._state["num_output_tokens"], rows, 1)
        slots = self._state["penalty_slot"][rows]
        penalised = np.flatnonzero(slots != _NO_SLOT)
        if len(penalised):
            tokens = self._tensor(token_ids) if isinstance(token_ids, np.ndarray) else token_ids
            self._penalties.add(self._tensor(slots[penalised]), tokens[self._tensor(penalised)].clamp_(min=0))

    def sample(self, logits: torch.Tensor, rows: np.ndarray, choice_offsets: np.ndarray | None = None) -> SampledTokens:
        """One token for each row of logits [R, V] of any float dtype, which stay as they are; rows [R].

        A row may repeat, with another choice_offsets [R] each time, which is added to its seed. Logits without one
        usable number give a token all the same: the argmax after nan_to_num.
        """
        drawn = self.draw(logits, rows, choice_offsets)
        return self.read(drawn, drawn.tokens.cpu().numpy())

    def draw(self, logits: torch.Tensor, rows: np.ndarray, choice_offsets: np.ndarray | None = None) -> Drawn:
        """As `sample`, as far as nothing has to be waited for on CUDA."""
        assert logits.shape == (len(rows), self._vocab_size), (logits.shape, len(rows), self._vocab_size)
        state = self._state[rows]
        raw = logits.detach()
        random = np.flatnonzero(state["temperature"] > 0)
        source = _Source(raw, self._edit(raw, rows, state), state, random)
        if len(random) == 0:
            return Drawn(argmax(source.edited), source)
        seeds = state["seed"] if choice_offsets is None else state["seed"] + choice_offsets.astype(np.uint64)
        return Drawn(self._draw_some(source, uniforms(seeds, state["num_output_tokens"].astype(np.uint64))), source)

    def read(self, drawn: Drawn, token_ids: np.ndarray) -> SampledTokens:
        """token_ids: `drawn.tokens`, brought to the host; changed in place where rows are looked at again."""
        source = drawn.source
        if source is None:
            return SampledTokens(token_ids, None)
        if (token_ids < 0).any():
            self._look_again(source, token_ids)
        return SampledTokens(token_ids, self._logprobs(source.raw, source.state["logprobs"], token_ids))

    def _reset(self, row: int) -> None:
        self._state[row] = np.zeros((), _STATE)
        self._state["top_k"][row] = self._vocab_size
        self._state["top_p"][row] = 1.0
        self._state["repetition_penalty"][row] = 1.0
        self._state["logprobs"][row] = -1
        self._state["penalty_slot"][row] = _NO_SLOT

    def _known(self, token_ids: np.ndarray) -> np.ndarray:
        return token_ids[token_ids < self._vocab_size]

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(values.copy()), self._device)

    def _edit(self, raw: torch.Tensor, rows: np.ndarray, state: np.ndarray) -> torch.Tensor:
        """Bias, min_tokens and penalties, in this order, on a copy; `raw` itself when no row wants any."""
        biased = np.flatnonzero(state["biased"])
        held = np.flatnonzero(state["num_output_tokens"] < state["min_tokens"])
        penalised = np.flatnonzero(state["penalty_slot"] != _NO_SLOT)
        if not (len(biased) or len(held) or len(penalised)):
            return raw
        logits = raw.to(torch.float32, copy=True)
        if len(biased):
            ids, biases = zip(*(self._biases[row] for row in rows[biased].tolist()), strict=True)
            where = self._positions(biased, ids)
            logits.index_put_(where, self._tensor(np.concatenate(biases)), accumulate=True)
        if len(held):
            where = self._positions(held, [self._stops[row] for row in rows[held].tolist()])
            logits.index_put_(where, logits.new_full((), -torch.inf))
        if len(penalised):
            self._penalties.apply(logits, penalised, state[penalised])
        return logits

    def _positions(self, indices: np.ndarray, ids: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        """Index of logits: every id of ids[i] in row indices[i]."""
        return self._tensor(np.repeat(indices, [len(some) for some in ids])), self._tensor(np.concatenate(ids))

    def _draw_some(self, source: _Source, numbers: np.ndarray) -> torch.Tensor:  # [R]
        """Greedy tokens, and random ones, each kind as one sub-batch; numbers [R] in [0, 1)."""
        logits, random, state = source.edited, source.random, source.state
        if len(random) == len(logits):
            return self._draw(source, logits.float(), state, numbers)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        greedy, others = self._tensor(np.flatnonzero(state["temperature"] == 0)), self._tensor(random)
        tokens[greedy] = argmax(logits[greedy])
        tokens[others] = self._draw(source, logits[others].float(), state[random], numbers[random])
        return tokens

    def _draw(self, source: _Source, logits: torch.Tensor, state: np.ndarray, numbers: np.ndarray) -> torch.Tensor:
        """Temperature, min-p, top-k, top-p and the draw; logits [S, V] float32, numbers [S] in [0, 1); -> [S].

        What a device decides comes back as part of the tokens: it is waited for once, and again for rare rows only.
        """
        with np.errstate(divide="ignore"):  # log 0 = -inf is what "off" means here
            least = np.log(state["min_p"])
        columns = (np.maximum(state["temperature"], 1e-30), least, numbers, state["top_p"], state["top_k"])
        temperature, lowest, *cuts = self._tensor(np.stack(columns))  # in one copy
        best = logits.amax(-1, keepdim=True)
        # The maximum is taken off first: it becomes exactly 0, and no temperature, however small, gives inf or NaN.
        scaled = (logits - best).div_(temperature.float().unsqueeze(-1))
        broken = ~best.isfinite()
        if logits.device.type == "cuda" or bool(broken.any()):  # on CUDA, to ask would wait
            scaled.masked_fill_(broken, 0.0)
        if state["min_p"].any():
            scaled.masked_fill_(scaled < lowest.float().unsqueeze(-1), -torch.inf)
        cut = (state["top_k"] < self._vocab_size) | (state["top_p"] < 1)
        source.scaled, source.cuts = scaled, cuts
        return torch.where(broken.squeeze(-1), BROKEN, self._draw_each(scaled, state, cuts, cut))

    def _look_again(self, source: _Source, token_ids: np.ndarray) -> None:
        for width in (*TOP_WIDTHS[1:], self._vocab_size):
            unsure = np.flatnonzero(token_ids == UNSURE)
            if len(unsure):
                assert source.scaled is not None
                rows, state = np.searchsorted(source.random, unsure), source.state[source.random]
                token_ids[unsure] = self._draw_cut(source.scaled, state, source.cuts, rows, width).cpu().numpy()
        if len(broken := np.flatnonzero(token_ids == BROKEN)):
            token_ids[broken] = argmax_of_usable(source.edited[self._tensor(broken)]).cpu().numpy()

    def _draw_each(
        self, scaled: torch.Tensor, state: np.ndarray, cuts: Sequence[torch.Tensor], cut: np.ndarray
    ) -> torch.Tensor:  # [S]
        """Rows whose tokens are cut by top-k or top-p, and the others. cuts: numbers, top-p and top-k, [S] float64."""
        some, others = np.flatnonzero(cut), np.flatnonzero(~cut)
        if not len(others):
            return self._draw_cut(scaled, state, cuts, some, TOP_WIDTHS[0])
        if not len(some):
            return draw_all(scaled, cuts[0])
        drawn, where = torch.empty(len(scaled), dtype=torch.int64, device=scaled.device), self._tensor(others)
        drawn[where] = draw_all(scaled[where], cuts[0][where])
        drawn[self._tensor(some)] = self._draw_cut(scaled, state, cuts, some, TOP_WIDTHS[0])
        return drawn

    def _draw_cut(
        self, scaled: torch.Tensor, state: np.ndarray, cuts: Sequence[torch.Tensor], rows: np.ndarray, width: int
    ) -> torch.Tensor:  # [len(rows)]
        if len(rows) < len(scaled):
            where = self._tensor(rows)
            scaled, cuts = scaled[where], [column[where] for column in cuts]
        numbers, top_p, top_k = cuts
        all_limited = bool((state["top_k"][rows] < self._vocab_size).all())
        return draw_cut(scaled, numbers, top_k.long(), top_p, width, all_limited)

    def _logprobs(
        self, raw: torch.Tensor, asked: np.ndarray, token_ids: np.ndarray
    ) -> list[TokenLogprob | None] | None:
        """Log-softmax of the unedited logits, as vLLM V1 reports it; asked [R]: how many alternatives, -1: none."""
        rows = np.flatnonzero(asked >= 0)
        if len(rows) == 0:
            return None
        scores = torch.log_softmax(raw[self._tensor(rows)].float(), dim=-1)
        scores = scores.nan_to_num_(nan=LOWEST_LOGPROB, neginf=LOWEST_LOGPROB)
        own = scores.gather(1, self._tensor(token_ids[rows]).unsqueeze(-1)).squeeze(-1).tolist()
        top = scores.topk(min(int(asked.max()), self._vocab_size), dim=-1)
        values, ids = top.values.tolist(), top.indices.tolist()
        result: list[TokenLogprob | None] = [None] * len(asked)
        for i, row in enumerate(rows.tolist()):
            k = int(asked[row])
            alternatives = dict(zip(ids[i][:k], values[i][:k], strict=True))
            result[row] = TokenLogprob(int(token_ids[row]), own[i], alternatives)
        return result


class _Penalties:
    """Token counts of the rows that use penalties, in a pool of dense rows that grows when it must."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self._max_slots = max_slots
        self._vocab_size = vocab_size
        self._seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)  # in the prompt or the answer
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # in the answer
        self._free: list[int] = []

    def acquire(self, prompt_token_ids: np.ndarray, output_token_ids: np.ndarray) -> int:
        """A slot with the counts of these tokens."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        output = torch.from_numpy(np.asarray(output_token_ids, np.int64))
        prompt = torch.from_numpy(np.unique(np.asarray(prompt_token_ids, np.int64)))
        counts = torch.bincount(output, minlength=self._vocab_size).to(self._counts.dtype)
        self._counts[slot] = to_device(counts, self._counts.device)
        self._seen[slot] = self._counts[slot] > 0
        self._seen[slot].index_fill_(0, to_device(prompt, self._seen.device), True)
        return slot

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def add(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        one = torch.ones((), dtype=torch.int32, device=self._counts.device)
        self._counts.index_put_((slots, token_ids), one, accumulate=True)
        self._seen.index_put_((slots, token_ids), one.bool())

    def apply(self, logits: torch.Tensor, indices: np.ndarray, state: np.ndarray) -> None:
        """Changes rows `indices` [P] of logits float32, whose state is `state` [P], where tokens have been seen."""
        names = ("penalty_slot", "repetition_penalty", "frequency_penalty", "presence_penalty")
        columns = np.stack([indices, *(state[name] for name in names)]).astype(np.float64)
        packed = to_device(torch.from_numpy(columns), logits.device)
        rows, slots, factors = packed[0].long(), packed[1].long(), packed[2:].float()
        if logits.device.type == "cuda":  # over the whole vocabulary: to find out which were seen would wait
            values = logits[rows]
            changed = _penalised(values, self._counts[slots], *factors.unsqueeze(-1))
            logits[rows] = torch.where(self._seen[slots], changed, values)
            return
        which, ids = self._seen[slots].nonzero(as_tuple=True)  # one entry per distinct token: few, beside V
        values = logits[rows[which], ids]
        logits[rows[which], ids] = _penalised(values, self._counts[slots[which], ids], *factors[:, which])

    def _grow(self) -> None:
        old = len(self._counts)
        new = min(max(2 * old, 4), self._max_slots)
        assert new > old, "more rows with penalties than rows"
        self._seen = F.pad(self._seen, (0, 0, 0, new - old))
        self._counts = F.pad(self._counts, (0, 0, 0, new - old))
        self._free.extend(range(new - 1, old - 1, -1))


def _penalised(
    values: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """As vLLM does: repetition as a factor that makes the logit smaller, then frequency and presence."""
    values = torch.where(values > 0, values / repetition, values * repetition)
    return values - frequency * counts - presence * (counts > 0)
