"""A link to a process that is none: who hears of it when no process is left."""

import threading
from types import SimpleNamespace

import pytest

from kvstore.engine.process.link import Link
from kvstore.engine.process.wire import Said, Update, Updates
from kvstore.engine.sampling_params import SamplingParams

MANY = 5000  # requests, so that it takes a while to end them


class Life:
    """Says one token of one request, and lives until it is ended."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._says = [Updates([Update("first", [Said(0, 5, None, None, None)], None)])]

    def greeted(self, is_wanted):
        return SimpleNamespace(facts=None)

    def watch_with(self, selector):
        """The test wakes the reader."""

    def receive(self):
        said, self._says = self._says, []
        return said

    def wait(self):
        self._over.wait()
        return "exit code 1"

    def end(self):
        self._over.set()

    def retire(self):
        """It has no channel."""


@pytest.mark.parametrize("is_closed", [True, False])
def test_all_requests_are_told_of_the_end_though_the_reader_is_busy(is_closed):
    """The reader comes back from telling one of them while the others are being ended."""
    life, told, is_telling = Life(), [], threading.Event()
    link = Link(lambda: life, max_restarts=0)
    link.started.result()

    def hear(handles):
        is_telling.set()
        while not link.is_over:
            pass
        told.extend(handle.request_id for handle in handles)

    names = ["first", *(f"request {number}" for number in range(MANY))]
    for name in names:
        link.outputs.add(name, [3, 4], SamplingParams(), 8, None, 16, hear)
    with link.changed:
        link.read()
    link.readiness.wake()
    is_telling.wait()
    link.close() if is_closed else life.end()
    link.reader.join()
    assert sorted(told) == sorted(["first", *names]), "the first heard of a token, too"
    link.close()
