"""A disk tier at one path, to be opened again and again."""

import pytest

from tests.support.store.disk_store import Store


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store")
    yield store
    store.close()
