"""Masks of random grammars against a slow reference: a token is allowed if some text goes on with it; and sampling."""

import json
import random
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from kvstore import SamplingParams
from kvstore.engine.model.step.masks import GrammarMasks, allows_others
from kvstore.engine.model.step.sampler import Sampler
from kvstore.engine.sampling_params import JSON_OPTIONS
from tests.support.grammars import WORDS, allowed, matcher_of, tokenizer_of

CPU = torch.device("cpu")
TOKENIZER = tokenizer_of()
EOS = TOKENIZER.eos
VOCAB = EOS + 8  # a model may know more ids than its tokenizer
TABLE = LLTokenizer(TOKENIZER.backend_tokenizer.to_str(), n_vocab=VOCAB, eos_token=[EOS])
BYTES = {index: data for index in range(EOS) if (data := TABLE.decode_bytes([index]))}  # not 0xFF, which no text has
NONE = np.array([], np.int64)

# -- languages as trees, and their derivatives by a byte (Brzozowski, 1964) --------------------------------------------
NOTHING, EMPTY = ("nothing",), ("empty",)


def seq(left, right):
    return NOTHING if NOTHING in (left, right) else right if left == EMPTY else ("seq", left, right)


def alt(left, right):
    return right if left == NOTHING else left if right in (NOTHING, left) else ("alt", left, right)


def ends(tree) -> bool:
    """Whether the language has the empty text."""
    kind, *parts = tree
    if kind in ("seq", "alt"):
        return (all if kind == "seq" else any)(map(ends, parts))
    return kind in ("empty", "star")


def after(tree, byte: int):
    """What may follow this byte."""
    kind, *parts = tree
    if kind == "byte":
        return EMPTY if parts[0] == byte else NOTHING
    if kind == "alt":
        return alt(after(parts[0], byte), after(parts[1], byte))
    if kind == "star":
        return seq(after(parts[0], byte), tree)
    if kind == "seq":
        first = seq(after(parts[0], byte), parts[1])
        return alt(first, after(parts[1], byte)) if ends(parts[0]) else first
    return NOTHING


def after_all(tree, data: bytes):
    for byte in data:
        tree = after(tree, byte)
    return tree


def as_lark(tree) -> str:
    kind, *parts = tree
    if kind == "byte":
        return json.dumps(chr(parts[0]))
    if kind == "star":
        return f"({as_lark(parts[0])})*"
    return f"({(' | ' if kind == 'alt' else ' ').join(map(as_lark, parts))})"


def as_regex(tree) -> str:
    kind, *parts = tree
    if kind == "byte":
        return chr(parts[0])
    if kind == "star":
        return f"({as_regex(parts[0])})*"
    return f"({('|' if kind == 'alt' else '').join(map(as_regex, parts))})"


TREES = st.recursive(
    st.sampled_from([("byte", ord(letter)) for letter in "abc12"]),
    lambda inner: st.one_of(
        st.tuples(st.just("seq"), inner, inner), st.tuples(st.just("alt"), inner, inner),
        st.tuples(st.just("star"), inner),
    ),
    max_leaves=8,
)  # fmt: skip


def expected_of(tree) -> set[int]:
    tokens = {token for token, data in BYTES.items() if after_all(tree, data) != NOTHING}
    return tokens | {EOS} if ends(tree) else tokens


def walk(matcher, tree, seed: int, check) -> None:
    """A few random tokens that are allowed, the mask before each."""
    masks, rng = GrammarMasks(VOCAB), random.Random(seed)
    masks.matchers[3] = matcher
    for _ in range(8):
        found = allowed(masks.masks(np.array([3]))[0])
        check(found, tree)
        token = rng.choice(sorted(found))
        assert matcher.consume_token(token)
        if token == EOS:
            assert matcher.is_stopped() and ends(tree)
            return
        tree = after_all(tree, BYTES[token])


def is_exact(found, tree) -> None:
    assert found == expected_of(tree)


def is_sound(found, tree) -> None:
    """Where the next byte is certain, only the tokenizer's own tokens for it are allowed."""
    expected = expected_of(tree)
    assert found and found <= expected
    firsts = {BYTES[token][0] for token in expected - {EOS}}
    assert found == expected or (len(firsts) == 1 and EOS not in expected)


