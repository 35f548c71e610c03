"""Parts of a model compute together what the whole one does: ranks that share its layers, stages one after the other.

What cannot be divided is refused.
"""

import json
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvstore.connector import NullConnector
from kvstore.engine.config import SchedulerConfig
from kvstore.engine.model.devices import num_hbm_blocks
from kvstore.engine.model.loading import load
from kvstore.engine.model.parallel.cutting import read_plan
from kvstore.engine.model.parallel.group import Part
from kvstore.engine.model.probe import intercept
from kvstore.errors import ConfigError, UnsupportedModelError
from kvstore.kernels.paged_batch import PagedBatch
from tests.support.engines import save_model
from tests.support.models import ARCHITECTURES, make_model, make_seeing_model
from tests.support.ranks import WINDOWED, on_parts, on_ranks

NO_TENSOR_PLAN, NO_PIPELINE_PLAN = {"StableLm", "GptOss", "Phimoe"}, {"StableLm", "Phimoe"}
OF_MANY_SHAPES = {name for name in ARCHITECTURES if name.startswith(("Gemma4", "MiMo"))}
# Gemma 3n hands on more than hidden states.
NOT_DIVIDED = {*OF_MANY_SHAPES, "Gemma3nText"}
IDS = torch.arange(40) * 7 % 160
EVERY, SOME, LAST = torch.arange(40), torch.tensor([3, 39]), torch.tensor([39])
LOADING = threading.Lock()  # transformers changes what is global while it loads


def loaded_part(folder: str, part: Part, dtype: str = "auto"):
    with LOADING:
        return load(folder, "cpu", dtype, None, part=part)


def opened(folder: str, part: Part, dtype: str = "auto"):
    loaded = loaded_part(folder, part, dtype)
    return intercept(loaded.model, loaded.max_model_len, pack=True, part=part)


def paged(model, samples: torch.Tensor, token_ids: torch.Tensor = IDS) -> torch.Tensor:
    """What a model gives for a prompt, through the paged cache; on later stages than the first hidden states."""
    count = len(token_ids)
    positions, caches = torch.arange(count), model.new_caches(3, 16)
    assert len(caches) == len(model.spec.layers)
    batch = PagedBatch([0, count], [count], torch.arange(3)[None], positions, 16)
    with torch.inference_mode():
        return model.forward(token_ids, positions, batch, caches, NullConnector(), samples)


def check_together(
    saved_model: Callable[..., str], name: str = "Llama", sizes: tuple[int, int] = (2, 1), samples=EVERY,
    **changes: object,
) -> None:  # fmt: skip
    """sizes: how many ranks share a layer, and how many stages there are. All ranks of the first stage have logits."""
    folder, expected = saved_model(name, **changes), make_model(name, **changes)(input_ids=IDS[None]).logits[0, samples]
    check_ranks(folder, expected, sizes, samples)


def check_ranks(folder: str, expected: torch.Tensor, sizes: tuple[int, int], samples=EVERY) -> None:
    def work(part: Part) -> torch.Tensor:
        model = opened(folder, part)
        (size,) = {cache.shape[2] for layer in model.new_caches(1, 16) for cache in layer}
        assert size * sizes[0] == model.spec.shapes[0].num_kv_heads
        return paged(model, samples)

    for found in on_parts(*sizes, work)[: sizes[0]]:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# -- ranks that share the layers ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(ARCHITECTURES.keys() - NO_TENSOR_PLAN - NOT_DIVIDED))
def test_the_ranks_together_are_the_whole_model(name, saved_model):
    check_together(saved_model, name)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["ranks", "stages"])
def test_the_text_part_of_a_model_that_sees_is_divided(sizes, tmp_path):
    network = make_seeing_model("Mistral3")
    network.save_pretrained(tmp_path)
    check_ranks(str(tmp_path), network(input_ids=IDS[None]).logits[0], sizes)


@pytest.mark.parametrize(
    ("size", "changes"),
    [(4, {"num_key_value_heads": 4}), (2, {"vocab_size": 161})],
    ids=["four ranks", "odd vocabulary"],
)
def test_tied_heads_of_four_ranks_and_of_a_vocabulary_that_cannot_be_divided(size, changes, saved_model):
    check_together(saved_model, "Llama", (size, 1), tie_word_embeddings=True, **changes)


