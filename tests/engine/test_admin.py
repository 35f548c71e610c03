"""What other processes ask of an engine about its sessions."""

import pytest

from kvstore import Engine, SamplingParams
from kvstore.errors import RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def session(name, tenant=""):
    return {"session": {"tenant": tenant, "session_id": name}}


@pytest.fixture(scope="module")
def engine():
    with Engine(cache_tiers={"hbm": "4MiB"}, device="cpu") as engine:
        yield engine


def test_a_session_and_its_transcript(engine):
    chat = engine.chat("ada", "acme", system="be brief")
    said = chat.send("My name is Ada.", GREEDY).text
    chat.set_ttl(3600)
    found = engine.admin.handle("sessions.show", session("ada", "acme"))
    assert found["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": said},
    ]
    assert found["session"] == engine.admin.handle("sessions", {"tenant": "acme"})["sessions"][0]
    assert found["session"]["expires_s"] == pytest.approx(found["session"]["updated_s"] + 3600)


def test_a_session_of_another_tenant_is_none(engine):
    engine.chat("bob", "acme").send("My name is Bob.", GREEDY)
    for tenant in ("", "other"):
        with pytest.raises(RequestError, match="there is no session 'bob'"):
            engine.admin.handle("sessions.show", session("bob", tenant))
