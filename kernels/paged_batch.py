"""One step's layout for attention, which all layers share: everything that can be computed once per step.

And how small tensors get to the device and back without a wait.
"""

import bisect
import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

VIEW_TOKENS = 512  # from this context length on, a request whose blocks are in one run is read in place


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor to the device without a wait. A copy from pageable memory would wait for everything queued.

    A tensor that is already there is returned as it is.
    """
    if device.type != "cuda" or numbers.device.type == "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def start_to_host(numbers: Tensor) -> Tensor:
    """A copy on the host, complete when the device has reached it. Never waits. On a CPU: the tensor itself."""
    if numbers.device.type != "cuda":
        return numbers
    pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    pinned.copy_(numbers, non_blocking=True)
    return pinned


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer changes its scores; see `kvstore.kernels.reference.attend`."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [num_heads]

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Single-token requests of similar context length that attend in one call."""

    rows: Tensor | None  # [size], their tokens in the step; None: tokens 0 .. size - 1 in order
    size: int
    context_len: int
    blocks: Tensor  # [size * blocks_each], their block numbers, each row padded with its first
    mask: Tensor | None  # [size, 1, 1, blocks_each * block_size], 0 or -inf
    run: int | None = None  # the first block, for one request whose blocks are in one run: read in place, not copied


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """The layout as a CUDA device reads it: int32 tensors on the device, and numbers on the host.

    A request whose context_len is 0 is padding.
    """

    query_start: Tensor  # [num_requests + 1]
    context_lens: Tensor  # [num_requests]
    block_table: Tensor  # [num_requests, max_blocks]
    num_decodes: int  # so many requests at the beginning have one token each
    max_query_len: int  # upper bounds; in a CUDA graph, those of the capture
    max_context_len: int

    @property
    def num_requests(self) -> int:
        return len(self.context_lens)


