"""Folders for sockets: gone with their owner, or with the next one where that was killed; no other one is touched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.admin.private_folder import OWNER, PREFIX, PrivateFolder
from tests.support.forks import in_fork

OPENED = """
import sys, time
from kvstore.admin.private_folder import PrivateFolder
folder = PrivateFolder(sys.argv[1])
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def owner(tmp_path):
    """Another process with a folder; it ends with the test."""
    command = [sys.executable, "-c", OPENED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_a_folder_stays_while_its_owner_lives_and_goes_when_it_was_killed(tmp_path, owner):
    process, theirs = owner
    (theirs / "0-call-1").touch()
    ours = PrivateFolder(str(tmp_path))
    assert theirs.is_dir() and ours.path.stat().st_mode & 0o777 == 0o700
    process.kill()
    process.wait()
    following = PrivateFolder(str(tmp_path))
    assert set(tmp_path.iterdir()) == {ours.path, following.path}
    for folder in (ours, following, following):
        folder.remove()
    assert not list(tmp_path.iterdir())


def test_what_is_not_ours_stays(tmp_path):
    def lookalike(name: str, mode: int = 0o700) -> Path:
        folder = tmp_path / (PREFIX + name)
        folder.mkdir(mode=0o700)
        (folder / OWNER).write_text("1\n")
        folder.chmod(mode)
        return folder

    elsewhere = tmp_path / "elsewhere"
    lookalike("abandoned").rename(elsewhere)
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    (tmp_path / f"{PREFIX}file").touch()
    lookalike("open-to-others", 0o755)
    (lookalike("without-owner") / OWNER).unlink()
    (lookalike("about-to-be-locked") / OWNER).write_text("")
    (lookalike("fifo") / OWNER).unlink()
    os.mkfifo(tmp_path / f"{PREFIX}fifo" / OWNER)
    known = set(tmp_path.rglob("*"))
    abandoned = lookalike("abandoned")
    PrivateFolder(str(tmp_path)).remove()
    assert not abandoned.exists() and set(tmp_path.rglob("*")) == known


def test_a_forked_child_leaves_it(tmp_path):
    folder = PrivateFolder(str(tmp_path))
    in_fork(folder.remove)
    assert folder.path.is_dir()
    folder.remove()
