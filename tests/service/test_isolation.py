"""Two tenants on one server: nothing of one is a hit, a session, a retry or a word for the other, on any tier. And a
small request is answered beside very many sequences of somebody else.
"""

import json
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256

import pytest

from kvstore.service.app import ROUTES
from kvstore.service.http.telling import LOGGER
from tests.support.by_hand import held
from tests.support.service.serving import ADMIN, ADMIN_KEY, raw_request, serving
from tests.support.service.talking import SECRET, SHORT, TALKING_ROUTES, WRONG, Stream, chat, talking_body, tenants

TIERS = {"hbm": "2MiB", "cpu": "64MiB", "disk": "128MiB"}
WORDS = "the sea and a long walk by it in the evening with an old friend who likes to talk about ships".split()


def text_of(*names: object) -> str:
    """A prompt of several blocks, not even the first of which other names lead to."""
    return f"{sha256(repr(names).encode()).hexdigest()[:12]}: " + " ".join(WORDS)


def body_of(route: str, text: str) -> dict:
    return {**talking_body(route, text), **SHORT, "max_output_tokens": SHORT["max_tokens"]}


def ask(server, route: str, text: str, **more) -> dict:
    """Cached tokens by tier, their sum as "all", and as "whole" how many there could be."""
    reply = server.post(route, {**body_of(route, text), **more})
    assert reply.status == 200, reply.body
    usage = reply.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    num_prompt = usage.get("prompt_tokens") or usage["input_tokens"]
    tiers = details["cached_tokens_details"]
    assert details["cached_tokens"] == sum(tiers.values())
    return {**tiers, "all": details["cached_tokens"], "whole": (num_prompt - 1) // 16 * 16}


def check_owner_only(owner, other, route: str, text: str, tier: str) -> None:
    """What the owner has said before is in this tier, for the owner alone."""
    assert ask(other, route, text)["all"] == 0
    found = ask(owner, route, text)
    assert found[tier] == found["all"] == found["whole"] >= 32, found


@contextmanager
def two_tenants(folder, **options):
    engine = {"cache_tiers": {**TIERS, "path": folder / "store"}, "load": "always", "max_model_len": 768}
    with tenants(folder, engine=engine, admin_key=ADMIN_KEY, **options) as servers:
        yield servers
        servers[0].wait_until_idle()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    with two_tenants(tmp_path_factory.mktemp("isolation")) as servers:
        yield servers


def fill_hbm(server, name: str) -> None:
    """Say so much else that nothing which was said before is in HBM any more."""
    num_blocks = server.engine.stats()["hbm"]["blocks"]
    for number in range(num_blocks * 16 // 200 + 2):
        text = f"{name} {number} " + " ".join(f"{word}{number}" for word in WORDS * 6)
        assert ask(server, "/v1/completions", text)["all"] == 0


# -- KV --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("route", TALKING_ROUTES)
def test_hbm_holds_nothing_for_another(both, route):
    owner, other = both
    text = text_of(owner.key, route)
    assert ask(owner, route, text)["all"] == 0
    check_owner_only(owner, other, route, text, "hbm")
    assert ask(other, route, text)["hbm"] >= 32, "it has its own now"


@pytest.mark.parametrize("other_route", TALKING_ROUTES[:2])
def test_neither_does_it_on_another_route(both, other_route):
    """The prompt of a message is the same on all routes that talk; so is its KV, for its owner."""
    owner, other = both
    text = text_of(owner.key, "from /v1/responses on", other_route)
    ask(owner, "/v1/responses", text)
    check_owner_only(owner, other, other_route, text, "hbm")


def test_the_cpu_tier_holds_nothing_for_another(both):
    owner, other = both
    texts = {route: text_of("for the CPU tier", owner.key, route) for route in TALKING_ROUTES}
    for route, text in texts.items():
        ask(owner, route, text)
    fill_hbm(owner, f"filling of {owner.key}")
    for route, text in texts.items():
        check_owner_only(owner, other, route, text, "cpu")


def test_the_disk_holds_nothing_for_another(tmp_path):
    with two_tenants(tmp_path) as both:
        texts = {(n, route): text_of("for the disk", n, route) for n in (0, 1) for route in TALKING_ROUTES}
        for (number, route), text in texts.items():
            ask(both[number], route, text)
        assert both[0].request("POST", "/admin/flush", {}, ADMIN).status == 200
    with two_tenants(tmp_path) as both:
        for (number, route), text in texts.items():
            check_owner_only(both[number], both[1 - number], route, text, "disk")


@pytest.mark.parametrize("route", TALKING_ROUTES[1:3])
def test_a_salt_separates_within_a_tenant(both, route):
    owner, other = both
    text = text_of("salted", owner.key, route)
    assert ask(owner, route, text, cache_salt="one")["all"] == 0
    assert ask(owner, route, text)["all"] == 0
    assert ask(owner, route, text, cache_salt="two")["all"] == 0
    assert ask(other, route, text, cache_salt="one")["all"] == 0
    for more in ({}, {"cache_salt": "one"}, {"cache_salt": "two"}):
        found = ask(owner, route, text, **more)
        assert found["all"] == found["whole"] >= 32, found  # which tier has it is the policy's choice


# -- sessions --------------------------------------------------------------------------------------------------------
BODIES = {
    "/sessions/{id}/pin": {"ttl": 60},
    "/sessions/{id}/truncate": {"turns": 1},
    "/sessions/{id}/edit": {"edits": [{"type": "replace", "index": 0, "content": "a"}], "reuse": "forget"},
}


OF_A_SESSION = [(one.method, one.path) for one in ROUTES if re.match(r"/(sessions|v1/responses)/\{id", one.path)]


def test_all_routes_that_name_a_session_are_known_here():
    others = {route.path for route in ROUTES if "{" in route.path} - {path for _, path in OF_A_SESSION}
    elsewhere = {"/requests/{id}/why"}  # tests/service/api/test_why.py
    assert others <= {"/v1/models/{id:.+}", "/web/{name:.+}"} | elsewhere, f"{others}: is an id in there somebody's?"


def name_for(path: str, session_id: str, turn: int = 1) -> str:
    return f"resp_{session_id}_{turn}" if "responses" in path else session_id


def check_same_answer(foreign, unknown, session_id: str, unknown_id: str) -> None:
    assert (foreign.status, unknown.status) == (404, 404), foreign.body
    assert foreign.body == unknown.body.replace(unknown_id.encode(), session_id.encode())
    differ = {"date", "x-request-id", "request-id"}
    assert foreign.headers.keys() == unknown.headers.keys()
    assert all(foreign.headers[name] == unknown.headers[name] for name in foreign.headers.keys() - differ)


@pytest.mark.parametrize(("method", "path"), OF_A_SESSION)
def test_another_s_session_is_one_that_never_was(both, method, path):
    owner, other = both
    session_id = chat(owner, "Hello")["session_id"]
    chat(owner, "And hello again", session_id)
    unknown_id = session_id.translate(str.maketrans("0123456789abcdef", "123456789abcdef0"))
    before = owner.get(f"/sessions/{session_id}").body
    body = None if method in ("GET", "DELETE") else BODIES.get(path, {})
    foreign, unknown = (
        other.request(method, path.replace("{id}", name_for(path, name)), body) for name in (session_id, unknown_id)
    )
    check_same_answer(foreign, unknown, session_id, unknown_id)
    assert owner.get(f"/sessions/{session_id}").body == before


def named_in_body(session_id: str, turn: int) -> list[tuple[str, dict]]:
    talk = {"session_id": session_id, "message": "And I?", **SHORT}
    respond = {"previous_response_id": name_for("responses", session_id, turn), "input": "And I?"}
    return [
        ("/chat", talk), ("/chat", {**talk, "stream": True}), ("/chat", {**talk, "system": "Be brief."}),
        ("/chat", {"fork_of": {"session_id": session_id, "turn": turn}, "message": "And I?", **SHORT}),
        ("/v1/responses", respond), ("/v1/responses", {**respond, "stream": True}),
        ("/v1/responses", {**respond, "store": False}), ("/v1/responses", {**respond, "instructions": "Be brief."}),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(len(named_in_body("", 1))))
def test_neither_can_it_be_gone_on_with(both, number):
    owner, other = both
    session_id = chat(owner, "Hello", system="Be brief.")["session_id"]
    unknown_id = session_id[::-1] if session_id[::-1] != session_id else "0" * len(session_id)
    for turn in (1, 2):
        foreign, unknown = (other.post(*named_in_body(name, turn)[number]) for name in (session_id, unknown_id))
        check_same_answer(foreign, unknown, session_id, unknown_id)
    assert owner.get(f"/sessions/{session_id}").json()["turns"] == 1


def test_lists_show_one_s_own(both):
    made = [{chat(server, f"Session {number}")["session_id"] for number in range(3)} for server in both]
    listed = [{one["id"] for one in server.get("/sessions?limit=1000").json()["data"]} for server in both]
    for number in (0, 1):
        assert made[number] <= listed[number] and not listed[number] & listed[1 - number]
    cursor = both[0].get("/sessions?limit=1").json()["last_id"]
    page = both[1].get(f"/sessions?limit=1000&after={cursor}")
    if page.status == 200:  # a cursor is a place in one's own list
        assert {one["id"] for one in page.json()["data"]} <= listed[1]


@pytest.mark.parametrize("route", ["/chat", "/v1/responses"])
def test_retries_of_one_are_new_requests_of_the_other(both, route):
    owner, other = both
    key = {"Idempotency-Key": f"{route} of both {owner.key}"}
    mine = owner.request("POST", route, body_of(route, text_of("mine", owner.key, route)), key)
    theirs = other.request("POST", route, body_of(route, text_of("theirs", owner.key, route)), key)
    assert (mine.status, theirs.status) == (200, 200)
    assert mine.json()["id"] != theirs.json()["id"]
    again = owner.request("POST", route, body_of(route, text_of("mine", owner.key, route)), key)
    assert again.json()["id"] == mine.json()["id"]


# -- words -----------------------------------------------------------------------------------------------------------
def odd_answer(server, text: str) -> tuple[list[dict], int, int]:
    """A history whose answer has other ids than its text; its tokens as they were, and as the text has them."""
    asked = [{"role": "user", "content": text}]
    for seed in range(50):
        body = {"messages": asked, "max_tokens": 40, "ignore_eos": True, "temperature": 2.0, "seed": seed}
        reply = server.post("/v1/chat/completions", body).json()
        history = [*asked, reply["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        num_known = reply["usage"]["total_tokens"]
        exact = server.post("/v1/chat/completions", {"messages": history, "max_tokens": 1}).json()["usage"]
        num_of_text = server.post("/tokenize", {"messages": history}).json()["count"]
        if exact["prompt_tokens"] != num_of_text:
            assert exact["prompt_tokens_details"]["cached_tokens"] == (num_known - 1) // 16 * 16
            return history, exact["prompt_tokens"], num_of_text
    raise AssertionError("every answer has the ids of its text")


@pytest.mark.parametrize("salt", [None, "salt"])
def test_answers_are_recognised_for_who_got_them(both, salt):
    owner, other = both
    history, num_exact, num_of_text = odd_answer(owner, text_of("recognised", owner.key, salt))
    more = {"messages": history, "max_tokens": 1}
    foreign = (other if salt is None else owner).post("/v1/chat/completions", {**more, "cache_salt": salt}).json()
    assert foreign["usage"]["prompt_tokens"] == num_of_text
    assert foreign["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert owner.post("/v1/chat/completions", more).json()["usage"]["prompt_tokens"] == num_exact


def test_errors_metrics_and_logs_tell_no_prompt_and_no_tenant(both, lines):
    alice, bob = both
    LOGGER.setLevel(logging.DEBUG)
    for route in TALKING_ROUTES:
        ask(alice, route, f"{SECRET} on {route}")
        Stream(alice, route, body_of(route, f"{SECRET} streamed")).rest()
    for route, body in WRONG:
        reply = alice.post(route, body)
        assert 400 <= reply.status < 500, (route, body, reply.body)
        said = reply.body.decode() + str(reply.headers)
        assert not re.search(f"{SECRET}|alice|bob", said), said
    metrics = bob.get("/metrics")
    assert metrics.status == 200 and b"kvstore:" in metrics.body
    assert not re.search(rf"{SECRET}|alice|bob|{alice.key}|[0-9a-f]{{32}}", metrics.body.decode())
    logged = lines["json"]
    assert len(logged) > len(WRONG) and not any(SECRET in line or alice.key in line for line in logged)
    for path in ("/sessions", "/health", "/version", "/v1/models", "/openapi.json"):
        assert not re.search(f"{SECRET}|alice", bob.get(path).body.decode())


def test_a_request_counts_by_its_prompts_and_choices():
    with serving(max_queue=1) as server, ThreadPoolExecutor(1) as client:
        body = {"prompt": ["a"] * 11, "n": 3, "max_tokens": 1}
        reply = server.post("/v1/completions", body)
        assert (reply.status, reply.error["code"]) == (400, "too_many_sequences")
        assert "33 sequences" in reply.error["message"] and "32" in reply.error["message"]
        assert server.post("/v1/completions", body | {"n": 2}).status == 200
        server.wait_until_idle()
        body = {"messages": [{"role": "user", "content": "a"}], "n": 9, "max_tokens": 1}
        with held(server.engine):
            reply = client.submit(server.post, "/v1/chat/completions", body)
            server.wait_until(lambda: sum(server.context.limits.counts().values()) == 9, "they are counted")
        assert reply.result().status == 200
        server.wait_until_idle()


def test_another_tenant_is_answered_beside_a_request_of_256_prompts_with_16_choices(tmp_path):
    """It ended before only because all of the first tenant's sequences had."""
    flood = {"prompt": [f"{i} is" for i in range(256)], "n": 16, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with tenants(tmp_path, engine={"max_num_seqs": 16}) as (alice, server), server.connect() as raw:
        sent = {"Authorization": f"Bearer {alice.key}", "Content_Type": "application/json"}
        raw.sendall(raw_request("POST", "/v1/completions", json.dumps(flood).encode(), **sent))
        scheduler = server.engine.loop.scheduler
        server.wait_until(lambda: scheduler.num_running == 16 and scheduler.num_waiting > 200, "all places are taken")
        small = {"prompt": "tea", "max_tokens": 3, "ignore_eos": True}
        reply = server.post("/v1/completions", small)
        assert reply.status == 200 and reply.json()["usage"]["completion_tokens"] == 3
        assert server.context.limits.is_shared, "what each may have at most is halved"
        assert scheduler.num_waiting > 200, "the first tenant's are far from their end"
        raw.close()
        server.wait_until_idle()
