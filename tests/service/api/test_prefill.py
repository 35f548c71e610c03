"""POST /prefill: who may call it, and that all blocks of a prompt are in the shared tier before it says so."""

import os

import pytest

from kvstore import CacheTiers
from kvstore.remote.names import PREFILL_KEY, fleet_secret
from kvstore.service.server import fleet_key_of
from tests.support.engines import tokens
from tests.support.redis_server import RedisServer
from tests.support.service.serving import KEY, serving

SECRET = "the secret of this fleet, 32 characters"
PROMPT = tokens(1, 160)


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.resume()
    server.kill()


@pytest.fixture(scope="module", params=["cpu", "disk"])
def server(request, redis, tmp_path_factory):
    os.environ["KVSTORE_FLEET_SECRET"] = SECRET
    tiers = {"hbm": "8MiB", "cpu": "8MiB", "remote": redis.url, "role": "prefill"}
    if request.param == "disk":
        tiers |= {"disk": "32MiB", "path": tmp_path_factory.mktemp("store")}
    redis.ask("FLUSHALL")
    with serving(engine={"cache_tiers": tiers}, fleet_key=fleet_key_of({"cache_tiers": tiers}), api_key=KEY) as found:
        yield found
    del os.environ["KVSTORE_FLEET_SECRET"]


def ask(server, key=None, **more):
    body = {
        "token_ids": PROMPT,
        "root": server.engine.facts.root("").hex(),
        "fingerprint": server.engine.facts.fingerprint.hex(),
    }
    key = fleet_secret(None).derived(PREFILL_KEY).hex() if key is None else key
    return server.post("/prefill", {**body, **more}, Authorization=f"Bearer {key}")


def test_a_prompt_is_in_the_shared_tier_when_the_answer_comes(server, redis):
    for length, num_blocks in ((160, 10), (100, 6), (15, 0), (0, 0)):
        redis.ask("FLUSHALL")
        prompt = tokens(length, length)
        reply = ask(server, token_ids=prompt)
        assert (reply.status, reply.json()) == (200, {"num_blocks": num_blocks})
        assert redis.ask("DBSIZE") == num_blocks
    server.wait_until_idle()


def test_a_prompt_that_is_there_is_told_at_once(server, redis):
    assert [ask(server).json()["num_blocks"] for _ in range(2)] == [10, 10]


def test_a_prompt_is_of_the_chain_that_it_names(server):
    root = server.engine.facts.root("ada")
    assert ask(server, root=root.hex(), tenant="ada").json() == {"num_blocks": 10}
    reply = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})
    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] in (0, 144), "only its own"
    output = server.run(server.context.engine.generate(PROMPT, tenant="ada"))
    assert output.usage.cached_tokens == 144


@pytest.mark.parametrize("key", ["", KEY, "ab" * 32])
def test_without_the_fleets_key_nothing_is_computed(server, key):
    reply = ask(server, key)
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("wrong", "status", "code"),
    [
        ({"fingerprint": "00" * 32}, 409, "another_model"),
        ({"root": "ab"}, 400, "invalid_value"),
        ({"token_ids": [10**6]}, 400, "invalid_value"),
        ({"token_ids": [1] * 2000}, 400, "context_length_exceeded"),
    ],
)
def test_what_it_cannot_compute_is_refused(server, wrong, status, code):
    reply = ask(server, **wrong)
    assert (reply.status, reply.error["code"]) == (status, code)


def test_without_the_shared_tier_it_says_that_nothing_is_there(server, redis):
    redis.kill()
    assert ask(server, token_ids=tokens(7, 160)).json() == {"num_blocks": 0}
    redis.start()
    server.wait_until(lambda: not server.engine.stats()["remote"]["degraded"], "it is back")


def test_only_a_server_of_that_role_lets_others_in():
    assert fleet_key_of({"cache_tiers": CacheTiers()}) is None and fleet_key_of({}) is None
