"""Loads, saves and forwards that fail: what they touched is computed again, nothing wrong is kept, nothing is held.

Invariants 1, 6 and 8 of the design under injected failures. Small random models in float32; all answers are greedy.
"""

import threading
from contextlib import ExitStack, contextmanager

import pytest

import kvstore.memory.transfer
import kvstore.store.assembly
from tests.support.by_hand import by_hand
from tests.support.engines import (
    LLAMA_BLOCK_BYTES,
    ask,
    cached,
    counters,
    evict_cpu,
    evict_hbm,
    evict_memory,
    greedy,
    open_engine,
    settle,
    tokens,
)
from tests.support.faults import before_each_load, before_each_save, constants

MODEL = {"tokenizer": True}
FIRST_AND_LAST = [0, 2]


@pytest.fixture
def engine(model, tmp_path):
    with by_hand(open_engine(model, tmp_path / "store")) as engine:
        yield engine
        engine.check_integrity()


class Failing:
    """Loads that leave garbage and raise at one layer, `times` times."""

    def __init__(self, layer: int, times: int) -> None:
        self.num_failures, self.left, self.layer = 0, times, layer

    def load(self, layer, tear):
        if layer == self.layer and self.left > 0:
            self.left -= 1
            self.num_failures += 1
            tear()
            raise RuntimeError("injected")


@pytest.fixture
def failing():
    """Makes one whose loads fail until its `left` is 0, or the test ends."""
    with ExitStack() as stack:

        def make(layer: int, times: int = 1_000_000) -> Failing:
            made = Failing(layer, times)
            stack.enter_context(before_each_load(made.load))
            return made

        yield make


def store_and_evict(engine, prompt, count: int = 4) -> None:
    ask(engine, prompt, count)
    evict_hbm(engine)


@pytest.mark.parametrize("layer", FIRST_AND_LAST)
def test_invariant_1_two_requests_that_share_loading_blocks_both_recompute_when_the_load_fails(
    engine, plain, failing, layer
):
    stem = tokens(1, 100)
    store_and_evict(engine, stem)
    faulty = failing(layer, times=1)
    prompts = [stem + tokens(2, 9), stem + tokens(3, 5)]
    handles = [engine.submit(prompt, greedy(6)) for prompt in prompts]
    engine.step()
    assert faulty.num_failures == 1
    assert [handle.output.token_ids for handle in handles] == [[], []], "a sample of the failed step leaked"
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert [handle.output.token_ids for handle in handles] == [plain(prompt, 6) for prompt in prompts]
    assert counters(engine)["load_failures"] == 6 and engine.loop.scheduler.roster.num_failed_loads == 2
    settle(engine)
    for prompt in prompts:  # what was stored by them is right
        engine.loop.pool.evict_all()
        out = ask(engine, prompt + plain(prompt, 6), 5)
        assert sum(cached(out)) == (len(prompt) + 6 - 1) // 16 * 16
        assert out.token_ids == plain(prompt + plain(prompt, 6), 5)


@pytest.mark.parametrize("layer", FIRST_AND_LAST)
def test_invariant_8_what_a_failed_step_saved_is_never_published(engine, plain, failing, monkeypatch, layer):
    """The step computes whole blocks behind the loaded ones: on garbage, under exact ids."""
    stem, rest = tokens(4, 64), tokens(5, 60)
    store_and_evict(engine, stem)
    saved = engine.connector.parts.transfer
    original, ended = saved.end, threading.Event()

    def end(succeeded=True):
        """The save's thread is given the time to be done before anybody learns of the failure."""
        original(succeeded)
        wake = threading.Event()
        wake.wait(0.2)
        ended.set()

    failing(layer, times=1)
    prompt = stem + rest
    handle = engine.submit(prompt, greedy(4))
    with monkeypatch.context() as patch:
        patch.setattr(saved, "end", end)
        engine.step()
    while engine.has_work:
        engine.step()
    assert ended.is_set() and handle.output.token_ids == plain(prompt, 4)
    evict_hbm(engine)
    again = ask(engine, [*prompt, 7], 6)
    assert again.token_ids == plain([*prompt, 7], 6)
    evict_memory(engine)
    assert ask(engine, [*prompt, 7], 6).token_ids == plain([*prompt, 7], 6)


