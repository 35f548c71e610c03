"""Stages of a model in processes: the same tokens as one process says, over the same store.

`--long` compares all kinds of models instead of a few. What each stage computes: `tests/engine/model/parallel`.
"""

import os
from pathlib import Path

import pytest

from kvstore import Engine
from kvstore.errors import ConfigError, UnsupportedModelError
from tests.support.engines import Plain, counters, greedy, open_engine, save_model, settle, tokens
from tests.support.ranks import children, ranks_of

MODEL = {"tokenizer": True}
FEW = ["Gemma3"]  # tied, with a window
KINDS = ["GPTNeoX", "Llama", "Qwen2", "Qwen3Moe", "Mistral", "Phi", "Phi3", "Gemma2", "Olmo2", "Cohere", "Glm4"]
FOUR = "Mixtral"
PROMPTS = [tokens(seed, 30 + 9 * seed) for seed in range(6)]


def open_two(model: str, path: Path | None = None, **options) -> Engine:
    return open_engine(model, path, pipeline_parallel_size=2, **options)


def check_says_the_same(model: str, path: Path, **options) -> None:
    """Computed, then loaded by all ranks."""
    plain = Plain(model)
    expected = [plain(prompt, 12) for prompt in PROMPTS]
    plain.engine.close()
    with open_two(model, path, max_num_batched_tokens=48, **options) as engine:
        for _ in range(2):
            assert [out.token_ids for out in engine.generate(PROMPTS, greedy(12))] == expected
            settle(engine)
            engine.loop.call(engine.loop.pool.evict_all)
        assert counters(engine)["loaded"] > 0


@pytest.mark.parametrize("name", [*FEW, *KINDS])
def test_two_stages_say_what_one_process_does(name, request, tmp_path):
    if name not in FEW and not request.config.getoption("--long"):
        pytest.skip("needs --long")
    check_says_the_same(save_model(tmp_path / "model", name), tmp_path / "store")


@pytest.mark.parametrize("name", [FOUR, *FEW, *KINDS])
def test_two_stages_of_two_ranks_say_what_one_process_does(name, request, tmp_path):
    if name != FOUR and not request.config.getoption("--long"):
        pytest.skip("needs --long")
    check_says_the_same(save_model(tmp_path / "model", name), tmp_path / "store", tensor_parallel_size=2)
    assert not ranks_of(os.getpid())


# -- what cannot be ----------------------------------------------------------------------------------------------------
def test_what_cannot_be_divided_is_refused_and_leaves_nothing(model, tmp_path):
    before = children(os.getpid())
    with pytest.raises(UnsupportedModelError, match="no plan of pipeline parallelism"):
        open_two(save_model(tmp_path / "model", "StableLm"))
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 4, but the model has 3 layers"):
        open_engine(model, pipeline_parallel_size=4)
    assert children(os.getpid()) <= before
