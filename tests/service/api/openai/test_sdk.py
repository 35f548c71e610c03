"""The `openai` package as a client: what it sends is understood, and what it gets it takes for OpenAI's."""

import openai
import pytest

from tests.support.service.packages import openai_client
from tests.support.service.serving import KEY, server_fixture, serving
from tests.support.service.talking import TALKING_ROUTES, talking_body
from tests.support.tools import said

MODEL = "kvstore-builtin"
server = server_fixture(api_key=KEY)


def ask(client, messages, **more):
    return client.chat.completions.create(model=MODEL, messages=messages, **{"max_tokens": 24, **more})


def test_an_answer_has_openais_shape(client):
    answer = ask(client, said("Hello"))
    (choice,) = answer.choices
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == MODEL
    assert choice.message.role == "assistant" and choice.message.content and choice.finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_stream_adds_up_to_the_answer(client):
    whole = ask(client, said("My name is Tom."))
    chunks = list(ask(client, said("My name is Tom."), stream=True, stream_options={"include_usage": True}))
    *parts, usage = chunks
    assert parts[0].choices[0].delta.role == "assistant" and parts[0].choices[0].delta.content == ""
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert usage.choices == [] and usage.usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {usage.id} and all(part.usage is None for part in parts)


def test_without_include_usage_no_chunk_is_empty(client):
    assert all(chunk.choices for chunk in ask(client, said("Hello"), stream=True))


