"""The conversations, the tokenizer and the trainer of the built-in model."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.builtin_model.blind import ASK_BLIND, ASK_LEADS_BLIND, CORRECT_BLIND, LEADS_BLIND, TELL_BLIND
from bench.builtin_model.conversations import (
    ALL_ASK_LEADS,
    ALL_LEADS,
    ASK_LEADS_HELD_OUT,
    LEADS_HELD_OUT,
    UNKNOWN,
    Conversation,
    make_conversation,
    plain_conversation,
)
from bench.builtin_model.kinds import ASK, ASK_HELD_OUT, CORRECT, CORRECT_HELD_OUT, KINDS, TELL, TELL_HELD_OUT, split
from bench.builtin_model.phrases import ASK_PARTS, CORRECT_PARTS, TELL_PARTS, WRITTEN, compose, vary, written
from bench.builtin_model.smalltalk import SYSTEM, SYSTEM_HELD_OUT
from bench.builtin_model.values import ALL_HELD_OUT, HELD_OUT, LISTS, NUMBERS, TRAIN, is_held_out_number, make_value
from kvstore.engine.builtin import MODEL_DIR

SEEDS = range(30)


def made(seed: int, which: str, ask_once: bool = False, dense: bool = False, crowded: bool = False) -> Conversation:
    """A conversation in which a word of six letters or so counts as two tokens."""
    return make_conversation(
        seed,
        which,
        max_tokens=700,
        count_tokens=lambda text: len(text) // 3 + 1,
        ask_once=ask_once,
        dense=dense,
        crowded=crowded,
    )


@pytest.fixture(scope="module")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    if not (MODEL_DIR / "tokenizer.json").exists():
        pytest.skip("the built-in model is not there yet")
    return transformers.AutoTokenizer.from_pretrained(MODEL_DIR)


def test_the_same_seed_makes_the_same_conversation():
    for seed in SEEDS:
        assert made(seed, TRAIN) == made(seed, TRAIN)
    assert made(0, TRAIN) != made(1, TRAIN) and made(0, TRAIN) != made(0, HELD_OUT)


def test_there_are_enough_kinds_and_phrasings():
    assert len({kind.group for kind in KINDS}) >= 12
    assert len({kind.key for kind in KINDS}) == len(KINDS)
    for kind in KINDS:
        assert len(kind.tell) + len(split(TELL)) >= 12 and len(kind.ask) + len(split(ASK)) >= 6
        assert len(kind.tell_held_out) + len(split(TELL_HELD_OUT)) >= 3
        assert len(kind.ask_held_out) >= 2


def as_regex(pattern: str) -> str:
    """What matches all sentences of a pattern of `compose`."""
    escaped = "".join(part if part in "[|]" else re.escape(part) for part in re.split(r"([\[|\]])", pattern))
    return escaped.replace("[", "(?:").replace("]", ")")


def test_held_out_phrasings_are_not_in_training():
    train = {*split(TELL), *split(ASK), *split(CORRECT)}
    held_out = {*split(TELL_HELD_OUT), *split(ASK_HELD_OUT), *split(CORRECT_HELD_OUT)}
    blind = {*split(TELL_BLIND), *split(ASK_BLIND), *split(CORRECT_BLIND)}
    for kind in KINDS:
        train |= {*kind.tell, *kind.ask}
        held_out |= {*kind.tell_held_out, *kind.ask_held_out}
        blind |= {*kind.tell_blind, *kind.ask_blind}
        assert len(kind.tell_blind) == len(kind.ask_blind) == 3
    assert not train & (held_out | blind) and not held_out & blind
    rng = random.Random(9)
    patterns = [*TELL_PARTS, *ASK_PARTS, *CORRECT_PARTS]
    composed = {compose(rng, pattern) for pattern in patterns for _ in range(200)}
    patterns += [one for name in ("general", "correct") for some in WRITTEN[name].values() for one in some]
    composed |= {compose(rng, pattern) for pattern in patterns}
    for kind in KINDS:
        own = {compose(rng, pattern) for pattern in (*kind.tell_more, *kind.ask_more) for _ in range(40)}
        assert len(own) > 20, kind.key
        composed |= own
    assert len(composed) > 8000 and not composed & held_out
    leads = {*ALL_LEADS[0], *ALL_ASK_LEADS[0]}
    assert not leads & {*LEADS_HELD_OUT, *ASK_LEADS_HELD_OUT, *LEADS_BLIND, *ASK_LEADS_BLIND}
    patterns += [one for kind in KINDS for one in (*kind.tell_more, *kind.ask_more)]
    expected = re.compile("|".join(as_regex(one) for one in patterns if not re.search("{[XQT]}", one)))
    assert expected.fullmatch(compose(rng, ASK_PARTS[0])) and not [one for one in blind if expected.fullmatch(one)]
    assert not set(SYSTEM) & set(SYSTEM_HELD_OUT)


def test_one_in_ten_of_the_written_patterns_is_kept_back():
    back = written(True)
    for name, ways in WRITTEN.items():
        for way, some in ways.items():
            assert not set(some) & set(back[name][way])
            assert len(some) > 10 or not some, (name, way)
    kept = sum(len(some) for ways in back.values() for some in ways.values())
    learnt = sum(len(some) for ways in WRITTEN.values() for some in ways.values())
    assert 0.08 < kept / (kept + learnt) < 0.12


def test_a_varied_frame_keeps_its_subject_and_value():
    rng = random.Random(3)
    varied = {vary(rng, "I should mention that {S} is {V}, of course.") for _ in range(300)}
    assert len(varied) > 200 and all(one.count("{S}") == one.count("{V}") == 1 for one in varied)


def test_held_out_values_are_not_in_training():
    rng = random.Random(5)
    for kind in LISTS:
        assert not set(LISTS[kind][TRAIN]) & ALL_HELD_OUT
        assert all(make_value(rng, kind, TRAIN) not in ALL_HELD_OUT for _ in range(300))
        for _ in range(50):
            assert set(make_value(rng, kind, HELD_OUT).split()) & {
                part for word in ALL_HELD_OUT for part in word.split()
            }
    for kind in NUMBERS:
        assert not any(is_held_out_number(make_value(rng, kind, TRAIN)) for _ in range(100))
        assert all(is_held_out_number(make_value(rng, kind, HELD_OUT)) for _ in range(100))


@pytest.mark.parametrize("which", [TRAIN, HELD_OUT])
def test_every_answer_is_the_newest_that_was_told(which: str):
    num_known = num_unknown = num_corrected = 0
    for seed in SEEDS:
        known: dict[str, str] = {}
        for turn in made(seed, which).turns:
            for asked in turn.asked:
                assert asked.value == known.get(asked.kind.key)
                assert f"{asked.kind.yours} is {asked.value or UNKNOWN}" in turn.assistant
                num_known += asked.value is not None
                num_unknown += asked.value is None
                num_corrected += asked.corrected
            for key, value in turn.told:
                assert value in turn.user
                known[key] = value
    assert num_known > 50 and num_unknown > 10 and num_corrected > 2


def test_dense_conversations_are_about_one_type_of_value():
    shares = {}
    for dense in (False, True):
        of_one_type, in_all = 0, 0
        for seed in SEEDS:
            told = [kind for turn in made(seed, TRAIN, dense=dense).turns for kind, _ in turn.told]
            types = [next(kind.value for kind in KINDS if kind.key == key) for key in told]
            of_one_type += max(map(types.count, types), default=0)
            in_all += len(types)
        shares[dense] = of_one_type / in_all
    assert shares[True] > 0.55 and shares[True] > 1.5 * shares[False]


def test_most_messages_of_a_crowded_conversation_tell_several_facts():
    for crowded in (False, True):
        told = [len(turn.told) for seed in SEEDS for turn in made(seed, TRAIN, crowded=crowded).turns if turn.told]
        assert (sum(count > 1 for count in told) > len(told) / 2) == crowded


def test_training_ends_with_lower_cycles_over_crowded_conversations():
    from bench.builtin_model.train import Plan

    plan = Plan()
    at = [plan.rate(step, step / plan.num_steps) for step in range(plan.num_steps)]
    begin = 0
    for end, highest, _, crowded in plan.cycles:
        cycle = at[begin : round(end * plan.num_steps)]
        assert max(cycle) == highest and cycle[-1] <= 0.01 * highest
        assert plan.stage(end - 1e-6)[3] == round(crowded * 8)
        begin += len(cycle)
    assert begin == plan.num_steps


def test_training_repeats_fewer_facts_than_the_evaluation():
    share = {}
    for which in (TRAIN, HELD_OUT):
        asked = [asked for seed in SEEDS for turn in made(seed, which).turns for asked in turn.asked if asked.value]
        share[which] = sum(one.repeated for one in asked) / len(asked)
    assert share[TRAIN] < 0.7 < share[HELD_OUT]


def test_ask_once_never_asks_for_what_an_answer_gave_away():
    for seed in SEEDS:
        asked_since_told: set[str] = set()
        for turn in made(seed, HELD_OUT, ask_once=True).turns:
            asked_since_told -= {key for key, _ in turn.told}
            keys = {asked.kind.key for asked in turn.asked if asked.value}
            assert not keys & asked_since_told
            asked_since_told |= keys


@pytest.mark.parametrize("length", [128, 512, 1024])
def test_rendered_conversations_fit_and_agree_with_the_template(tokenizer, length: int):
    from bench.builtin_model.batches import Encoder

    encoder = Encoder(tokenizer)
    for seed in range(8):
        one = make_conversation(seed, HELD_OUT, max_tokens=length, count_tokens=encoder.count)
        tokens, weights = encoder.conversation(one)
        rendered = tokenizer.apply_chat_template(one.messages(), tokenize=True, return_dict=False)
        assert tokens == rendered and length // 3 < len(tokens) <= length
        assert len(tokens) == len(weights)


def test_a_longer_chat_begins_with_the_shorter_one(tokenizer):
    messages = made(3, HELD_OUT).messages()
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    for count in range(1, len(messages)):
        part = tokenizer.apply_chat_template(
            messages[:count],
            tokenize=True,
            return_dict=False,
            add_generation_prompt=messages[count]["role"] == "assistant",
        )
        assert whole[: len(part)] == part


def test_any_text_survives_the_tokenizer(tokenizer):
    for text in ("Zoë's 42 naïve cafés", "日本語 and emoji 🙂", "a  b\n\tc", "<|user|> spelled out"):
        ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert tokenizer.decode(ids) == text
        assert not set(ids) & set(tokenizer.all_special_ids)


def test_resumed_training_equals_uninterrupted_training(tokenizer, tmp_path: Path):
    torch = pytest.importorskip("torch")
    from bench.builtin_model.train import Plan, Trainer

    plan = Plan(
        num_steps=8,
        tokens_per_batch=256,
        stages=((1.0, 128, 0.5),),
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        mlp_size=32,
        compiled=False,
    )
    whole = Trainer(plan, tmp_path / "whole")
    losses = [whole.train_step() for _ in range(4)]
    first = Trainer(plan, tmp_path / "parts")
    assert [first.train_step() for _ in range(2)] == losses[:2]
    first.save()
    second = Trainer(replace(plan), tmp_path / "parts")
    second.load()
    assert [second.train_step() for _ in range(2)] == losses[2:]
    for (name, one), (_, other) in zip(whole.model.named_parameters(), second.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    assert json.loads((tmp_path / "parts" / "checkpoint.json").read_text())["step"] == 2


def test_a_plain_conversation_tells_two_facts_in_words_of_training_and_asks_for_them():
    for seed in range(50):
        first, second, *asked = plain_conversation(seed).turns
        for turn, question in zip((first, second), asked, strict=True):
            ((key, value),), (fact,) = turn.told, question.asked
            assert (key, value) == (fact.kind.key, fact.value) and value in turn.user and value not in question.user
            assert question.assistant == f"{fact.kind.yours} is {value}."
