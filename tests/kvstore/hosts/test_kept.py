"""A file of what was learned: found again, replaced, and never a reason to fail."""

import logging
import os

import msgspec
import pytest

from kvstore.hosts.read_ahead import KeptFile
from tests.support.programs import python
from tests.support.waiting import wait_until

KIND = msgspec.json.Decoder(dict[str, list[bytes]])


def test_what_was_kept_is_found_and_written_now_and_then(tmp_path):
    path = tmp_path / "kept.json"
    first = KeptFile(path, KIND, every_s=3600)
    assert first.found is None and first.is_due
    first.keep({"a": [b"\x00\xff"]})
    assert not first.is_due
    wait_until(path.exists)
    first.keep({"b": []})
    first.close()
    assert KeptFile(path, KIND).found == {"b": []}


@pytest.mark.parametrize("content", [b"{", b"[1]", b'{"a": ["not base64"]}', b"[" * 100_000])
def test_a_file_that_is_wrong_is_told_and_not_used(tmp_path, content, caplog):
    path = tmp_path / "kept.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        kept = KeptFile(path, KIND)
    assert kept.found is None and "kept.json is not used" in caplog.text
    kept.keep({"a": []})
    kept.close()
    assert KeptFile(path, KIND).found == {"a": []}


def test_what_cannot_be_written_is_told(tmp_path, caplog):
    kept = KeptFile(tmp_path / "nowhere" / "kept.json", KIND)
    with caplog.at_level(logging.WARNING):
        kept.keep({})
        kept.close()
    assert "was not written" in caplog.text


def test_a_file_system_that_hangs_does_not_keep_a_process_from_ending(tmp_path):
    os.mkfifo(tmp_path / "kept.json.new")  # nobody reads it, so that opening it to write never returns
    code = (
        "import sys, msgspec; from pathlib import Path; from kvstore.hosts import read_ahead; read_ahead.CLOSE_S = 0.1;"
        "kept = read_ahead.KeptFile(Path(sys.argv[1]), msgspec.json.Decoder(dict)); kept.keep({}); kept.close()"
    )
    assert python(code, tmp_path / "kept.json").returncode == 0
