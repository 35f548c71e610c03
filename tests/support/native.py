"""Where there is a compiler for C, and a machine without one, as the C code meets it."""

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import pytest

from kvstore.kernels.cpu import native

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no compiler for C here")


@contextmanager
def no_compiler() -> Iterator[None]:
    """In here the C code cannot be compiled, and none is kept from before."""
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as empty:
        patch.setenv("CC", "/nonexistent/cc")
        patch.setenv("XDG_CACHE_HOME", empty)
        _forget()
        assert native.library() is None and native.codec_library() is None
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    for found in (native.library, native.codec_library, native.codec_functions):
        found.cache_clear()
