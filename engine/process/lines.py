"""Warnings and messages of a process that writes no log: one line each on stderr."""

import logging
import sys
import warnings
from typing import Any


def tell_in_lines() -> None:
    """Print warnings, and log messages that nobody takes, as one line each on stderr."""
    warnings.showwarning = one_line_warning
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(logging.Formatter("kvstore: %(message)s"))


def one_line_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"kvstore: {message}", file=sys.stderr, flush=True)
