"""What a server that shares its sessions does every few seconds: it carries out the other servers' deletions.

Knows only the engine's administration, and keeps no engine alive that its owner has dropped.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress

from kvstore.engine.admin import Admin
from kvstore.errors import KVStoreError

ROUND_S = 5.0


class Rounds:
    def __init__(self, admin: Admin, round_s: float = ROUND_S) -> None:
        self._admin = weakref.ref(admin)
        self._round_s = round_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-rounds", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if threading.current_thread() is not self._thread:  # this thread may be the one that dropped the engine
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._round_s):
            admin = self._admin()
            if admin is None:
                return
            with suppress(KVStoreError):  # the server is away, or the engine is closing; the next round retries
                admin.resume()
            del admin
