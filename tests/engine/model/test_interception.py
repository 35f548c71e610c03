"""Every architecture through our attention and rotation, and through lean layers, against the unmodified model."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from kvstore.connector import NullConnector
from kvstore.engine.model import lean
from kvstore.engine.model.interception import PositionFreeModel, RotaryTap, run_step
from kvstore.engine.model.probe import Recorder, intercept
from kvstore.errors import UnsupportedModelError
from kvstore.kernels.paged_batch import PagedBatch
from tests.support.models import ARCHITECTURES, make_model
from tests.support.packed import small_weights_packed

MAX_LEN = 256
NUM_TOKENS = 70  # longer than every sliding window in ARCHITECTURES
# Families whose layers are taken over, and such whose are not.
PLAIN = ("Llama", "Qwen2", "Qwen3", "Mistral", "Qwen3Moe", "Mixtral", "Granite", "Gemma")
OTHERS = ("Gemma2", "Olmo2", "Cohere", "GPTNeoX", "Phi3", "Glm4")


@pytest.fixture(autouse=True)
def small_weights_are_packed() -> Iterator[None]:
    with small_weights_packed():
        yield


def prompt(seed: int = 1, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    return torch.randint(160, (num_tokens,), generator=torch.Generator().manual_seed(seed))


def expected_logits(name: str, token_ids: torch.Tensor, **changes: object) -> torch.Tensor:
    network = make_model(name, **changes)
    return network(input_ids=token_ids[None], use_cache=False).logits[0]


class Sequence:
    """One request fed to a model in chunks, its blocks deliberately out of order."""

    def __init__(self, model: PositionFreeModel, block_size: int = 8) -> None:
        count = -(-MAX_LEN // block_size)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(3))
        self.model, self.block_size, self.table, self.length = model, block_size, order[None], 0
        self.caches = model.new_caches(count, block_size)

    def feed(self, token_ids: torch.Tensor, samples: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of every token, unless `samples` says of which."""
        start, self.length = self.length, self.length + len(token_ids)
        positions = torch.arange(start, self.length)
        slots = self.table[0][positions // self.block_size] * self.block_size + positions % self.block_size
        batch = PagedBatch([0, len(token_ids)], [self.length], self.table, slots, self.block_size)
        samples = torch.arange(len(token_ids)) if samples is None else samples
        return self.model.forward(token_ids, positions, batch, self.caches, NullConnector(), samples)


def num_lean(model: PositionFreeModel) -> int:
    return sum(isinstance(m.__dict__.get("forward"), lean.LeanLayer) for m in model.network.modules())


CASES = [
    *product(ARCHITECTURES, ["plain", "packed"]),
    *product(["Llama", "Qwen3", "Gemma3", "GPTNeoX", "GptOss"], ["packed for CUDA"]),  # on a CPU, too
]


@pytest.mark.parametrize(("name", "way"), CASES)
@torch.inference_mode()
def test_logits_equal_the_unmodified_model(name, way, monkeypatch):
    token_ids = prompt()
    expected = expected_logits(name, token_ids)
    if way == "packed for CUDA":
        monkeypatch.setattr("kvstore.engine.model.probe._is_on_cpu", lambda _: False)
    model = intercept(make_model(name), MAX_LEN, pack=way != "plain")
    if way == "packed" and name in (*PLAIN, *OTHERS):
        assert num_lean(model) == (len(model.spec.shapes) if name in PLAIN else 0)
        assert (model.network.kvstore_carrier.pruned_layer is None) == (name in OTHERS)
    for chunks in ([NUM_TOKENS - 5, 1, 1, 1, 1, 1], [1, 7, 33, 1, 28]):
        sequence = Sequence(model)
        logits = torch.cat([sequence.feed(chunk) for chunk in token_ids.split(chunks)])
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "widths"), [("Qwen3Moe", {"moe_intermediate_size": 35}), ("GptOss", {"intermediate_size": 50})]
)
@torch.inference_mode()
def test_experts_may_have_any_width(name, widths):
    """torch's grouped products refuse a row that is no multiple of 16 bytes."""
    network, token_ids = make_model(name, **widths), prompt()
    network.set_experts_implementation("eager")
    expected = network(input_ids=token_ids[None], use_cache=False).logits[0]
    logits = Sequence(intercept(make_model(name, **widths), MAX_LEN, pack=True)).feed(token_ids)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Gemma3", "Cohere", "Glm4", "GptOss", "GPTNeoX"])
