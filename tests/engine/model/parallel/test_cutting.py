"""Parts of a model, together, compute what the whole model does; what cannot be divided is refused."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvstore.connector import NullConnector
from kvstore.engine.model.loading import load
from kvstore.engine.model.parallel.group import Part
from kvstore.engine.model.parallel.plan import read_plan
from kvstore.engine.model.probe import intercept
from kvstore.errors import UnsupportedModelError
from kvstore.kernels.paged_batch import PagedBatch
from tests.support.models import ARCHITECTURES, make_model
from tests.support.ranks import ThreadGroup, on_ranks

WITHOUT_PLAN = {"StableLm", "GptOss"}
DIVIDED = sorted(ARCHITECTURES.keys() - WITHOUT_PLAN)
NUM_TOKENS = 40
LOADING = threading.Lock()  # transformers changes what is global while it loads


def loaded_part(folder: str, group: ThreadGroup):
    with LOADING:
        return load(folder, "cpu", "auto", None, part=Part(group))


def logits_of_parts(folder: str, size: int, token_ids: torch.Tensor) -> list[torch.Tensor]:
    """Through the paged cache, as the engine computes them, on each rank."""

    def work(group: ThreadGroup) -> torch.Tensor:
        part = loaded_part(folder, group)
        model = intercept(part.model, part.max_model_len, pack=True, part=Part(group))
        count = len(token_ids)
        positions = torch.arange(count)
        caches = model.new_caches(3, 16)
        assert {cache.shape[2] for layer in caches for cache in layer} == {model.spec.num_kv_heads // size}
        batch = PagedBatch([0, count], [count], torch.arange(3)[None], positions, 16)
        with torch.inference_mode():
            return model.forward(token_ids, positions, batch, caches, NullConnector(), positions)

    return on_ranks(size, work)


@pytest.mark.parametrize("name", DIVIDED)
def test_the_parts_together_are_the_whole_model(name, saved_model):
    token_ids = torch.arange(NUM_TOKENS) * 7 % 160
    expected = make_model(name)(input_ids=token_ids[None]).logits[0]
    for found in logits_of_parts(saved_model(name), 2, token_ids):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_four_ranks_have_a_quarter_each(saved_model):
    changes = {"num_key_value_heads": 4, "tie_word_embeddings": True}
    token_ids = torch.arange(NUM_TOKENS) * 3 % 160
    expected = make_model("Llama", **changes)(input_ids=token_ids[None]).logits[0]
    for found in logits_of_parts(saved_model("Llama", **changes), 4, token_ids):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_rank_holds_its_part_only(saved_model):
    folder = saved_model("Mixtral", num_local_experts=4, num_experts_per_tok=2)
    whole = sum(tensor.numel() for tensor in load_file(Path(folder) / "model.safetensors").values())
    parts = on_ranks(2, lambda group: loaded_part(folder, group).model)
    held = [sum(parameter.numel() for parameter in part.parameters()) for part in parts]
    embedding = parts[0].get_input_embeddings().weight.numel()
    assert held[0] == held[1] < (whole + embedding) / 2 * 1.02  # norms, routers and an untied embedding are whole


def test_a_vocabulary_that_cannot_be_divided_stays_whole(saved_model):
    changes = {"vocab_size": 161, "tie_word_embeddings": True}
    token_ids = torch.arange(NUM_TOKENS) * 7 % 161
    expected = make_model("Llama", **changes)(input_ids=token_ids[None]).logits[0]
    for found in logits_of_parts(saved_model("Llama", **changes), 2, token_ids):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def refusal(folder: str, size: int) -> str:
    with pytest.raises(UnsupportedModelError) as refused:
        on_ranks(size, lambda group: loaded_part(folder, group))
    return str(refused.value)


@pytest.mark.parametrize("name", sorted(WITHOUT_PLAN))
def test_a_model_without_a_plan_is_refused(name, saved_model):
    assert "has no plan of tensor parallelism; give tensor_parallel_size=1" in refusal(saved_model(name), 2)


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
