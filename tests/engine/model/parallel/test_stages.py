"""Stages of a model, one after the other, compute what the whole model does; what cannot be divided so is refused."""

import threading

import pytest
import torch

from kvstore.connector import NullConnector
from kvstore.engine.model.loading import load
from kvstore.engine.model.parallel.group import Part
from kvstore.engine.model.probe import intercept
from kvstore.errors import ConfigError, UnsupportedModelError
from kvstore.kernels.paged_batch import PagedBatch
from tests.support.models import ARCHITECTURES, make_model
from tests.support.ranks import on_parts

WITHOUT_PLAN = {"StableLm"}
NUM_TOKENS = 40
LOADING = threading.Lock()  # transformers changes what is global while it loads


def loaded_part(folder: str, part: Part, dtype: str = "auto"):
    with LOADING:
        return load(folder, "cpu", dtype, None, part=part)


def paged(model, token_ids: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """What a model gives for a prompt; on later stages than the first hidden states."""
    count = len(token_ids)
    positions, caches = torch.arange(count), model.new_caches(3, 16)
    assert len(caches) == len(model.spec.layers)
    batch = PagedBatch([0, count], [count], torch.arange(3)[None], positions, 16)
    with torch.inference_mode():
        return model.forward(token_ids, positions, batch, caches, NullConnector(), samples)


def opened(folder: str, part: Part, dtype: str = "auto"):
    loaded = loaded_part(folder, part, dtype)
    return intercept(loaded.model, loaded.max_model_len, pack=True, part=part)


def logits_of_stages(folder: str, tensor_size: int, pipeline_size: int, token_ids, samples) -> list[torch.Tensor]:
    """Those of the first stage's ranks."""

    def work(part: Part) -> torch.Tensor:
        return paged(opened(folder, part), token_ids, samples)

    return on_parts(tensor_size, pipeline_size, work)[:tensor_size]


KINDS = sorted(ARCHITECTURES.keys() - WITHOUT_PLAN)


@pytest.mark.parametrize(
    ("name", "tensor_size"), [*((name, 1) for name in KINDS), ("Gemma3", 2), ("Mixtral", 2), ("Olmo2", 2)]
)
def test_the_stages_together_are_the_whole_model(name, tensor_size, saved_model):
    token_ids, samples = torch.arange(NUM_TOKENS) * 7 % 160, torch.tensor([3, 39])
    expected = make_model(name)(input_ids=token_ids[None]).logits[0, samples]
    for found in logits_of_stages(saved_model(name), tensor_size, 2, token_ids, samples):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_three_stages_have_a_layer_each_and_share_tied_weights(saved_model):
    changes = {"tie_word_embeddings": True}
    token_ids = torch.arange(NUM_TOKENS) * 3 % 160
    expected = make_model("Llama", **changes)(input_ids=token_ids[None]).logits[0]
    (found,) = logits_of_stages(saved_model("Llama", **changes), 1, 3, token_ids, torch.arange(NUM_TOKENS))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_step_that_samples_nothing_ends_at_the_last_stage(saved_model):
    nothing = torch.arange(0)
    (found,) = logits_of_stages(saved_model("Llama"), 1, 2, torch.arange(NUM_TOKENS), nothing)
    assert found.shape == (0, 160)


def test_forwards_that_were_begun_end_in_their_order(saved_model):
    """The last stage computes all of them, whatever the first waits for meanwhile."""
    prompts = [torch.arange(NUM_TOKENS) * times % 160 for times in (3, 7, 9)]
    whole = make_model("Llama")
    expected = [whole(input_ids=prompt[None]).logits[0, -1:] for prompt in prompts]

    def work(part: Part) -> list[torch.Tensor]:
        model = opened(saved_model("Llama"), part)
        positions, caches, last = torch.arange(NUM_TOKENS), model.new_caches(9, 16), torch.tensor([NUM_TOKENS - 1])
        with torch.inference_mode():
            for index, prompt in enumerate(prompts):
                table = torch.arange(3)[None] + 3 * index
                batch = PagedBatch([0, NUM_TOKENS], [NUM_TOKENS], table, positions, 16)
                model.begin(prompt, positions, batch, caches, NullConnector(), last)
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


def test_stages_of_16_bit_models_compute_in_their_type(saved_model):
    token_ids, samples = torch.arange(NUM_TOKENS) * 7 % 160, torch.tensor([39])
    folder = saved_model("Llama")
    whole = paged(opened(folder, Part(), "bfloat16"), token_ids, samples).float()
    found = on_parts(1, 2, lambda part: paged(opened(folder, part, "bfloat16"), token_ids, samples))[0].float()
    assert (found - whole).norm() / whole.norm() < 0.02


# -- what cannot be ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(WITHOUT_PLAN))
def test_a_model_without_a_plan_is_refused(name, saved_model):
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