@torch.inference_mode()
def test_bf16_logits_are_as_close_as_bf16_allows(name):
    token_ids = prompt()
    expected = expected_logits(name, token_ids).float()
    own = make_model(name, dtype=torch.bfloat16)
    error_of_bf16 = (own(input_ids=token_ids[None], use_cache=False).logits[0].float() - expected).norm()
    sequence = Sequence(intercept(make_model(name, dtype=torch.bfloat16), MAX_LEN))
    logits = torch.cat([sequence.feed(chunk) for chunk in token_ids.split([40, 29, 1])])
    assert (logits.float() - expected).norm() < 1.5 * error_of_bf16


@pytest.mark.parametrize("name", ["Llama", "Phi", "Cohere", "Gemma3", "GptOss", "SmolLM3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_our_rotation_is_the_models_bit_for_bit(name, dtype):
    """The probe has compared them at load, with torch.equal; here at every position, on other tokens."""
    network = make_model(name, dtype=dtype)
    model = intercept(network, MAX_LEN)
    token_ids, positions = prompt(5, MAX_LEN), torch.arange(MAX_LEN)
    plain, shown = Recorder(), Recorder()
    run_step(network, token_ids, positions, plain, positions[:1])
    taps = [m.forward for m in network.modules() if type(m).__name__.endswith("RotaryEmbedding")]
    for tap in taps:
        tap.revealed = "all"
    run_step(network, token_ids, positions, shown, positions[:1])
    for layer, rotation in enumerate(model.rotations):
        key = plain.keys[layer] if rotation is None else rotation.at(positions).apply(plain.keys[layer])
        assert torch.equal(key, shown.keys[layer])
        assert rotation is None or not torch.equal(key, plain.keys[layer])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "longrope", "long_factor": [4.0] * 8, "short_factor": [1.0] * 8,
         "original_max_position_embeddings": 64, "factor": 4.0},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
@torch.inference_mode()
def test_rope_types_have_the_frequencies_of_the_whole_window(rope):
    """Logits equal the unmodified model's on a prompt that fills the window, and a prefix has the same keys."""
    changes = {"rope_parameters": {**rope, "rope_theta": 10000.0}}
    token_ids = prompt(2, MAX_LEN)
    expected = expected_logits("Llama", token_ids, **changes)
    model = intercept(make_model("Llama", **changes), MAX_LEN)
    for chunks in ([MAX_LEN], [30, 100, 126]):
        sequence = Sequence(model)
        logits = torch.cat([sequence.feed(chunk) for chunk in token_ids.split(chunks)])
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)


@torch.inference_mode()
def test_logits_are_computed_where_a_token_is_sampled_only():
    network = make_model()
    model = intercept(network, MAX_LEN)
    seen = []
    network.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    logits = Sequence(model).feed(prompt()[:9], torch.tensor([2, 8]))
    assert seen == [2] and logits.shape == (2, 160)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("GPT2", "depend on position and it has no rotary"),
        ("OPT", "depend on position and it has no rotary"),
        ("Mamba", "does not go through transformers' interface"),
        ("Bloom", "does not go through transformers' interface"),
        ("Jamba", "computed in pieces"),
        ("MiniMax", "does not keep its states as others do: MiniMax uses cache of its own$"),
        ("Falcon", "does not go through transformers' interface"),
        ("Llama4Text", "attend within chunks"),
        ("HunYuanDenseV1", "a norm follows it"),
        ("NanoChat", "a norm follows it"),
        ("DeepseekV3", "cannot be served"),
    ],
)
def test_other_models_are_refused_with_the_reason(name, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        intercept(make_model(name), MAX_LEN)


def test_a_model_whose_keys_are_changed_after_rotation_is_refused():
    network = make_model("Llama")
    attention = network.model.layers[1].self_attn
    original = attention.forward

    def forward(*args, **kwargs):
        cos, sin = kwargs["position_embeddings"]
        return original(*args, **{**kwargs, "position_embeddings": (cos * 2 - 1, sin)})

    attention.forward = forward
    with pytest.raises(UnsupportedModelError, match=r"layer 1"):
        intercept(network, MAX_LEN)


def test_damaged_weights_are_called_so():
    network = make_model("Llama")
    with torch.no_grad():
        network.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(UnsupportedModelError, match="keys of layer 1 are no finite numbers: its weights are damaged"):
        intercept(network, MAX_LEN)


EXPERTS = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32, "num_hidden_layers": 4,
    "num_experts": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "dtype": torch.bfloat16,
}  # fmt: skip


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_other_experts_that_rounding_alone_chooses_are_no_reason_to_refuse_a_model(name):
    intercept(make_model(name, **EXPERTS), MAX_LEN)


