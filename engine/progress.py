"""What an engine says while it starts: each stage as it begins, and how far a long one is, to the log and to a bar. And
how a process that writes no log says something: in one line.

Loads no torch.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LOGGER = logging.getLogger("kvstore.engine")
WEIGHTS, PROBE, KERNELS = STAGES = ("reading the weights", "probing the model", "preparing kernels and the store")

_listeners: list[Callable[[str], object]] = []  # as with a log's, nobody between here and the stages needs to know them


def begin(stage: str) -> None:
    LOGGER.info(stage)
    for listener in _listeners:
        listener(stage)


@contextmanager
def told_to(listener: Callable[[str], object]) -> Iterator[None]:
    """Within it, the function gets each stage that begins in this process, in the thread that begins it."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def shown(progress: bool) -> Iterator[None]:
    """Show the stages as a bar on stderr, if that is wanted."""
    if not progress:
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=len(STAGES))

        def show(stage: str) -> None:
            bar.update(task, description=stage, completed=STAGES.index(stage) if stage in STAGES else None)

        with told_to(show):
            yield
        bar.update(task, description="ready", completed=len(STAGES))


def tell_in_lines() -> None:
    """Print warnings, and log messages that nobody takes, as one line each on stderr."""
    warnings.showwarning = one_line_warning
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(logging.Formatter("kvstore: %(message)s"))


def one_line_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"kvstore: {message}", file=sys.stderr, flush=True)
