"""Draws one token from each row of logits: the best one, or by inverse CDF with a given number in [0, 1).

Pure functions of tensors; knows no requests and no parameters beyond top-k and top-p.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# How many of the best tokens to look at for top-k and top-p, in turn, before everything is sorted.
TOP_WIDTHS = (128, 2048)
# The inverse CDF sums chunks first: a running sum over a whole vocabulary in float64 is ten times slower.
CHUNK = 128
UNSURE, BROKEN = -1, -2  # instead of a token: more tokens must be looked at; the row has no usable number


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
