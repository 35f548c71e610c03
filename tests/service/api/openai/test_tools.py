"""Tools and formats with the `openai` package: what it sends is understood, and what it gets it takes for OpenAI's.

The built-in model cannot choose tools: `tool_choice` and schemas force its answers.
"""

import json
from typing import Annotated, Literal

import openai
import pydantic
import pytest

from kvstore.service.api.asking import LOGGER
from tests.support.service.serving import KEY, server_fixture
from tests.support.thinking import as_asked
from tests.support.tools import FLAT, PERSON, TOOLS, is_weather, reordered, said

MODEL = "kvstore-builtin"
ASKED = [{"role": "user", "content": "What is the weather in Rome?"}]


class Person(pydantic.BaseModel):
    name: Literal["Ada", "Bob"]
    age: Annotated[int, pydantic.Field(ge=0, le=99)]


server = server_fixture(api_key=KEY)


def ask(client, messages=ASKED, **more):
    return client.chat.completions.create(model=MODEL, messages=messages, **{"max_tokens": 120, "seed": 3, **more})


def must_call(client, messages=ASKED, **more):
    return ask(client, messages, **{"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, **more})


def rounds(answer, content="Sunny.", change=lambda arguments: arguments):
    """The messages after an answer with calls: that answer, and a result of each call."""
    message = answer.choices[0].message.model_dump(exclude_none=True)
    for call in message["tool_calls"]:
        call["function"]["arguments"] = change(call["function"]["arguments"])
    results = [{"role": "tool", "tool_call_id": call["id"], "content": content} for call in message["tool_calls"]]
    return [message, *results]


def result(call_id, content="Sunny."):
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def cached(answer) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


# -- chat completions --------------------------------------------------------------------------------------------------
def test_a_call_its_result_and_the_next_answer(client):
    asked = said("Is it warm in Rome?")
    first = must_call(client, asked)
    choice = first.choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.type == "function" and call.id.startswith("call_") and json.loads(call.function.arguments)
    second = ask(client, [*asked, *rounds(first)], tools=TOOLS, max_tokens=8)
    assert second.choices[0].message.tool_calls is None and second.choices[0].finish_reason in ("stop", "length")
    assert cached(second) == (first.usage.total_tokens - 1) // 16 * 16


def test_calls_sent_back_in_another_form_of_the_same_json_hit_like_any_turn(client):
    asked = said("Is it cold in Oslo?")
    first = must_call(client, asked)
    second = ask(client, [*asked, *rounds(first, change=reordered)], tools=TOOLS, max_tokens=8)
    assert cached(second) == (first.usage.total_tokens - 1) // 16 * 16


def test_a_named_function_and_none(client):
    named = must_call(client, tool_choice={"type": "function", "function": {"name": "weather"}})
    (call,) = named.choices[0].message.tool_calls
    assert call.function.name == "weather" and is_weather(call.function.arguments)
    free = ask(client, tools=TOOLS, tool_choice="none", max_tokens=8)
    assert free.choices[0].message.content and free.choices[0].message.tool_calls is None


def test_streamed_calls_add_up(client):
    whole = must_call(client).choices[0].message.tool_calls[0].function
    chunks = list(must_call(client, stream=True, stream_options={"include_usage": True}))
    calls = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.function for call in calls] == [type(calls[0].function)(**whole.model_dump())]
    assert calls[0].index == 0 and calls[0].id.startswith("call_") and calls[0].type == "function"
    assert not any(chunk.choices and chunk.choices[0].delta.content for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage.completion_tokens > 0


def test_the_sdks_own_stream_of_calls(client):
    with client.chat.completions.stream(
        model=MODEL, messages=ASKED, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=120
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls and final.choices[0].finish_reason == "tool_calls"


def test_a_call_cut_off_by_length_is_not_there(client):
    cut = must_call(client, max_tokens=12)
    assert cut.choices[0].finish_reason == "length" and cut.choices[0].message.tool_calls is None
    chunks = list(must_call(client, max_tokens=12, stream=True))
    assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_call_cut_off_by_length_is_not_there_on_other_routes(client, server):
    cut = {"tools": FLAT, "tool_choice": "required", "max_output_tokens": 12}
    answer = client.responses.create(model=MODEL, input="Hello", **cut)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert not any(item.type == "function_call" for item in answer.output)
    events = list(client.responses.create(model=MODEL, input="Hello", stream=True, **cut))
    assert events[-1].type == "response.incomplete"
    assert not any("function_call" in event.type for event in events)
    reply = server.post("/chat", {"message": "Hi", "tools": TOOLS, "tool_choice": "required", "max_tokens": 12}).json()
    assert (
        reply["finish_reason"] == "length"
        and not reply["message"].get("tool_calls")
        and not reply["message"]["content"]
    )


def test_several_choices_call_each_for_itself(client):
    answer = must_call(client, n=3, temperature=2)
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 3


def test_results_in_another_order_are_shown_in_that_of_the_calls(client, server):
    calls = [{"id": f"call_{i}", "type": "function", "function": {"name": "clock", "arguments": "{}"}} for i in "ab"]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": f"call_{i}", "content": f"it is {i}"} for i in "ab"]
    there = [ask(client, [*ASKED, called, *order], tools=TOOLS, max_tokens=1) for order in (results, results[::-1])]
    assert cached(there[1]) == (there[0].usage.prompt_tokens - 1) // 16 * 16


def test_other_types_of_tools_are_passed_over_and_named_in_the_log(client, caplog):
    caplog.set_level("INFO", LOGGER.name)
    others = [{"type": "web_search"}, {"type": "namespace", "name": "x"}, {"type": "web_search"}]
    answer = ask(client, tools=[*others, *TOOLS], max_tokens=4)
    assert answer.choices[0].message.content is not None
    respond(client, "Hello", tools=[*others, *FLAT])
    line = "tools of the types 'namespace', 'web_search' are passed over: this server runs none"
    assert [message for message in caplog.messages if "passed over" in message] == [line] * 2


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "1 to 128"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "give auto"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}},
         "response_format.json_schema.schema", "cannot be compiled"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}}}],
          "tool_choice": "required"}, "tools", "f: parameters are of the type foo; give object"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 1}}}}],
          "tool_choice": "required"}, "tools", 'cannot be compiled: schema must be .*after .*"f"'),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": "x" * 66000}}}],
          "tool_choice": "required"}, "tools", "f: the schema has 66"),
        ({"extra_body": {"guided_regex": "a{1000000}"}}, "guided_regex", "too complex for this answer: [^<]*$"),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex", "cannot be compiled"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["a"]}}, "guided_regex", "one of them"),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs", "give one of json, [a-z, ]*json_object$"),
        ({"extra_body": {"structured_outputs": {"choice": []}}}, "structured_outputs", "choice: the list is empty"),
        ({"extra_body": {"guided_choice": []}}, "guided_choice", "400 - guided_choice: the list is empty"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs", "messages"),
        ({"extra_body": {"chat_template_kwargs": {"self": 1}}}, "chat_template_kwargs", "self"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_a_400_that_names_the_field(client, body, param, message):
    with pytest.raises(openai.BadRequestError, match=message) as wrong:
        ask(client, **body)
    assert wrong.value.param == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "4"}, "messages[1].tool_call_id"),
        ({"role": "assistant", "content": None}, "messages[1].content"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "tool", "tool_call_id": "a", "content": [{"type": "image_url"}]}, "messages[1].content[0]"),
    ],
)
def test_histories_that_cannot_be_read_name_the_path(client, message, param):
    with pytest.raises(openai.BadRequestError) as wrong:
        ask(client, [*ASKED, message], tools=TOOLS)
    assert wrong.value.param == param


