"""What the store does when something unforeseen goes wrong, what it forgets, how a start waits for its index; and the
connector of a step that is cut off, or of a store that is closed.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from msgspec.structs import replace

from kvstore.blocks.ids import Lineage
from kvstore.connector import NullConnector
from kvstore.disk.format import WriteError
from kvstore.disk.tier import DiskTier
from kvstore.engine.client import local
from kvstore.engine.progress import told_to
from kvstore.errors import StoreError
from kvstore.store.saving import StepTransfers
from kvstore.store.tiered import TieredConnector
from kvstore.tiers.port import Written
from tests.support.engines import (
    ask,
    cached,
    chain_of,
    check_closed,
    counters,
    evict_memory,
    open_engine,
    settle,
    tokens,
)
from tests.support.faults import before_each, disk_that, fail, stuck_disk
from tests.support.waiting import TIMEOUT_S, wait_until

BLOCKS = 6  # of a prompt of 100 tokens


@pytest.fixture
def engine(model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        yield engine


def on_disk(engine) -> set[bytes]:
    return {entry.block_id for batch in engine.connector.parts.disk.scan() for entry in batch}


def test_nothing_is_kept_of_a_splice_that_was_given_up_before_it_was_written(engine):
    connector, lineage = engine.connector, Lineage(engine.facts.root(""))

    def spliced(seed: int) -> set[bytes]:
        """Its first block."""
        ids = tokens(seed, 200)
        chain, made = connector.splice(chain_of(engine, ids), ids, lineage, [(0, 32), (48, 176)], "")
        return {chain[made.splice_index]}

    for seed in (1, 2):
        ask(engine, tokens(seed, 200))
    settle(engine)
    disk = connector.parts.store.disk
    with connector.parts.lock:
        assert spliced(1) == disk.before_splice.keys()
        for block_id in reversed(chain_of(engine, tokens(1, 200))):
            connector.parts.cpu.forget(block_id)
    settle(engine)
    with connector.parts.lock:
        assert spliced(2) == disk.before_splice.keys()
    settle(engine)
    assert not disk.before_splice


def test_use_in_a_session_that_writes_nothing_is_remembered(model, tmp_path):
    def last_use(engine) -> float:
        return max(e.last_access_s for batch in engine.connector.parts.disk.scan() for e in batch)

    with open_engine(model, tmp_path / "store") as engine:
        ask(engine, tokens(1, 100))
    with open_engine(model, tmp_path / "store") as engine:
        before = last_use(engine)
        time.sleep(0.2)
        assert cached(ask(engine, tokens(1, 100), 2))[2] == 96
    with open_engine(model, tmp_path / "store") as engine:
        assert last_use(engine) > before + 0.1


def test_a_sound_block_of_another_identity_stays(engine):
    """A reader that expects something else, of whatever fault, must not take from others what is theirs."""
    expected = ask(engine, tokens(3, 100)).token_ids
    evict_memory(engine)
    read = DiskTier.read
    with disk_that(read=lambda d, r, into: read(d, replace(r, fingerprint=b"x" * 32), into)):
        assert ask(engine, tokens(3, 100)).token_ids == expected
    assert set(counters(engine)["read_failures"]) == {"mismatch"}
    evict_memory(engine)
    assert engine.stats()["disk"]["blocks"] == BLOCKS and cached(ask(engine, tokens(3, 100)))[2] == 96


def test_the_housekeeper_survives_an_error_which_is_counted(engine, monkeypatch):
    def fail():
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(engine.connector.parts.store.disk, "pump", fail)
        wait_until(lambda: counters(engine)["housekeeping_errors"] >= 2)
    assert engine.connector.parts.housekeeping.is_alive()
    ask(engine, tokens(4, 100))
    wait_until(lambda: engine.stats()["disk"]["blocks"] == BLOCKS)


def test_an_error_while_collecting_loses_only_that_outcome(engine, monkeypatch):
    store, seen = engine.connector.parts.store, []
    monkeypatch.setattr(store, "_collect", lambda one: seen.append(one) or 1 // len(seen[1:]))
    with engine.connector.parts.lock:
        store.ended += [1, 2, 3]
        with pytest.raises(ZeroDivisionError):
            store.poll()
        store.poll()
    assert seen == [1, 2, 3]


@pytest.mark.filterwarnings("ignore:.*is damaged")
def test_a_damaged_file_that_cannot_be_put_aside_is_tried_again_later(engine, monkeypatch):
    expected = ask(engine, tokens(5, 100)).token_ids
    settle(engine)
    disk, tries = engine.connector.parts.disk, []

    def refuse(*_):
        tries.append(time.monotonic())
        raise OSError("read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr("kvstore.disk.check.quarantine", refuse)
        disk.file.broken = True
        wait_until(lambda: len(tries) >= 2)
        assert tries[1] - tries[0] > 0.4 and disk.file.broken and "put aside" in engine.stats()["disk"]["degraded"]
        assert counters(engine)["housekeeping_errors"] == 0 and engine.connector.parts.housekeeping.is_alive()
        engine.loop.pool.evict_all()
        assert ask(engine, tokens(5, 100)).token_ids == expected
    wait_until(lambda: not disk.file.broken)
    settle(engine)
    assert engine.stats()["disk"]["blocks"] == BLOCKS == check_closed(engine, {engine.facts.root("")})


def test_forget_names_what_went_and_waits_for_nothing_else(engine):
    ask(engine, tokens(9, 100))
    settle(engine)
    chain = chain_of(engine, tokens(9, 100))
    with engine.connector.parts.lock:
        engine.connector.parts.store.disk.contents.removing.sizes[b"?" * 32] = 0  # of an eviction that does not end
    assert engine.connector.upkeep.forget(chain[2:3], timeout_s=TIMEOUT_S) == (frozenset(chain[2:]), True)
    with engine.connector.parts.lock:
        engine.connector.parts.store.disk.contents.removing.drop(b"?" * 32)
    assert on_disk(engine) == set(chain[:2])
    assert NullConnector().upkeep.forget(chain) == (frozenset(chain), True)


def test_forget_does_not_wait_for_a_disk_that_cannot_write_and_is_made_up_for(engine):
    ask(engine, tokens(10, 100))
    settle(engine)
    chain, tries = chain_of(engine, tokens(10, 100)), []

    def fail(*_, **__):
        tries.append(time.monotonic())
        return Written(error=WriteError.IO)

    with disk_that(write=fail):
        started = time.monotonic()
        assert engine.connector.upkeep.forget(chain, timeout_s=2 * TIMEOUT_S) == (frozenset(chain), False)
        assert time.monotonic() - started < TIMEOUT_S
        wait_until(lambda: len(tries) >= 2)
        assert tries[1] - tries[0] > 0.4, "a deletion that failed is not tried again at once"
    wait_until(lambda: engine.connector.upkeep.forget(chain, timeout_s=TIMEOUT_S) == (frozenset(chain), True))
    settle(engine)
    assert engine.stats()["disk"]["blocks"] == 0


@pytest.fixture
def stored(model, tmp_path):
    """A store with one chain."""
    with open_engine(model, tmp_path / "store") as engine:
        ask(engine, tokens(11, 100))
        settle(engine)
        return tmp_path / "store", chain_of(engine, tokens(11, 100))


@contextmanager
def scan_in_parts(fault=lambda: None) -> Iterator[threading.Event]:
    """The index comes in two parts, the second one when the event is set, with a fault."""
    go, scan = threading.Event(), DiskTier.scan

    def slow(disk):
        entries = [entry for batch in scan(disk) for entry in batch]
        if threading.current_thread().name != "kvstore-index":
            return (yield entries)
        yield entries[:4]
        go.wait(TIMEOUT_S)
        fault()
        yield entries[4:]

    with disk_that(scan=slow):
        yield go


def test_a_start_waits_for_the_index_says_how_far_it_is_and_knows_all_of_it(model, stored):
    (path, chain), said = stored, []
    with scan_in_parts() as go, told_to(lambda line: said.append(line) or (": 4 of 6 blocks" in line and go.set())):
        engine = open_engine(model, path)
    with engine:
        assert go.is_set() and said[-1].startswith("reading the index of ") and said[-1].endswith(": 4 of 6 blocks")
        assert engine.stats()["disk"]["blocks"] == BLOCKS
        dropped, is_gone = engine.connector.upkeep.forget(chain[4:5], TIMEOUT_S)
        assert (dropped, is_gone) == (frozenset(chain[4:]), True), "also what is below"
        assert cached(ask(engine, tokens(11, 100)))[2] == 64


def test_an_index_that_cannot_be_read_to_its_end_is_counted_and_the_rest_is_stored_again(model, stored):
    path, chain = stored
    with scan_in_parts(fail) as go:
        go.set()
        engine = open_engine(model, path)
    with engine:
        disk = engine.stats()["disk"]
        assert (disk["failures"], disk["blocks"], disk["broken"]) == ({"scan": 1}, 4, False)
        ask(engine, tokens(11, 100))
        settle(engine)
        assert engine.stats()["disk"]["blocks"] == BLOCKS and on_disk(engine) == set(chain)


@pytest.mark.filterwarnings("ignore:.*is damaged")
def test_a_file_that_turns_out_to_be_damaged_while_its_index_is_read_is_put_aside(model, stored):
    scan = DiskTier.scan

    def broken(disk):
        yield from scan(disk)
        disk.file.broken = True

    with disk_that(scan=broken):
        engine = open_engine(model, stored[0])
    with engine:
        assert cached(ask(engine, tokens(11, 100)))[2] == 0 and counters(engine)["read_failures"] == {}
        settle(engine)
        assert engine.stats()["disk"]["blocks"] == BLOCKS and len(list(stored[0].glob("quarantine-*"))) == 1


def test_a_model_that_cannot_be_loaded_leaves_the_store_free(model, stored):
    """Also while its index is being read."""
    cannot = before_each(local, "open_model", lambda: go.set() or fail())
    with scan_in_parts() as go, cannot, pytest.raises(RuntimeError, match="injected"):
        open_engine(model, stored[0])
    with open_engine(model, stored[0]) as engine:
        assert engine.stats()["disk"]["blocks"] == BLOCKS


# -- the connector ---------------------------------------------------------------------------------------------------
def test_a_step_that_is_cut_off_after_it_was_planned_holds_nothing(engine, monkeypatch):
    """Between the store's plan and the moment when the engine has it."""
    plan = TieredConnector.build_connector_meta

    def cut_off(connector, spans):
        plan(connector, spans)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(TieredConnector, "build_connector_meta", cut_off)
        with pytest.raises(MemoryError):
            ask(engine, tokens(8, 100))
    assert not engine.connector.parts.store.steps.by_ticket
    with engine.connector.parts.lock:
        assert not engine.connector.parts.cpu.pool.cached_blocks(), "blocks that will never come"


def test_a_step_that_has_begun_is_not_dropped_by_the_failure_of_another(engine):
    store = engine.connector.parts.store
    with engine.connector.parts.lock:
        store.steps.by_ticket[1001] = step = StepTransfers()
        store.steps.begun(1001)
        store.steps.drop_unbegun()
        assert store.steps.by_ticket == {1001: step}
        del store.steps.by_ticket[1001]


def test_flush_ends_when_the_store_is_closed(model, tmp_path):
    raised = []

    def flush():
        try:
            engine.connector.upkeep.flush()
        except StoreError as error:
            raised.append(str(error))

    with stuck_disk() as go:
        engine = open_engine(model, tmp_path / "store")
        ask(engine, tokens(13, 100))
        flushing = threading.Thread(target=flush)
        flushing.start()
        time.sleep(0.1)
        engine.close()
        flushing.join()
        go.set()
    assert len(raised) == 1 and "closed" in raised[0]
