"""Which sessions stay in memory: those used last, whatever was deleted in between."""

import pytest

from kvstore.sessions.record import SessionKey
from kvstore.sessions.store import SessionStore
from tests.children.session_child import TENANT, talk


@pytest.fixture
def store():
    store = SessionStore(None, max_sessions=3)
    yield store
    assert store.upkeep.check().problems == ()
    store.close()


def key(name: str) -> SessionKey:
    return SessionKey(TENANT, name)


def there(store, names: str) -> str:
    return "".join(name for name in names if store.exists(key(name)))


def test_memory_drops_what_was_used_longest_ago(store):
    for name in "abc":
        talk(store, key(name), 2)
    store.load(key("a"))
    talk(store, key("d"), 1)
    assert there(store, "abcd") == "acd"
    store.delete(key("c")).wait()
    talk(store, key("e"), 1)
    assert there(store, "abcde") == "ade"
    assert store.stats()["dropped"] == 1


def test_a_turn_is_a_use(store):
    for name in "abc":
        talk(store, key(name), 1)
    talk(store, key("a"), 2)
    store.set_ttl(key("b"), 5).wait()
    talk(store, key("d"), 1)
    assert there(store, "abcd") == "abd"
