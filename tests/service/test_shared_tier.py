"""Two servers that share KV, over HTTP: a tenant's is hit on the other one, and by nobody else; system prompts are."""

import pytest

from tests.service.test_isolation import TIERS, WORDS, ask, text_of
from tests.support.buckets import Directory, need_obstore
from tests.support.service.talking import SHORT, tenants


def options(folder, shared):
    folder.mkdir()
    tiers = {**TIERS, "path": folder / "store", "remote": shared.url}
    return folder, {"engine": {"cache_tiers": tiers, "load": "always", "max_model_len": 768}}


def test_tenants_stay_apart_on_another_server_both_ways(redis, tmp_path):
    one, other = options(tmp_path / "one", redis), options(tmp_path / "other", redis)
    route, said = "/v1/chat/completions", text_of("said by alice")
    with tenants(one[0], **one[1]) as (alice, bob), tenants(other[0], **other[1]) as (alice_there, bob_there):
        assert ask(alice, route, said)["all"] == 0
        alice.engine.flush()
        assert ask(bob_there, route, said)["all"] == 0, "another tenant on another server"
        found = ask(alice_there, route, said)
        assert found["remote"] == found["all"] == found["whole"] >= 32, found
        mine = text_of("said by bob")
        assert ask(bob_there, route, mine)["all"] == 0
        bob_there.engine.flush()
        assert ask(alice, route, mine)["all"] == 0, "and back"
        found = ask(bob, route, mine)
        assert found["remote"] == found["all"] == found["whole"] >= 32, found
        for server in (alice, alice_there):
            server.wait_until_idle()


@pytest.mark.parametrize("route", ["/chat", "/v1/chat/completions"])
@pytest.mark.usefixtures("fleet_secret")
def test_another_conversation_hits_the_system_prompt_in_a_directory(tmp_path, route):
    need_obstore()
    shared = Directory(tmp_path / "objects")
    one, other = options(tmp_path / "one", shared), options(tmp_path / "other", shared)
    system = {"role": "system", "content": " ".join(WORDS * 4)}

    def body(*said: str) -> dict:
        roles = ["user", "assistant"] * len(said)
        return {"messages": [system, *({"role": r, "content": s} for r, s in zip(roles, said, strict=False))], **SHORT}

    with tenants(one[0], **one[1]) as (here, _), tenants(other[0], **other[1]) as (there, _):
        begun = "My dog is called Biscuit, and he likes the sea.", "What a good name for a dog who likes it."
        assert here.post(route, body(*begun, "What does my dog like?")).status == 200
        here.engine.flush()
        num_system = len(there.engine.chats.language.chat_template().head_ids([system])) // 16 * 16
        assert num_system >= 64
        found = there.post(route, body("Who likes to walk by the sea?")).json()["usage"]["prompt_tokens_details"]
        assert found["cached_tokens_details"]["remote"] == found["cached_tokens"] == num_system
        for server in (here, there):
            server.wait_until_idle()
