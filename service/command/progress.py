"""Progress of long work, on stderr: a bar in a terminal, elsewhere a line now and then.

The first second shows nothing.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHOWN_AFTER_S = 1.0
LINE_EVERY_S = 10.0
OnProgress = Callable[[float | None], None]


@contextmanager
def progress(
    note: str, is_silent: bool = False, after_s: float = SHOWN_AFTER_S, every_s: float = LINE_EVERY_S
) -> Iterator[OnProgress]:
    """Yields a function to call with the share that is done, from 0 to 1, or with None as a mere sign of life.

    is_silent: show nothing, for output that a program reads. after_s: nothing is shown before; every_s: between lines.
    """
    if is_silent:
        yield lambda fraction: None
        return
    shown = _Bar(note) if sys.stderr.isatty() else _Lines(note, every_s)
    ended = threading.Event()
    thread = threading.Thread(target=_tick, args=(shown, ended, after_s), name="kvstore-progress", daemon=True)
    thread.start()
    try:
        yield shown.note
    finally:
        ended.set()
        thread.join()
        shown.end()


class _Lines:
    """For a log or a pipe."""

    def __init__(self, note: str, every_s: float) -> None:
        self._note, self._fraction, self.every_s = note, 0.0, every_s
        self._started_s = time.monotonic()

    def note(self, fraction: float | None) -> None:
        if fraction is not None:
            self._fraction = fraction

    def show(self) -> None:
        elapsed_s = time.monotonic() - self._started_s
        done = f", {self._fraction:.0%} done" if self._fraction else ""
        print(f"kvstore: {self._note} since {elapsed_s:.0f} s{done}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """What was printed stays."""


class _Bar:
    """For a terminal: it disappears when the work is done."""

    every_s = 3600.0  # it draws itself

    def __init__(self, note: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        console = Console(stderr=True, highlight=False)
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._task = self._progress.add_task(note, total=None)

    def note(self, fraction: float | None) -> None:
        if fraction is not None:
            self._progress.update(self._task, total=1.0, completed=fraction)

    def show(self) -> None:
        self._progress.start()

    def end(self) -> None:
        self._progress.stop()


def _tick(shown: _Lines | _Bar, ended: threading.Event, after_s: float) -> None:
    if ended.wait(after_s):
        return
    shown.show()
    while not ended.wait(shown.every_s):
        shown.show()
