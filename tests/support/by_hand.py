"""Engines whose loop is run by hand: a test says when there is a step, and what is asked happens at once."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from kvstore.engine.client.requests import Bell
from kvstore.engine.core.step_loop import StepLoop
from tests.support.faults import before_each_step

STEP_S = 0.05
_wait = Bell.wait


def _wait_or_step(bell: Bell, is_so: Callable[[], object]) -> None:
    """Who waits for an answer of an engine that is stepped by hand has to step it."""
    loop: StepLoop | None = getattr(bell, "loop", None)
    if loop is None:
        _wait(bell, is_so)
    while not is_so():
        loop.round()


Bell.wait = _wait_or_step


def by_hand(engine):
    """From now on, and until it is closed, this engine is used by the calling thread only, and steps with `step()`."""
    loop, client, me = engine.loop, engine.client, threading.get_ident()
    put, close, submit_all, receive = loop.inbox.put, loop.inbox.close, client.submit_all, client.receive
    let_go, is_taking = _hold(loop), threading.Event()

    def put_and_answer(*args, **kwargs):
        assert threading.get_ident() == me, "another thread uses an engine that is stepped by hand"
        future = put(*args, **kwargs)
        loop.inbox.answer()
        if not is_taking.is_set():  # else what takes the news now has ended a request, which the next step tells
            loop.deliver()
        return future

    def submit_all_with_loop(*args, **kwargs):
        handles = submit_all(*args, **kwargs)
        for handle in handles:
            if isinstance(handle.listener, Bell):
                handle.listener.loop = loop
        return handles

    def receive_alone():
        is_taking.set()
        try:
            receive()
        finally:
            is_taking.clear()

    def close_and_let_go():
        let_go.set()
        close()

    loop.inbox.put, loop.inbox.close, loop.on_news = put_and_answer, close_and_let_go, receive_alone
    client.submit_all, engine.step = submit_all_with_loop, loop.round
    return engine


def _hold(loop: StepLoop) -> threading.Event:
    """The loop's thread waits from now on until the event is set."""
    held, let_go = threading.Event(), threading.Event()
    loop.inbox.put(lambda: (held.set(), let_go.wait()))
    held.wait()
    return let_go


@contextmanager
def held(engine) -> Iterator[None]:
    """In here no step of the engine runs, and nothing that is asked of it happens."""
    let_go = _hold(engine.loop)
    try:
        yield
    finally:
        let_go.set()


@contextmanager
def crawling(engine) -> Iterator[None]:
    """In here each step takes a while: a long answer is far from its end when who reads it does something."""
    with before_each_step(engine, lambda: time.sleep(STEP_S)):
        yield


@contextmanager
def ending_at_once(engine):
    """In here what is queued is aborted before its first step."""
    submit = engine.client.submit_all

    def submit_and_abort(*args, **kwargs):
        with held(engine):
            handles = submit(*args, **kwargs)
            for handle in handles:
                engine.core.end(handle.request_id)
        return handles

    with mock.patch.object(engine.client, "submit_all", submit_and_abort):
        yield
