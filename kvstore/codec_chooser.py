"""Which codec a disk tier uses: fixed by name, or measured on the blocks of this model and on this disk.

Decides only; `kvstore.codec` does the work. One thread at a time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstore.codec import CODEC_NAMES, Bytes, Codec, compress, decompress
from kvstore.errors import ConfigError

FIRST_SAMPLE, NUM_SAMPLES = 512, 6  # by then transactions have shown how fast the disk is
BLOCKS_BETWEEN_SAMPLES = 4096
WRITE_WEIGHT = 0.25  # nobody waits for a write, but it takes the same processor and the same disk
MIN_GAIN = 0.10
ASSUMED_BYTES_PER_S = 1e9  # of a disk that was not measured yet: an ordinary NVMe drive, cold
MAX_SAMPLE_BYTES = 4 << 20


@dataclass(slots=True)
class CodecCosts:
    """Sums over the samples of one codec."""

    raw_bytes: int = 0
    stored_bytes: int = 0
    compress_s: float = 0.0
    decompress_s: float = 0.0

    def predicted_s_per_byte(self, read_bytes_per_s: float, write_bytes_per_s: float) -> float:
        """Of reading one byte of KV from the cold disk, and with its weight of writing it."""
        if not self.raw_bytes:
            return float("inf")
        read_s = self.stored_bytes / read_bytes_per_s + self.decompress_s
        write_s = self.stored_bytes / write_bytes_per_s + self.compress_s
        return (read_s + WRITE_WEIGHT * write_s) / self.raw_bytes


class CodecChooser:
    """`pick` for every block that is written. name: one of `CODEC_NAMES`, or "auto": raw until something pays.

    auto measures some blocks with each codec soon after the start, and again every BLOCKS_BETWEEN_SAMPLES blocks.
    """

    def __init__(self, name: str = "auto", itemsize: int = 2, clock: Callable[[], float] = time.perf_counter) -> None:
        if name != "auto" and name not in CODEC_NAMES:
            raise ConfigError(f"codec is {name!r}; give auto, {', '.join(CODEC_NAMES)}")
        self.is_auto = name == "auto"
        self.codec = Codec.RAW if self.is_auto else CODEC_NAMES[name]
        self.itemsize = itemsize
        self.num_decisions = 0
        self.read_bytes_per_s = self.write_bytes_per_s = ASSUMED_BYTES_PER_S
        self._clock = clock
        self._num_blocks = 0
        self._costs = {codec: CodecCosts() for codec in Codec}

    def set_disk_rates(self, read_bytes_per_s: float | None, write_bytes_per_s: float | None) -> None:
        """What the disk was measured to do, cold and synced; None where that is not known."""
        self.read_bytes_per_s = read_bytes_per_s or self.read_bytes_per_s
        self.write_bytes_per_s = write_bytes_per_s or self.write_bytes_per_s

    @property
    def will_decide(self) -> bool:
        """The next block's `pick` decides: the moment to `set_disk_rates`."""
        return self.is_auto and self._sample == NUM_SAMPLES - 1

    @property
    def _sample(self) -> int:
        """Which of the samples the next block is; none outside 0 .. NUM_SAMPLES - 1."""
        return self._num_blocks % BLOCKS_BETWEEN_SAMPLES - FIRST_SAMPLE

    def pick(self, payload: Bytes) -> Codec:
        """The codec for this block."""
        if self.is_auto:
            sample = self._sample
            self._num_blocks += 1
            if 0 <= sample < NUM_SAMPLES:
                self._measure(payload, restart=sample == 0)
            if sample == NUM_SAMPLES - 1:
                self._decide()
        return self.codec

    def _measure(self, payload: Bytes, restart: bool) -> None:
        if restart:
            self._costs = {codec: CodecCosts() for codec in Codec}
        size = min(len(memoryview(payload).cast("B")), MAX_SAMPLE_BYTES) // self.itemsize * self.itemsize
        raw = np.frombuffer(payload, np.uint8, count=size)
        out = np.empty_like(raw)
        for codec, costs in self._costs.items():
            started = self._clock()
            parts = compress(raw, codec, self.itemsize)
            compressed = self._clock()
            if parts is None or not size:
                continue
            stored = np.concatenate([np.frombuffer(part, np.uint8) for part in parts])
            before = self._clock()
            if codec is not Codec.RAW:
                decompress(stored, codec, self.itemsize, out)
            ended = self._clock()
            costs.raw_bytes += size
            costs.stored_bytes += len(stored)
            costs.compress_s += compressed - started
            costs.decompress_s += ended - before

    def _decide(self) -> None:
        rates = (self.read_bytes_per_s, self.write_bytes_per_s)
        predicted = {codec: costs.predicted_s_per_byte(*rates) for codec, costs in self._costs.items()}
        best = min(Codec, key=predicted.__getitem__)
        pays = predicted[best] < predicted[Codec.RAW] * (1 - MIN_GAIN)
        self.codec = best if pays else Codec.RAW
        self.num_decisions += 1

    def stats(self) -> dict[str, object]:
        """The choice and what it rests on; ratio: stored bytes / raw bytes."""
        names = {codec: name for name, codec in CODEC_NAMES.items()}
        measured = {
            names[codec]: {
                "ratio": costs.stored_bytes / costs.raw_bytes,
                "compress_bytes_per_s": costs.raw_bytes / max(costs.compress_s, 1e-9),
                "decompress_bytes_per_s": costs.raw_bytes / max(costs.decompress_s, 1e-9),
            }
            for codec, costs in self._costs.items()
            if costs.raw_bytes and codec is not Codec.RAW
        }
        return {
            "codec": names[self.codec],
            "is_auto": self.is_auto,
            "num_decisions": self.num_decisions,
            "assumed_read_bytes_per_s": self.read_bytes_per_s,
            "assumed_write_bytes_per_s": self.write_bytes_per_s,
            "measured": measured,
        }
