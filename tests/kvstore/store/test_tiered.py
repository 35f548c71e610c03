"""The connector with tiers: a step that is cut off, a forked child, a store that is closed."""

import threading
import time

import pytest

from kvstore.errors import StoreError
from kvstore.store.steps import StepTransfers
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
