"""How many bytes a conversation takes in a store, by the sizes that five models publish; `bench.tiers --part bytes`."""

from dataclasses import dataclass

from bench.common import Report

NUMBER_BYTES = 2  # bfloat16
BLOCK = 16  # tokens
LENGTHS = (8192, 32768, 131072)  # tokens
STATES = 3  # of a conversation: behind its system prompt, and of two turns
SYSTEM, TURN = 200, 400  # tokens of a system prompt, and of a turn


@dataclass(frozen=True, slots=True)
class Kept:
    """What a model computes of a conversation. full, windowed: bytes of KV a token, of layers that see everything, and
    of those that see `window` tokens. state_bytes: of all layers with a state, once.
    """

    full: int
    window: int = 0
    windowed: int = 0
    state_bytes: int = 0

    def whole(self, num_tokens: int) -> int:
        """All KV, without states."""
        return num_tokens * (self.full + self.windowed)

    def stored(self, num_tokens: int) -> int:
        """What is stored. A window is cut into blocks as large as those of the other layers."""
        seen = 0
        if self.window:
            span = -(-(self.window - 1) // BLOCK) * BLOCK + BLOCK
            seen = min(num_tokens, span + min(span, TURN) + min(span, SYSTEM))
        windowed = -(-self.windowed // self.full) * self.full
        return num_tokens * self.full + seen * windowed + (STATES if self.state_bytes else 0) * self.state_bytes


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
    """Stored, beside all KV. Turns have TURN tokens, the system prompt SYSTEM."""
    for name, kept in SHAPES.items():
        for num_tokens in LENGTHS:
            stored, whole = kept.stored(num_tokens), kept.whole(num_tokens)
            report.add(
                measure=f"{name}, {num_tokens // 1024}K", kv_kib_a_token=(kept.full + kept.windowed) / 1024,
                state_mb=kept.state_bytes / 1e6, all_kv_mb=whole / 1e6, stored_mb=stored / 1e6, share=stored / whole,
            )  # fmt: skip
