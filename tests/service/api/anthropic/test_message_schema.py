"""Bodies of /v1/messages as the engine's messages, and for how long they pin a conversation. No server."""

import json

import pytest

from kvstore.service.api.anthropic.message_schema import MessagesBody, messages_of
from kvstore.service.api.schema import parse
from kvstore.service.http.errors import ApiError

AN_HOUR, EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"}
LINE = "x-anthropic-billing-header: cc_version=2.1.197.0df; cc_entrypoint=sdk-cli;"


def body_of(messages, **fields):
    return parse(json.dumps({"messages": messages, **fields}).encode(), MessagesBody)


def said(*messages, late=True, **fields):
    """As the engine has it: role and content of each, and what there is beside."""
    return messages_of(body_of([{"role": role, "content": content} for role, content in messages], **fields), late)


def text(words, **more):
    return {"type": "text", "text": words, **more}


def result(call_id, content="", **more):
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def test_results_are_messages_of_their_own_in_the_order_of_the_calls():
    use = [{"type": "tool_use", "id": f"call_{name}", "name": "f", "input": {"a": name}} for name in "xy"]
    results = [result("call_y", "2"), result("call_x", [text("1"), text(".")]), text("Go"), text(" on.")]
    system, user, answer, *rest = said(
        ("user", "Hi"), ("assistant", [{"type": "thinking", "thinking": "Hm."}, text("Wait."), *use]),
        ("user", results), system=[text("Be kind."), text("Be brief.")],
    )  # fmt: skip
    assert system == {"role": "system", "content": "Be kind.\n\nBe brief."} and user["content"] == "Hi"
    assert (answer["content"], answer["reasoning_content"]) == ("Wait.", "Hm.")
    assert [call["function"] for call in answer["tool_calls"]] == [
        {"name": "f", "arguments": f'{{"a": "{name}"}}'} for name in "xy"
    ]
    assert rest == [
        {"role": "tool", "tool_call_id": "call_x", "content": "1."},
        {"role": "tool", "tool_call_id": "call_y", "content": "2"}, {"role": "user", "content": "Go on."},
    ]  # fmt: skip


def test_a_text_is_still_reused_where_a_late_system_message_is_joined_to_it():
    first = [text("A"), text("BC", reuse="reencode"), text("D")]
    (user,) = said(("user", first), ("system", "S"), ("user", [text("E", reuse="reencode")]), late=False)
    assert user == {"role": "user", "content": "ABCD\n\nS\n\nE", "reuse": [(1, 3), (9, 10)]}


def test_a_text_is_reused_whoever_says_it_and_what_is_wrong_is_named_where_it_stands():
    user, answer, last = said(
        ("user", [result("call_x", "1"), text("A"), text("BC", reuse="reencode")][1:]),
        ("assistant", [text("Hm: "), text("D", reuse="reencode")]), ("user", "So?"),
    )  # fmt: skip
    assert (user["reuse"], answer["content"], answer["reuse"]) == ([(1, 3)], "Hm: D", [(4, 5)]) and "reuse" not in last
    call = {"type": "tool_use", "id": "call_x", "name": "f", "input": {}}
    for role, blocks, place in (
        ("user", [result("call_x"), text("A"), text("B", reuse="always")], 2),
        ("user", [text("A"), result("call_x", reuse="reencode")], 1), ("assistant", [{**call, "reuse": "reencode"}], 0),
        ("assistant", [call, text("A", reuse="always")], 1),
    ):  # fmt: skip
        with pytest.raises(ApiError, match="reuse") as error:
            said((role, blocks))
        assert error.value.param == f"messages[0].content[{place}].reuse"


def test_a_call_that_failed_says_so():
    (message,) = said(("user", [result("call_x", "no such file", is_error=True)]))
    assert message["content"] == "Error: no such file"


def test_the_line_for_whoever_bills_goes_behind_the_first_question():
    asked = [text("Hi")]
    for system in ([text(LINE + " cch=1a2b3;"), text("Be kind.")], f"{LINE} cch=0;\nBe kind."):
        first, second, *_ = said(("user", asked), ("assistant", "Hello."), ("user", "So?"), system=system)
        assert first["content"] == "Be kind." and second["content"] == f"Hi\n\n{LINE}"
    (only,) = said(("user", asked), system=[text(LINE)])
    assert only["content"] == f"Hi\n\n{LINE}"
    assert said(("user", f"{LINE} Hi"))[0]["content"] == f"{LINE} Hi", "what a user says stays where it is"


def test_a_late_system_message_is_the_users_where_the_template_shows_none():
    talk = (
        ("user", "Hi"),
        ("system", [text("Agents: none")]),
        ("assistant", "Yes."),
        ("system", "Now"),
        ("user", "Go"),
    )
    assert [message["role"] for message in said(*talk)] == [role for role, _ in talk]
    changed = said(*talk, late=False, system="Be kind.")
    assert [(message["role"], message["content"]) for message in changed] == [
        ("system", "Be kind."), ("user", "Hi\n\nAgents: none"), ("assistant", "Yes."), ("user", "Now\n\nGo")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, None), ({"cache_control": EPHEMERAL}, 300), ({"system": [text("a", cache_control=AN_HOUR)]}, 3600),
        ({"tools": [{"name": "f", "cache_control": EPHEMERAL}]}, 300),
        ({"messages": [text("a", cache_control=EPHEMERAL), text("b", cache_control=AN_HOUR)]}, 3600),
        ({"messages": [result("x", [text("a", cache_control=AN_HOUR)])]}, 3600),
        ({"messages": [result("x", cache_control=EPHEMERAL)], "cache_control": None}, 300),
    ],
)  # fmt: skip
def test_the_longest_of_its_breakpoints_pins_a_conversation(fields, seconds):
    messages = [{"role": "user", "content": fields.pop("messages", "Hi")}]
    assert body_of(messages, **fields).pin_s == seconds


def test_tools_and_thinking_become_options():
    function = {"name": "f", "description": "F.", "parameters": {"type": "object"}, "strict": True}
    tools = [{"name": "f", "type": "custom", "description": "F.", "input_schema": {"type": "object"}, "strict": True}]
    for choice, wanted, parallel in (
        (None, "auto", True), ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, True),
    ):  # fmt: skip
        options = body_of([{"role": "user", "content": "Hi"}], tools=tools, tool_choice=choice).options
        assert list(options.tools) == [{"type": "function", "function": function}]
        assert (options.tool_choice, options.parallel_tool_calls) == (wanted, parallel)
    on, low = {"enable_thinking": True, "thinking": True}, {"reasoning_effort": "low"}
    off = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    for thinking, effort, variables in (
        (None, None, {}), ("enabled", None, on), ("adaptive", "low", low | on), ("disabled", "low", off),
    ):  # fmt: skip
        fields = {"thinking": thinking and {"type": thinking, "budget_tokens": 9}, "output_config": {"effort": effort}}
        assert body_of([{"role": "user", "content": "Hi"}], **fields).options.variables == variables
