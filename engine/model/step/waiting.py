"""When the host may wait for a CUDA device. Torch refuses waits for the whole process, so nobody else works then."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class DeviceWaiting:
    """Lets engines take turns: steps and starts run side by side, a trial that refuses all waits runs alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working: set[int] = set()  # ids of threads within `allowed`
        self._num_trials = 0  # trials that run or wait for their turn
        self._is_refused = False

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """The device may be waited for in this context. Must not be nested."""
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
        """Whatever makes the host wait raises RuntimeError in this context, such as routing that counts tokens.

        It begins when no other thread works. May be used within `allowed`.
        """
        thread = threading.get_ident()
        with self._changed:
            was_working = thread in self._working
            self._working.discard(thread)  # otherwise two trials that start at once would wait for each other
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
    import torch  # here, so that a process that never refuses waits does not load it

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # torch warns once that this is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


WAITING = DeviceWaiting()  # one per process, as torch's mode is
