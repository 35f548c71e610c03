"""A store of sessions, on disk and in memory."""

import pytest

from kvstore.sessions.store import SessionStore
from tests.children.session_child import Clock, disk_store


@pytest.fixture(params=["disk", "memory"])
def store(request, tmp_path):
    store = disk_store(tmp_path) if request.param == "disk" else SessionStore(None, Clock())
    yield store
    assert store.check().problems == ()
    store.close()
