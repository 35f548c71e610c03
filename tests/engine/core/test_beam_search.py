"""Beam search beside transformers', whatever befalls its beams; what it leaves behind, and that it waits for nobody."""

import pytest
import torch

from kvstore import Engine, SamplingParams
from kvstore.blocks.ids import Lineage
from kvstore.engine.core.beam_search import BeamSearch
from kvstore.engine.core.request import Request
from kvstore.engine.outputs import TokenLogprob
from tests.support.by_hand import by_hand
from tests.support.engines import ask, evict_hbm, greedy, open_engine, settle, tokens
from tests.support.faults import before_each_step, fail
from tests.support.first_stage import pipelined
from tests.support.house import ROOT
from tests.support.models import check_answer, network_of

FAMILIES = ("Llama", "Qwen3", "Gemma3", "Qwen3_5Text", "GptOss")  # dense, with windows, with states, with experts
ENDS = (3, 7, 11, 50)
PROMPT, MOST, BLOCK = tokens(0, 37), 20, 16
SEARCH = SamplingParams(use_beam_search=True, beam_width=4, n=3, max_tokens=MOST)
ENDING = SamplingParams(
    use_beam_search=True, beam_width=4, n=3, max_tokens=MOST, length_penalty=0.0, stop_token_ids=ENDS
)


@pytest.fixture(params=FAMILIES)
def name(request) -> str:
    return request.param


def opened(model: str, path=None, **options) -> Engine:
    return open_engine(model, path, hbm="4MiB", cpu="8MiB", dtype="float32", **options)


def of_transformers(network, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    """Without its cache, which cannot give a beam another one's states in all versions."""
    ends = list(params.stop_token_ids)
    made = network.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
        num_beams=params.beam_width, num_return_sequences=params.n, length_penalty=params.length_penalty,
        early_stopping=False, max_new_tokens=params.max_tokens, eos_token_id=ends or None, pad_token_id=0,
        use_cache=False,
    )  # fmt: skip
    answers = made[:, len(prompt) :].tolist()
    lengths = [next((at for at, token in enumerate(answer, start=1) if token in ends), MOST) for answer in answers]
    return [answer[:length] for answer, length in zip(answers, lengths, strict=True)]


def found(output) -> list[list[int]]:
    return [choice.token_ids for choice in output.choices]


def step(search: BeamSearch, *found: dict[int, float]) -> list[tuple[int, float]]:
    """Let each beam go on so; returns the last tokens of those that do, and their sums."""
    for beam, top in zip(list(search.beams), found, strict=True):
        assert not search.is_complete
        search.add(beam, TokenLogprob(max(top, key=top.__getitem__), 0.0, top))
    going_on, search.beams = search.advance(), {}
    for one in going_on:
        beam = search.fork(one.beam)
        beam.append(one.token_id)
        search.beams[beam] = one.logprob
    return [(one.token_id, pytest.approx(one.logprob)) for one in going_on]


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_an_end_counts_among_the_best_alone_and_a_search_goes_on_while_a_beam_may_be_better(penalty):
    params = SamplingParams(use_beam_search=True, n=2, length_penalty=penalty)
    search = BeamSearch(Request("a", [1, 2], params, 4, Lineage(ROOT), 4, 0, frozenset({9})))
    assert step(search, {1: -1, 2: -2, 9: -3}) == [(1, -1), (2, -2)]
    assert step(search, {9: -0.5, 4: -1}, {9: -0.1, 5: -3}) == [(4, -2), (5, -5)]  # the second end is the third best
    going_on = step(search, {9: -0.1, 6: -0.2}, {7: -1, 8: -2})
    if penalty:  # -2.2 / 3 is better than -1.5 / 2
        assert going_on == [(6, -2.2), (7, -6)]
        assert step(search, {3: -0.1, 9: -9}, {3: -1, 9: -2}) == []
        assert [one.output_token_ids for one in search.answers()] == [[1, 4, 6, 3], [1, 4, 9]]
    else:
        assert going_on == []
        assert [one.output_token_ids for one in search.answers()] == [[1, 9], [1, 4, 9]]
    ends = {one.index: one.finish_reason for one in search.answers()}
    assert ends == {0: "length" if penalty else "stop", 1: "stop"}


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.loop.scheduler.roster.check_integrity()


def test_its_answers_are_those_of_transformers(name, saved_model):
    network = network_of(saved_model(name))
    others = [tokens(8, 20), tokens(9, 50)]  # in one batch
    with opened(saved_model(name)) as engine:
        plain, ending, *alone = engine.generate([PROMPT, PROMPT, *others], [SEARCH, ENDING, *[greedy(MOST)] * 2])
        engine.check_integrity()
    assert found(plain) == of_transformers(network, PROMPT, SEARCH)
    assert found(ending) == of_transformers(network, PROMPT, ENDING)
    for prompt, answer in zip(others, alone, strict=True):
        check_answer(network, prompt, answer.token_ids)
    assert plain.usage.completion_tokens == 3 * MOST
    for choice in [*plain.choices, *ending.choices]:
        end = choice.token_ids[-1]
        stopped = ("stop", end) if choice in ending.choices and end in ENDS else ("length", None)
        assert (choice.finish_reason, choice.stop_reason) == stopped


