"""Weights as one digest: contents, names and sizes count, and unchanged files are read once."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from kvstore.disk import weights as module
from kvstore.disk.weights import weights_digest
from kvstore.errors import ModelError


@pytest.fixture
def folder(tmp_path) -> Path:
    """Weights in two files; the digest does not care what stands in them."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-1.safetensors").write_bytes(bytes(range(256)) * 100)
    (folder / "model-2.safetensors").write_bytes(b"two" * 1000)
    (folder / "config.json").write_text("{}")
    return folder


@contextmanager
def after_each_hash(told):
    """In here `told` is called with each file that was hashed."""
    original = module._hash_file
    with mock.patch.object(module, "_hash_file", lambda file: (original(file), told(file))[0]):
        yield


@pytest.fixture
def reads() -> Iterator[list[str]]:
    """Names of the files that were hashed."""
    names: list[str] = []
    with after_each_hash(lambda file: names.append(file.name)):
        yield names


def test_identical_files_elsewhere_have_the_same_digest(folder, tmp_path):
    first = weights_digest(folder)
    assert first == weights_digest(str(folder)) == weights_digest(shutil.copytree(folder, tmp_path / "copy"))
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in folder.glob("*.safetensors"):
        (linked / file.name).symlink_to(file)
    assert weights_digest(linked) == first


def test_contents_names_and_number_of_files_count(folder):
    digests = [weights_digest(folder)]
    (folder / "model-2.safetensors").write_bytes(b"owt" * 1000)
    digests.append(weights_digest(folder))
    (folder / "model-2.safetensors").rename(folder / "model-3.safetensors")
    digests.append(weights_digest(folder))
    (folder / "model-3.safetensors").unlink()
    digests.append(weights_digest(folder))
    assert len(set(digests)) == 4


def test_a_cached_digest_reads_no_weights(folder, tmp_path, reads):
    cache = tmp_path / "new" / "weights.json"
    first = weights_digest(folder, cache)
    assert sorted(reads) == ["model-1.safetensors", "model-2.safetensors"]
    reads.clear()
    assert weights_digest(folder, cache) == first
    assert reads == []
    assert cache.stat().st_mode & 0o777 == 0o600
    assert os.listdir(cache.parent) == ["weights.json"]


@pytest.mark.parametrize("keep_time", [False, True])
def test_weights_changed_in_place_are_read_again(folder, tmp_path, reads, keep_time):
    cache, file = tmp_path / "weights.json", folder / "model-2.safetensors"
    first, stat = weights_digest(folder, cache), file.stat()
    reads.clear()
    file.write_bytes(b"TWO" * 1000)
    time_ns = stat.st_mtime_ns + (0 if keep_time else 1)
    os.utime(file, ns=(time_ns, time_ns))
    second = weights_digest(folder, cache)
    assert second == weights_digest(folder) != first
    reads.clear()
    assert weights_digest(folder, cache) == second
    assert reads == []
    assert len(json.loads(cache.read_text())["files"]) == 2  # the old state is gone


def test_one_cache_serves_several_models(folder, tmp_path, reads):
    other, cache = shutil.copytree(folder, tmp_path / "other"), tmp_path / "weights.json"
    weights_digest(folder, cache)
    weights_digest(other, cache)
    reads.clear()
    assert weights_digest(folder, cache) == weights_digest(other, cache)
    assert reads == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"",
        lambda text: text[: len(text) // 2],
        lambda text: b"\xff\xfe\x00",
        lambda text: b"[]",
        lambda text: b'{"version": 1}',
        lambda text: b'{"version": 1, "files": 3}',
        lambda text: b'{"version": 1, "files": [[[], "00"]]}',
        lambda text: b'{"version": 1, "files": [[["x", 1, 2, 3, 4], 5]]}',
        lambda text: b'{"version": 1, "files": [[["x", 1, 2, 3, 4], "abc"]]}',
        lambda text: b"[" * 100_000,
        lambda text: text.replace(b'"version":1', b'"version":0'),
    ],
)
def test_a_damaged_cache_is_ignored_and_written_anew(folder, tmp_path, reads, damage):
    cache = tmp_path / "weights.json"
    first = weights_digest(folder, cache)
    intact = cache.read_bytes()
    cache.write_bytes(damage(intact))
    reads.clear()
    assert weights_digest(folder, cache) == first
    assert len(reads) == 2 and cache.read_bytes() == intact


def test_a_cache_that_cannot_be_written_costs_only_time(folder, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for cache in (tmp_path / "file" / "weights.json", tmp_path / "folder"):
        assert weights_digest(folder, cache) == weights_digest(folder)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "model"]


def test_a_file_that_changes_while_it_is_read_is_not_remembered(folder, tmp_path):
    file = folder / "model-2.safetensors"
    with after_each_hash(lambda hashed: hashed == file and file.write_bytes(b"later")):
        weights_digest(folder, tmp_path / "weights.json")
    assert weights_digest(folder, tmp_path / "weights.json") == weights_digest(folder)


def test_weights_that_cannot_be_read_are_one_clear_line(tmp_path):
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        weights_digest(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(ModelError, match="cannot read the weights"):
        weights_digest(tmp_path)
