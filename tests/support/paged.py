"""Requests over shuffled pages and ways to score them, for the tests of attention."""

import itertools
import math

import pytest
import torch

from kvstore.kernels import reference
from kvstore.kernels.paged_batch import PagedBatch, Scoring

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
SCORINGS = ("plain", "window", "softcap", "sinks", "all")


def scoring_of(name: str, num_heads: int, device: str = "cpu") -> Scoring:
    sinks = torch.linspace(-1, 3, num_heads, device=device)
    return {
        "plain": Scoring(0.25),
        "window": Scoring(0.25, window=5),
        "softcap": Scoring(0.25, softcap=2.0),
        "sinks": Scoring(0.25, sinks=sinks),
        "all": Scoring(0.25, window=40, softcap=3.0, sinks=sinks),
    }[name]


class Paged:
    """Requests, (context_len, num_new_tokens) each; what is new is a view of one product, and in the caches, too.

    heads: how many of queries, and of keys, their size, and that of values where it is smaller. in_order: the pages of
    each request lie in one run. filler: what stands where no token is: in the rest of each last page, and in a page of
    nobody at which the table's padding points.
    """

    def __init__(
        self, requests, heads=(6, 2, 16), block_size=16, dtype=torch.float32, device="cpu", in_order=False,
        filler=math.nan, seed=0,
    ) -> None:  # fmt: skip
        num_heads, num_kv_heads, head_dim, value_dim = (*heads, heads[2])[:4]
        generator = torch.Generator().manual_seed(seed)
        self.contexts = [context for context, _ in requests]
        self.query_start = [0, *itertools.accumulate(new for _, new in requests)]
        counts = [-(-context // block_size) for context in self.contexts]
        count = sum(counts) + 1
        numbers = torch.arange(count) if in_order else torch.randperm(count, generator=generator)
        *pages, spare = numbers.split([*counts, 1])
        self.table = torch.full((len(requests), max(counts)), spare.item())
        caches = torch.full((2, count, block_size, num_kv_heads, head_dim), filler)
        slots = []
        for row, (own, (context, new)) in enumerate(zip(pages, requests, strict=True)):
            self.table[row, : len(own)] = own
            places = (own[:, None] * block_size + torch.arange(block_size)).flatten()[:context]
            for cache in caches:
                cache.flatten(0, 1)[places] = torch.randn(context, num_kv_heads, head_dim, generator=generator)
            slots.append(places[context - new :])
        self.slots = torch.cat(slots).to(device)
        sizes = (num_heads, num_kv_heads, num_kv_heads)
        product = torch.randn(self.query_start[-1], sum(sizes), head_dim, generator=generator).to(device, dtype)
        self.query, self.key, self.value = product.split(sizes, 1)
        self.key_cache, self.value_cache = caches.to(device, dtype)
        self.value, self.value_cache = self.value[..., :value_dim], self.value_cache[..., :value_dim].contiguous()
        self.key_cache.flatten(0, 1)[self.slots] = self.key
        self.value_cache.flatten(0, 1)[self.slots] = self.value
        self.batch = PagedBatch(self.query_start, self.contexts, self.table, self.slots, block_size)

    def expected(self, scoring: Scoring, dtype: torch.dtype | None = None) -> torch.Tensor:
        """By the twin; dtype: computed in this one."""
        tensors = [t.to(dtype or t.dtype) for t in (self.query, self.key_cache, self.value_cache)]
        return reference.paged_attention(
            *tensors, self.query_start, self.contexts, self.table.to(self.query.device),
            scoring.scale, scoring.window, scoring.softcap, scoring.sinks,
        )  # fmt: skip

    def check(self, scoring: Scoring | None = None) -> None:
        """What a test's own `attend` gives is what the twin gives."""
        scoring = scoring or Scoring(self.query.shape[2] ** -0.5)
        tolerance = TOLERANCE[self.query.dtype]
        torch.testing.assert_close(self.attend(scoring), self.expected(scoring), atol=tolerance, rtol=tolerance)


def without_foreign_kernels(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone, our kernels attend to prompts."""
    patch.setattr("kvstore.kernels.attention.foreign_prefill", lambda setting: None)
