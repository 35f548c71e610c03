"""What a store has learned outlives the process, and no state of the file keeps a store from opening."""

import json
import math
import os
import stat
import time

import msgspec
import pytest

from kvstore.disk.check import MAX_KEPT_BYTES, read_kept, write_durably
from kvstore.disk.directory import StoreDirectory
from kvstore.store.history import FILE_NAME
from tests.support.engines import ask, counters, greedy, open_engine, settle, tokens

PROMPT = tokens(1, 100)
ANYTHING = msgspec.json.Decoder(object)


def read_learned(folder):
    return read_kept(folder / FILE_NAME, ANYTHING)


def write_learned(folder, learned):
    write_durably(folder / FILE_NAME, json.dumps(learned).encode())


def test_what_was_written_is_read_and_only_the_owner_may(tmp_path):
    assert read_learned(tmp_path) is None
    for value in ({"a": [1, 2.5, None]}, {"b": "ü"}):
        write_learned(tmp_path, value)
        assert read_learned(tmp_path) == value
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [FILE_NAME]


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    write_learned(tmp_path, 1)

    def replace(*_):
        raise OSError("injected")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="injected"):
        write_learned(tmp_path, 2)
    assert read_learned(tmp_path) == 1 and os.listdir(tmp_path) == [FILE_NAME]


def test_what_a_crash_left_behind_is_overwritten(tmp_path):
    (tmp_path / f"{FILE_NAME}.new").write_text("{")
    write_learned(tmp_path, 3)
    assert read_learned(tmp_path) == 3 and os.listdir(tmp_path) == [FILE_NAME]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b" " * (MAX_KEPT_BYTES + 1)])
def test_a_damaged_file_is_an_error_that_can_be_caught(tmp_path, content):
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(ValueError):
        read_learned(tmp_path)


# -- in a store ------------------------------------------------------------------------------------------------------
def test_rates_and_returns_are_there_after_a_restart(model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        for number in range(3):
            ask(engine, PROMPT + tokens(number, 40))
        settle(engine)
        old = engine.connector.parts.store.planner.as_dict()
    found = json.loads((tmp_path / "store" / FILE_NAME).read_text())
    assert found.keys() == {"steering", "rates"}
    with open_engine(model, tmp_path / "store") as engine:
        assert engine.connector.parts.store.planner.as_dict() == pytest.approx(old)
        assert old["prefill_tokens_per_s"] > 0 and counters(engine)["policy_file_errors"] == 0


@pytest.fixture(scope="module")
def fingerprint(model, tmp_path_factory):
    with open_engine(model, tmp_path_factory.mktemp("store")) as engine:
        return engine.connector.fingerprint.hex()


@pytest.mark.parametrize("content", ["{", '{"steering": 5, "rates": 7}', '{"rates": {"THIS ONE": {"read": 0}}}'])
def test_whatever_is_in_the_file_the_store_opens_and_starts_anew(model, fingerprint, tmp_path, content):
    StoreDirectory.open(tmp_path / "store").close()
    (tmp_path / "store" / FILE_NAME).write_text(content.replace("THIS ONE", fingerprint))
    with open_engine(model, tmp_path / "store") as engine:
        assert counters(engine)["policy_file_errors"] == 1
        ask(engine, PROMPT)
        settle(engine)
        assert engine.stats()["policy"]["policy"] == "auto"
    assert json.loads((tmp_path / "store" / FILE_NAME).read_text()).keys() == {"steering", "rates"}


def test_pins_and_ends_of_conversations_that_only_the_disk_knows(model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        handle = engine.submit(PROMPT, greedy(4))
        list(engine.stream(handle))
        settle(engine)
    with open_engine(model, tmp_path / "store") as engine:
        connector, chain = engine.connector, handle.chain
        connector.pin(chain, 3600.0)
        found = connector.parts.store.steering.conversation_of(chain)
        assert found.pinned_until_s > time.time() + 1800
        connector.pin(chain, 0)
        assert found.pinned_until_s <= time.time()
        connector.pin(chain, None, 5.0)
        assert connector.parts.store.steering.conversation_of(chain) is found and found.expires_s == 5.0
        connector.pin(chain, None, math.inf)
        assert found.expires_s == math.inf
        connector.pin([b"x" * 32], 60.0, 1.0)  # nobody has this
        assert connector.parts.store.steering.conversation_of([b"x" * 32]) is None


def test_without_a_disk_there_is_no_file(model, tmp_path):
    with open_engine(model, tmp_path, disk=0) as engine:
        ask(engine, PROMPT)
    assert not list(tmp_path.rglob(FILE_NAME))
