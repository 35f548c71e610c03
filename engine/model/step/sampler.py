"""How each row of the batch is sampled: the best token, or by inverse CDF with a given number in [0, 1).

First the draw itself, as functions of tensors; then one step's tokens by the parameters of their rows. Each running
request has a row of state; random generators have none. Knows rows, logits and SamplingParams; must not know requests,
blocks or the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from llguidance import LLMatcher
from torch import Tensor

from kvstore.engine.model.step.masks import GrammarMasks, allows_others
from kvstore.engine.model.step.penalties import Penalties
from kvstore.engine.outputs import TokenLogprob
from kvstore.engine.sampling_params import SamplingParams
from kvstore.kernels.paged_batch import to_device
from kvstore.kernels.token_masks import forbid_tokens

# How many of the best tokens to look at for top-k and top-p, in turn, before everything is sorted.
TOP_WIDTHS = (128, 2048)
# The inverse CDF sums chunks first: a running sum over a whole vocabulary in float64 is ten times slower.
CHUNK = 128
UNSURE, BROKEN = -1, -2  # instead of a token: more tokens must be looked at; the row has no usable number
LOWEST_LOGPROB = -9999.0  # for log 0, as in the OpenAI API: JSON has no infinity
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


def argmax(logits: Tensor) -> Tensor:
    """The best token of each row [S], the lowest id among equals; BROKEN if there is a NaN. Waits for nothing."""
    if logits.device.type == "cpu":  # numpy's is vectorised: 0.13 ms against 0.84 ms for [64, 32000]
        values = logits.float().numpy()
        token_ids = values.argmax(-1)
        token_ids[np.isnan(np.take_along_axis(values, token_ids[:, None], -1)[:, 0])] = BROKEN
        return torch.from_numpy(token_ids)
    best = logits.max(-1)  # NaN wins
    return torch.where(best.values.isnan(), BROKEN, best.indices)


def argmax_of_usable(logits: Tensor) -> Tensor:
    """As `argmax`, but NaN counts as the lowest number that is not forbidden (-inf)."""
    lowest = torch.finfo(torch.float32).min
    return logits.float().nan_to_num_(nan=lowest, neginf=-torch.inf).argmax(-1)


def draw_all(scaled: Tensor, numbers: Tensor) -> Tensor:
    """Inverse CDF over all tokens, by id: scaled [S, V] with maximum 0, overwritten; numbers [S] float64; -> [S]."""
    padding = -scaled.shape[1] % CHUNK
    weights = (F.pad(scaled, (0, padding), value=-torch.inf) if padding else scaled).exp_()
    chunks = weights.view(len(weights), -1, CHUNK)
    sums = chunks.sum(-1).cumsum(-1, dtype=torch.float64)
    target = _below(numbers, sums[:, -1])
    chunk = torch.searchsorted(sums, target, right=True)  # in this chunk the sum grows, so it has some weight
    before = F.pad(sums, (1, 0)).gather(1, chunk)
    inside = chunks[torch.arange(len(chunks), device=chunks.device), chunk.squeeze(-1)]  # [S, CHUNK]
    reached = (before + inside.cumsum(-1, dtype=torch.float64) > target) & (inside > 0)
    # This sum may be rounded to just below the chunk's sum. Then take the last token with weight.
    last = (inside > 0) * torch.arange(1, CHUNK + 1, device=chunks.device)
    offset = torch.where(reached.any(-1), reached.int().argmax(-1), last.argmax(-1))
    return chunk.squeeze(-1) * CHUNK + offset


def draw_cut(scaled: Tensor, numbers: Tensor, top_k: Tensor, top_p: Tensor, width: int, all_limited: bool) -> Tensor:
    """Inverse CDF over the tokens that top_k [S] and then top_p [S] leave, best first, lowest id first among equals.

    Looks at the best `width` tokens, and returns UNSURE for rows that need more. That depends on the row alone, so its
    token does not depend on the batch. all_limited: no row's top_k is the whole vocabulary. On CUDA nothing waits for
    the device. scaled [S, V] with maximum 0, numbers [S] float64; -> [S].
    """
    vocab_size = scaled.shape[1]
    width = min(width, vocab_size)
    values, ids = _best(scaled, width)
    cumulated = values.double().exp().cumsum(-1)
    mass = _at(cumulated, top_k.clamp(max=width) - 1)  # of the tokens that top_k leaves
    limited = top_k < vocab_size
    if not all_limited:
        mass = torch.where(limited, mass, scaled.exp().sum(-1).double())
    top_mass = torch.where(top_p < 1, top_p * mass, torch.inf)
    before = F.pad(cumulated[:, :-1], (1, 0))
    num_kept = (before < top_mass.unsqueeze(-1)).sum(-1).clamp(min=1).minimum(top_k)
    target = _below(numbers, _at(cumulated, num_kept - 1))
    rank = torch.searchsorted(cumulated, target, right=True).squeeze(-1)
    value = _at(values, rank).unsqueeze(-1)
    place = rank - (values > value).sum(-1)  # among the tokens of the same value
    if ids is None:
        return _token_at(scaled == value, place)
    tokens = _at(torch.where(values == value, ids, vocab_size).sort(-1).values, place)
    if width == vocab_size:
        return tokens
    more = torch.where(limited, top_k > width, cumulated[:, -1] < top_mass)
    goes_on = value <= values[:, -1:]  # there may be more equals than _best has returned
    return torch.where(more | goes_on.squeeze(-1), UNSURE, tokens)


def _best(scaled: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
    """The `width` highest values of each row, highest first, and their ids if these are cheap (equals in any order)."""
    if width < scaled.shape[1]:
        best = scaled.topk(width, dim=-1)
        return best.values, best.indices
    if scaled.device.type == "cpu":  # torch sorts the indices too: 150 ms against 40 ms for [64, 32000]
        return torch.from_numpy(np.sort(scaled.numpy(), axis=-1)).flip(-1), None
    return scaled.sort(dim=-1, descending=True).values, None


def _token_at(equal: Tensor, place: Tensor) -> Tensor:
    """Id of the place-th token [S], counted from 0, that is True in equal [S, V]."""
    equals = equal.nonzero()  # by row, then by id
    num_equals = torch.bincount(equals[:, 0], minlength=len(equal))
    return equals[num_equals.cumsum(0) - num_equals + place, 1]


def _at(table: Tensor, index: Tensor) -> Tensor:
    return table.gather(1, index.unsqueeze(-1)).squeeze(-1)


def _below(numbers: Tensor, mass: Tensor) -> Tensor:
    """numbers * mass as [S, 1], strictly below mass, so that some sum is above it, and its token has weight."""
    return torch.minimum(numbers * mass, torch.nextafter(mass, torch.zeros_like(mass))).unsqueeze(-1)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of a step."""

    token_ids: np.ndarray  # [R] int64
    logprobs: list[TokenLogprob | None] | None  # one per row, None for a row that wants none; None if no row wants any


