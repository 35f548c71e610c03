"""How many bytes a conversation takes in a store, by the sizes that five models publish; `bench.tiers --part bytes`.

With --part windows: the same, measured, of two of these with as many layers and windows, and small ones; and how many
tokens HBM holds. With --part states: what it changes in the next tokens when a state takes half its bytes.
"""

from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from warnings import catch_warnings, simplefilter

import torch

from bench.common import LlamaShape, Report, random_model, random_qwen_hybrid

NUMBER_BYTES = 2  # bfloat16
BLOCK = 16  # tokens
LENGTHS = (8192, 32768, 131072)  # tokens
HBM_GIB = (8, 24, 80)
STATES = 3  # of a conversation: behind its system prompt, and of two turns
SYSTEM, TURN = 200, 400  # tokens of a system prompt, and of a turn
BEFORE, AFTER, NUM_TEXTS = 512, 128, 4  # tokens on both sides of a checkpoint, and how many of these
TEMPLATE = "{% for one in messages %} w2 {{ one.content }} w3 {% endfor %}{% if add_generation_prompt %} w2 {% endif %}"
LOGITS_STD = 3.0  # about as those of trained models; random ones say nearly the same of every token


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


# -- windows, measured ------------------------------------------------------------------------------------------------
def bench_hbm(report: Report) -> None:
    """The tokens that HBM holds, beside those that it would hold if layers with a window kept all; and the windows."""
    from kvstore.engine.config import SchedulerConfig
    from kvstore.engine.model.devices import num_hbm_blocks
    from kvstore.engine.model.interception import ModelSpec, PositionFreeModel, StepCarrier
    from kvstore.engine.model.parallel.group import Part
    from kvstore.memory.layout import LayerShape

    config = SchedulerConfig(131072)
    models = {"gpt-oss-20b": (12, 12, 8, 64, 128), "Gemma 3 27B": (10, 52, 16, 128, 1024)}
    for name, (num_full, num_windowed, num_heads, head_dim, window) in models.items():
        shapes = (LayerShape(num_heads, head_dim, head_dim),) * (num_full + num_windowed)
        windows = (None,) * num_full + (window,) * num_windowed
        spec = ModelSpec(shapes, torch.bfloat16, 1, 131072, windows=windows)
        network = SimpleNamespace(kvstore_carrier=StepCarrier(torch.nn.Module(), Part()), device=torch.device("cpu"))
        model = PositionFreeModel(network, spec, (None,) * len(shapes))
        for gib in HBM_GIB:
            with catch_warnings():
                simplefilter("ignore")  # some are less than a model's longest prompt
                num_blocks, num_slots = num_hbm_blocks(model, config, gib << 30)
            before = (gib << 30) // (BLOCK * spec.kv_bytes_per_token) * BLOCK
            report.add(
                measure=f"{name}, {gib} GiB of HBM", tokens_before=before, tokens=num_blocks * BLOCK,
                ratio=num_blocks * BLOCK / before, windows=num_slots * BLOCK / window,
            )  # fmt: skip


def bench_windows(report: Report, num_tokens: int) -> None:
    """A conversation of so many tokens: a long first prompt, and three turns. Blocks that are on disk, of all KV's."""
    from transformers import Gemma3TextConfig, GptOssConfig

    bench_hbm(report)

    sizes = {
        "vocab_size": 512, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "num_attention_heads": 1,
        "num_key_value_heads": 1, "max_position_embeddings": 2 * num_tokens, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": 0,
    }  # fmt: skip
    configs = {
        "gpt-oss-20b": GptOssConfig(**sizes, num_hidden_layers=24, num_local_experts=2, num_experts_per_tok=1),
        "Gemma 3 27B": Gemma3TextConfig(**sizes, num_hidden_layers=62, sliding_window=1024),
    }
    for name, config in configs.items():
        with random_model(config, "float32") as (folder, _), TemporaryDirectory(prefix="kvstore-bench-") as store:
            report.add(measure=f"{name}, {num_tokens} tokens", **_measured(str(folder), store, num_tokens))


