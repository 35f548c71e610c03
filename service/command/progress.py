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
    with _bar(note, after_s) if sys.stderr.isatty() else _lines(note, after_s, every_s) as update:
        yield update


@contextmanager
def _bar(note: str, after_s: float) -> Iterator[OnProgress]:
    """For a terminal: it disappears when the work is done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    console = Console(stderr=True, highlight=False)
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    task = bar.add_task(note, total=None)

    def update(fraction: float | None) -> None:
        if fraction is not None:
            bar.update(task, total=1.0, completed=fraction)

    start = threading.Timer(after_s, bar.start)
    start.daemon = True
    start.start()
    try:
        yield update
    finally:
        start.cancel()
        start.join()
        bar.stop()


@contextmanager
def _lines(note: str, after_s: float, every_s: float) -> Iterator[OnProgress]:
    """For a log or a pipe."""
    started_s, done, ended = time.monotonic(), 0.0, threading.Event()

    def update(fraction: float | None) -> None:
        nonlocal done
        done = done if fraction is None else fraction

    def tell() -> None:
        wait_s = after_s
        while not ended.wait(wait_s):
            share = f", {done:.0%} done" if done else ""
            print(f"kvstore: {note} since {time.monotonic() - started_s:.0f} s{share}", file=sys.stderr, flush=True)
            wait_s = every_s

    thread = threading.Thread(target=tell, name="kvstore-progress", daemon=True)
    thread.start()
    try:
        yield update
    finally:
        ended.set()
        thread.join()
