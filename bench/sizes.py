"""How many bytes a conversation takes in a store, by the sizes that five models publish; `bench.tiers --part bytes`."""

from dataclasses import dataclass

from bench.common import Report

NUMBER_BYTES = 2  # bfloat16
LENGTHS = (8192, 32768, 131072)  # tokens
CHECKPOINTS = 4  # of a conversation, at most


@dataclass(frozen=True, slots=True)
class Kept:
    """What a model computes of a conversation. full, windowed: bytes of KV a token, of layers that see everything, and
    of those that see `window` tokens. state_bytes: of all layers with a state, once.
    """

    full: int
    window: int = 0
    windowed: int = 0
    state_bytes: int = 0

    def stored(self, num_tokens: int, num_windows: int | None, num_states: int) -> int:
        """num_windows: how many whole windows are kept; None for all KV."""
        seen = num_tokens if num_windows is None else min(num_tokens, num_windows * self.window)
        return num_tokens * self.full + seen * self.windowed + num_states * self.state_bytes


def kv(num_layers: int, num_heads: int, head_dim: int) -> int:
    """Bytes a token, of keys and values."""
    return num_layers * 2 * num_heads * head_dim * NUMBER_BYTES


def state(num_layers: int, heads: int, rows: int, columns: int, width: int, kernel: int = 4) -> int:
    """Bytes: a float32 matrix for each head, and the last `kernel` inputs of a convolution over `width` channels."""
    return num_layers * (heads * rows * columns * 4 + kernel * width * NUMBER_BYTES)


SHAPES = {
    "Qwen3.5-9B": Kept(kv(8, 4, 256), state_bytes=state(24, 32, 128, 128, 2 * 16 * 128 + 32 * 128)),
    "Granite-4.0-H Small": Kept(kv(4, 8, 128), state_bytes=state(36, 128, 64, 128, 128 * 64 + 2 * 128)),
    "gpt-oss-20b": Kept(kv(12, 8, 64), 128, kv(12, 8, 64)),
    "Gemma 3 27B": Kept(kv(10, 16, 128), 1024, kv(52, 16, 128)),
    "Gemma 4 26B-A4B": Kept(kv(5, 2, 512), 1024, kv(25, 8, 256)),
}


def bench_bytes(report: Report) -> None:
    """Whole: all KV. Windows: that of layers with a window only at four places, or at the last turn's end alone."""
    for name, kept in SHAPES.items():
        num_states = CHECKPOINTS if kept.state_bytes else 0
        for num_tokens in LENGTHS:
            whole = kept.stored(num_tokens, None, num_states)
            row = {"kv_kib_a_token": (kept.full + kept.windowed) / 1024, "state_mb": kept.state_bytes / 1e6}
            row |= {"whole_mb": whole / 1e6}
            if kept.window:
                row["windows_4_mb"] = kept.stored(num_tokens, CHECKPOINTS, num_states) / 1e6
                row["windows_1_mb"] = kept.stored(num_tokens, 1, num_states) / 1e6
                row["share_4"], row["share_1"] = row["windows_4_mb"] * 1e6 / whole, row["windows_1_mb"] * 1e6 / whole
            report.add(measure=f"{name}, {num_tokens // 1024}K", **row)
