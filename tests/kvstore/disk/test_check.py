"""Tests of kvstore.disk.check as it looks over a whole store; single files are in
tests/kvstore/disk/test_directory.py."""

import os
from pathlib import Path

import pytest

from kvstore.disk.directory import StoreDirectory, read_lock_info
from kvstore.errors import StoreError


@pytest.mark.parametrize(
    "name", ["lock", "secret", "weights.json", "policy.json", "sessions/data.mdb", "blocks/lock.mdb", "answers/clean"]
)
@pytest.mark.parametrize("kind", ["a named pipe", "a directory"])
def test_what_is_no_file_is_told_and_not_waited_for(tmp_path, name, kind):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path) if kind == "a named pipe" else path.mkdir()
    if kind == "a directory" and name.endswith(".json"):
        StoreDirectory.open(tmp_path).close()  # a cache, which does without
        return
    with pytest.raises(StoreError, match=f"{name} is {kind} where a file of the store has to be") as caught:
        StoreDirectory.open(tmp_path)
    assert "\n" not in str(caught.value)
    assert read_lock_info(tmp_path) is None


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "sessions").write_text("hello")
    with pytest.raises(StoreError, match="sessions is a file where a directory"):
        StoreDirectory.open(tmp_path)


def test_data_that_cannot_be_written_is_told_at_once(tmp_path, monkeypatch):
    (tmp_path / "sessions").mkdir()
    (tmp_path / "sessions" / "data.mdb").write_bytes(b"")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "data.mdb")  # root may write everything
    with pytest.raises(StoreError, match=r"sessions/data.mdb is not writable"):
        StoreDirectory.open(tmp_path)