def test_several_choices_in_one_stream(client):
    texts = {0: "", 1: "", 2: ""}
    ends = {}
    for chunk in ask(client, said("Tell me"), n=3, temperature=1, seed=5, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    whole = ask(client, said("Tell me"), n=3, temperature=1, seed=5)
    assert [choice.message.content for choice in whole.choices] == list(texts.values())
    assert set(ends) == {0, 1, 2}


def test_log_probabilities(client):
    answer = ask(client, said("Hello"), logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(one.top_logprobs) == 3 and one.logprob <= 0 for one in content)
    assert all(bytes(one.bytes).decode() == one.token for one in content)
    streamed = list(ask(client, said("Hello"), logprobs=True, top_logprobs=3, stream=True))
    tokens = [one.token for chunk in streamed if chunk.choices[0].logprobs
              for one in chunk.choices[0].logprobs.content]  # fmt: skip
    assert tokens == [one.token for one in content]


def test_the_bytes_of_tokens_that_are_parts_of_characters_add_up(client):
    answer = ask(client, said("Hello"), logprobs=True, top_logprobs=1, extra_body={"guided_choice": ["é😀\ufffdx"]})
    *content, _ = answer.choices[0].logprobs.content  # without the end token
    assert b"".join(bytes(one.bytes) for one in content).decode() == answer.choices[0].message.content == "é😀\ufffdx"
    choice = {"extra_body": {"guided_choice": ["é😀\ufffdx"]}}
    made = client.completions.create(model=MODEL, prompt="Hello", max_tokens=40, logprobs=0, **choice).choices[0]
    assert made.text == "é😀\ufffdx" and made.logprobs.text_offset[made.logprobs.tokens.index("x")] == 3


def test_stop_strings_seeds_and_limits(client):
    whole = ask(client, said("My name is Ada.")).choices[0].message.content
    word = whole.split()[2]
    cut = ask(client, said("My name is Ada."), stop=[word]).choices[0]
    assert cut.message.content == whole[: whole.index(word)] and cut.finish_reason == "stop"
    short = ask(client, said("Hello"), max_tokens=2).choices[0]
    assert short.finish_reason == "length"
    also = client.chat.completions.create(model=MODEL, messages=said("Hello"), max_completion_tokens=2)
    assert also.choices[0] == short
    twice = {ask(client, said("Hi"), temperature=1.5, seed=9).choices[0].message.content for _ in range(2)}
    assert len(twice) == 1


def test_completions_of_texts_and_of_ids(client, server):
    to_the_end = {"model": MODEL, "max_tokens": 4, "extra_body": {"ignore_eos": True}}
    made = client.completions.create(prompt=["Hello", "My name"], n=2, echo=True, **to_the_end)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    assert all(choice.text.startswith(("Hello", "My name")) for choice in made.choices)
    assert made.usage.completion_tokens == 16
    ids = server.post("/tokenize", {"prompt": "Hello"}).json()["tokens"]
    of_ids = client.completions.create(prompt=ids, **to_the_end)
    assert of_ids.choices[0].text == made.choices[0].text.removeprefix("Hello")
    streamed = list(client.completions.create(prompt=["Hello", "My name"], stream=True,
                                              stream_options={"include_usage": True}, **to_the_end))  # fmt: skip
    texts = ["", ""]
    for chunk in streamed[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert ["Hello" + texts[0], "My name" + texts[1]] == [made.choices[0].text, made.choices[2].text]
    assert streamed[-1].usage.completion_tokens == 8


def test_completions_with_log_probabilities(client):
    made = client.completions.create(model=MODEL, prompt="Hello", max_tokens=4, logprobs=2).choices[0]
    assert len(made.logprobs.tokens) == 4 and "".join(made.logprobs.tokens) == made.text
    assert all(len(top) == 2 for top in made.logprobs.top_logprobs)
    assert made.logprobs.text_offset == [made.text.index(token) if i == 0 else len("".join(made.logprobs.tokens[:i]))
                                         for i, token in enumerate(made.logprobs.tokens)]  # fmt: skip
    with pytest.raises(openai.BadRequestError, match="logprobs of an echoed prompt"):
        client.completions.create(model=MODEL, prompt="Hello", logprobs=2, echo=True)


# -- beam search -----------------------------------------------------------------------------------------------------
SEARCH = {"use_beam_search": True, "beam_width": 4, "length_penalty": 0.5}


def test_a_beam_search_gives_its_best_answers_whole_or_as_a_stream(client):
    def complete(**more):
        asked = {"model": MODEL, "prompt": "My name", "max_tokens": 8, "n": 3, "extra_body": SEARCH}
        return client.completions.create(**asked, **more)

    made = complete()
    texts = [choice.text for choice in made.choices]
    assert len({*texts}) == 3 and [choice.index for choice in made.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in made.choices} <= {"stop", "length"}
    streamed = ["", "", ""]
    for chunk in complete(stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    assert complete(temperature=1.0).choices[0].text == texts[0], "what vLLM takes for nothing said"
    chosen = client.chat.completions.create(model=MODEL, messages=said("Hello"), n=2, extra_body=SEARCH)
    assert len({choice.message.content for choice in chosen.choices}) == 2


@pytest.mark.parametrize("path", [*TALKING_ROUTES, "/v1/messages"])
def test_a_route_with_one_answer_gives_the_best(server, path):
    body = {**talking_body(path, "Hello"), "max_tokens": 8}
    found = {server.post(path, {**body, **SEARCH}).status, server.post(path, {**body, **SEARCH, "top_k": 5}).status}
    assert found == {200, 400}


@pytest.mark.parametrize(("param", "more"), [
    ("beam_width", {"extra_body": {**SEARCH, "beam_width": 65}}),
    ("beam_width", {"n": 5, "extra_body": SEARCH}),
    ("beam_width", {"extra_body": {"beam_width": 2}}),
    ("temperature", {"temperature": 0.5, "extra_body": SEARCH}),
    ("logprobs", {"logprobs": 1, "extra_body": SEARCH}),
    ("stop", {"stop": ["x"], "extra_body": SEARCH}),
    ("structured_outputs", {"extra_body": {**SEARCH, "structured_outputs": {"regex": "a"}}}),
    ("guided_regex", {"extra_body": {**SEARCH, "guided_regex": "a"}}),
])  # fmt: skip
def test_what_a_beam_search_cannot_do_is_an_error_by_name(client, param, more):
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model=MODEL, prompt="Hello", max_tokens=4, **more)
    assert wrong.value.param == param and param in wrong.value.message


def test_more_beams_than_sequences_that_run_at_once_are_refused():
    with serving(engine={"max_num_seqs": 4}) as small:
        for param in ("beam_width", "n"):
            reply = small.post("/v1/completions", {"prompt": "Hello", "use_beam_search": True, param: 5})
            assert (reply.status, reply.error["param"]) == (400, param) and "max_num_seqs" in reply.error["message"]


# -- errors ----------------------------------------------------------------------------------------------------------
def test_errors_are_the_sdks_own_classes(client, server):
    with pytest.raises(openai.NotFoundError) as wrong:
        client.chat.completions.create(model="another", messages=said("Hello"))
    assert wrong.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        ask(client, said("word " * 5000))
    assert wrong.value.code == "context_length_exceeded" and "1024" in wrong.value.message
    with openai_client(server, "no-such-key") as stranger, pytest.raises(openai.AuthenticationError) as wrong:
        stranger.models.list()
    assert wrong.value.code == "invalid_api_key"
