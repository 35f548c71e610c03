"""The whole engine under random arrivals, aborts, choices and preemptions, against a plain transformers loop.

Invariants 1 (the same tokens at any batch mix) and 6 of the design. float32 and greedy, so the tokens must be equal.
"""

import random
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import CacheTiers, Engine, SamplingParams
from kvstore.engine.client.requests import Handle
from tests.support.by_hand import by_hand
from tests.support.models import make_model

VOCAB = 160
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4  # K and V, layers, KV heads, head_dim, float32
LONGEST_PROMPT, LONGEST_ANSWER = 34, 12
# (block size, blocks in HBM, tokens of a step, requests at once): pools of two to three requests.
HOUSES = [(4, 14, 13, 5), (16, 5, 64, 3), (1, 60, 3, 6), (8, 12, 5, 8)]
MARGIN = 1e-3  # between the best two logits; float32 noise here is below 1e-5


class Reference:
    """Greedy answers of the unmodified model, each prompt computed once and as far as it was asked for."""

    def __init__(self, model) -> None:
        self.model = model
        self.num_tokens = self.num_clear = 0  # compared, and of these where the model is sure
        self._answers: dict[tuple[float, tuple[int, ...]], list[int]] = {}
        self._margins: dict[tuple[float, tuple[int, ...]], list[float]] = {}

    @torch.inference_mode()
    def answer(self, prompt: list[int], num_tokens: int, penalty: float) -> tuple[list[int], list[float]]:
        """The next `num_tokens` tokens, and for each the distance of the best two logits.

        penalty: taken off a token's logit for each time that it stands in the answer (frequency_penalty).
        """
        key = (penalty, tuple(prompt))
        answer, margins = self._answers.setdefault(key, []), self._margins.setdefault(key, [])
        while len(answer) < num_tokens:
            logits = self.model(torch.tensor([[*prompt, *answer]]), use_cache=False, logits_to_keep=1).logits[0, -1]
            counts = torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=len(logits))
            best = (logits - penalty * counts).topk(2)
            answer.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
        return answer[:num_tokens], margins[:num_tokens]

    def check(self, prompt: list[int], got: list[int], penalty: float = 0.0) -> None:
        """Equal up to the first place where the model itself can not tell its two best tokens apart."""
        expected, margins = self.answer(prompt, len(got), penalty)
        clear = next((i for i, margin in enumerate(margins) if margin < MARGIN), len(got))
        self.num_tokens += len(got)
        self.num_clear += clear
        assert got[:clear] == expected[:clear], (prompt, got, expected)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model = make_model("Qwen3", seed=3, num_hidden_layers=2, hidden_size=32, intermediate_size=48)
    model.save_pretrained(path, safe_serialization=True)
    return path, Reference(model)


@pytest.fixture(scope="module")
def houses(model_dir):
    """One engine per shape, used by all examples: what an example leaves in the cache, the next one finds."""
    engines = {}
    for block_size, num_blocks, budget, seqs in HOUSES:
        hbm = num_blocks * block_size * BYTES_PER_TOKEN
        engines[block_size] = by_hand(Engine(
            model_dir[0], CacheTiers(hbm=hbm), device="cpu", block_size=block_size, max_model_len=48,
            max_num_seqs=seqs, max_num_batched_tokens=budget,
        ))  # fmt: skip
        assert engines[block_size].stats()["hbm"]["blocks"] == num_blocks
    yield engines
    for engine in engines.values():
        engine.close()


def check_step(engine: Engine, budget: int, seqs: int) -> None:
    scheduler, pool = engine.loop.scheduler, engine.loop.pool
    engine.check_integrity()
    assert scheduler.num_running <= seqs
    assert engine.loop.runner.batch.num_rows <= seqs
    held = Counter(block for request in scheduler.roster.requests.values() for block in request.block_numbers)
    assert {b: pool.ref_count(b) for b in range(pool.num_blocks) if not pool.is_free(b)} == held