NESTED = {
    "tools": '[{"type":"function","function":{"name":"f","parameters":DEEP}}]',
    "chat_template_kwargs": '{"a":DEEP}',
    "messages": '[{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":DEEP}}]}]',
}


@pytest.mark.parametrize("field", NESTED)
def test_what_is_nested_too_deep_is_a_400(server, field):
    statuses = set()
    for depth in (*range(500, 1000, 20), 2000):
        given = NESTED[field].replace("DEEP", '{"a":' * depth + "1" + "}" * depth)
        messages = "" if field == "messages" else f'"messages":{json.dumps(ASKED)},'
        body = f'{{{messages}"tool_choice":"none","max_tokens":1,"{field}":{given}}}'
        answer = server.post("/v1/chat/completions", body.encode())
        statuses.add((answer.status, answer.json().get("error", {}).get("param")))
    assert (400, field) in statuses and {status for status, _ in statuses} <= {200, 400}


@pytest.mark.parametrize("arguments", ['{"zone": "\\ud800"}', {"zone": 10**300}])
def test_odd_arguments_are_shown_as_they_came(client, server, arguments):
    call = {"id": "call_a", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    turn = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, result("call_a")]
    assert ask(client, turn, tools=TOOLS, max_tokens=1).usage.completion_tokens == 1
    begun = client.post("/../chat", body={"messages": turn, "tools": TOOLS, "max_tokens": 1}, cast_to=object)
    assert begun["turn"] == 1


