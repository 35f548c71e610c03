"""A file beside a store that keeps what a process has learned. It is written now and then. Knows no host.

Losing it costs only speed, so its errors are logged and never raised.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from kvstore.disk.check import write_durably

logger = logging.getLogger(__name__)
EVERY_S, CLOSE_S = 10.0, 5.0
MAX_BYTES = 16 << 20
T = TypeVar("T")


class KeptFile(Generic[T]):
    """decoder: of the value. `found` is what an earlier process has left, or None."""

    def __init__(self, path: Path, decoder: msgspec.json.Decoder[T], every_s: float = EVERY_S) -> None:
        self._path = path
        self._every_s = every_s
        self._ready = threading.Condition()
        self._value: T | None = None  # to be written
        self._is_closing = False
        self._due_s = 0.0
        self._thread = threading.Thread(target=self._write_loop, name="kvstore-kept", daemon=True)
        self.found: T | None = self._read(decoder)
        self._thread.start()

    def _read(self, decoder: msgspec.json.Decoder[T]) -> T | None:
        try:
            if self._path.stat().st_size > MAX_BYTES:
                raise ValueError("it is too large")
            return decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("%s is not used: %s", self._path, error)
            return None

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due_s

    def keep(self, value: T) -> None:
        """Let a thread write this value over the last one. The caller must not change it afterwards."""
        self._due_s = time.monotonic() + self._every_s
        with self._ready:
            self._value = value
            self._ready.notify()

    def close(self) -> None:
        """Write what is still waiting; takes a few seconds at most."""
        with self._ready:
            self._is_closing = True
            self._ready.notify()
        self._thread.join(CLOSE_S)

    def _write_loop(self) -> None:
        while True:
            with self._ready:
                while self._value is None:
                    if self._is_closing:
                        return
                    self._ready.wait()
                value, self._value = self._value, None
            try:
                write_durably(self._path, msgspec.json.encode(value))
            except (OSError, ValueError, TypeError) as error:
                logger.warning("%s was not written: %s", self._path, error)
