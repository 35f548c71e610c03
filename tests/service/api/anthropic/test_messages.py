"""/v1/messages with the `anthropic` package: what it sends is understood, and what it gets it takes for Anthropic's.

The built-in model cannot choose tools: `tool_choice` forces its calls.
"""

import json
import random
import time
from datetime import UTC, datetime

import anthropic
import pytest

from tests.support.engines import chain_of
from tests.support.faults import before_each_step
from tests.support.service.packages import anthropic_client
from tests.support.service.serving import KEY, server_fixture, serving
from tests.support.service.talking import WRONG, Stream
from tests.support.thinking import THINKING, THOUGHT, as_asked
from tests.support.tools import OURS, PERSON, TOOLS, is_weather, said

PATH, MODEL = "/v1/messages", "kvstore-builtin"
TIERS = {"hbm": "8MiB", "cpu": "8MiB", "disk": "64MiB"}
ONE_CALL = {"type": "any", "disable_parallel_tool_use": True}
server = server_fixture(TIERS, api_key=KEY)


@pytest.fixture
def client(server):
    with anthropic_client(server) as one:
        yield one
    server.wait_until_idle()


def ask(client, messages, **more):
    """extra: fields that the package does not know."""
    given = {"model": MODEL, "max_tokens": 120, "tools": OURS, **more}
    return client.messages.create(messages=messages, extra_body={"seed": 3, **given.pop("extra", {})}, **given)


def must_call(client, messages, **more):
    return ask(client, messages, **{"tool_choice": ONE_CALL, **more})


