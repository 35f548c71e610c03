"""Forbidding tokens, in C and in torch: the words that are all or nothing, the mixed ones, and the vocabulary's end."""

import numpy as np
import pytest
import torch

from kvstore.kernels import reference
from kvstore.kernels.token_masks import forbid_tokens
from tests.support.native import no_compiler

KINDS = {"none": [0], "all": [-1], "some": [0x5A5A5A5A, -0x12345678, 1, -(2**31)], "mixed": [0, -1, 12345, -2]}


def both(logits: torch.Tensor, rows: np.ndarray, masks: np.ndarray) -> torch.Tensor:
    """What the C code makes of the logits, where there is a compiler, and torch otherwise."""
    results = [logits.clone() for _ in range(2)]
    forbid_tokens(results[0], rows, masks)
    with no_compiler():
        forbid_tokens(results[1], rows, masks)
    assert torch.equal(results[0].nan_to_num(7.5), results[1].nan_to_num(7.5))
    return results[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 700])
def test_a_token_without_a_bit_is_forbidden_and_no_other_number_changes(kind, vocab_size):
    rng, num_words = np.random.default_rng(vocab_size), -(-vocab_size // 32) + 1  # masks may be longer
    masks = rng.choice(np.array(KINDS[kind], np.int32), (3, num_words))
    logits, rows = torch.randn(5, vocab_size), np.array([4, 0, 3])
    logits[3, 0], logits[4, -1] = torch.nan, torch.inf
    found = both(logits, rows, masks)
    for row in range(5):
        for token in range(vocab_size):
            mask = masks[rows.tolist().index(row)] if row in rows else None
            allowed = mask is None or int(mask[token // 32]) >> token % 32 & 1
            wanted = logits[row, token] if allowed else torch.tensor(-torch.inf)
            assert torch.equal(found[row, token].nan_to_num(7.5), wanted.nan_to_num(7.5))


def test_rows_with_a_gap_between_them():
    wide = torch.randn(4, 100)
    before, masks = wide.clone(), np.full((4, 2), 0x0F0F0F0F, np.int32)
    forbid_tokens(wide[:, :64], np.arange(4), masks)
    expected = before[:, :64].clone()
    reference.forbid_tokens(expected, torch.arange(4), torch.from_numpy(masks))
    assert torch.equal(wide[:, :64], expected) and torch.equal(wide[:, 64:], before[:, 64:])


def test_no_row_at_all():
    logits = torch.randn(2, 40)
    assert torch.equal(both(logits, np.array([], np.int64), np.empty((0, 2), np.int32)), logits)
