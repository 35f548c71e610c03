"""File descriptors: enough for all connections, or a clear error at the start."""

import asyncio
import errno
import logging
import resource
import time
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.service.http.logs import log

NUM_OWN = 192  # beside connections: the store's files, the engine's process, what the runtime opens
TOLD_S = 10.0  # between two log lines about connections that cannot be accepted
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def ensure_descriptors(max_connections: int, ends: int = 1) -> None:
    """Raise the soft limit of this process and so of the engine's process. Raises KVStoreError where it cannot.

    ends: of each connection that this process has.
    """
    needed = max_connections * ends + NUM_OWN
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (ValueError, OSError):
        fewer = f", or give --max-connections {(hard - NUM_OWN) // ends} or fewer" if hard > NUM_OWN else ""
        raise KVStoreError(
            f"--max-connections {max_connections} needs {needed} open files, but this process may have {hard}; raise "
            f"the hard limit (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of Docker){fewer}"
        ) from None


class AcceptErrors:
    """An event loop's exception handler: logs now and then, in one line, that connections cannot be accepted.

    asyncio tries again after a second.
    """

    def __init__(self) -> None:
        self._told_s: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _SHORT or "socket" not in context:
            loop.default_exception_handler(context)
            return
        now = time.monotonic()
        if self._told_s is None or now - self._told_s >= TOLD_S:
            self._told_s = now
            log("connections wait: they cannot be accepted", {"error": error.strerror}, logging.ERROR)
