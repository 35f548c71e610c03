"""The store of each replica."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import StoreError
from kvstore.service.replicas.replica import ReplicaPlace
from tests.support.service.server_process import ENVIRONMENT

HOLD = """
import sys, time
from pathlib import Path
from kvstore.service.replicas.replica import ReplicaPlace
place = ReplicaPlace.below(Path(sys.argv[1]))
print(place.name, flush=True)
time.sleep(600)
"""


def test_a_replica_that_was_killed_leaves_its_place_to_the_next_one(tmp_path):
    store = tmp_path / "not there yet" / "store"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(store)], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "replica-0\n"
        second = ReplicaPlace.below(store)
        assert (second.name, second.number, second.path) == ("replica-1", 1, store / "replica-1")
        process.kill()
        process.wait()
    again = ReplicaPlace.below(store)
    assert (again.name, again.path) == ("replica-0", store / "replica-0")
    assert ReplicaPlace.below(store).name == "replica-2"
    second.close()
    assert ReplicaPlace.below(store).name == "replica-1"


def test_a_place_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"--store .*file cannot be used"):
        ReplicaPlace.below(tmp_path / "file")


def test_a_place_below_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    place = ReplicaPlace.below(Path("~/store"))
    assert place.path == tmp_path / "store" / "replica-0"
    place.close()
