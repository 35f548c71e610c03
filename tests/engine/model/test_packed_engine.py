"""The engine over packed weights and lean layers: chunks, mixed steps, batches of decodes, prefix hits, preemption.

Every answer is held to transformers' own forward, in bfloat16 and float32; see `packed.Reference`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.engine.model import lean, packing
from kvstore.kernels import attention
from kvstore.kernels.cpu import native
from kvstore.kernels.cpu.attention import DecodeStep
from kvstore.kernels.cpu.layer import NativeLayer, has_tiles, max_rows
from tests.support.engines import cached, tokens
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
# How many layers are lean, whether the network is as a whole, and which layer may leave out tokens, where not all can.
LEAN = {
    "gemma": (NUM_LAYERS, False, NUM_LAYERS - 1),  # its embedding is scaled
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
    is_known = engine.model.spec.head_dim % 32 == 0 and case.name != "gemma2" and has_tiles()
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


def test_preemption_in_a_small_pool(case: Case, reference: Reference) -> None:
    options = {"hbm": pool_bytes(reference.network, 10), "max_num_batched_tokens": BUDGET}
    with pytest.warns(UserWarning, match="fewer than max_model_len"), watched(case.folder, **options) as engine:
        outputs = engine.answer([tokens(50 + i, length) for i, length in enumerate((60, 33, 48))], asking(40))
        assert engine.engine.loop.scheduler.roster.num_preemptions > 0
        reference.check(*outputs)