@settings(max_examples=60)
@given(TREES, st.integers(0, 99), st.booleans())
def test_a_token_is_allowed_if_some_text_goes_on_with_it(tree, seed, is_regex):
    body = f"/{as_regex(tree)}/" if is_regex else as_lark(tree)
    walk(matcher_of(TABLE, f'%llguidance {{"no_forcing": true}}\nstart: {body}'), tree, seed, is_exact)
    walk(matcher_of(TABLE, f"start: {body}"), tree, seed, is_sound)


# -- JSON schemas, and the texts that match them, as trees -------------------------------------------------------------
def text_tree(text: str):
    return reduce(seq, (("byte", byte) for byte in text.encode()), EMPTY)


def array(items, most: int):
    """Up to so many items."""
    tree = EMPTY
    for _ in range(most - 1):
        tree = alt(seq(text_tree(","), seq(items[1], tree)), EMPTY)
    inside = alt(seq(items[1], tree), EMPTY) if most else EMPTY
    schema = {"type": "array", "items": items[0], "maxItems": most}
    return schema, seq(text_tree("["), seq(inside, text_tree("]")))


def objects(values: list, required: list[bool]):
    """Properties come in the order of the schema. Trees for what follows, with none or some of them before."""
    none = some = EMPTY
    for index in reversed(range(len(values))):
        pair = seq(text_tree(f'"{"ab"[index]}":'), values[index][1])
        skipped = (NOTHING, NOTHING) if required[index] else (none, some)
        none = alt(seq(pair, some), skipped[0])
        some = alt(seq(text_tree(","), seq(pair, some)), skipped[1])
    named = dict(zip("ab", (schema for schema, _ in values), strict=False))
    need = [name for name, is_needed in zip(named, required, strict=False) if is_needed]
    schema = {"type": "object", "properties": named, "required": need, "additionalProperties": False}
    return schema, seq(text_tree("{"), seq(none, text_tree("}")))


LEAVES = [
    ({"type": "boolean"}, alt(text_tree("true"), text_tree("false"))), ({"type": "null"}, text_tree("null")),
    ({"const": "ab"}, text_tree('"ab"')),
    ({"enum": [12, "a", "ba"]}, alt(text_tree("12"), alt(text_tree('"a"'), text_tree('"ba"')))),
]  # fmt: skip
SCHEMAS = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.builds(array, inner, st.integers(0, 2)),
        st.builds(objects, st.lists(inner, max_size=2), st.lists(st.booleans(), min_size=2, max_size=2)),
        st.builds(lambda a, b: ({"anyOf": [a[0], b[0]]}, alt(a[1], b[1])), inner, inner),
    ),
    max_leaves=4,
)


@settings(max_examples=60)
@given(SCHEMAS, st.integers(0, 99))
def test_a_token_is_allowed_if_some_json_that_matches_goes_on_with_it(both, seed):
    schema, tree = both
    lark = f"start: %json {json.dumps(schema | {'x-guidance': JSON_OPTIONS})}"
    walk(matcher_of(TABLE, f'%llguidance {{"no_forcing": true}}\n{lark}'), tree, seed, is_exact)
    walk(matcher_of(TABLE, lark), tree, seed, is_sound)


def id_of(word: str) -> int:
    return next(token for token, data in BYTES.items() if data == word.encode())


def test_masks_are_those_of_their_rows_which_may_occur_repeatedly():
    masks, languages = GrammarMasks(VOCAB), {5: "a", 2: "b", 9: "c"}
    masks.matchers = {row: matcher_of(TABLE, f'start: "{letter}"') for row, letter in languages.items()}
    assert masks.constrained(np.array([1, 9, 2, 2, 7])).tolist() == [1, 2, 3]
    found = masks.masks(np.array([9, 2, 2, 5, 9]))
    assert [allowed(mask) for mask in found] == [{id_of(letter)} for letter in "cbbac"]


