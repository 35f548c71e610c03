"""A person at the terminal."""

import io
import sys

import pytest


def type_in(patch: pytest.MonkeyPatch, *lines: str) -> None:
    """Until the patch is undone, these lines are on stdin, and then its end."""
    patch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
