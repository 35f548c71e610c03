"""Load or recompute, decided from measured rates. Knows numbers only."""

from __future__ import annotations

LEAST_SAVING_S = 0.020
LEAST_SHARE = 0.10
_SMOOTHING = 0.3
_RETRY_EVERY = 16  # of the requests that are better computed so many are loaded all the same: rates change


class Planner:
    """Rates of this machine, as running means, and the decision that follows from them.

    always: load whatever is stored. Until both rates have been measured, what is stored is loaded.
    """

    def __init__(self, block_bytes: int, block_size: int, always: bool = False) -> None:
        self.block_bytes = block_bytes
        self._bytes_per_token = block_bytes / block_size
        self._always = always
        self._load_rate: float | None = None  # bytes/s, CPU -> HBM
        self._prefill_rate: float | None = None  # tokens/s
        self._num_computed = 0

    def loaded(self, num_bytes: int, seconds: float) -> None:
        """A step's loads have ended."""
        self._load_rate = _mean(self._load_rate, num_bytes / max(seconds, 1e-9))

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step with a prefill of so many tokens has ended."""
        self._prefill_rate = _mean(self._prefill_rate, num_tokens / max(seconds, 1e-9))

    def should_load(self, num_tokens: int) -> bool:
        """Whether to load so many stored tokens: yes, unless computing saves more than 20 ms and 10 %."""
        if self._always or self._load_rate is None or self._prefill_rate is None:
            return True
        load_s = num_tokens * self._bytes_per_token / self._load_rate
        compute_s = num_tokens / self._prefill_rate
        if load_s - compute_s <= max(LEAST_SAVING_S, LEAST_SHARE * load_s):
            return True
        self._num_computed += 1
        return self._num_computed % _RETRY_EVERY == 0

    def as_dict(self) -> dict[str, float | None]:
        return {"load_bytes_per_s": self._load_rate, "prefill_tokens_per_s": self._prefill_rate}


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)