@pytest.mark.parametrize("name, sizes, more", [("Llama", {}, 0.5), ("Mixtral", EXPERTS, 8.0)])
def test_a_model_whose_attention_adds_something_is_refused(name, sizes, more):
    """Whatever the reason: when the logits through our attention differ, the model is not served."""
    network = make_model(name, **sizes)
    original = type(network.config)._attn_implementation.fget
    layer = network.model.layers[2]
    plain = layer.forward

    def forward(hidden_states, **kwargs):
        extra = more if original(network.config) == "eager" else 0.0
        return plain(hidden_states, **kwargs) + extra

    layer.forward = forward
    with pytest.raises(UnsupportedModelError, match="logits differ"):
        intercept(network, MAX_LEN)


# -- lean layers -------------------------------------------------------------------------------------------------------
def packed(name: str, **changes: object) -> PositionFreeModel:
    return intercept(make_model(name, **changes), MAX_LEN, pack=True)


@torch.inference_mode()
def test_a_pruned_step_still_writes_every_key() -> None:
    model = packed("Llama")
    pruned, whole = Sequence(model), Sequence(model)
    pruned.feed(prompt(), torch.tensor([NUM_TOKENS - 1]))
    whole.feed(prompt())
    for found, expected in zip(pruned.caches, whole.caches, strict=True):
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
        assert int(found[0].abs().sum(dim=(2, 3)).count_nonzero()) == NUM_TOKENS


@pytest.mark.parametrize("name, changes", [("Gemma", {}), ("Granite", {"embedding_multiplier": 2.0})])
def test_a_network_that_scales_what_its_embedding_says_keeps_its_own_forward(name, changes) -> None:
    """Gemma's embedding does that itself."""
    model = packed(name, **changes)
    assert num_lean(model) == 3
    assert (model.network.kvstore_carrier.lean is None) == (name == "Granite")


def test_a_layer_that_scales_its_sums_stays() -> None:
    assert num_lean(packed("Granite", residual_multiplier=0.9)) == 0


def test_a_layer_that_scales_the_little_it_adds_stays_in_16_bits() -> None:
    """As Granite's trained layers do: a row's largest value would hide that."""
    network = make_model("Granite", dtype=torch.bfloat16, residual_multiplier=0.22, embedding_multiplier=12.0)
    with torch.inference_mode():
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.05)
            layer.mlp.down_proj.weight.mul_(0.05)
    assert num_lean(intercept(network, MAX_LEN, pack=True)) == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
@torch.inference_mode()
def test_queries_may_grow_with_their_position(dtype, tolerance) -> None:
    """As in Ministral 3, behind the context that it was first made for. In 16 bits the layers look plain."""
    rope = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
        "llama_4_scaling_beta": 0.1,
    }  # fmt: skip
    changes, token_ids = {"head_dim": 16, "rope_parameters": rope}, prompt(num_tokens=MAX_LEN)
    expected = expected_logits("Ministral3", token_ids, **changes)
    found = Sequence(packed("Ministral3", dtype=dtype, **changes)).feed(token_ids).float()
    assert (found - expected).norm() < tolerance * expected.norm()


def test_a_layer_that_computes_something_else_is_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with the parts of a plain one, whose forward uses them in another way."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    original = LlamaDecoderLayer.forward

    def scaled(self: object, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return original(self, hidden_states, *args, **kwargs) * 1.01

    monkeypatch.setattr(LlamaDecoderLayer, "forward", scaled)
    assert num_lean(packed("Llama")) == 0


def test_in_whatever_order_a_model_asks_for_rotations_all_processes_number_them_alike():
    """Gemma 3 asks in the order of a set of strings, which each process has another of."""
    taps = [RotaryTap(make_model("Gemma3").model.rotary_emb, 64) for _ in range(2)]
    for tap, kinds in zip(
        taps, (("sliding_attention", "full_attention"), ("full_attention", "sliding_attention")), strict=True
    ):
        for kind in kinds:
            tap(torch.zeros(1, 3, 64), torch.arange(3)[None], kind)
    assert taps[0].sources == taps[1].sources == [("full_attention",), ("sliding_attention",)]
