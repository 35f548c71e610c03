"""Tests that are coroutines."""

import asyncio
import functools
from collections.abc import Awaitable, Callable


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs the test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        asyncio.run(test(*args, **kwargs))  # type: ignore[arg-type]

    return run