def test_invariant_1_a_failure_of_one_plan_leaves_the_other_requests_right(engine, plain, failing):
    """One loads, one hits HBM, one decodes, one computes: whoever does not refer to a failed block keeps its tokens."""
    loading, hitting, decoding, new = (tokens(seed, 50) for seed in (6, 7, 8, 9))
    store_and_evict(engine, loading)
    ask(engine, hitting)
    running = engine.submit(decoding, greedy(12))
    for _ in range(4):
        engine.step()
    failing(1, times=1)
    prompts = [[*loading, 1], [*hitting, 2], new]
    handles = [engine.submit(prompt, greedy(6)) for prompt in prompts]
    engine.step()
    assert [len(handle.output.token_ids) for handle in handles] == [0, 1, 1]
    while engine.has_work:
        engine.step()
    assert [handle.output.token_ids for handle in handles] == [plain(prompt, 6) for prompt in prompts]
    assert running.output.token_ids == plain(decoding, 12)
    evict_hbm(engine)
    for prompt in [*prompts, decoding + plain(decoding, 12)]:
        assert ask(engine, prompt, 6).token_ids == plain(prompt, 6)


def test_invariant_1_loads_that_fail_for_ever_end_in_computing(engine, plain, failing):
    prompts = [tokens(seed, 70) for seed in range(20, 24)]
    for prompt in prompts:
        store_and_evict(engine, prompt)
    faulty = failing(0)
    for _ in range(3):
        engine.loop.pool.evict_all()
        outs = engine.generate([[*prompt, 1] for prompt in prompts], greedy(4))
        assert [out.token_ids for out in outs] == [plain([*prompt, 1], 4) for prompt in prompts]
        assert {cached(out) for out in outs} == {(0, 0, 0, 0)}, "what is computed after all was not cached"
        engine.check_integrity()
    assert faulty.num_failures >= 3 and counters(engine)["load_failures"] >= 12
    faulty.left = 0
    engine.loop.pool.evict_all()
    assert sum(cached(ask(engine, [*prompts[0], 1]))) == 64, "it loads again when loads work again"


def test_a_spliced_chain_whose_load_fails_becomes_exact_and_so_does_its_session(engine, plain, failing):
    chat = engine.chat("session", system="Be kind.")
    for turn in range(7):
        chat.send(f"This is message number {turn} of a long talk.", greedy(10))
    evict_hbm(engine)
    faulty = failing(1)
    while not chat.truncated_tokens:
        out = chat.send("And this is one more message, of a talk that is long.", greedy(10))
    assert faulty.num_failures and cached(out)[3] >= 0
    assert chat.window.lineage.splice_index is None and out.token_ids == plain(out.prompt_token_ids, 10)
    faulty.left = 0
    state = engine.sessions.load(chat.key)
    assert (state.first_reencoded, state.chain) == (None, chat.window.chain)
    evict_hbm(engine)
    out = chat.send("Next.", greedy(5))
    assert cached(out)[3] == 0 and cached(out)[1] > 0
    assert out.token_ids == plain(out.prompt_token_ids, 5)


@contextmanager
def before_forward(engine, words, monkeypatch):
    """In here a step fails when its loads have begun."""

    def broken(*args, **kwargs):
        raise RuntimeError(words)

    with monkeypatch.context() as patch:
        patch.setattr(engine.loop.runner.model, "begin", broken, raising=False)
        yield


# -- the forward ------------------------------------------------------------------------------------------------------
def test_invariant_6_a_forward_that_raises_while_loads_and_saves_are_in_flight(engine, plain, monkeypatch):
    """The loads of the failed step must not land in blocks that the next step computes."""
    stem = tokens(30, 96)
    store_and_evict(engine, stem)
    go = threading.Event()
    with before_each_load(lambda layer, tear: go.wait(0.1)):
        with (
            before_forward(engine, "the device is lost", monkeypatch),
            pytest.raises(RuntimeError, match="device is lost"),
        ):
            ask(engine, [*stem, 1])
        others = [tokens(seed, 60) for seed in (31, 32)]
        outs = engine.generate(others, greedy(6))
        assert [out.token_ids for out in outs] == [plain(prompt, 6) for prompt in others]
        go.wait(0.4)  # loads that were left behind would have landed
        for prompt in others:
            out = ask(engine, [*prompt, 1], 6)
            assert cached(out)[0] == 48 and out.token_ids == plain([*prompt, 1], 6)
    engine.check_integrity()
    settle(engine)
    assert engine.loop.scheduler.roster.num_failed_loads == 0
    for prompt in [*others, stem]:
        engine.loop.pool.evict_all()
        assert ask(engine, [*prompt, 2], 6).token_ids == plain([*prompt, 2], 6)


