"""Fields that a body does not have: constraints and near misses are refused by name, all others ignored as before."""

import json

import pytest

from kvstore.service.api.anthropic.message_schema import MessagesBody
from kvstore.service.api.edge import DetokenizeBody, TokenizeBody
from kvstore.service.api.openai.chat import ChatCompletionBody
from kvstore.service.api.openai.completions import CompletionBody
from kvstore.service.api.openai.response_schema import ResponseBody
from kvstore.service.api.schema import MAX_EXAMINED, near_misses, parse
from kvstore.service.api.sessions.routes import ForkBody
from kvstore.service.api.sessions.turns import ChatBody
from kvstore.service.http.errors import ApiError
from tests.support.service.serving import server_fixture
from tests.support.service.talking import TALKING_ROUTES, talking_body

BODIES = {path: {**talking_body(path, "Hello"), "max_tokens": 2, "max_output_tokens": 2} for path in TALKING_ROUTES}
CONSTRAINTS = {
    "structured_outputs": {"regex": "a+"},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "bad_words": ["a"],
    "include_stop_str_in_output": True,
    "lora_request": {"lora_name": "a"},
    "truncate_prompt_tokens": 8,
    "allowed_token_ids": [5],
    "response_format": {"type": "json_object"},
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "functions": [{"name": "x"}],
    "chat_template": "{{x}}",
    "chat_template_kwargs": {"enable_thinking": False},
    "audio": {"voice": "x"},
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "documents": [{"text": "x"}],
    "prompt_embeds": "x",
    "modalities": ["audio"],
    "add_generation_prompt": False,
    "continue_final_message": True,
}
NEUTRAL = {
    "tool_choice": "auto", "response_format": {"type": "text"}, "modalities": ["text"], "add_generation_prompt": True
}  # fmt: skip

# What clients send: the openai package, vLLM's benchmarks, guidellm, aiperf, and settings of other servers.
SENT = """
message_id     background best_of cache_prompt conversation dry_base echo extra_body
    format frequency_penalty function_call id include include_reasoning input instructions
    kv_transfer_params length_penalty lora_path max_completion_tokens max_new_tokens max_output_tokens
    max_prompt_tokens max_tool_calls max_tokens metadata min_length min_new_tokens mirostat models
    moderation name num_ctx nvext parallel_tool_calls plugins prediction prefix prompt_cache_key
    prompt_cache_retention prompt_logprobs provider random_seed reasoning reasoning_effort repeat_penalty
    request_id return_token_ids return_tokens_as_token_ids route safe_prompt safety_identifier seed
    service_tier session_id skip_special_tokens spaces_between_special_tokens stop_sequences store
    stream_reasoning suffix system tags tenant text tfs thinking timeout title top_a top_n trace transforms
    truncate truncation typical_p usage user verbosity vllm_xargs watermark web_search_options x
    client_metadata prompt_cache_options mode speed reasoning_format
""".split()
KIND = dict(zip(BODIES, (ChatBody, ChatCompletionBody, CompletionBody, ResponseBody), strict=True))
KINDS = (ChatCompletionBody, CompletionBody, ResponseBody, ChatBody, TokenizeBody, DetokenizeBody, MessagesBody)


server = server_fixture()


@pytest.mark.parametrize("path", BODIES)
def test_constraints_that_are_not_kept_are_refused_by_name(server, path):
    for name, value in CONSTRAINTS.items():
        if name in KIND[path].__struct_encode_fields__:
            continue
        reply = server.post(path, {**BODIES[path], name: value})
        assert (reply.status, reply.error["param"]) == (400, name), reply.body
        assert name in reply.error["message"] and reply.error["code"] == "unsupported_parameter"