# -- formats -----------------------------------------------------------------------------------------------------------
def test_formats_of_answers(client):
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    content = ask(client, response_format=schema).choices[0].message.content
    assert set(json.loads(content)) == {"name", "age"}
    streamed = ask(client, response_format=schema, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == content
    assert ask(client, response_format={"type": "json_object"}, max_tokens=4).choices[0].message.content[0] == "{"


def test_vllms_names(client):
    for body, expected in (
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")), ({"structured_outputs": {"choice": ["a"]}}, ("a",)),
        ({"guided_regex": "b{3}"}, ("bbb",)), ({"guided_grammar": 'root ::= "x" "y"'}, ("xy",)),
        ({"guided_json": {"const": 7}}, ("7",)),
    ):  # fmt: skip
        assert ask(client, extra_body=body).choices[0].message.content in expected
    made = client.completions.create(model=MODEL, prompt="Hello", extra_body={"guided_choice": ["yes"]})
    assert made.choices[0].text == "yes"


def test_parse_gives_objects(client):
    parsed = client.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Person, max_tokens=300, seed=1)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    tool = openai.pydantic_function_tool(Person)
    called = client.chat.completions.parse(
        model=MODEL, messages=ASKED, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=300,
        seed=1,
    )  # fmt: skip
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Person)


# -- responses ---------------------------------------------------------------------------------------------------------
def respond(client, asked, **more):
    return client.responses.create(model=MODEL, input=asked, max_output_tokens=120, **more)


FORCED = {"tools": FLAT, "tool_choice": {"type": "function", "name": "weather"}, "extra_body": {"seed": 5}}


@pytest.mark.parametrize(("store", "goes_on"), [(True, True), (True, False), (False, False)])
def test_responses_over_two_rounds(client, store, goes_on):
    """A client goes on with the response, or sends the whole history, in which the call is JSON of another form."""
    asked = said(f"What is the weather, at {store} and {goes_on}?")
    first = respond(client, asked, store=store, **FORCED)
    (call,) = first.output
    assert call.type == "function_call" and call.name == "weather" and is_weather(call.arguments)
    assert first.status == "completed" and first.tools[0].name == "weather"
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    if store:
        assert client.responses.retrieve(first.id).output == first.output
    if goes_on:
        second = respond(client, [output], previous_response_id=first.id, tools=FLAT)
    else:
        sent = call.model_dump() | {"arguments": reordered(call.arguments)}
        second = respond(client, [*asked, sent, output], tools=FLAT, store=store)
    assert second.output[0].type == "message"
    assert second.usage.input_tokens_details.cached_tokens == (first.usage.total_tokens - 1) // 16 * 16


def test_a_conversation_that_moves_between_routes_goes_on_hitting(client, server):
    first = respond(client, "Shall I go to Oslo?", **FORCED)
    (call,) = first.output
    called = {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    history = [
        *said("Shall I go to Oslo?"), {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "Sunny."},
    ]  # fmt: skip
    there = ask(client, history, tools=TOOLS, max_tokens=4)
    assert cached(there) == (first.usage.total_tokens - 1) // 16 * 16


def test_streamed_responses_with_calls(client):
    with client.responses.stream(model=MODEL, input="Hello", max_output_tokens=120, **FORCED) as stream:
        events = list(stream)
        final = stream.get_final_response()
    (call,) = final.output
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [call.arguments] and is_weather(call.arguments)


CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "Rome", "days": 1\}\}\n</tool_call>'


@pytest.mark.parametrize(("behind", "kinds"), [("", []), ("Wait", ["message"])])
def test_an_item_of_a_stream_ends_before_the_next_one_begins(client, behind, kinds):
    """So a client that keeps items as they end sends the conversation back as it was."""
    asked, kinds = said("Is it warm?"), ["message", "function_call", *kinds]
    more = {"tools": FLAT, "store": False, "extra_body": {"structured_outputs": {"regex": f"I look[.] {CALL}{behind}"}}}
    with as_asked():
        events = list(respond(client, asked, stream=True, **more))
    places = [(event.output_index, event.type.rpartition(".")[2]) for event in events if "output_item" in event.type]
    assert places == [(index, what) for index in range(len(kinds)) for what in ("added", "done")]
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in items] == kinds and len({item.id for item in items}) == len(items)
    final = events[-1].response
    assert final.output == items and final.status == "completed"
    output = {"type": "function_call_output", "call_id": items[1].call_id, "output": "Sunny."}
    second = respond(client, [*asked, *items, output], tools=FLAT, store=False)
    assert second.usage.input_tokens_details.cached_tokens == (final.usage.total_tokens - 1) // 16 * 16


def test_responses_with_a_format(client):
    text = {"format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}}
    assert set(json.loads(respond(client, "Hello", text=text).output_text)) == {"name", "age"}
    parsed = client.responses.parse(model=MODEL, input="Hello", text_format=Person, max_output_tokens=300)
    assert isinstance(parsed.output_parsed, Person)
    with pytest.raises(openai.BadRequestError) as wrong:
        respond(client, "Hello", text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "foo"}}})
    assert wrong.value.param == "text.format.schema"
