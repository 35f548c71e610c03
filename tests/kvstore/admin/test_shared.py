"""The commands on sessions that servers share, carried out on their Redis alone."""

import pytest

from kvstore.admin.shared import ask_shared
from kvstore.errors import ConfigError, RemoteError, StoreError
from kvstore.sessions.record import SessionKey
from tests.children.session_child import create, make_turn
from tests.support.redis_server import RedisServer, free_port
from tests.support.shared_sessions import shared_store

TALK, OTHER = {"session_id": "talk"}, {"session_id": "talk", "tenant": "ann"}


@pytest.fixture
def url(redis: RedisServer) -> str:
    """Of a Redis in which a server that has ended left two sessions of one name."""
    store = shared_store(redis)
    for key, name, num_turns in ((SessionKey("", "talk"), "red", 2), (SessionKey("ann", "talk"), "blue", 1)):
        create(store, key).wait()
        for number in range(1, num_turns + 1):
            store.commit_turn(key, make_turn(name, number)).wait()
    store.close()
    return redis.url


def test_the_list_is_of_one_tenant(url):
    for tenant, num_turns in (("", 2), ("ann", 1)):
        (found,) = ask_shared(url, "sessions", {"tenant": tenant})["sessions"]
        assert (found["id"], found["tenant"], found["turns"]) == ("talk", tenant, num_turns)
    assert ask_shared(url, "sessions", {"tenant": "bob"}) == {"sessions": []}


def test_a_session_is_shown_and_deleted_for_everybody(url, redis):
    shown = ask_shared(url, "sessions.show", {"session": OTHER})
    assert shown["session"]["turns"] == 1 and shown["messages"]
    found = ask_shared(url, "sessions.delete", {"session": OTHER})
    assert found["deleted"] is True and found["blocks"] > 0
    server = shared_store(redis)
    assert server.head(SessionKey("ann", "talk")) is None
    assert server.head(SessionKey("", "talk")).num_turns == 2
    assert len(server.pending_deletions()) == 1, "each server takes the KV out of its own tiers"
    server.close()
    for command in ("sessions.show", "sessions.delete"):
        with pytest.raises(StoreError, match=r"no session 'talk' of tenant 'ann' among the shared ones"):
            ask_shared(url, command, {"session": OTHER})


def test_what_only_a_server_can_do_is_refused(url):
    with pytest.raises(ConfigError, match="give --store of a server"):
        ask_shared(url, "sessions.accept_loss", {})
    with pytest.raises(ConfigError, match="unknown command"):
        ask_shared(url, "sessions.sing", {})


def test_nothing_is_made_where_there_is_nothing(redis):
    for command, arguments in (("sessions", {}), ("sessions.show", {"session": TALK})):
        with pytest.raises(StoreError, match="there are no shared sessions in redis://"):
            ask_shared(redis.url, command, arguments)
    assert redis.ask("DBSIZE") == 0


def test_no_redis_is_said_once_and_what_to_do(redis, caplog):
    with pytest.raises(RemoteError, match="refused; see that this Redis runs, or give the address"):
        ask_shared(f"redis://127.0.0.1:{free_port()}/0", "sessions", {})
    assert not caplog.records
    with pytest.raises(ConfigError, match="--session-store is 'http://x'"):
        ask_shared("http://x", "sessions", {})