def test_a_next_turn_goes_on_with_the_best_answer(saved_model):
    with opened(saved_model("Llama")) as engine:
        best = engine.generate([PROMPT], SEARCH)[0].token_ids
        history = PROMPT + best + tokens(7, 4)
        assert ask(engine, history).usage.cached_tokens_details.hbm == (len(history) - 5) // BLOCK * BLOCK


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Qwen3_5Text"])
def test_what_the_beams_leave_in_the_tiers_is_right_and_the_next_turn_adds_what_is_missing(
    family, saved_model, tmp_path
):
    """A beam that begins within a block cannot be saved from there on."""
    network = network_of(saved_model(family))
    with opened(saved_model(family), tmp_path) as engine:
        history, least = PROMPT, len(PROMPT)
        answer = engine.generate([PROMPT], SEARCH)[0].token_ids
        for _ in range(2):
            evict_hbm(engine)
            history = history + answer + tokens(7, 4)
            made = ask(engine, history)
            assert made.usage.cached_tokens_details.cpu >= least // BLOCK * BLOCK
            answer, least = made.token_ids, len(history)
            check_answer(network, history, answer)
        settle(engine)


def num_given_up(engine: Engine) -> int:
    """How often a beam that is computed has lost its place or its blocks, or what it was forked from."""
    searches = engine.loop.scheduler.roster.searches.values()
    return max((beam.num_preemptions for search in searches for beam in search.beams), default=0)


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Qwen3_5Text"])
def test_beams_that_are_preempted_change_nothing(family, saved_model, tmp_path):
    engine = opened(saved_model(family), tmp_path, max_num_seqs=4, max_num_batched_tokens=48)
    with by_hand(engine):
        alone = found(engine.generate([PROMPT], ENDING, cache_salt="alone")[0])
        handle = engine.submit(PROMPT, ENDING)
        most = 0
        for number in range(4):
            for _ in range(3):
                engine.step()
                most = max(most, num_given_up(engine))
            engine.submit(tokens(20 + number, 30), greedy(2), tenant="another")  # takes a beam's place
        run(engine)
        assert most > 0
        assert found(handle.output) == alone
        settle(engine)


def ahead(engine: Engine) -> None:
    engine.loop.steps.depth = 2


def in_a_pipeline(engine: Engine) -> None:
    pipelined(engine, 2)


@pytest.mark.parametrize("way", [ahead, in_a_pipeline])
def test_beams_that_are_computed_in_several_steps_wait_for_one_another(way, saved_model, tmp_path):
    engine = opened(saved_model("Llama"), tmp_path)
    with by_hand(engine):
        alone = found(engine.generate([PROMPT], ENDING, cache_salt="alone")[0])
        way(engine)
        handles = [engine.submit(PROMPT, ENDING), engine.submit(tokens(8, 20), greedy(MOST))]
        run(engine)
        assert found(handles[0].output) == alone
        check_answer(network_of(saved_model("Llama")), tokens(8, 20), handles[1].output.token_ids)
        settle(engine)


def test_searches_that_want_more_places_and_blocks_than_there_are_all_end(saved_model):
    """None may hold what another one waits for."""
    prompts = [tokens(seed, 40) for seed in range(3)]
    model = saved_model("Llama")
    with opened(model) as engine:
        alone = [found(engine.generate([prompt], SEARCH)[0]) for prompt in prompts]
    block_bytes = engine.facts.block_bytes
    small = open_engine(model, hbm=9 * block_bytes, dtype="float32", max_num_seqs=5, max_model_len=64)
    with by_hand(small):
        handles = [small.submit(prompt, SEARCH, tenant=f"tenant {i % 2}") for i, prompt in enumerate(prompts)]
        most = 0
        while small.loop.has_work:
            small.step()
            most = max(most, num_given_up(small))
        assert [found(handle.output) for handle in handles] == alone
        assert most > 0
        assert small.loop.pool.num_free == small.loop.pool.num_blocks
        small.check_integrity()


@pytest.mark.parametrize(
    ("family", "num_steps"), [("Llama", 0), ("Llama", 1), ("Llama", 2), ("Llama", 6), ("Qwen3_5Text", 2)]
)
def test_a_search_that_is_given_up_leaves_nothing_behind(family, num_steps, saved_model, tmp_path):
    engine = opened(saved_model(family), tmp_path)
    with by_hand(engine):
        handle = engine.submit(PROMPT, SEARCH)
        for _ in range(num_steps):
            engine.step()
        engine.client.abort(handle)
        run(engine)
        assert [choice.finish_reason for choice in handle.output.choices] == ["abort"] * 3
        assert engine.loop.pool.num_free == engine.loop.pool.num_blocks and not engine.loop.scheduler.roster.requests
        settle(engine)


def test_a_step_that_fails_ends_a_search_and_the_next_one_is_well(saved_model):
    engine = opened(saved_model("Llama"))
    with by_hand(engine):
        handle = engine.submit(PROMPT, SEARCH)
        for _ in range(3):
            engine.step()
        with before_each_step(engine, fail):
            engine.loop.round()
        assert handle.error is not None
        engine.check_integrity()
        assert found(engine.generate([PROMPT], SEARCH)[0])[0]
        engine.check_integrity()


def test_one_beam_is_greedy(saved_model):
    with opened(saved_model("Llama")) as engine:
        (search,) = engine.generate([PROMPT], SamplingParams(use_beam_search=True, max_tokens=MOST))
        assert search.token_ids == ask(engine, PROMPT, MOST).token_ids
