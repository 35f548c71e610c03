"""Packed weights and lean layers: chunks, mixed steps, batches of decodes, hits in every tier, preemption, sessions.

Every answer is held to transformers' own forward, in bfloat16 and float32 (see `packed.Reference`), and what was loaded
to what was computed.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.engine.builtin import MODEL_DIR
from kvstore.engine.model import lean, packing
from kvstore.kernels import attention
from kvstore.kernels.cpu import native
from kvstore.kernels.cpu.attention import DecodeStep
from kvstore.kernels.cpu.layer import NativeLayer, has_tiles, max_rows
from tests.support.engines import cached, counters, evict_hbm, evict_memory, settle, tokens
from tests.support.packed import (
    DTYPES,
    MODELS,
    NUM_LAYERS,
    Reference,
    Watched,
    asking,
    counted,
    has_products,
    layer_stays,
    make,
    pool_bytes,
    watched,
    without_c,
    without_tiles,
)

BUDGET = 48
# How many layers are lean, whether the network is as a whole, and which layer may leave out tokens, where not all are.
LEAN = {
    "gemma2": (0, False, None),
    "mixed": (NUM_LAYERS - 1, False, NUM_LAYERS - 1),
}
VARIANTS = {  # of "llama"
    "mixed": lambda: layer_stays(1),
    "without C": without_c,
    "without tiles": without_tiles,
}
IN_FLOAT32 = ("llama", "qwen3", "gemma2", "smollm3", "mixed")  # as the others, to rounding: these differ in their paths
CASES = [(name, dtype) for name in [*MODELS, *VARIANTS] for dtype in DTYPES if dtype != "float32" or name in IN_FLOAT32]
MANY = 36  # requests at once: more rows than C takes by tiles
BELOW_HBM = [  # each path and each dtype once: what a tier gives back does not know which of the two it is
    ("llama", "float32"), ("llama", "bfloat16"), ("qwen2 windows", "bfloat16"), ("qwen3", "bfloat16"),
    ("gemma2", "float32"),
]  # fmt: skip
TALKING = [("llama", "bfloat16", True), ("qwen3", "float32", False)]
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 48, "hbm": "4MiB", "cpu": "4MiB"}


@dataclass(frozen=True, slots=True)
class Case:
    """One engine for all tests of a model and dtype, and what its answers are held to."""

    name: str
    folder: Path
    engine: Watched
    reference: Reference


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    name, dtype = request.param
    if not packing.packs_weights(DTYPES[dtype]):
        pytest.skip(f"no packed product for {dtype} here")
    folder = tmp_path_factory.mktemp("model")
    reference = Reference(make("llama" if name in VARIANTS else name, dtype))
    reference.network.save_pretrained(folder)
    patch = VARIANTS.get(name, pytest.MonkeyPatch)()
    try:
        with watched(folder, max_num_batched_tokens=BUDGET, max_num_seqs=MANY, hbm="8MiB") as engine:
            yield Case(name, folder, engine, reference)
    finally:
        patch.undo()


@pytest.fixture
def engine(case: Case) -> Watched:
    case.engine.engine.loop.pool.evict_all()
    return case.engine


@pytest.fixture
def reference(case: Case) -> Reference:
    return case.reference


def test_the_paths_that_are_to_be_tested_are_taken(case: Case, engine: Watched, reference: Reference) -> None:
    num_lean, is_whole, pruned = LEAN.get(case.name, (NUM_LAYERS, True, NUM_LAYERS - 1))
    assert (engine.num_lean, engine.carrier.pruned_layer) == (num_lean, pruned)
    assert isinstance(engine.carrier.lean, lean.LeanNetwork) == is_whole
    assert (engine.num_packed, engine.num_linears) == (NUM_LAYERS * 4 + 1, 0)  # beside q/k/v, which are one
    num_native = num_lean if has_products() and reference.dtype == "bfloat16" and case.name != "odd" else 0
    assert engine.num_native == num_native
    with counted(DecodeStep, "attend") as attended, counted(NativeLayer, "after_attention") as finished:
        reference.check(*engine.answer([tokens(1, 33)], asking(5)))
    assert engine.steps == [(33, 1, 0, 1)] + [(1, 1, 1, 1)] * 4
    has_c = native.library() is not None
    assert attended == [case.name != "gemma2"] * (4 * NUM_LAYERS if has_c else 0)  # its softcap is left to torch
    in_prefill = num_native if max_rows() >= 33 else int(num_native > 0 and pruned is not None)
    assert len(finished) == 4 * num_native + in_prefill


def test_chunks_of_a_prefill_that_sample_nothing(engine: Watched, reference: Reference) -> None:
    outputs = engine.answer([tokens(2, 200), tokens(3, 97)], asking(6))
    assert engine.num_chunks_without_samples >= 4
    reference.check(*outputs)


def test_whole_prompts_in_one_step(case: Case, reference: Reference) -> None:
    prompts = [tokens(4 + i, length) for i, length in enumerate((230, 64, 129, 31))]
    with watched(case.folder, max_num_batched_tokens=512) as engine, counted(attention, "prefill") as attended:
        outputs = engine.answer(prompts, asking(3))
        assert engine.steps[0] == (454, 4, 0, 4)
    is_known = engine.model.spec.shapes[0].key_dim % 32 == 0 and case.name != "gemma2" and has_tiles()
    assert attended.count(True) >= (4 * (NUM_LAYERS - 1) if is_known and reference.dtype == "bfloat16" else 0)
    reference.check(*outputs)


def test_prefills_beside_decodes(engine: Watched, reference: Reference) -> None:
    handles = []
    engine.steps.clear()
    for seed, length in enumerate((20, 130, 1, 17, 90, 60)):
        handles.append(engine.engine.submit(tokens(10 + seed, length), asking(12)))
        for _ in range(3):
            engine.engine.step()
    engine.finish()
    assert engine.num_mixed >= 5
    assert any(0 < samples < requests for _, requests, _, samples in engine.steps), "who decodes beside a chunk"
    reference.check(*(handle.output for handle in handles))


def test_batches_of_decodes_of_every_size_with_contexts_of_every_length(engine: Watched, reference: Reference) -> None:
    """Many requests decode together, then one less, and so on: they end one after the other."""
    prompts = [tokens(60 + i, 1 + 16 * (i % 5) + i % 4) for i in range(MANY)]
    firsts = engine.answer(prompts, asking(1))
    outputs = engine.answer(prompts, *(asking(6 + i) for i in range(MANY)))
    assert all(engine.num_decodes_of(size) for size in range(1, MANY + 1))
    reference.check(*firsts, *outputs)
    reference.check_precision()


def test_prefix_hits_in_hbm(engine: Watched, reference: Reference) -> None:
    stem = tokens(30, 96)
    (first,) = engine.answer([stem], asking(20))
    history = stem + first.token_ids
    prompts = [history + tokens(31, 30), history + tokens(32, 3), stem, stem[:80] + tokens(33, 60)]
    outputs = engine.answer(prompts, asking(8))
    assert [cached(output)[0] for output in outputs] == [112, 112, 80, 80]
    reference.check(first, *outputs)


def test_choices_of_one_prompt(engine: Watched, reference: Reference) -> None:
    several, alone = engine.answer(
        [tokens(40, 70), tokens(41, 9)], asking(10, n=5, temperature=1.0, seed=3), asking(10)
    )
    assert len({tuple(choice.token_ids) for choice in several.choices}) == 5
    reference.check(several, is_greedy=False)
    reference.check(alone)


@dataclass(frozen=True, slots=True)
class Stored:
    """A model in a folder, and what answers are held to."""

    folder: Path
    reference: Reference

    @property
    def same_bits(self) -> bool:
        """Whether logits have the same bits wherever blocks lie: C adds in the order of positions, torch may not."""
        return native.library() is not None and not hasattr(self.reference.network.config, "attn_logit_softcapping")


@pytest.fixture(scope="module", params=BELOW_HBM, ids=" ".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    stored = Stored(tmp_path_factory.mktemp("model"), Reference(make(*request.param)))
    stored.reference.network.save_pretrained(stored.folder)
    return stored


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_a_turn_is_the_same_from_every_tier(model: Stored, path: Path) -> None:
    """From the same blocks the same logits, where the order of sums does not depend on where the blocks lie."""
    history, outputs = tokens(1, 90), []
    with watched(model.folder, path, **OPTIONS) as engine:
        (first,) = engine.answer([history], asking(20))
        question = history + first.token_ids + tokens(2, 61)  # 171 tokens
        outputs += engine.answer([question], asking(12))
        outputs += engine.answer([question], asking(12))
        evict_hbm(engine.engine)
        outputs += engine.answer([question], asking(12))
        evict_memory(engine.engine)
        outputs += engine.answer([question], asking(12))
    with watched(model.folder, path, **OPTIONS) as engine:
        outputs += engine.answer([question], asking(12))
    assert [cached(out) for out in outputs] == [
        (96, 0, 0, 0), (160, 0, 0, 0), (0, 160, 0, 0), (0, 0, 160, 0), (0, 0, 160, 0)
    ]  # fmt: skip
    if model.same_bits:
        from_hbm, *from_below = (out.choices[0].logprobs for out in outputs[1:])
        assert all(found == from_hbm for found in from_below)
    model.reference.check(first, *outputs)
    with watched(model.folder, **OPTIONS) as engine:
        (anew,) = engine.answer([question], asking(12))
    assert cached(anew) == (0, 0, 0, 0)
    model.reference.check(anew)
    if model.reference.dtype == "float32":
        assert {tuple(out.token_ids) for out in (anew, *outputs)} == {tuple(anew.token_ids)}


def test_preempted_requests_resume_by_loading(model: Stored, path: Path) -> None:
    options = {**OPTIONS, "hbm": pool_bytes(model.reference.network, 10)}
    with pytest.warns(UserWarning, match="fewer than max_model_len"), watched(model.folder, path, **options) as engine:
        outputs = engine.answer([tokens(seed, 64) for seed in (30, 31, 32)], asking(60))
        assert engine.engine.loop.scheduler.roster.num_preemptions > 0 and counters(engine.engine)["loaded"] > 0
        model.reference.check(*outputs)


def test_many_requests_beside_evictions(model: Stored, path: Path) -> None:
    """Tiers are emptied at random between steps; choices fan out, prompts share their beginnings."""
    rng, handles = random.Random(5), []
    stems = [tokens(seed, 120) for seed in (40, 41, 42)]
    with watched(model.folder, path, **OPTIONS, max_num_seqs=12) as engine:
        for number in range(24):
            prompt = [*rng.choice(stems)[: rng.randrange(1, 120)], number]
            params = asking(rng.randrange(1, 16), n=rng.choice((1, 1, 3)), temperature=rng.choice((0.0, 1.0)))
            handles.append(engine.engine.submit(prompt, params))
            for _ in range(rng.randrange(4)):
                engine.engine.step()
                if rng.random() < 0.3:
                    engine.engine.loop.pool.evict_all()
                if rng.random() < 0.2:
                    with engine.engine.connector.parts.lock:
                        engine.engine.connector.parts.cpu.pool.evict_all()
        engine.finish()
        settle(engine.engine)
        assert counters(engine.engine)["loaded"] > 0 and engine.num_mixed > 0
    model.reference.check(*(handle.output for handle in handles), is_greedy=False)
    assert sum(cached(handle.output)[0] > 0 for handle in handles) > 0


# -- sessions ----------------------------------------------------------------------------------------------------------
def chatting(folder: Path, name: str, dtype: str) -> Stored:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    tokenizer.save_pretrained(folder)
    network = make(name, dtype, vocab_size=len(tokenizer) + 16, eos_token_id=tokenizer.eos_token_id)
    network.save_pretrained(folder)
    return Stored(folder, Reference(network))


@torch.inference_mode()
def reused(network: Any, old: list[int], source: list[int], rest: list[int]) -> torch.Tensor:
    """Log probabilities, [len(rest), vocab_size], of `rest` behind keys and values that `old` left.

    source: for each position in front of `rest`, the position in `old` whose KV stands there, its key rotated on.
    """
    kept = network(input_ids=torch.tensor([old]), use_cache=True).past_key_values
    moved = torch.arange(len(source)) - torch.tensor(source)
    for layer in kept.layers:
        cos, sin = network.model.rotary_emb(layer.keys, moved[None])
        key, (first, second) = layer.keys[:, :, source], layer.keys[:, :, source].chunk(2, -1)
        layer.keys = key * cos + torch.cat([-second, first], -1) * sin
        layer.values = layer.values[:, :, source]
    positions = torch.arange(len(source), len(source) + len(rest))
    ids = torch.tensor([rest])
    logits = network(input_ids=ids, past_key_values=kept, position_ids=positions[None], use_cache=True).logits
    return logits[0].float().log_softmax(-1)


def check_reencoded(reference: Reference, output: Any, old: list[int], source: list[int]) -> None:
    """old, source: see `reused`; everything behind was computed, in this turn or in turns before it."""
    rest = [*output.prompt_token_ids, *output.token_ids][len(source) :]
    theirs, exact = (reused(network, old, source, rest) for network in (reference.network, reference.exact))
    first = len(rest) - 1 - len(output.token_ids)
    reference.check_choice(output.choices[0], theirs[first:-1], exact[first:-1])


@pytest.mark.parametrize(("name", "dtype", "is_emptied"), TALKING)
def test_a_truncated_session_reuses_its_keys_at_new_positions(
    name: str, dtype: str, is_emptied: bool, path: Path, tmp_path: Path
) -> None:
    """Its turns are held to a forward over the keys of the whole session, moved to where the kept tokens stand."""
    chat_model = chatting(tmp_path / "model", name, dtype)
    reference = chat_model.reference
    with watched(chat_model.folder, path, **OPTIONS) as engine:
        chat = engine.engine.chat("one", system="Be kind, and be brief, and say nothing that is not so.")
        output = chat.send("This is the first message.", asking(10))
        while not chat.truncated_tokens:
            reference.check(output)
            if is_emptied:
                evict_memory(engine.engine)
            old, (head, *_) = list(chat.token_ids), chat.window.turn_starts
            output = chat.send(f"This is message number {chat.num_turns}.", asking(10))
        num_dropped = chat.truncated_tokens
        assert cached(output)[3] >= 32
        source = [place if place < head else place + num_dropped for place in range(output.usage.cached_tokens)]
        for following in (output, chat.send("And now?", asking(10))):
            check_reencoded(reference, following, old, source)
    with watched(chat_model.folder, path, **OPTIONS) as engine:
        again = engine.engine.chat("one")
        output = again.send("And then?", asking(10))
        assert again.truncated_tokens == num_dropped
        assert cached(output)[2] > 0 and cached(output)[3] >= len(source) - cached(output)[2]
        check_reencoded(reference, output, old, source)