def test_a_rank_holds_its_part_only(saved_model):
    folder = saved_model("Mixtral", num_local_experts=4, num_experts_per_tok=2)
    whole = sum(tensor.numel() for tensor in load_file(Path(folder) / "model.safetensors").values())
    parts = on_ranks(2, lambda group: loaded_part(folder, Part(group)).model)
    held = [sum(parameter.numel() for parameter in part.parameters()) for part in parts]
    embedding = parts[0].get_input_embeddings().weight.numel()
    assert held[0] == held[1] < (whole + embedding) / 2 * 1.02  # norms, routers and an untied embedding are whole


# -- stages ------------------------------------------------------------------------------------------------------------
STAGED = [
    *product(["Llama", "Phi3", "Gemma2", "Gemma3", "Cohere", "GPTNeoX", "SmolLM3", "GptOss", "Qwen3Moe"], [1]),
    *product(["Gemma3", "Mixtral"], [2]),
]


@pytest.mark.parametrize(("name", "size"), STAGED)
def test_the_stages_together_are_the_whole_model(name, size, saved_model):
    check_together(saved_model, name, (size, 2), SOME)


def test_three_stages_have_a_layer_each_and_share_tied_weights(saved_model):
    check_together(saved_model, "Llama", (1, 3), tie_word_embeddings=True)


def test_a_step_that_samples_nothing_ends_at_the_last_stage(saved_model):
    check_together(saved_model, "Llama", (1, 2), torch.arange(0))


def test_forwards_that_were_begun_end_in_their_order(saved_model):
    """The last stage computes all of them, whatever the first waits for meanwhile."""
    prompts = [torch.arange(40) * times % 160 for times in (3, 7, 9)]
    whole = make_model("Llama")
    expected = [whole(input_ids=prompt[None]).logits[0, -1:] for prompt in prompts]

    def work(part: Part) -> list[torch.Tensor]:
        model = opened(saved_model("Llama"), part)
        caches = model.new_caches(9, 16)
        with torch.inference_mode():
            for index, prompt in enumerate(prompts):
                table = torch.arange(3)[None] + 3 * index
                batch = PagedBatch([0, 40], [40], table, EVERY, 16)
                model.begin(prompt, EVERY, batch, caches, NullConnector(), LAST)
            return [model.end(1) for _ in prompts] if not part.pipe.rank else []

    for found, logits in zip(on_parts(1, 2, work)[0], expected, strict=True):
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)


def test_a_rank_has_its_layers_only_and_the_first_what_stands_around_them(saved_model):
    folder = saved_model("Mixtral", num_local_experts=4, num_experts_per_tok=2)
    names = on_parts(1, 2, lambda part: {name for name, _ in loaded_part(folder, part).model.named_parameters()})
    first, second = ({name for name in found if ".layers." in name} for found in names)
    assert {name.split(".")[2] for name in first} == {"0"}
    assert {name.split(".")[2] for name in second} == {"1", "2"}
    assert names[0] - first == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert names[1] == second


def test_rotations_of_all_layers_are_known_to_all(saved_model):
    folder = saved_model("SmolLM3")  # whose third layer, of the second stage, does not rotate
    for model in on_parts(1, 2, lambda part: opened(folder, part)):
        assert [rotation is None for rotation in model.rotations] == [False, False, True]


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)])
def test_windows_of_all_layers_are_known_to_all_and_their_pools_are_as_large_as_said(sizes, tmp_path):
    folder = save_model(tmp_path, "Gemma3", **WINDOWED)
    limits = SchedulerConfig(max_model_len=16, block_size=16, max_num_seqs=4, max_num_batched_tokens=48)

    def work(part: Part) -> tuple[tuple[int | None, ...], int, int, int]:
        model = opened(folder, part)
        num_blocks, num_slots = num_hbm_blocks(model, limits, 400 << 10)
        caches = model.new_caches(num_blocks, 16, num_slots)
        return model.spec.windows, num_blocks, num_slots, sum(cache.nbytes for pair in caches for cache in pair)

    windows, num_blocks, num_slots, num_bytes = (set(one) for one in zip(*on_parts(*sizes, work), strict=True))
    assert windows == {(24, 24, None, 24, None, 24, 24)}
    assert len(num_blocks) == len(num_slots) == 1 and num_slots.pop() < num_blocks.pop()
    assert 390 << 10 < max(num_bytes) <= 400 << 10


def test_stages_of_16_bit_models_compute_in_their_type(saved_model):
    folder = saved_model("Llama")
    whole = paged(opened(folder, Part(), "bfloat16"), LAST).float()
    found = on_parts(1, 2, lambda part: paged(opened(folder, part, "bfloat16"), LAST))[0].float()
    assert (found - whole).norm() / whole.norm() < 0.02