def _measured(folder: str, store: str, num_tokens: int) -> dict[str, Any]:
    from kvstore import CacheTiers, Engine, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    tiers, text = CacheTiers("1GiB", "2GiB", "4GiB", store), lambda count: " ".join(["w1"] * count)
    template = Path(folder, "template.jinja")
    template.write_text(TEMPLATE)
    options: dict[str, Any] = {"max_num_batched_tokens": 2048, "max_model_len": 2 * num_tokens}
    with Engine(folder, tiers, device="cpu", chat_template=str(template), **options) as engine:
        chat = engine.chat("one", system=text(SYSTEM))
        for count in (num_tokens - SYSTEM - 4 * TURN, *[TURN - 40] * 4):
            chat.send(text(count), params)
        engine.flush()
        disk, num_blocks = engine.stats()["disk"], len(chat.window.chain)
        model: Any = engine.loop.runner.model  # type: ignore[attr-defined]
        spec, layout = model.spec, model.layout(BLOCK)
    whole = num_blocks * BLOCK * spec.kv_bytes_per_token
    return {"kv_blocks": num_blocks, "stored": disk["blocks"], "share": disk["blocks"] * layout.block_bytes / whole}


# -- states in half the bytes ----------------------------------------------------------------------------------------
@torch.inference_mode()
def bench_states(report: Report, widths: tuple[int, ...]) -> None:
    """Random models of Qwen 3.5's proportions go on from a checkpoint in float32, and from the same in bfloat16."""
    from transformers import AutoModelForCausalLM

    for width in widths:
        heads = width // 128
        shape = LlamaShape(width, 8, heads, max(heads // 4, 1), width * 7 // 2, vocab_size=16384)
        with random_qwen_hybrid(shape, "float32") as (folder, _):
            network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for memory in ("as it is made", "10 to 10,000 tokens"):
            if memory != "as it is made":
                for name, decay in network.named_parameters():
                    if name.endswith("A_log"):  # beside a step of about one
                        decay.copy_(-torch.logspace(1, 4, len(decay)).log())
            coarse = deepcopy(network).bfloat16()
            apart = [_apart(network, coarse, seed) for seed in range(NUM_TEXTS)]
            divergence, is_same, of_all, is_same_in_all = (torch.stack(one) for one in zip(*apart, strict=True))
            report.add(
                measure=f"hidden size {width}, memory {memory}",
                kl_first=float(divergence[:, 0].mean()),
                kl_16=float(divergence[:, :16].mean()),
                kl=float(divergence.mean()),
                kl_most=float(divergence.max()),
                same_top=float(is_same.float().mean()),
                all_bf16_kl=float(of_all.mean()),
                all_bf16_same_top=float(is_same_in_all.float().mean()),
                tokens=is_same.numel(),
            )


def _apart(network: Any, coarse: Any, seed: int) -> tuple[torch.Tensor, ...]:
    """Of each token after the checkpoint: how far the distributions of the next one diverge, and whether their top is
    the same, [AFTER]; then both for `coarse`, which computes everything in bfloat16, as a measure of these.
    """
    from transformers import DynamicCache

    draw = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(network.config.vocab_size, (1, BEFORE + AFTER), generator=draw)
    exact = DynamicCache(config=network.config)
    network(input_ids=token_ids[:, :BEFORE], past_key_values=exact, logits_to_keep=1)
    rounded = _rounded(network, deepcopy(exact), token_ids[0, :16])
    expected, found = (
        network(input_ids=token_ids[:, BEFORE:], past_key_values=one).logits[0] for one in (exact, rounded)
    )
    sharp, measured = LOGITS_STD / expected.std(), list[torch.Tensor]()
    for other in (found, coarse(input_ids=token_ids, logits_to_keep=AFTER).logits[0].float()):
        own, others = (sharp * expected).log_softmax(-1), (sharp * other).log_softmax(-1)
        measured += (own.exp() * (own - others)).sum(-1), own.argmax(-1) == others.argmax(-1)
    return tuple(measured)


def _rounded(network: Any, cache: Any, token_ids: torch.Tensor) -> Any:
    """The cache with its states as the store gives them back with --state-dtype bfloat16."""
    from kvstore.engine.model.states import StatePool, observe_states

    observed = observe_states(network, token_ids, torch.arange(len(token_ids)))
    assert observed is not None
    pool = StatePool(replace(observed[0], stored_dtype=torch.bfloat16), 1, token_ids.device)
    held = [
        (getattr(cache.layers[layer], part.kind)[part.index], tensor)
        for layer, pairs in pool.tensors.items()
        for part, tensor in pairs
    ]
    for state, tensor in held:
        tensor.copy_(state)
    pool.unpack([0], pool.packed([0]))
    for state, tensor in held:
        state.copy_(tensor)
    return cache