class PagedBatch:
    """Which tokens belong to which request, where their KV goes and which tokens they may see.

    query_start: [num_requests + 1] and context_lens: [num_requests], lists. The first `num_decodes` requests have one
    token each. block_table: [num_requests, max_blocks] int64 on the CPU; slots: [num_tokens] int64 on the device, -1
    for padding. on_device: the same layout on a CUDA device, if its tensors outlive the step. windowed: the same tokens
    for layers with a window whose caches have blocks for what they see only; None: these are as the others.
    """

    def __init__(
        self, query_start: list[int], context_lens: list[int], block_table: Tensor, slots: Tensor, block_size: int,
        on_device: DeviceBatch | None = None, windowed: "PagedBatch | None" = None,
    ) -> None:  # fmt: skip
        self.query_start = query_start
        self.context_lens = context_lens
        self.block_table = block_table
        self.slots = slots
        self.block_size = block_size
        self._on_device = on_device
        self.windowed = windowed
        self._groups: dict[int | None, list[DecodeGroup]] = {}
        self._runs: dict[tuple[int, int], int | None] = {}
        self._masks: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def at(self, tokens: Tensor) -> "PagedBatch":
        """The layout in which each of these tokens, [n] in order, is a request of its own. It has no slots."""
        numbers = tokens.tolist()
        requests = [bisect.bisect_right(self.query_start, token) - 1 for token in numbers]
        behind = [self.query_start[i + 1] - 1 - token for i, token in zip(requests, numbers, strict=True)]
        context_lens = [self.context_lens[i] - after for i, after in zip(requests, behind, strict=True)]
        table = self.block_table[requests]
        return PagedBatch(list(range(len(numbers) + 1)), context_lens, table, self.slots[:0], self.block_size)

    @cached_property
    def num_decodes(self) -> int:
        starts = self.query_start
        lengths = [end - start for start, end in itertools.pairwise(starts)]
        return next((i for i, length in enumerate(lengths) if length != 1), len(lengths))

    @cached_property
    def device_batch(self) -> DeviceBatch:
        """The layout on the device of `slots`. Unless it was given, it is copied there once per step, in one piece."""
        if self._on_device is not None:
            return self._on_device
        parts = [torch.tensor(self.query_start), torch.tensor(self.context_lens), self.block_table.flatten()]
        packed = to_device(torch.cat(parts).to(torch.int32), self.slots.device)
        query_start, context_lens, blocks = packed.split([len(part) for part in parts])
        return DeviceBatch(
            query_start=query_start, context_lens=context_lens, block_table=blocks.view(self.block_table.shape),
            num_decodes=self.num_decodes,
            max_query_len=max(end - start for start, end in itertools.pairwise(self.query_start)),
            max_context_len=max(self.context_lens),
        )  # fmt: skip

    def decode_groups(self, window: int | None, dtype: torch.dtype) -> list[DecodeGroup]:
        """The decode requests in groups for layers with this window, built at the first use in a step."""
        if window not in self._groups:
            self._groups[window] = self._build_groups(window, dtype)
        return self._groups[window]

    def _build_groups(self, window: int | None, dtype: torch.dtype) -> list[DecodeGroup]:
        order = sorted(range(self.num_decodes), key=self.context_lens.__getitem__, reverse=True)
        groups: list[list[int]] = []
        for i in order:
            alone = self._is_alone([i])
            longest = self.context_lens[groups[-1][0]] if groups and not alone else 0
            if groups and not alone and 2 * self.context_lens[i] >= longest and not self._is_alone(groups[-1]):
                groups[-1].append(i)
            else:
                groups.append([i])
        return [self._group(sorted(members), window, dtype) for members in groups]

    def _is_alone(self, members: list[int]) -> bool:
        return self.context_lens[members[0]] >= VIEW_TOKENS and self.run_start(members[0]) is not None

    def _group(self, members: list[int], window: int | None, dtype: torch.dtype) -> DecodeGroup:
        firsts = [self._first_block(self.context_lens[i], window) for i in members]
        ends = [self.context_lens[i] - first * self.block_size for i, first in zip(members, firsts, strict=True)]
        size, context_len = len(members), max(ends)
        width = -(-context_len // self.block_size)
        device = self.slots.device
        rows = None if members == list(range(size)) and size == self.num_decodes else torch.tensor(members)
        run = self.run_start(members[0], firsts[0]) if size == 1 else None
        lens = torch.tensor(ends)
        positions = torch.arange(context_len if run is not None else width * self.block_size)
        hidden = positions >= lens[:, None]
        if window is not None:
            hidden |= positions < lens[:, None] - window
        mask = None
        if bool(hidden.any()):
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None, None]
        used = torch.arange(width) < -(-lens[:, None] // self.block_size)
        columns = torch.where(used, torch.arange(width), 0) + torch.tensor(firsts)[:, None]
        blocks = self.block_table[torch.tensor(members)[:, None], columns].flatten()  # padded with the request's first
        move = device.type != "cpu"
        return DecodeGroup(
            rows=rows.to(device) if rows is not None and move else rows, size=size, context_len=context_len,
            blocks=blocks.to(device) if move else blocks, mask=mask.to(device) if mask is not None and move else mask,
            run=run,
        )  # fmt: skip

    def causal_mask(self, num_tokens: int, before: int, dtype: torch.dtype) -> Tensor:
        """What each of so many tokens after `before` others may see: [num_tokens, before + num_tokens], 0 or -inf."""
        name = (num_tokens, before, dtype)
        if name not in self._masks:
            hidden = torch.full((num_tokens, before + num_tokens), float("-inf"), dtype=dtype, device=self.slots.device)
            self._masks[name] = hidden.triu_(before + 1)
        return self._masks[name]

    def _first_block(self, end: int, window: int | None) -> int:
        """The first block that the token before `end` can see."""
        return 0 if window is None else max(0, end - window) // self.block_size

    def run_start(self, i: int, first: int = 0) -> int | None:
        """Block `first` of request i if its blocks from there on are in one run, else None."""
        if (i, first) not in self._runs:
            blocks = self.block_table[i, first : -(-self.context_lens[i] // self.block_size)]
            start, last = int(blocks[0]), int(blocks[-1])
            in_order = last - start == len(blocks) - 1 and bool((blocks.diff() == 1).all())
            self._runs[i, first] = start if in_order else None
        return self._runs[i, first]

    def gather(self, cache: Tensor, i: int, window: int | None) -> Tensor:  # [num_seen, num_kv_heads, head_dim]
        """Keys or values of request i from the first block that its tokens in this step can see; a view of the cache
        if they are in one run.
        """
        before = self.context_lens[i] - (self.query_start[i + 1] - self.query_start[i])
        first = self._first_block(before + 1, window)
        num_seen, run = self.context_lens[i] - first * self.block_size, self.run_start(i, first)
        if run is not None:
            return cache.view(-1, *cache.shape[2:])[run * self.block_size : run * self.block_size + num_seen]
        blocks = self.block_table[i, first : -(-self.context_lens[i] // self.block_size)].to(cache.device)
        return cache.index_select(0, blocks).flatten(0, 1)[:num_seen]