@pytest.mark.parametrize("layer", FIRST_AND_LAST)
def test_invariant_8_a_forward_that_raises_in_its_middle_stores_nothing_of_its_step(engine, plain, monkeypatch, layer):
    prompt = tokens(40 + layer, 90)
    save = engine.connector.save_kv_layer

    def failing(number, key, value):
        if number == layer:
            raise RuntimeError("injected")
        save(number, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(engine.connector, "save_kv_layer", failing)
        with pytest.raises(RuntimeError, match="injected"):
            ask(engine, prompt)
    settle(engine)
    assert counters(engine)["saved"] == 0 and engine.connector.parts.cpu.pool.num_cached == 0
    out = ask(engine, prompt, 6)
    assert sum(cached(out)) == 0 and out.token_ids == plain(prompt, 6)
    evict_hbm(engine)
    out = ask(engine, [*prompt, 1], 6)
    assert cached(out)[1] == 80 and out.token_ids == plain([*prompt, 1], 6)


def test_invariant_6_a_failed_load_of_a_failed_step_does_not_hit_the_next_step(engine, plain, failing, monkeypatch):
    """Block numbers of a load that failed beside its forward say nothing about the requests that have them next."""
    stem = tokens(50, 96)
    store_and_evict(engine, stem)
    faulty = failing(0, times=1)
    with before_forward(engine, "injected", monkeypatch), pytest.raises(RuntimeError, match="injected"):
        ask(engine, [*stem, 1])
    faulty.left = 0
    prompt = tokens(51, 90)
    assert ask(engine, prompt, 6).token_ids == plain(prompt, 6)
    assert engine.loop.scheduler.roster.num_failed_loads == 0


# -- saves -------------------------------------------------------------------------------------------------------------
class FailingSave:
    """Saves that raise in the steps `numbers`, counted from its making. A step may be saved layer by layer."""

    def __init__(self, numbers):
        self.num_failures, self.step, self.numbers = 0, -1, numbers

    def save(self, layer):
        begins = layer == 0
        self.step += begins
        if self.step in self.numbers:
            self.num_failures += begins
            raise RuntimeError("no memory for this copy")


@pytest.mark.parametrize("number", [0, 1, 15, 16])
def test_invariant_8_a_save_that_failed_is_made_up_for_by_a_later_turn(engine, plain, number):
    """Call 0 is the prompt's step, the others are decode steps that write one token of a block each."""
    prompt = tokens(60 + number, 70)
    faulty = FailingSave({number})
    with before_each_save(faulty.save):
        first = ask(engine, prompt, 40)
        assert first.token_ids == plain(prompt, 40)
        settle(engine)
    assert faulty.num_failures == 1
    history = prompt + first.token_ids
    engine.loop.pool.evict_all()
    check = ask(engine, [*history, 1], 8)
    assert check.token_ids == plain([*history, 1], 8), "a block was stored without some of its tokens"
    assert sum(cached(check)) < 96
    evict_hbm(engine)
    out = ask(engine, [*history, 2], 8)
    assert sum(cached(out)) == 96 and out.token_ids == plain([*history, 2], 8)


# -- reads -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cpu", ["2MiB", 0])
def test_invariant_1_a_stored_chain_larger_than_the_free_arena_blocks_is_loaded_as_far_as_they_go(
    model, plain, tmp_path, cpu
):
    """Writes that fail hold their arena blocks: a request that cannot get enough must not wait for ever."""
    if cpu:
        cpu = 40 * LLAMA_BLOCK_BYTES
    with constants(kvstore.store.assembly, STAGING_BYTES=0):
        opened = open_engine(model, tmp_path / "s", cpu=cpu, max_num_seqs=2)
    with by_hand(opened) as engine:
        prompt = tokens(97, 200)
        store_and_evict(engine, prompt)
        evict_cpu(engine)
        pool = engine.connector.parts.cpu.pool
        with engine.connector.parts.lock:  # as if what cannot be written stood there
            held = pool.allocate(pool.num_free - 5)
        handle = engine.submit([*prompt, 1], greedy(4))
        for _ in range(300):
            if handle.done:
                break
            engine.step()
        done = handle.done
        with engine.connector.parts.lock:
            pool.release(held)
        engine.abort(handle)
        assert done, "it waits for arena blocks that nobody will give back"
        assert handle.output.token_ids == plain([*prompt, 1], 4)
