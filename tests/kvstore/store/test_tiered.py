"""The connector with tiers: a step that is cut off, a forked child, a store that is closed."""

import os
import threading
import time

import pytest

from kvstore.blocks.records import Evict
from kvstore.errors import StoreError
from kvstore.store.saving import StepTransfers
from kvstore.store.tiered import TieredConnector
from tests.support.engines import ask, open_engine, tokens
from tests.support.faults import stuck_disk


@pytest.fixture
def engine(model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        yield engine


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


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_every_verb_refuses_a_forked_child_before_it_takes_a_lock(engine):
    connector, go = engine.connector, threading.Event()
    held = threading.Event()

    def hold():
        with connector.parts.lock:
            held.set()
            go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    calls = (
        connector.upkeep.stats, connector.get_finished, connector.upkeep.flush,
        lambda: connector.wait_for_progress(0.0), lambda: connector.get_num_new_matched_tokens("", 0, 0),
        lambda: connector.update_state_after_alloc("", (), 0, 0), lambda: connector.request_finished(""),
        connector.step_failed, lambda: connector.upkeep.check_integrity(False), connector.upkeep.verify,
        lambda: connector.upkeep.forget(()), lambda: connector.upkeep.evict(Evict()),
        lambda: connector.build_connector_meta(()), connector.upkeep.compact, lambda: connector.pin((), 1.0),
    )  # fmt: skip
    if (child := os.fork()) == 0:
        num_refused = 0
        try:
            for call in calls:
                try:
                    call()
                except StoreError as error:
                    num_refused += "forked" in str(error)
            connector.close()
        finally:
            os._exit(num_refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(calls)
    go.set()
    thread.join()


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