@pytest.mark.parametrize("path", BODIES)
def test_constraints_that_say_nothing_are_none(server, path):
    nothing = [None, False, [], {}, ""]
    body = {name: nothing[i % len(nothing)] for i, name in enumerate(CONSTRAINTS)}
    body |= dict.fromkeys(name for name in body if name in KIND[path].__struct_encode_fields__)
    for said in (body | NEUTRAL, dict.fromkeys(CONSTRAINTS)):
        reply = server.post(path, {**BODIES[path], **said})
        assert reply.status == 200, reply.body


@pytest.mark.parametrize("path", ["/chat", "/v1/responses"])
@pytest.mark.parametrize("name", ["logprobs", "top_logprobs"])
def test_log_probabilities_that_a_route_does_not_give_are_refused(server, path, name):
    reply = server.post(path, {**BODIES[path], name: 1})
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, name, "unsupported_parameter")
    assert server.post(path, {**BODIES[path], name: None}).status == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("topk", "top_k"),
        ("Stop", "stop"),
        ("strem", "stream"),
        ("tool_choise", "tool_choice"),
    ],
)
def test_a_near_miss_is_told_what_it_was_meant_to_be(server, path, name, meant):
    reply = server.post(path, {**BODIES[path], name: 1})
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, name, "unknown_field")
    assert reply.error["message"] == f"{name}: did you mean {meant}?"


def test_what_clients_of_other_servers_send_is_still_accepted(server):
    for path, body in BODIES.items():
        kept = {*KIND[path].__struct_encode_fields__, *getattr(KIND[path], "REFUSED", ())}
        ignored = {name: 1 for name in SENT if name not in kept}
        reply = server.post(path, {**body, **ignored})
        assert reply.status == 200, reply.body


@pytest.mark.parametrize("kind", KINDS)
def test_no_name_in_use_is_a_near_miss(kind):
    known = kind.__struct_encode_fields__
    ours = {name for one in KINDS for name in one.__struct_encode_fields__} - {"message"}
    assert [name for name in {*SENT, *ours} - {*known} if near_misses(name, known)] == []


@pytest.mark.parametrize(("name", "meant"), [
    ("max_token", "max_tokens"), ("maxTokens", "max_tokens"), ("tempratur", "temperature"),
    ("messgaes", "messages"), ("sed", "seed"), ("stpo", "stop"),
    ("max_tokens_", "max_tokens"), ("n_", None), ("note", None), ("to", None), ("max", None),
    ("tokens", None), ("", None),
])  # fmt: skip
def test_one_slip_in_a_short_name_and_two_in_a_long_one(name, meant):
    assert near_misses(name, ChatCompletionBody.__struct_encode_fields__) == [meant] * (meant is not None)


def test_a_fork_is_not_given_an_id(server):
    session = server.post("/chat", BODIES["/chat"]).json()["session_id"]
    num_sessions = len(server.get("/sessions").json()["data"])
    reply = server.post(f"/sessions/{session}/fork", {"turn": 1, "session_id": "mine"})
    assert (reply.status, reply.error["param"]) == (400, "session_id") and "session_id" in reply.error["message"]
    reply = server.post(f"/sessions/{session}/fork", {"turns": 1})
    assert reply.error["message"] == "turns: did you mean turn?"
    assert server.post(f"/sessions/{session}/fork", {"turn": 1, "session_id": None}).status == 200
    assert len(server.get("/sessions").json()["data"]) == num_sessions + 1


def test_many_unknown_fields_cost_little():
    body = {"turn": 1, **{f"trun{i:x}": i for i in range(MAX_EXAMINED)}, "trun": 2}
    assert parse(json.dumps(body).encode(), ForkBody).turn == 1  # the last was not looked at
    for wrong in ({"trun": 2}, {f"x{i}": i for i in range(MAX_EXAMINED + 1)} | {"tools": [1]}):
        with pytest.raises(ApiError):
            parse(json.dumps({"turn": 1, **wrong}).encode(), ForkBody)
    with pytest.raises(ApiError) as caught:
        parse(json.dumps({"turn": 1, "turn" + "_" * 10**6: 2}).encode(), ForkBody)
    assert len(caught.value.message) < 200
