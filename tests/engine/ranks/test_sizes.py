"""A model in one process, in two that share its layers, and in two stages: what must not depend on it."""

import pytest

from tests.support.engines import cached, counters, greedy, open_engine, settle, tokens
from tests.support.ranks import SIZES

MODEL = {"tokenizer": True}
PROMPTS = [tokens(seed, 30 + 9 * seed) for seed in range(6)]


def test_the_store_does_not_know_which_ranks_wrote_it(model, plain, tmp_path):
    store, told = tmp_path / "store", list(PROMPTS)
    for number, size in enumerate([{}, SIZES["tensor"], SIZES["pipeline"], {}]):
        with open_engine(model, store, **size) as engine:
            outs = engine.generate(told, greedy(20))
            assert [out.token_ids for out in outs] == [plain(prompt, 20) for prompt in told]
            if number:
                most = [(len(prompt) - 1) // 16 * 16 for prompt in told]
                assert [cached(out)[2] for out in outs] == most
            told = [[*prompt, *out.token_ids] for prompt, out in zip(told, outs, strict=True)]
            settle(engine)


@pytest.mark.parametrize("size", SIZES)
def test_preempted_requests_say_the_same(model, plain, size):
    with open_engine(model, hbm="96KiB", max_num_batched_tokens=48, max_model_len=192, **SIZES[size]) as engine:
        found = engine.generate(PROMPTS, greedy(40))
        assert engine.stats()["requests"]["preemptions"] > 0
        assert [out.token_ids for out in found] == [plain(prompt, 40) for prompt in PROMPTS]
        engine.check_integrity()


def test_a_conversation_is_truncated_and_goes_on_after_a_restart(model, tmp_path):
    said = []
    for sizes in (({}, {}), (SIZES["tensor"], SIZES["pipeline"])):
        store, turns = tmp_path / str(len(said)), []
        for size, few in zip(sizes, (range(10), range(10, 14)), strict=True):
            with open_engine(model, store, max_model_len=192, **size) as engine:
                chat = engine.chat("talk", system="Be brief.")
                turns += [chat.send(f"message number {turn} of a long talk", greedy(16)).token_ids for turn in few]
                assert chat.truncated_tokens > 0 and counters(engine)["spliced"] > 0
                settle(engine)
        said.append(turns)
    assert said[0] == said[1]