class Drawing:
    """raw [R, V]: the model's logits; edited: with bias, penalties and forbidden tokens; state [R]: of the rows.

    tokens [R] int64: on the device of the logits; UNSURE or BROKEN for rows to look at again. A row's token does not
    depend on other rows.
    """

    def __init__(self, raw: Tensor, edited: Tensor, state: np.ndarray) -> None:
        self._raw, self._edited, self._state = raw, edited, state
        self._vocab_size = raw.shape[1]
        self._random = np.flatnonzero(state["temperature"] > 0)
        self._scaled: Tensor | None = None  # this and `_cuts` belong to the rows `_random` [S]
        self._cuts: Sequence[Tensor] = ()  # numbers, top-p and top-k, [S] float64
        self.tokens = self._draw()

    def _tensor(self, values: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(values.copy()), self._raw.device)

    def _draw(self) -> Tensor:  # [R]
        """Greedy and random tokens, each kind as one sub-batch."""
        logits, random, state = self._edited, self._random, self._state
        if not len(random):
            return argmax(logits)
        numbers = uniforms(state["seed"], state["num_output_tokens"].astype(np.uint64))
        if len(random) == len(logits):
            return self._draw_random(logits.float(), state, numbers)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        greedy, others = self._tensor(np.flatnonzero(state["temperature"] == 0)), self._tensor(random)
        tokens[greedy] = argmax(logits[greedy])
        tokens[others] = self._draw_random(logits[others].float(), state[random], numbers[random])
        return tokens

    def read(self, token_ids: np.ndarray) -> SampledTokens:
        """token_ids: `tokens`, copied to the host. Rows that are looked at again are changed in place."""
        if (token_ids < 0).any():
            self._look_again(token_ids)
        return SampledTokens(token_ids, self._logprobs(token_ids))

    def _draw_random(self, logits: Tensor, state: np.ndarray, numbers: np.ndarray) -> Tensor:
        """Temperature, min-p, top-k, top-p and the draw; logits [S, V] float32, numbers [S] in [0, 1); -> [S].

        The device marks rows to look at again in the tokens themselves: the host waits once, and again in rare cases.
        """
        with np.errstate(divide="ignore"):  # log 0 = -inf is what "off" means here
            least = np.log(state["min_p"])
        columns = (np.maximum(state["temperature"], 1e-30), least, numbers, state["top_p"], state["top_k"])
        temperature, lowest, *self._cuts = self._tensor(np.stack(columns))  # in one copy
        best = logits.amax(-1, keepdim=True)
        # The maximum is taken off first: it becomes exactly 0, and no temperature, however small, gives inf or NaN.
        scaled = self._scaled = (logits - best).div_(temperature.float().unsqueeze(-1))
        broken = ~best.isfinite()
        if logits.device.type == "cuda" or bool(broken.any()):  # on CUDA, asking would wait
            scaled.masked_fill_(broken, 0.0)
        if state["min_p"].any():
            scaled.masked_fill_(scaled < lowest.float().unsqueeze(-1), -torch.inf)
        return torch.where(broken.squeeze(-1), BROKEN, self._draw_each(scaled, state))

    def _draw_each(self, scaled: Tensor, state: np.ndarray) -> Tensor:  # [S]
        """Draw rows that use top-k or top-p, and the others."""
        cut, numbers = (state["top_k"] < self._vocab_size) | (state["top_p"] < 1), self._cuts[0]
        some, others = np.flatnonzero(cut), np.flatnonzero(~cut)
        if not len(others):
            return self._draw_cut(scaled, state, some, TOP_WIDTHS[0])
        if not len(some):
            return draw_all(scaled, numbers)
        drawn, where = torch.empty(len(scaled), dtype=torch.int64, device=scaled.device), self._tensor(others)
        drawn[where] = draw_all(scaled[where], numbers[where])
        drawn[self._tensor(some)] = self._draw_cut(scaled, state, some, TOP_WIDTHS[0])
        return drawn

    def _draw_cut(self, scaled: Tensor, state: np.ndarray, rows: np.ndarray, width: int) -> Tensor:
        """The tokens of these of the S rows, looking at the best `width` tokens: [len(rows)]."""
        cuts = self._cuts
        if len(rows) < len(scaled):
            where = self._tensor(rows)
            scaled, cuts = scaled[where], [column[where] for column in cuts]
        numbers, top_p, top_k = cuts
        all_limited = bool((state["top_k"][rows] < self._vocab_size).all())
        return draw_cut(scaled, numbers, top_k.long(), top_p, width, all_limited)

    def _look_again(self, token_ids: np.ndarray) -> None:
        for width in (*TOP_WIDTHS[1:], self._vocab_size):
            unsure = np.flatnonzero(token_ids == UNSURE)
            if len(unsure):
                assert self._scaled is not None
                rows, state = np.searchsorted(self._random, unsure), self._state[self._random]
                token_ids[unsure] = self._draw_cut(self._scaled, state, rows, width).cpu().numpy()
        if len(broken := np.flatnonzero(token_ids == BROKEN)):
            token_ids[broken] = argmax_of_usable(self._edited[self._tensor(broken)]).cpu().numpy()

    def _logprobs(self, token_ids: np.ndarray) -> list[TokenLogprob | None] | None:
        """Log-softmax of the unedited logits, as vLLM V1 reports it."""
        asked = self._state["logprobs"]  # how many alternatives, -1: none
        rows = np.flatnonzero(asked >= 0)
        if len(rows) == 0:
            return None
        scores = torch.log_softmax(self._raw[self._tensor(rows)].float(), dim=-1)
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
        self._penalties = Penalties(max_rows, vocab_size, device)
        self._masks = GrammarMasks(vocab_size)
        self._edited = torch.empty(0, vocab_size)
        self._by_row: tuple[dict[int, Any], ...] = (self._biases, self._stops, self._masks.matchers)

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
        num_alternatives = -1 if params.logprobs is None else params.logprobs
        if params.use_beam_search:  # as many that go on, however many end
            num_alternatives = params.num_sequences + len(stops)
        self._state[row] = (
            params.temperature, params.min_p, min(params.top_k or self._vocab_size, self._vocab_size), params.top_p,
            *penalties, seed & _UINT64_MASK, len(output_token_ids), params.min_tokens if len(stops) else 0,
            num_alternatives, penalty_row, bool(params.logit_bias),
        )  # fmt: skip

    def move_row(self, src: int, dst: int) -> None:
        """Move the request at row `src` to `dst`, whose request is forgotten. Row `src` is then free."""
        if src == dst:
            return
        self.clear_row(dst)
        self._state[dst] = self._state[src]
        for known in self._by_row:
            if src in known:
                known[dst] = known.pop(src)
        self._state[src] = self._clear

    def clear_row(self, row: int) -> None:
        """Clear the row of a request that has left. The row may be clear already."""
        penalty_row = int(self._state["penalty_row"][row])
        if penalty_row != _NO_ROW:
            self._penalties.release(penalty_row)
        for known in self._by_row:
            known.pop(row, None)
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
        """Sample one token from each row of logits [R, V] of any float dtype, which may be overwritten; rows [R].

        A row may occur several times with different choice_offsets [R], which are added to its seed. Logits without a
        usable number give a token, too: the argmax after nan_to_num.
        """
        drawing = self.draw(logits, rows, choice_offsets)
        return drawing.read(drawing.tokens.cpu().numpy())

    def draw(self, logits: Tensor, rows: np.ndarray, choice_offsets: np.ndarray | None = None) -> Drawing:
        """Like `sample`, but does not wait on CUDA: some tokens may have to be looked at again."""
        assert logits.shape == (len(rows), self._vocab_size), (logits.shape, len(rows), self._vocab_size)
        state = self._state[rows]
        if choice_offsets is not None:
            state["seed"] += choice_offsets.astype(np.uint64)
        raw = logits.detach()
        return Drawing(raw, self._edit(raw, rows, state), state)

    def _known(self, token_ids: np.ndarray) -> np.ndarray:
        return token_ids[token_ids < self._vocab_size]

    def _tensor(self, values: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(values.copy()), self._device)

    def _edit(self, raw: Tensor, rows: np.ndarray, state: np.ndarray) -> Tensor:
        """Bias, min_tokens, penalties and grammars, in this order: in place, unless a row wants `raw`'s logprobs.

        min_tokens does not hold back the end of an answer to which nothing more can be added.
        """
        biased = np.flatnonzero(state["biased"])
        held = np.flatnonzero(state["num_output_tokens"] < state["min_tokens"])
        penalised = np.flatnonzero(state["penalty_row"] != _NO_ROW)
        constrained = self._masks.constrained(rows) if self._masks.matchers else rows[:0]
        if not (len(biased) or len(held) or len(penalised) or len(constrained)):
            return raw
        masks = self._masks.masks(rows[constrained]) if len(constrained) else np.empty((0, 0), np.int32)
        if len(constrained) and len(held):
            masked = dict(zip(constrained.tolist(), masks, strict=True))
            goes_on = [i not in masked or allows_others(masked[i], self._stops[rows[i]]) for i in held.tolist()]
            held = held[goes_on]
        logits = raw if raw.dtype == torch.float32 and (state["logprobs"] < 0).all() else self._copied(raw)
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
            forbid_tokens(logits, constrained, masks)
        return logits

    def _copied(self, raw: Tensor) -> Tensor:
        """A copy of logits in float32; on a CPU where the last one was, because new pages cost more than the copy."""
        if raw.device.type != "cpu":
            return raw.to(torch.float32, copy=True)
        if len(self._edited) < len(raw):
            self._edited = torch.empty(raw.shape, dtype=torch.float32)
        return self._edited[: len(raw)].copy_(raw)

    def _positions(self, indices: np.ndarray, ids: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """An index into logits: every id of ids[i] in row indices[i]."""
        return self._tensor(np.repeat(indices, [len(some) for some in ids])), self._tensor(np.concatenate(ids))
