"""Models that also see are served by their text part, and nothing else of them is read."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engines import greedy, open_engine
from tests.support.models import SEEING, make_seeing_model

IDS = torch.arange(60) * 7 % 150 + 3


@pytest.mark.parametrize("name", SEEING)
@torch.inference_mode()
def test_the_text_part_answers_as_the_whole_model_does(name, tmp_path):
    """Some families keep the names that their weights had in transformers 4, others have today's."""
    whole = make_seeing_model(name)
    whole.save_pretrained(tmp_path)
    expected = whole.generate(IDS[None], max_new_tokens=12, do_sample=False)[0, len(IDS) :].tolist()
    weights = load_file(tmp_path / "model.safetensors")
    text_only = {key: weight for key, weight in weights.items() if "visi" not in key and "visual" not in key}
    assert len(text_only) < len(weights)
    save_file(text_only, tmp_path / "model.safetensors", {"format": "pt"})
    with open_engine(str(tmp_path), tmp_path / "store", dtype="float32") as engine:
        for _ in range(2):  # computed, and from the cache
            (answer,) = engine.generate([IDS.tolist()], greedy(12))
            assert answer.token_ids == expected
