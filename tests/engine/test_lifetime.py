"""The end of an engine: dropped, cut off while it is made, carried over a fork."""

import gc
import os
import threading
import weakref

import pytest

from tests.support.conversations import PARAMS
from tests.support.engines import ask, open_engine, tokens
from tests.support.waiting import TIMEOUT_S, wait_until

MODEL = {"tokenizer": True}


@pytest.fixture
def engine(model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        yield engine
        engine.check_integrity()


def test_a_dropped_engine_ends_at_once_without_the_collector(model, tmp_path):
    gc.collect()
    gc.disable()
    try:
        dropped = open_engine(model, tmp_path / "store")
        chat = dropped.chat("one")
        chat.send("Hello", PARAMS)
        alive = weakref.ref(dropped)
        del chat
        del dropped
        assert alive() is None
        open_engine(model, tmp_path / "store").close()
    finally:
        gc.enable()


def test_an_engine_that_one_of_our_threads_drops_is_closed_in_another(model, tmp_path):
    engine = open_engine(model, tmp_path / "store")
    ended_in: list[str] = []
    runner = engine.loop.runner
    close = runner.close
    runner.close = lambda: (ended_in.append(threading.current_thread().name), close())
    thread = threading.Thread(target=engine._finalizer, name="kvstore-housekeeping")
    thread.start()
    thread.join(TIMEOUT_S)
    wait_until(lambda: ended_in)
    (ender,) = [t for t in threading.enumerate() if t.name == "engine-shut"] or [None]
    if ender is not None:
        ender.join(TIMEOUT_S)
    assert set(ended_in) == {"engine-shut"} and engine.closed
    open_engine(model, tmp_path / "store").close()


@pytest.mark.parametrize("part", ["kvstore.engine.admin.Admin.resume", "kvstore.engine.engine.ControlServer"])
def test_a_constructor_that_fails_late_leaves_nothing_open(model, tmp_path, monkeypatch, part):
    with monkeypatch.context() as patch:
        patch.setattr(part, lambda *_: (_ for _ in ()).throw(OSError("injected")))
        with pytest.raises(OSError, match="injected") as caught:
            open_engine(model, tmp_path / "store")
    open_engine(model, tmp_path / "store").close()
    del caught


def test_a_forked_child_leaves_the_engine_alone(engine):
    ask(engine, tokens(1, 50, 100))
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        code = 1
        try:
            engine.close()
            engine._finalizer()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert not engine.closed and ask(engine, tokens(1, 50, 100)).token_ids
