"""Names that clients give to conversations: each header and field names one, and no other tenant's."""

import json

import pytest
from multidict import CIMultiDict

from kvstore.service.api.naming import Naming, name_of
from kvstore.service.api.openai.chat import ChatCompletionBody
from kvstore.service.api.schema import parse
from tests.support.faults import before_each_call
from tests.support.service.talking import SHORT, chat, talking_body

LONG = "Tell me about the sea, and how far it is from here, and then about every river that ends in it."
CLAUDE_CODE = {"user_id": json.dumps({"device_id": "d", "session_id": "ada"})}
HEADERS = (
    "X-Claude-Code-Session-Id", "session-id", "session_id", "X-Session-Id", "x-session-affinity", "x-opencode-session",
    "X-Amp-Thread-Id",
)  # fmt: skip
FIELDS = (
    {"session_id": "ada"}, {"conversation": "ada"}, {"conversation": {"id": "ada"}}, {"metadata": CLAUDE_CODE},
    {"prompt_cache_key": "ada"},
)  # fmt: skip
NAMES = [
    *(pytest.param({header: "ada"}, {}, id=header) for header in HEADERS),
    *(pytest.param({}, fields, id=json.dumps(fields)[:24]) for fields in FIELDS),
]
SOME = [({"X-Session-Id": "ada"}, {}), ({}, {"metadata": CLAUDE_CODE}), ({}, {})]


class Agent:
    """Sends its whole history each time. named: headers and fields of a body."""

    def __init__(self, server, headers, fields):
        self.server, self.headers, self.fields, self.messages = server, headers, fields, []

    def ask(self, text):
        """Its miss; None for none."""
        self.messages.append({"role": "user", "content": text})
        body = {"messages": self.messages, **SHORT, **self.fields}
        reply = self.server.request("POST", "/v1/chat/completions", body, self.headers)
        assert reply.status == 200, reply.body
        answer = reply.json()
        self.messages.append(answer["choices"][0]["message"])
        return answer["usage"]["prompt_tokens_details"].get("miss")


@pytest.mark.parametrize(("headers", "fields"), NAMES)
def test_each_header_and_field_names_a_conversation(headers, fields):
    said = {**talking_body("/v1/chat/completions", "Hello"), **fields}
    assert name_of(CIMultiDict(headers), parse(json.dumps(said).encode(), ChatCompletionBody)) == "ada"


@pytest.mark.parametrize(("headers", "fields"), SOME, ids=["header", "field", "unnamed"])
def test_of_agents_that_begin_alike_the_named_one_s_branch_explains_its_miss(both, server, request, headers, fields):
    """Another agent has said the same since, and gone on otherwise: its branch has nothing to do with the miss."""
    opening = f"{request.node.callspec.id}: {LONG}"
    ada, eve = Agent(server, headers, fields), Agent(server, {}, {"prompt_cache_key": "eve"} if fields else {})
    stranger = Agent(both[1], headers, fields)
    for agent in (ada, eve, stranger):
        assert agent.ask(opening) is None
    assert [ada.ask(text) for text in (LONG, "Go on.")] == [None, None]
    for agent in (eve, stranger):
        agent.messages[1:] = ada.messages[1:2]
        again = Agent(agent.server, agent.headers, agent.fields)
        assert again.ask(opening) is None and again.messages == agent.messages
    ada.messages[2]["content"] += " No: about its ships."
    miss = ada.ask("And then?")
    if headers or fields:
        assert (miss["cause"], miss["message"], miss["role"]) == ("edit", 2, "user")
    else:
        assert miss is None, "whose branch it is cannot be told"


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages", "/v1/completions", "/v1/responses"])
def test_every_route_tells_the_engine_whose_it_is(both, route):
    told = []
    body = {**talking_body(route, "Hello"), "max_tokens": 2} | ({"store": False} if "responses" in route else {})
    with before_each_call(both[0].engine.core, "submit", told.extend):
        for server in both:
            for more in ({"prompt_cache_key": "ada"}, {"prompt_cache_key": "eve"}, {"prompt_cache_key": "ada"}, {}):
                assert server.post(route, {**body, **more}).status == 200
    digests = [one.conversation for one in told]
    for ada, eve, again, unnamed in (digests[:4], digests[4:]):
        assert ada == again != eve and unnamed == b""
    assert len(set(digests)) == 5, "each tenant's are its own"


def test_a_name_makes_no_session_of_a_turn_that_names_none(server):
    named = server.request("POST", "/chat", {"message": "Hello", **SHORT}, {"X-Session-Id": "ada"}).json()
    assert named["session_id"] != "ada" and server.get("/sessions/ada").status == 404
    assert chat(server, "Go on.", named["session_id"], prompt_cache_key="other")["turn"] == 2


@pytest.mark.parametrize(
    "fields",
    [{"session_id": 7}, {"conversation": {"id": ["ada"]}}, {"conversation": ["ada"]}, {"metadata": "ada"},
     {"metadata": {"user_id": "user_ada"}}, {"metadata": {"user_id": '"ada"'}}, {"metadata": {"user_id": 7}},
     {"metadata": {"user_id": '{"session_id": 7}'}}, {"metadata": {"user_id": '{"session_id": ' + "[" * 20_000}},
     {"prompt_cache_key": ""}, {"prompt_cache_key": None}],
)  # fmt: skip
def test_what_is_no_name_names_nothing(server, fields):
    assert name_of({}, Naming(**fields)) == ""
    body = {**talking_body("/v1/chat/completions", "Hello"), **SHORT, **fields}
    assert server.post("/v1/chat/completions", body, **{"X-Client-Request-Id": "ada"}).status == 200


def test_of_several_names_the_one_of_a_conversation_alone_counts():
    body = Naming(session_id="field", conversation="conversation", prompt_cache_key="shared")
    assert name_of({"x-session-id": "header"}, body) == "header"
    assert name_of({"x-session-id": "", "x-client-request-id": "one per request"}, body) == "field"
    assert name_of({}, Naming(conversation="conversation", prompt_cache_key="shared")) == "conversation"
    assert name_of({}, Naming(metadata=CLAUDE_CODE, prompt_cache_key="shared")) == "ada"
