"""Whether to load or to compute, for hosts that tell little: judged by how long loads take, and how soon computed
blocks are offered to the store.

Knows only numbers.
"""

from __future__ import annotations

from kvstore.policy.planner import ASSUMED_READ_RATE, LEAST_SAVING_S, LEAST_SHARE, RETRY_EVERY, Rate, StepRate


class LoadOrCompute:
    """block_bytes, block_tokens: the size of a block. always: load whatever is stored.

    What is stored is loaded, unless computing is predicted to save more than 20 ms and 10 %. Of the histories of which
    not even the first block would be loaded, it is loaded for one in 16: this shows when the disk has become faster.
    """

    def __init__(self, block_bytes: int, block_tokens: int, always: bool = False) -> None:
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._always = always
        self._read = Rate()  # bytes/s
        self._prefill = StepRate()  # tokens/s
        self._num_skipped = 0  # first blocks

    def read(self, num_bytes: int, seconds: float) -> None:
        """A job's blocks were read."""
        if num_bytes:
            self._read.add(num_bytes, seconds)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A request's first computed blocks were offered to the store, this long after it was scheduled."""
        if num_tokens:
            self._prefill.add(num_tokens, seconds)

    def should_load(self, num_tokens: int, num_ahead: int, is_first: bool) -> bool:
        """num_tokens: the length of the history up to this block. num_ahead: blocks that are already being read.
        is_first: whether this is the first block that is stored of it.
        """
        prefill = self._prefill.per_s
        if self._always or prefill is None:
            return True
        num_blocks = num_ahead + num_tokens / self._block_tokens
        load_s = num_blocks * self._block_bytes / (self._read.per_s or ASSUMED_READ_RATE)
        if load_s - num_tokens / prefill <= max(LEAST_SAVING_S, LEAST_SHARE * load_s):
            return True
        self._num_skipped += is_first
        return is_first and self._num_skipped % RETRY_EVERY == 0
