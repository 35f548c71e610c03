"""Cache breakpoints pin the conversation that they are in, as long as they say; what was written is counted."""

import time

import pytest

from kvstore.service.api.schema import TTLS
from tests.support.engines import chain_of
from tests.support.service.serving import server_fixture

server = server_fixture({"hbm": "8MiB", "cpu": "8MiB", "disk": "64MiB"})
MODEL = {"model": "kvstore-builtin"}


def pinned_s(server, messages):
    """For how long the conversation of this history stays pinned; 0 for not at all."""
    chain = chain_of(server.engine, server.context.recall.prompt_ids("", "", messages))
    conversation = server.engine.connector.parts.store.steering.conversation_of(chain)
    return max(0, round(conversation.pinned_until_s - time.time(), -2))


def part(text, **mark):
    return {"type": "input_text", "text": text, **({"prompt_cache_breakpoint": mark} if mark else {})}


def test_a_breakpoint_pins_a_history_for_the_longest_of_the_times(server, client):
    said = [{"role": "system", "content": [part("You are an agent. " * 20, mode="explicit")]}]
    said += [{"role": "user", "content": [part("Hello"), part("you", mode="explicit", ttl="12h")]}]
    answer = client.chat.completions.create(messages=said, max_tokens=4, **MODEL)
    plain = [{"role": "system", "content": "You are an agent. " * 20}, {"role": "user", "content": "Helloyou"}]
    assert pinned_s(server, plain) == TTLS["12h"]
    details = answer.usage.prompt_tokens_details
    assert details.cache_write_tokens == answer.usage.prompt_tokens // 16 * 16 > 0 == details.cached_tokens
    again = client.chat.completions.create(messages=said, max_tokens=4, **MODEL).usage.prompt_tokens_details
    assert again.cache_write_tokens == 0 < again.cached_tokens


def test_a_breakpoint_pins_a_session(server, client):
    said = [{"role": "user", "content": [part("Hello, my dear.", mode="explicit")]}]
    for options, seconds in (({}, TTLS["30m"]), ({"prompt_cache_options": {"ttl": "12h"}}, TTLS["12h"])):
        answer = client.responses.create(input=said, max_output_tokens=4, extra_body=options, **MODEL)
        session = server.get(f"/sessions/{answer.id.split('_')[1]}").json()
        assert round(session["pinned_until"] - time.time(), -2) == seconds
        turn = {"message": {"role": "user", "content": said[0]["content"]}, "max_completion_tokens": 4, **options}
        answer = server.post("/chat", turn).json()
        assert answer["usage"]["completion_tokens"] == 4
        session = server.get(f"/sessions/{answer['session_id']}").json()
        assert round(session["pinned_until"] - time.time(), -2) == seconds


def test_without_a_breakpoint_the_options_say_whether_the_end_is_one(server, client):
    text = "A prompt of some length. " * 20
    ask = {"input": text, "store": False, "max_output_tokens": 4, **MODEL}
    for options in ({}, {"prompt_cache_options": {"mode": "explicit", "ttl": "12h"}}, {"prompt_cache_options": None}):
        client.responses.create(extra_body=options, **ask)
        assert pinned_s(server, [{"role": "user", "content": text}]) == 0
    client.responses.create(extra_body={"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}, **ask)
    assert pinned_s(server, [{"role": "user", "content": text}]) == TTLS["30m"]


@pytest.mark.parametrize(
    "options", [{"ttl": "3y"}, {"mode": "never"}, {"ttl": 5}, {"mode": []}, 7, "30m", [], {"ttl": {}}]
)
def test_options_of_another_kind_are_refused(server, options):
    bodies = [
        ("/v1/responses", {"input": "Hello", "prompt_cache_options": options}),
        ("/chat", {"message": "Hello", "prompt_cache_options": options}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "prompt_cache_options": options}),
    ]
    marked = {"type": "input_text", "text": "x", "prompt_cache_breakpoint": options}
    if options != {"mode": "never"}:
        bodies.append(("/v1/responses", {"input": [{"role": "user", "content": [marked]}]}))
    for path, body in bodies:
        reply = server.post(path, body)
        assert reply.status == 400 and "prompt_cache_" in reply.error["param"], reply.body
