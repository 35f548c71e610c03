"""When the host may wait for a CUDA device. Torch refuses it for the whole process: nobody else works meanwhile."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class DeviceWaiting:
    """Engines take turns: steps and starts run at once, a trial that refuses all waits runs alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working: set[int] = set()  # threads
        self._num_trials = 0  # that wait for their turn, or run
        self._is_refused = False

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """In here the device may be waited for. Not to be nested."""
        thread = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._num_trials)
            self._working.add(thread)
        try:
            yield
        finally:
            with self._changed:
                self._working.discard(thread)
                self._changed.notify_all()

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Whatever makes the host wait, such as routing that counts tokens, raises RuntimeError; within `allowed`, too.

        Begins when no other thread works.
        """
        thread = threading.get_ident()
        with self._changed:
            was_working = thread in self._working
            self._working.discard(thread)  # two that start at the same time would wait for each other
            self._num_trials += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_refused and not self._working)
            self._is_refused = True
        try:
            with _refusal():
                yield
        finally:
            with self._changed:
                self._is_refused = False
                self._num_trials -= 1
                if was_working:
                    self._working.add(thread)
                self._changed.notify_all()


@contextmanager
def _refusal() -> Iterator[None]:
    import torch  # here, so that who only waits for its turn does not load it

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # torch says once that this is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


WAITING = DeviceWaiting()  # of the process, as torch's mode is
