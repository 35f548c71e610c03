"""Tiny random models of many architectures, and the plain loops that our engine is compared with."""

import torch
import transformers

CLOSE = 0.01  # of two logits, in standard deviations: a module may compute a step otherwise than a prompt
BASE = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_GEMMA_4 = {
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 24, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0,
}  # fmt: skip

ARCHITECTURES: dict[str, dict] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Qwen3Moe": {"head_dim": 16, **_EXPERTS},
    "Mistral": {"sliding_window": 24},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "Phi": {"partial_rotary_factor": 0.5},
    "Phi3": {},
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 24, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "Gemma3": {"head_dim": 16, "sliding_window": 24, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "Olmo2": {},
    "Cohere": {},
    "Cohere2": {"head_dim": 16, "sliding_window": 24},
    "StableLm": {"partial_rotary_factor": 0.25},
    "Granite": {},
    "SmolLM3": {"no_rope_layer_interval": 3},
    "Glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "GPTNeoX": {"rotary_pct": 0.25},
    "GptOss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    "Starcoder2": {},
    "Exaone4": {"sliding_window": 24},
    "Phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    # Whose windows and full layers have keys and values of other shapes, or whose values are not as wide as keys.
    "Gemma4Text": _GEMMA_4,
    "Gemma4Text small": {
        **_GEMMA_4,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 160,
    },
    "Gemma4Text MoE": {
        **_GEMMA_4,
        **_EXPERTS,
        "enable_moe_block": True,
        "top_k_experts": 2,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "Gemma3nText": {
        "head_dim": 16,
        "sliding_window": 24,
        "num_hidden_layers": 5,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
        "intermediate_size": [96] * 5,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 160,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 3,
        "pad_token_id": 0,
    },
    "MiMoV2Flash": {
        "head_dim": 32,
        "v_head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
}

# Some layers of these have a window, the others see the whole context.
ARCHITECTURES_WITH_WINDOWS = (
    "Gemma2", "Gemma3", "Gemma3nText", "Cohere2", "GptOss", "Exaone4", "Gemma4Text", "Gemma4Text small",
    "Gemma4Text MoE", "MiMoV2Flash",
)  # fmt: skip

_LINEAR = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "head_dim": 16,
}  # fmt: skip
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 48}
CHUNK = 24  # tokens that a Mamba layer scans together: its own 256 take seconds, and a prompt here would be one chunk
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2, "mamba_chunk_size": CHUNK}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"]}
# Families whose layers keep a state beside the KV of others, or of their own.
ARCHITECTURES_WITH_STATES: dict[str, dict] = {
    "Qwen3_5Text": _LINEAR,
    "Qwen3_5MoeText": {**_LINEAR, **_SHARED_EXPERT},
    "Qwen3Next": {**_LINEAR, **_SHARED_EXPERT},
    "OlmoHybrid": _LINEAR,
    "GraniteMoeHybrid": {**_MAMBA, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0},
    "Bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "NemotronH": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "mlp", "attention", "mamba"], "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "head_dim": 16, "chunk_size": CHUNK,
    },
    "FalconH1": {**_MAMBA, "mamba_d_ssm": 128, "mamba_n_groups": 1},
    "Lfm2": _CONVOLUTIONS,
    "Lfm2Moe": {**_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": 1},
    "Zamba2": {
        "mamba_d_state": 16, "n_mamba_heads": 8, "mamba_headdim": 16, "use_mamba_kernels": False, "chunk_size": CHUNK,
        "hybrid_layer_ids": [1], "layers_block_type": ["mamba", "hybrid", "mamba"],
    },
}  # fmt: skip
REFUSED = {
    "HunYuanDenseV1": {"head_dim": 16},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False},
}

_EYE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
_QWEN_EYE = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}  # of time, height and width
_SEEING_TEXT = {**BASE, "head_dim": 16}
# Models that also see, with what their text and vision parts differ in.
SEEING: dict[str, tuple[dict, dict]] = {
    "Gemma3": (ARCHITECTURES["Gemma3"], {**_EYE, "patch_size": 14}),
    "Gemma4": ({**_GEMMA_4, "pad_token_id": 0}, {**_EYE, "patch_size": 14, "head_dim": 16}),
    "Mistral3": (
        {"model_type": "mistral", "sliding_window": None},
        {**_EYE, "patch_size": 14, "model_type": "pixtral", "head_dim": 16},
    ),
    "Qwen2_5_VL": ({"rope_parameters": _SECTIONS}, _QWEN_EYE),
    "Qwen3VL": ({"rope_parameters": _SECTIONS, "tie_word_embeddings": True}, _QWEN_EYE),
    "SmolVLM": ({"model_type": "llama"}, {**_EYE, "patch_size": 14}),
    "Qwen3_5": (_LINEAR, _QWEN_EYE),
    "Qwen3VLMoe": ({"rope_parameters": _SECTIONS, **_EXPERTS}, _QWEN_EYE),
}


def make_model(name: str = "Llama", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object):
    """A random model of an architecture in `ARCHITECTURES`, or of any `<Name>Config` with a causal LM."""
    family = name.split()[0]
    suffix = "TextConfig" if name == "Gemma3" else "Config"
    own = (ARCHITECTURES | ARCHITECTURES_WITH_STATES | REFUSED).get(name, {})
    config = getattr(transformers, family + suffix)(**{**BASE, **own, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    return _with_random_weights(model)


def network_of(path: str):
    """What transformers makes of a saved model, in float32. `make_model` may make other weights a second time."""
    network = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return network.eval().requires_grad_(False)


def make_seeing_model(name: str):
    """A random model of those in `SEEING`, whole."""
    text, eye = SEEING[name]
    is_tied = text.get("tie_word_embeddings", False)
    parts = {"text_config": {**_SEEING_TEXT, **text}, "vision_config": eye, "tie_word_embeddings": is_tied}
    config = getattr(transformers, name + "Config")(**parts)
    torch.manual_seed(0)
    return _with_random_weights(transformers.AutoModelForImageTextToText.from_config(config).eval())


@torch.inference_mode()
def check_answer(network, token_ids: list[int], answer: list[int]) -> None:
    """To the network alone each token is the best behind those before it, or as good as the best."""
    logits = network(input_ids=torch.tensor([token_ids + answer]), use_cache=False).logits[0, len(token_ids) - 1 : -1]
    given = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    is_best = logits.amax(1) - given <= CLOSE * logits.std(1)
    assert bool(is_best.all()), f"token {is_best.tolist().index(False)}"


def _with_random_weights(model):
    with torch.no_grad():
        for parameter in model.parameters():  # larger than their defaults, so that attention is far from uniform
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.15)
            elif "sinks" not in repr(parameter):
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.requires_grad_(False)
