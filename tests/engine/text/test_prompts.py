"""Checks of what callers hand in: every wrong prompt is a RequestError, and lengths come with both numbers."""

import numpy as np
import pytest
import transformers

from kvstore.engine.builtin import MODEL_DIR
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.text.prompts import check_fits, check_length, checked_prompts, prompt_ids
from kvstore.errors import ContextLengthError, RequestError

GREEDY = SamplingParams(temperature=0)


class Letters:
    """A tokenizer: a letter is its place in the alphabet, and a text begins with 0."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [0, *(ord(letter) - 96 for letter in text)]}


LIST = r"give a list of prompts, such as \[\[1, 2, 3\]\]"


@pytest.mark.parametrize(
    ("prompts", "message"),
    [([1, 2, 3], LIST), (np.array([1, 2]), LIST), (range(3), LIST), (None, "prompts is"), (1.5, "prompts is")], ids=str,
)  # fmt: skip
def test_what_is_no_list_of_prompts_is_refused(prompts, message):
    with pytest.raises(RequestError, match=message):
        checked_prompts(prompts, None)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "prompt is empty"), (5, "a prompt is a text or a list of token ids"), ("abc\udfff", "not valid Unicode")],
)
def test_what_is_no_prompt_is_refused(prompt, message):
    with pytest.raises(RequestError, match=message):
        prompt_ids(prompt, Letters(), 4)


def test_texts_go_through_the_tokenizer_with_its_special_tokens():
    assert prompt_ids("abc", Letters(), 27) == [0, 1, 2, 3]
    with pytest.raises(RequestError, match="no tokenizer; give prompts as token ids"):
        prompt_ids("abc", None, 4)


def test_one_set_of_parameters_serves_all_prompts():
    assert checked_prompts("hello", None) == (["hello"], [SamplingParams()])
    assert checked_prompts(["a", [1, 2]], GREEDY) == (["a", [1, 2]], [GREEDY, GREEDY])
    assert checked_prompts((), GREEDY) == ([], [])


def test_each_prompt_may_have_its_own_parameters():
    other = SamplingParams(max_tokens=3)
    assert checked_prompts(["a", "b"], (GREEDY, other)) == (["a", "b"], [GREEDY, other])
    with pytest.raises(RequestError, match="2 prompts, but 1 sampling parameters"):
        checked_prompts(["a", "b"], [GREEDY])


@pytest.mark.parametrize(
    "prompt",
    [[3, 1, 2], (3, 1, 2), np.array([3, 1, 2]), iter([3, 1, 2]), [np.int32(3), np.uint8(1), 2]],
    ids=["list", "tuple", "array", "iterator", "scalars"],  # the same in every process
)
def test_ids_of_any_whole_number_type_become_plain_ints(prompt):
    ids = prompt_ids(prompt, None, 4)
    assert ids == [3, 1, 2]
    assert {type(token_id) for token_id in ids} == {int}


@pytest.mark.parametrize("prompt", [[4], [0, -1], [1.0], [True], ["1"], [None], [[1]], [2**70]], ids=str)
def test_ids_outside_the_models_vocabulary_are_refused(prompt):
    with pytest.raises(RequestError, match="whole numbers from 0 to 3") as error:
        prompt_ids(prompt, None, 4)
    assert error.value.param == "prompt"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "window", "pool", "expected"),
    [
        (10, None, 64, 1000, 54),  # what remains
        (10, 54, 64, 1000, 54),  # exactly full
        (63, None, 64, 1000, 1),
        (63, 1, 64, 1000, 1),
        (10, None, 64, 32, 22),  # a pool smaller than the window
        (10, 22, 64, 32, 22),
        (10, 5, 64, 64, 5),
        (10, 55, 64, 1000, 54),  # an upper bound
        (10, 2**31, 64, 1000, 54),
        (10, 23, 64, 32, 22),
    ],
)
def test_what_fits(num_prompt, max_tokens, window, pool, expected):
    assert check_fits(num_prompt, SamplingParams(max_tokens=max_tokens), window, pool) == expected


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "window", "pool", "message", "numbers"),
    [
        (64, None, 64, 1000, "the prompt has 64 tokens, but the context window has 64", (64, 64)),
        (100, 1, 64, 1000, "the prompt has 100 tokens, but the context window has 64", (100, 64)),
        (32, None, 64, 32, "the prompt has 32 tokens, but the HBM pool holds 32", (32, 32)),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers(num_prompt, max_tokens, window, pool, message, numbers):
    with pytest.raises(ContextLengthError, match=message) as error:
        check_fits(num_prompt, SamplingParams(max_tokens=max_tokens), window, pool)
    assert (error.value.requested_tokens, error.value.limit_tokens) == numbers


def test_only_what_cannot_fit_is_refused_unseen():
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    text = "how are you today? " * 20_000
    count = len(tokenizer(text)["input_ids"])
    check_length([text], tokenizer, count)
    check_length([text[:1000]] * (len(text) // 1000), tokenizer, count)
    for texts, limit in (([text], count // 4), ([text], 10), ([text[:100_000]] * 10, count)):
        with pytest.raises(ContextLengthError) as refused:
            check_length(texts, tokenizer, limit)
        assert limit < refused.value.requested_tokens <= 3 * count