def rounds(message, content="Sunny.", **more):
    """The messages after an answer with calls, as a client makes them of its JSON."""
    calls = [block for block in message.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": content, **more} for call in calls]
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = dict(reversed(block["input"].items()))
    return [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]


def prompt_tokens(usage) -> int:
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def blocks_of(message) -> int:
    """How many tokens of the next prompt are there: the last one's KV was not computed."""
    return (prompt_tokens(message.usage) + message.usage.output_tokens - 1) // 16 * 16


# -- answers -----------------------------------------------------------------------------------------------------------
def test_a_message_whole_and_streamed(client):
    asked = {"model": MODEL, "max_tokens": 40, "messages": said("Hello, who are you?"), "system": "Be kind."}
    whole = client.messages.create(**asked)
    (block,) = whole.content
    assert (whole.type, whole.role, whole.model, whole.stop_reason) == ("message", "assistant", MODEL, "end_turn")
    # Claude Code would take 0 for what the stream's beginning says: all 16.
    assert (whole.usage.input_tokens, whole.usage.cache_creation_input_tokens) == (1, 15)
    assert block.type == "text" and block.text and whole.id.startswith("msg_") and whole.stop_sequence is None
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (block.text, "end_turn")
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert prompt_tokens(final.usage) == prompt_tokens(whole.usage)


def test_the_events_of_a_stream(server):
    body = {"model": MODEL, "max_tokens": 20, "messages": said("Hello"), "context_management": {"edits": []}}
    events = Stream(server, f"{PATH}?beta=true", body).rest()
    kinds = [event["type"] for event in events]
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[3:] == ["content_block_delta"] * len(deltas) + ["content_block_stop", "message_delta", "message_stop"]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    last = events[-2]
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert last["context_management"] == {"applied_edits": []}
    assert last["usage"]["output_tokens"] > 1 and "cached_tokens_details" in last["usage"]
    raw = server.post(PATH, {**body, "stream": True}).body.decode()
    assert raw.startswith("event: message_start\ndata: {") and "[DONE]" not in raw


def test_why_an_answer_ends(client):
    text = client.messages.create(model=MODEL, max_tokens=30, messages=said("Hello")).content[0].text
    word = text.split()[1]
    stopped = client.messages.create(model=MODEL, max_tokens=30, messages=said("Hello"), stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert stopped.content[0].text == text[: text.index(word)]
    cut = client.messages.create(model=MODEL, max_tokens=2, messages=said("Hello"))
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)


def test_max_tokens_is_capped():
    with serving(engine={"max_model_len": 64}) as server:
        body = {"model": MODEL, "messages": said("Hello"), "max_tokens": 32_000, "ignore_eos": True}
        message = server.post(PATH, body).json()
        assert message["stop_reason"] == "model_context_window_exceeded"
        assert message["usage"]["capped_max_tokens"] == message["usage"]["output_tokens"]
        server.wait_until_idle()


def test_what_others_would_say_last_goes_on_from_there(client, server):
    begun = [*said("Hello"), {"role": "assistant", "content": "Hello, my name"}]
    message = client.messages.create(model=MODEL, max_tokens=4, messages=begun)
    like = {"messages": begun, "max_tokens": 4, "continue_final_message": True, "add_generation_prompt": False}
    answer = server.post("/v1/chat/completions", like).json()["choices"][0]["message"]["content"]
    assert message.content[0].text == answer


def test_a_format(client):
    config = {"format": {"type": "json_schema", "schema": PERSON}}
    for extra in ({"output_config": config}, {"output_format": config["format"]}):
        message = ask(client, said("Who?"), tools=[], extra=extra)
        assert set(json.loads(message.content[0].text)) == {"name", "age"}


# -- tools -------------------------------------------------------------------------------------------------------------
def test_tools_over_two_rounds_hit_like_any_turn(client, server):
    asked = said("Is it warm in Rome?")
    first = must_call(client, asked, tool_choice={"type": "tool", "name": "weather"})
    (call,) = first.content
    assert (first.stop_reason, call.name) == ("tool_use", "weather") and is_weather(json.dumps(call.input))
    second = must_call(client, [*asked, *rounds(first)])
    third = ask(client, [*asked, *rounds(first), *rounds(second)], max_tokens=8)
    for before, after in ((first, second), (second, third)):
        assert after.usage.cache_read_input_tokens == blocks_of(before)
        assert not hasattr(after.usage, "miss")
    assert first.usage.cache_creation_input_tokens == prompt_tokens(first.usage) // 16 * 16
    history = [
        *asked, {"role": "assistant", "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.input)}}
        ]}, {"role": "tool", "tool_call_id": call.id, "content": "Sunny."},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {**tool["function"], "description": "A tool."}} for tool in TOOLS]
    body = {"messages": history, "tools": tools, "max_tokens": 1}
    usage = server.post("/v1/chat/completions", body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= blocks_of(first), "the same prompt on another route"


def test_a_streamed_call(client):
    asked = {"model": MODEL, "max_tokens": 120, "messages": said("Weather?"), "tools": OURS, "tool_choice": ONE_CALL}
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use" and "input_json" in kinds
    assert message.content[0].input == client.messages.create(**asked).content[0].input


def test_none_and_a_call_that_is_cut_off(client):
    free = ask(client, said("Weather?"), tool_choice={"type": "none"}, max_tokens=8)
    assert [block.type for block in free.content] == ["text"]
    cut = must_call(client, said("Weather?"), max_tokens=12)
    assert (cut.stop_reason, cut.content) == ("max_tokens", [])


def test_results_of_several_kinds(client, server):
    asked = said("Is it cold in Oslo?")
    first = must_call(client, asked)
    parts = [{"type": "text", "text": "Sun"}, {"type": "text", "text": "ny."}]
    plain, listed, failed, none = (
        client.messages.count_tokens(model=MODEL, tools=OURS, messages=[*asked, *rounds(first, *given, **more)])
        for given, more in ((["Sunny."], {}), ([parts], {}), (["Sunny."], {"is_error": True}), ([""], {}))
    )
    assert plain == listed and none.input_tokens < plain.input_tokens < failed.input_tokens


def test_count_tokens_is_the_prompt(client):
    asked = {"model": MODEL, "system": "Be kind.", "messages": said("What is the weather?"), "tools": OURS}
    counted = client.messages.count_tokens(**asked)
    assert counted.input_tokens == prompt_tokens(client.messages.create(**asked, max_tokens=1).usage)
    asked["messages"] += [{"role": "assistant", "content": "It is"}]
    counted = client.messages.count_tokens(**asked)
    assert counted.input_tokens == prompt_tokens(client.messages.create(**asked, max_tokens=1).usage), "it goes on"
    long = client.messages.count_tokens(model=MODEL, messages=said("word " * 5000))
    assert long.input_tokens > 5000, "also of what no window holds"


# -- thinking ----------------------------------------------------------------------------------------------------------
def test_thinking_is_a_block_of_its_own_and_comes_back():
    with serving(engine={"chat_template": THINKING}) as server, as_asked():
        body = {"model": MODEL, "messages": said("Is it so?"), **THOUGHT, "thinking": {"type": "adaptive"}}
        message = server.post(PATH, body).json()
        thought, text = message["content"]
        assert set(thought) == {"type", "thinking", "signature"} and len(thought["thinking"]) == 40
        assert text["text"] in ("yes", "no") and thought["signature"]
        events = server.post(PATH, {**body, "stream": True}).events()
        begun = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
        deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
        assert begun == ["thinking", "text"]
        assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta"]
        history = [*body["messages"], {"role": "assistant", "content": message["content"]}, *said("Why?")]
        again = {"model": MODEL, "messages": history, "max_tokens": 1}
        assert server.post(PATH, again).json()["usage"]["thinking"] == "dropped"
        off = {"model": MODEL, "messages": said("Hello"), "max_tokens": 8, "thinking": {"type": "disabled"}}
        assert [block["type"] for block in server.post(PATH, off).json()["content"]] == ["text"]
        lower = {**off, "thinking": None, "output_config": {"effort": "low"}}
        counts = [server.post(f"{PATH}/count_tokens", one).json()["input_tokens"] for one in (again, lower, off)]
        assert len(set(counts)) == 3
        server.wait_until_idle()


# -- what Claude Code sends --------------------------------------------------------------------------------------------
def billed(session: str, request: str) -> list:
    line = f"x-anthropic-billing-header: cc_version=2.1.197.{session}; cc_entrypoint=cli; cch={request};"
    system = [{"type": "text", "text": "You are an agent. " * 30, "cache_control": {"type": "ephemeral"}}]
    return [{"type": "text", "text": line}, *system]


def test_the_line_that_changes_per_session_stands_behind_what_sessions_share(client):
    def usage(session, request, messages):
        return ask(client, messages, system=billed(session, request), max_tokens=1).usage

    first = usage("0df", "00001", said("Hello there"))
    other = usage("1a2", "00002", said("Hello there"))
    assert prompt_tokens(first) == prompt_tokens(other) and other.cache_read_input_tokens > 400
    longer = [*said("Hello there"), {"role": "assistant", "content": "Hi."}, *said("And now?")]
    usage("0df", "00003", longer)
    again = usage("0df", "00004", longer)
    assert again.cache_read_input_tokens == (prompt_tokens(again) - 1) // 16 * 16


def test_a_system_message_within_the_conversation(client):
    begun = [*said("Hello"), {"role": "system", "content": "The user is Ada."}]
    first = client.messages.create(model=MODEL, max_tokens=20, system="Be kind. " * 20, messages=begun)
    answered = [*begun, {"role": "assistant", "content": first.content}, *said("Who am I?")]
    second = client.messages.create(model=MODEL, max_tokens=2, system="Be kind. " * 20, messages=answered)
    assert second.usage.cache_read_input_tokens == blocks_of(first)


def test_unknown_fields_are_passed_over_and_named_once(client, caplog):
    caplog.set_level("INFO", "kvstore.service")
    for _ in range(2):
        ask(client, said("Hello"), max_tokens=1, extra={"a_field_of_tomorrow": {"type": "x"}, "container": None})
    lines = [line for line in caplog.messages if "passed over" in line]
    assert len([line for line in lines if "a_field_of_tomorrow" in line]) == 1
    web = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    ask(client, said("Hello"), tools=[web, *OURS], max_tokens=1)
    assert "tools of the types 'web_search_20250305' are passed over" in caplog.text


def test_a_breakpoint_pins_the_conversation(client, server):
    text = "Hello, agent. " * 20
    marked = {"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    ask(client, said([marked]), tools=[], max_tokens=1)
    chain = chain_of(server.engine, server.context.recall.prompt_ids("", "", said(text)))
    conversation = server.engine.connector.parts.store.steering.conversation_of(chain)
    assert round(conversation.pinned_until_s - time.time(), -2) == 3600


# -- errors ------------------------------------------------------------------------------------------------------------
def wrong(server, body, path=PATH, **headers):
    """The error's type and text; its shape is Anthropic's."""
    reply = server.post(path, body, **headers)
    told = reply.json()
    assert set(told) == {"type", "error", "request_id"} and told["type"] == "error", told
    assert set(told["error"]) == {"type", "message"} and told["request_id"] == reply.headers["request-id"]
    return reply.status, told["error"]["type"], told["error"]["message"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages must be a list of at least 1 entry"),
        ({"messages": said([IMAGE])}, r"messages[0].content[0] is of the type 'image'"),
        ({"messages": said([{**RESULT, "content": [IMAGE]}])}, "messages[0].content[0].content[0] is of the type"),
        ({"messages": said([{"type": "text"}])}, "messages[0].content[0].text is missing"),
        ({"messages": said([{"type": "tool_result"}])}, "messages[0].content[0].tool_use_id is missing"),
        ({"messages": said([{"type": "tool_use", "id": "a", "name": "f", "input": {}}])}, "messages[0].content[0] is"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
         "messages[0].content[0].input is missing"),
        ({"messages": [*said("a"), {"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, "messages[1].content ends with calls"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role is 'king'"),
        ({"system": [{"type": "document", "text": "a"}]}, "system[0] is of the type 'document'"),
        ({"system": 5}, "system is a whole number"),
        ({"tools": [{"name": "two words"}]}, "tools[0].name is 'two words'"),
        ({"tools": OURS, "tool_choice": {"type": "some"}}, "tool_choice.type is 'some'; give auto, any, tool or none"),
        ({"tools": OURS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names 'x'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is 'any', and there are no tools"),
        ({"thinking": {"type": "deep"}}, "thinking.type is 'deep'; give enabled, adaptive or disabled"),
        ({"output_config": {"effort": "some"}}, "output_config.effort is 'some'"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "foo"}}}}, "output_config.format.s"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2d"}}, "cache_control.ttl is '2d'"),
        ({"tools": [{**OURS[0], "cache_control": {"ttl": "x"}}], "tool_choice": {"type": "any"}},
         "tools[0].cache_control.ttl is 'x'"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1"), ({"n": 2}, "n is 2"),
        ({"max_tokns": 1}, "max_tokns: did you mean max_tokens?"), ({"stop_sequences": [1]}, "stop_sequences[0] is"),
        ({"logprobs": True}, "logprobs is not supported here"),
        ({"compaction": {"type": "summarize"}}, "compaction: ask for a summary in a message"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_a_400_that_names_the_field(server, fields, message):
    body = {"model": MODEL, "max_tokens": 1, "messages": said("Hello"), **fields}
    status, kind, text = wrong(server, body)
    assert (status, kind) == (400, "invalid_request_error") and message in text


def test_count_tokens_names_what_is_wrong_too(server):
    path = f"{PATH}/count_tokens"
    for fields, message in (
        ({"messages": said([IMAGE])}, "messages[0].content[0] is of the type 'image'"), ({"messages": 5}, "messages"),
        ({"tools": [{"name": "two words"}]}, "tools[0].name is"), ({"thinking": {"type": "deep"}}, "thinking.type is"),
        ({"messages": said("x" * 2**21)}, "at most 1048576 are tokenized at once"),
    ):  # fmt: skip
        status, kind, text = wrong(server, {"messages": said("Hello"), **fields}, path)
        assert (status, kind) == (400, "invalid_request_error") and message in text


def test_errors_have_the_classes_of_the_package(client, server):
    for more, kind, message in (
        ({"model": "gpt-4o"}, anthropic.NotFoundError, "there is no model 'gpt-4o'"),
        ({"messages": said("word " * 5000)}, anthropic.BadRequestError, r"prompt is too long: \d+ tokens > 1024 max"),
        ({"extra_headers": {"Host": "evil.example"}}, anthropic.PermissionDeniedError, "evil.example"),
        ({"messages": said("x" * 2**26)}, anthropic.RequestTooLargeError, "bytes"),
    ):
        with pytest.raises(kind, match=message) as told:
            ask(client, **{"messages": said("Hello"), **more})
        assert told.value.request_id and told.value.body["type"] == "error"
    with pytest.raises(anthropic.AuthenticationError, match="the key is not known"):
        ask(client.with_options(api_key="wrong"), said("Hello"))


def test_an_error_within_a_stream_is_an_event(client, server):
    def fail():
        raise RuntimeError("injected")

    asked = {"model": MODEL, "max_tokens": 20, "messages": said("Hello"), "stream": True}
    with before_each_step(server.engine, fail), pytest.raises(anthropic.APIStatusError) as told:
        list(client.messages.create(**asked))
    assert told.value.body["error"] == {"type": "api_error", "message": "internal error"}


def test_names_of_anthropics_models_are_this_servers_model(client):
    for name in ("claude-opus-4-8", "claude-haiku-4-5-20251001"):
        assert ask(client, said("Hello"), model=name, max_tokens=1).model == MODEL


def test_the_list_of_models_is_one_for_this_package(client):
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name, model.max_input_tokens) == (MODEL, "model", MODEL, 1024)
    assert client.models.retrieve(MODEL) == model and model.created_at <= datetime.now(UTC)


def test_the_root_answers_head(server):
    assert server.request("HEAD", "/", None, {"Authorization": None}).status == 200


def test_bodies_of_random_wrong_types_are_400s_in_this_shape(server):
    chance = random.Random(7)
    whole = {
        "model": MODEL, "max_tokens": 1, "system": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}],
        "messages": [
            *said([{"type": "text", "text": "a"}, {**RESULT, "content": [{"type": "text", "text": "b"}]}]),
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "c", "signature": "d"}, {"type": "text", "text": "e"},
                {"type": "tool_use", "id": "a", "name": "clock", "input": {"zone": "UTC"}}]},
            *said([RESULT]),
        ],
        "tools": OURS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "x"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "stop_sequences": ["x"], "context_management": {"edits": []}, "temperature": 0.5, "stream": False,
    }  # fmt: skip
    odd = [None, 5, -1.5, True, "", "x", [], {}, [None], [[]], {"a": {}}, [{"type": 5}], [{"type": "text"}], 10**30]
    statuses = set()
    for _ in range(300):
        body = json.loads(json.dumps(whole))
        for _ in range(chance.randrange(1, 3)):
            place, key = body, chance.choice(list(body))
            while isinstance(place[key], dict | list) and place[key] and chance.random() < 0.75:
                place = place[key]
                key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
            place[key] = chance.choice(odd)
        path = chance.choice((PATH, f"{PATH}/count_tokens"))
        reply = server.post(path, body)
        statuses.add(reply.status)
        assert reply.status in (200, 400, 404), (reply.body, body)
        if reply.status != 200:
            assert set(reply.json()) == {"type", "error", "request_id"}
    assert {200, 400} <= statuses
    for path, body in WRONG:
        if isinstance(body, bytes) and path == "/chat":
            assert wrong(server, body)[:2] == (400, "invalid_request_error")


@pytest.mark.parametrize("depth", [*range(500, 1000, 60), 2000])
def test_what_is_nested_too_deep_is_a_400(server, depth):
    deep = '{"a":' * depth + "1" + "}" * depth
    use = f'{{"type":"tool_use","id":"a","name":"f","input":{deep}}}'
    for body in (
        f'{{"messages":[{{"role":"assistant","content":[{use}]}},{{"role":"user","content":"a"}}],"max_tokens":1}}',
        f'{{"messages":[{{"role":"user","content":"a"}}],"max_tokens":1,"tools":[{{"name":"f","input_schema":{deep}}}]}}',
    ):
        assert server.post(PATH, body.encode()).status in (200, 400)
    server.wait_until_idle()