def check_idle(engine: Engine) -> None:
    """Invariant 6: every count is zero."""
    assert not engine.has_work
    assert engine.loop.pool.num_free == engine.loop.pool.num_blocks
    assert engine.loop.runner.batch.num_rows == len(engine.loop.scheduler.roster.left)  # they leave with the next step
    assert (engine.loop.news.running, engine.loop.scheduler.roster.requests) == ([], {})
    assert len(engine.loop.scheduler.roster.tenants) == 0
    engine.loop.pool.check_integrity(idle=True)


class Guest:
    """Submits, aborts and steps at random, and knows what was asked."""

    def __init__(self, engine: Engine, rng: random.Random, shape: tuple[int, int, int, int]) -> None:
        self.engine, self.rng, self.shape = engine, rng, shape
        self.asked: list[tuple[list[int], SamplingParams, Handle]] = []
        self.num_aborts = 0
        # Few stems over all examples, so that prompts meet in the cache.
        self.stems = [[(7 * stem + 3 * i * i + i) % VOCAB for i in range(LONGEST_PROMPT)] for stem in range(4)]

    def submit(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.stems)[: rng.randrange(1, LONGEST_PROMPT + 1)]
        if rng.random() < 0.5:
            prompt = [*prompt[: LONGEST_PROMPT - 4], *(rng.randrange(4) for _ in range(rng.randrange(1, 5)))]
        num_tokens = rng.randrange(1, LONGEST_ANSWER + 1)
        penalty = rng.choice([0.0, 0.0, 1.5])  # a state in the sampler, which moves with its row
        n = rng.choice([1, 1, 1, 2, 3])
        params = SamplingParams(n=n, max_tokens=num_tokens, temperature=0, frequency_penalty=penalty, ignore_eos=True)
        self.asked.append((prompt, params, self.engine.submit(prompt, params)))

    def abort(self) -> None:
        running = [handle for _, _, handle in self.asked if not handle.done]
        if running:
            self.engine.abort(self.rng.choice(running))
            self.num_aborts += 1
            self.engine.check_integrity()

    def step(self) -> None:
        _, _, budget, seqs = self.shape
        self.engine.step()
        check_step(self.engine, budget, seqs)

    def run(self, num_events: int) -> None:
        for _ in range(num_events):
            event = self.rng.random()
            if event < 0.35:
                self.submit()
            elif event < 0.42:
                self.abort()
            elif self.engine.has_work:
                self.step()
        while self.engine.has_work:
            self.step()

    def check(self, reference: Reference) -> None:
        for prompt, params, handle in self.asked:
            assert handle.done
            usage = handle.output.usage
            assert usage.prompt_tokens == len(prompt)
            assert 0 <= usage.cached_tokens < len(prompt)
            for choice in handle.output.choices:
                if choice.finish_reason != "abort":
                    assert (choice.finish_reason, len(choice.token_ids)) == ("length", params.max_tokens)
                reference.check(prompt, choice.token_ids, params.frequency_penalty)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(seed=st.integers(0, 2**32), shape=st.sampled_from(HOUSES))
def test_invariant_1_random_traffic_gives_what_a_plain_loop_gives(houses, model_dir, seed, shape):
    engine = houses[shape[0]]
    guest = Guest(engine, random.Random(seed), shape)
    guest.run(num_events=30)
    guest.check(model_dir[1])
    check_idle(engine)


@pytest.mark.parametrize("shape", HOUSES, ids=str)
def test_invariant_1_known_seeds_reach_preemption_abort_and_hit(houses, model_dir, shape):
    """Random examples may be few and tame; these are not."""
    engine = houses[shape[0]]
    engine.loop.pool.evict_all()  # what random examples left there must not decide what happens here
    before, guests = engine.loop.scheduler.roster.num_preemptions, []
    for attempt in range(10):  # which of them preempts depends on what was learned of earlier traffic
        guests.append(Guest(engine, random.Random(f"{shape} {attempt}"), shape))
        guests[-1].run(num_events=100)
        guests[-1].check(model_dir[1])
        check_idle(engine)
        if engine.loop.scheduler.roster.num_preemptions > before:
            break
    assert engine.loop.scheduler.roster.num_preemptions > before
    assert any(guest.num_aborts for guest in guests)
    handles = [handle for guest in guests for _, _, handle in guest.asked]
    assert any(handle.output.usage.cached_tokens for handle in handles)
    assert any(len(handle.output.choices) > 1 for handle in handles)