# -- what cannot be ----------------------------------------------------------------------------------------------------
def refusal(folder: str, size: int) -> str:
    with pytest.raises(UnsupportedModelError) as refused:
        on_ranks(size, lambda group: loaded_part(folder, Part(group)))
    return str(refused.value)


@pytest.mark.parametrize(("name", "sizes"), list(product(sorted(OF_MANY_SHAPES), [(2, 1), (1, 2)])))
def test_layers_of_different_shapes_are_not_divided(name, sizes, saved_model):
    with pytest.raises(UnsupportedModelError, match=r"different shapes; give tensor_parallel_size=1 and pipeline"):
        on_parts(*sizes, lambda part: opened(saved_model(name), part))


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["ranks", "stages"])
@pytest.mark.parametrize("name", ["Qwen3_5Text", "Bamba", "Lfm2", "Zamba2"])
def test_states_are_not_divided(name, sizes, saved_model):
    with pytest.raises(UnsupportedModelError, match="keeps states beside its KV, which are not divided; give tensor"):
        on_parts(*sizes, lambda part: loaded_part(saved_model(name), part))


@pytest.mark.parametrize("name", sorted(NO_TENSOR_PLAN))
def test_a_model_without_a_plan_of_ranks_is_refused(name, saved_model):
    assert "has no plan of tensor parallelism; give tensor_parallel_size=1" in refusal(saved_model(name), 2)


def test_a_model_that_compares_all_activations_of_a_layer_is_refused(saved_model):
    assert "by the spread of all of a layer; give tensor_parallel_size=1" in refusal(saved_model("Gemma3nText"), 2)


def test_heads_that_cannot_be_divided_are_refused(saved_model):
    assert "2 KV heads cannot be divided among 4 ranks" in refusal(saved_model("Llama"), 4)
    assert "4 attention heads cannot be divided among 3 ranks" in refusal(saved_model("Llama"), 3)


def test_other_widths_that_cannot_be_divided_are_refused(saved_model):
    found = refusal(saved_model("Llama", intermediate_size=97), 2)
    assert "97 rows of model.layers.0.mlp.gate_proj.weight cannot be divided among 2 ranks" in found


def test_quantized_weights_are_refused(saved_model, tmp_path):
    config = json.loads((Path(saved_model("Llama")) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}  # which transformers would unpack, whole
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(load_file(Path(saved_model("Llama")) / "model.safetensors"), tmp_path / "model.safetensors")
    assert "quantized weights cannot be divided" in refusal(str(tmp_path), 2)


@pytest.mark.parametrize("style", ["mla_kv_a_proj", "ep_router"])
def test_a_style_that_is_not_known_is_refused(style):
    network = SimpleNamespace(base_model_prefix="model", tp_plan={"model.layers.*.self_attn.o_proj": style})
    with pytest.raises(UnsupportedModelError, match=f"divides model.layers.*.self_attn.o_proj as {style}, which"):
        read_plan(network)


def test_a_plan_of_the_head_alone_is_none():
    network = SimpleNamespace(base_model_prefix="model", tp_plan={"lm_head": "colwise_gather_output"})
    with pytest.raises(UnsupportedModelError, match="has no plan"):
        read_plan(network)


@pytest.mark.parametrize("name", sorted(NO_PIPELINE_PLAN))
def test_a_model_without_a_plan_of_stages_is_refused(name, saved_model):
    with pytest.raises(UnsupportedModelError, match="no plan of pipeline parallelism; give pipeline_parallel_size=1"):
        on_parts(1, 2, lambda part: loaded_part(saved_model(name), part))


def test_more_stages_than_layers_are_refused(saved_model):
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 4, but the model has 3 layers; give less"):
        on_parts(1, 4, lambda part: loaded_part(saved_model("Llama"), part))


@pytest.mark.parametrize("beside", ["kwarg", "dict"])
def test_layers_that_are_given_more_than_hidden_states_are_refused(beside, saved_model):
    """As in families whose plan does not say so: embeddings of the tokens for each layer, or a dict that they share."""

    def work(part: Part) -> object:
        loaded = loaded_part(saved_model("Llama"), part)
        if part.pipe.rank == 0:
            base = loaded.model.model
            forward = base.forward

            def with_more(input_ids, **kwargs):
                more = base.embed_tokens(input_ids) if beside == "kwarg" else {}
                return forward(input_ids=input_ids, per_layer=more, **kwargs)

            base.forward = with_more
        return intercept(loaded.model, loaded.max_model_len, part=part)

    with pytest.raises(UnsupportedModelError, match="its layers are given more than hidden states and positions"):
        on_parts(1, 2, work)