@pytest.mark.parametrize("word", WORDS)
def test_a_mask_that_allows_others(word):
    mask = np.zeros(-(-VOCAB // 32), np.int32)
    mask.view(np.uint8)[EOS // 8] = 1 << EOS % 8
    token = id_of(word)
    assert not allows_others(mask, [EOS, 3])
    mask.view(np.uint8)[token // 8] |= 1 << token % 8
    assert allows_others(mask, [EOS, 3])
    assert not allows_others(mask, [EOS, token])


# -- in the sampler ----------------------------------------------------------------------------------------------------
def sampled(params: SamplingParams, grammar: str, logits: torch.Tensor, count: int) -> list[int]:
    """The answer of one row; the other one is free."""
    sampler, matcher = Sampler(4, VOCAB, CPU), matcher_of(TABLE, grammar)
    sampler.set_row(0, SamplingParams(temperature=0), 0, [EOS], NONE, NONE)
    sampler.set_row(3, params, 7, [EOS], NONE, NONE, matcher)
    sampler.move_row(3, 1)
    tokens, rows = [], np.array([0, 1])
    for _ in range(count):
        drawn = sampler.sample(logits.repeat(2, 1), rows).token_ids
        assert drawn[0] == int(logits.argmax())
        sampler.append(rows, drawn)
        assert matcher.consume_token(int(drawn[1])), matcher.get_error()
        tokens.append(int(drawn[1]))
        if tokens[-1] == EOS:
            break
    return tokens


def text(tokens: list[int]) -> str:
    return b"".join(BYTES[token] for token in tokens if token != EOS).decode()


PREFERRED = torch.zeros(1, VOCAB)
PREFERRED[0, [EOS, id_of("c"), id_of("a"), id_of("b"), VOCAB - 1]] = torch.tensor([9.0, 5.0, 4.0, 3.0, 10.0])
GREEDY = {"temperature": 0}


@pytest.mark.parametrize(
    ("changes", "grammar", "expected"),
    [
        (GREEDY, "start: /[ab]{1,4}/", "a"),
        (GREEDY | {"min_tokens": 3}, "start: /[ab]{1,4}/", "aaa"),
        (GREEDY | {"min_tokens": 9}, "start: /[ab]{1,4}/", "aaaa"),  # then nothing else is allowed
        (GREEDY | {"min_tokens": 3, "logit_bias": {id_of("b"): 2.0}}, "start: /[ab]{1,4}/", "bbb"),
        (GREEDY | {"min_tokens": 4, "frequency_penalty": 0.6}, "start: /[ab]{1,4}/", "aaba"),
        (GREEDY, "start: /b[a1]?/", "b"),
        ({"top_k": 1}, "start: /[ab]{2}/", "aa"),
        ({"top_p": 1e-6}, "start: /[ab]{2}/", "aa"),
        ({"min_p": 1.0}, "start: /[ab]{2}/", "aa"),
    ],
)  # fmt: skip
def test_other_parameters_keep_their_meaning(changes, grammar, expected):
    tokens = sampled(SamplingParams(**changes), grammar, PREFERRED, 20)
    assert text(tokens) == expected and tokens[-1] == EOS


@pytest.mark.parametrize(("worst", "best"), [(torch.nan, "b"), (-torch.inf, "b"), (torch.inf, "a")])
def test_a_broken_model_gives_allowed_tokens(worst, best):
    logits = torch.full((1, VOCAB), worst)
    logits[0, [id_of("b"), EOS]] = torch.tensor([1.0, 2.0])
    sampler, matcher = Sampler(1, VOCAB, CPU), matcher_of(TABLE, "start: /[ab]{3}/")
    sampler.set_row(0, SamplingParams(temperature=0), 0, [EOS], NONE, NONE, matcher)
    assert sampler.sample(logits, np.array([0])).token_ids.tolist() == [id_of(best)]


def test_logprobs_are_those_of_the_model():
    sampler, matcher = Sampler(1, VOCAB, CPU), matcher_of(TABLE, "start: /[ab]{3}/")
    sampler.set_row(0, SamplingParams(temperature=0, logprobs=2), 0, [EOS], NONE, NONE, matcher)
    (logprob,) = sampler.sample(PREFERRED, np.array([0])).logprobs
    assert logprob.token_id == id_of("a") and list(logprob.top) == [VOCAB - 1, EOS]
    assert logprob.logprob == pytest.approx(float(PREFERRED.log_softmax(-1)[0, id_of("a")]))


def test_a_row_is_free_again_when_its_request_has_left():
    sampler = Sampler(2, VOCAB, CPU)
    sampler.set_row(0, SamplingParams(temperature=0), 0, [EOS], NONE, NONE, matcher_of(TABLE, 'start: "b"'))
    assert sampler.is_constrained(np.array([1, 0])) and not sampler.is_constrained(np.array([1]))
    sampler.clear_row(0)
    assert not sampler.is_constrained(np.array([0]))
    sampler.set_row(0, SamplingParams(temperature=0), 0, [EOS], NONE, NONE)
    assert sampler.sample(PREFERRED, np.array([0])).token_ids.tolist() == [VOCAB - 1]
