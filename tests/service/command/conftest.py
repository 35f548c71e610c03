"""A small store, as commands look after it."""

import shutil
from pathlib import Path

import pytest

from tests.support.store.small_store import SmallStore, make_store


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SmallStore:
    return make_store(tmp_path_factory.mktemp("made") / "store")


@pytest.fixture
def store(made: SmallStore, tmp_path: Path) -> SmallStore:
    shutil.copytree(made.path, tmp_path / "store")
    return SmallStore(tmp_path / "store", made.shared, made.anna, made.bert, made.lone)
