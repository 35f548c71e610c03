"""What a killed vLLM has left in /dev/shm: removed by the next on its store, and nothing else ever."""

import uuid
from pathlib import Path

import pytest

from kvstore.hosts.vllm_memory import FILE_NAME, remove_left_memory


@pytest.fixture
def engine():
    """A name with a file in /dev/shm."""
    name = f"test-{uuid.uuid4().hex}"
    file = Path(f"/dev/shm/vllm_offload_{name}.mmap")
    file.write_bytes(b"memory")
    yield name, file
    file.unlink(missing_ok=True)


def test_it_is_removed_by_the_next_one(tmp_path, engine):
    name, file = engine
    assert remove_left_memory(tmp_path, name) is None
    assert remove_left_memory(tmp_path, name) is None and file.exists(), "the same engine's, which may serve"
    assert remove_left_memory(tmp_path, "next") == file and not file.exists()
    assert remove_left_memory(tmp_path, "one more") is None


@pytest.mark.parametrize("wrong", ["", "/dev/shm/other", "/dev/shm/vllm_offload_a.mmap/../../etc", "\0"])
def test_another_file_is_never_removed(tmp_path, wrong):
    (tmp_path / FILE_NAME).write_text(wrong)
    assert remove_left_memory(tmp_path, "mine") is None
    assert (tmp_path / FILE_NAME).read_text() == "/dev/shm/vllm_offload_mine.mmap"
